"""How a training process of a `GoodputTrainer` enters the user's loop: with the session that `rg.session()` gives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray_goodput
from ray_goodput.core.buckets import Bucket
from ray_goodput.data.waits import observe_waits
from ray_goodput.errors import ConfigError, SessionError
from ray_goodput.train import ray_compat, sigterm
from ray_goodput.train.failures import note_step
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.worker import open_worker

if TYPE_CHECKING:
    from ray_goodput.train.session import Session

_current: Session | None = None


def session() -> Session:
    """The session of this training process.

    Raises:
        SessionError: outside the train loop of a `GoodputTrainer`.
    """
    if _current is None:
        where = (
            "this Ray Train worker was started by another trainer"
            if ray_compat.in_train_worker()
            else "this process is not a training worker"
        )
        raise SessionError(
            f"rg.session() works inside the train loop of a GoodputTrainer, and {where}: "
            "call it in the function you pass to GoodputTrainer, or use rg.ShardedDataset(...).loader() alone."
        )
    return _current


def run_packed(version: str, packed: bytes, train_loop: Callable[[], Any]) -> Any:
    """`run_in_session` with the spec that a driver of `version` packed.

    Raises:
        ConfigError: this worker has another version than the driver.
    """
    if version != ray_goodput.__version__:
        raise ConfigError(
            f"The driver runs ray_goodput {version}, and this worker (node {ray_compat.node_ip()}) has "
            f"{ray_goodput.__version__}: install the same version on every node, or ship it with the job "
            f'(runtime_env={{"pip": ["ray_goodput=={version}"]}}).'
        )
    return run_in_session(pickle.loads(packed), train_loop)


def run_in_session(spec: TrainSpec, train_loop: Callable[[], Any]) -> Any:
    """Enter the user's loop with a session around it; the last state is saved and committed when it returns."""
    global _current
    # Only here: the driver and the controller import this module, too, without torch's checkpoints and tensors.
    from ray_goodput.train.session import Session

    worker = open_worker(spec)
    _current = current = Session(spec, worker)
    observe_waits(lambda: worker.recorder.span(Bucket.DATA_WAIT))
    try:
        value = train_loop()
        current.close()
        return value
    except Exception as error:
        note_step(error, current.step_index)
        raise
    finally:
        _current = None
        sigterm.listen(False)
        observe_waits(None)
        worker.close()
