"""`GoodputTrainer`: a `TorchTrainer` whose runs survive failures without repeating or skipping a sample."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray import cloudpickle
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer

import ray_goodput
from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.actors.factories import start_coordinator
from ray_goodput.actors.run_end import RunEnd
from ray_goodput.actors.spec import RunSpec
from ray_goodput.clock import SystemClock
from ray_goodput.config import CheckpointConfig, FailureBudget, MlflowConfig, StoreSpec, WatchdogConfig
from ray_goodput.core.commit import CommitRecord
from ray_goodput.core.run_state import Resume
from ray_goodput.data.mixture import AnyDataset
from ray_goodput.errors import ConfigError, CrashLoopError
from ray_goodput.goodput.mlflow_sink import Status
from ray_goodput.goodput.report import GoodputReport, render_table
from ray_goodput.storage import open_store
from ray_goodput.train.callbacks import GoodputCallback, SigtermCallback
from ray_goodput.train.datasets import CheckedDataset, check_dataset, write_dataset
from ray_goodput.train.drain import EXIT_CODE_DRAINED, DrainOnSigterm
from ray_goodput.train.entry import run_packed
from ray_goodput.train.mlflow_feed import MlflowFeed
from ray_goodput.train.policies import ProgressFailurePolicy
from ray_goodput.train.ray_compat import (
    TrainingFailedError,
    goodput_error_in,
    polling_often,
    without_dataset_manager,
)
from ray_goodput.train.scaling import GoodputScalingPolicy
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.storage_path import probe_storage, resolve_storage

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class GoodputResult(ray.train.Result):
    """Ray's `Result`, plus the run's goodput; `checkpoint` is the newest committed one.

    metrics: what was reported to Ray Train, else the last metrics given to `run.step`.

    resumes: where each attempt of this driver began.
    history: (step, metrics of rank 0) in step order; a step done again counts once, with its last values.
    """

    goodput: GoodputReport | None = None
    resumes: tuple[Resume, ...] = ()
    history: tuple[tuple[int, dict[str, float]], ...] = ()


class GoodputTrainer(TorchTrainer):
    """A `TorchTrainer` with asynchronous checkpoints, an elastic data plane and a ledger.

    Every argument of `TorchTrainer` keeps its meaning. Added:

    datasets: `ShardedDataset` and `Mixture` values feed `run.batches(name)`; other values go to Ray Train as usual.
    checkpoint: when to save and what to keep.
    failure: how many failures without progress end the run. Ignored, in favour of Ray's own policy, only if it is not
    given and
        `RunConfig(failure_config=FailureConfig(max_failures=...))` is.
    watchdog: after how long without progress a rank is hung: its stack is kept, it is killed, and the run goes on.
    mlflow: where the run shows up in MLflow, as one run whatever is restarted. A dead or slow server delays nothing.
    storage_options: for `storage_path`, in the spelling of s3fs (`key`, `secret`, `endpoint_url`, ...).
    reproducible: deterministic kernels, and no re-sorting of gradient buckets in DDP (use `run.prepare_model`), so that
        a run resumed at the same world size ends with bit-identical weights. And what a rank reads depends on the
        world size alone, never on what nodes have cached.
    sample_log: write the ids of the samples of every step to the run's storage (for tests and audits; it costs time).
    apply_batch_weight: scale gradients by `batch.weight` when the ranks' batches differ in size, so that their average
        is the gradient of the global batch.

    SIGTERM to the driver (`ray job stop`, a cluster manager) drains the run: all ranks save at their next step, the
    commit is awaited, and the driver exits with code 143. A second SIGTERM ends it at once. The same script goes on
    from there.

    Raises (from `fit`):
        GoodputError: bad input, in one sentence; nothing was started or half-written.
        CrashLoopError: the failure budget is used up.
        ray.train.TrainingFailedError: what Ray Train could not retry.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        datasets: Mapping[str, Any] | None = None,
        checkpoint: CheckpointConfig | None = None,
        failure: FailureBudget | None = None,
        watchdog: WatchdogConfig | None = None,
        mlflow: MlflowConfig | None = None,
        storage_options: Mapping[str, Any] | None = None,
        reproducible: bool = False,
        sample_log: bool = False,
        apply_batch_weight: bool = True,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        **torch_trainer_arguments: Any,
    ) -> None:
        scaling_config = scaling_config or ray.train.ScalingConfig()
        self._own_failure_policy = failure is not None or not _asks_for_rays_failure_policy(run_config)
        self._failure = failure or FailureBudget()
        self._mlflow = mlflow
        run_config, run_store = resolve_storage(run_config or ray.train.RunConfig(), storage_options)
        ours = {name: d for name, d in (datasets or {}).items() if isinstance(d, AnyDataset)}
        self._max_workers = _max_workers(scaling_config)
        if self._max_workers < 1:
            raise ConfigError("GoodputTrainer needs ScalingConfig(num_workers=...) of at least 1.")
        for name, dataset in ours.items():
            _warn_if_ranks_must_share(name, dataset.global_batch_size, self._max_workers)
        self._spec = TrainSpec(
            run=RunSpec(
                run=str(run_config.name),
                store=run_store,
                checkpoint=checkpoint or CheckpointConfig(),
                target_world=self._max_workers,
                watchdog=watchdog or WatchdogConfig(),
            ),
            datasets=ours,
            reproducible=reproducible,
            sample_log=sample_log,
            apply_batch_weight=apply_batch_weight,
        )
        super().__init__(
            _in_session(train_loop_per_worker, self._spec),
            datasets={name: d for name, d in (datasets or {}).items() if name not in ours},
            scaling_config=scaling_config,
            run_config=run_config,
            **torch_trainer_arguments,
        )

    @property
    def run_store(self) -> StoreSpec:
        """The run's own folder in the storage."""
        return self._spec.run.store

    def fit(self) -> GoodputResult:
        """Train to the end, through failures; goes on from the newest commit if the run name was used before."""
        newest, datasets = self._check()
        if not ray.is_initialized():
            ray.init()
        taken = dataclasses.replace(
            self._spec.run, started_at_s=time.time(), driver_pid=os.getpid(), driver=uuid.uuid4().hex
        )
        coordinator = start_coordinator(taken)
        if newest is not None:
            logger.info("Run %s goes on from the commit of step %d.", self._spec.run.run, newest.checkpoint.step)
        end: RunEnd | None = None
        status: Status = "FAILED"
        feed: MlflowFeed | None = None
        try:
            feed = self._start_mlflow(coordinator)
            self._write(datasets)
            with DrainOnSigterm(coordinator) as drain:
                result = super().fit()
            if drain.requested:
                raise SystemExit(EXIT_CODE_DRAINED)
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit):  # Ray turns SIGTERM into the latter
            status = "KILLED"
            raise
        except TrainingFailedError as error:
            ours = goodput_error_in(error)
            if ours is not None:
                raise ours from error
            gave_up = _why_given_up(coordinator)
            if gave_up is not None:
                raise CrashLoopError(gave_up) from error
            raise
        finally:
            end = _close_books(coordinator)
            if feed is not None:
                feed.close(status, end)
            ray.kill(coordinator)
        rays = {f.name: getattr(result, f.name) for f in dataclasses.fields(ray.train.Result)}
        if end is None:
            return GoodputResult(**rays)
        rays["checkpoint"] = self._checkpoint(end.newest)
        rays["metrics"] = rays["metrics"] or (end.history[-1][1] if end.history else None)
        return GoodputResult(**rays, goodput=end.report, resumes=end.resumes, history=end.history)

    def _check(self) -> tuple[CommitRecord | None, list[CheckedDataset]]:
        """Find out what is wrong before anything is started; changes nothing, since another driver may hold the run."""
        spec = self._spec.run
        probe_storage(spec.store)
        store = open_store(spec.store)
        commits = CommitLog(run=spec.run, store=store, clock=SystemClock())
        commits.open()
        newest = commits.newest()
        cursors = newest.cursors if newest is not None else None
        return newest, [check_dataset(store, name, data, cursors) for name, data in self._spec.datasets.items()]

    def _write(self, datasets: Sequence[CheckedDataset]) -> None:
        """The manifests are in the run's storage."""
        store = open_store(self._spec.run.store)
        for checked in datasets:
            write_dataset(store, checked)

    def _start_mlflow(self, coordinator: Any) -> MlflowFeed | None:
        if self._mlflow is None:
            return None
        feed = MlflowFeed(self._mlflow, self._spec, coordinator, self.train_loop_config)
        feed.start()
        return feed

    def _initialize_and_run_controller(self, **kwargs: Any) -> ray.train.Result:
        key = self._spec.run.key
        if self._own_failure_policy:
            kwargs["failure_policy"] = ProgressFailurePolicy(
                self.run_config.failure_config, budget=self._failure, run_key=key
            )
        kwargs["scaling_policy"] = GoodputScalingPolicy(
            self.scaling_config, run_key=key, budget=self._failure, may_give_up=self._own_failure_policy
        )
        kwargs["callbacks"] = [*kwargs["callbacks"], GoodputCallback(self._spec.run), SigtermCallback()]
        with polling_often(self._max_workers):
            return super()._initialize_and_run_controller(**kwargs)

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return callbacks if self.datasets else without_dataset_manager(callbacks, self.train_run_context)

    def _checkpoint(self, newest: CommitRecord | None) -> ray.train.Checkpoint | None:
        if newest is None:
            return None
        root = Path(str(self.run_config.storage_path)) / str(self.run_config.name)
        return ray.train.Checkpoint(
            (root / CHECKPOINTS / newest.checkpoint.folder).as_posix(), filesystem=self.run_config.storage_filesystem
        )


def _in_session(train_loop: Callable[..., Any], spec: TrainSpec) -> Callable[..., Any]:
    """`train_loop` entered by our wrapper, with as many parameters as it had.

    The spec travels packed, beside the driver's version: a worker of another version can then say so before it tries
    to read it.
    """
    dumps: Callable[[Any], bytes] = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage] (Ray's own, public)
    packed, version = dumps(spec), ray_goodput.__version__
    takes_config = bool(inspect.signature(train_loop).parameters)
    if takes_config:

        @functools.wraps(train_loop)
        def with_config(config: dict[str, Any]) -> Any:
            return run_packed(version, packed, functools.partial(train_loop, config))

        return with_config

    @functools.wraps(train_loop)
    def without_config() -> Any:
        return run_packed(version, packed, train_loop)

    return without_config


def _why_given_up(coordinator: Any) -> str | None:
    """The failure policy's last word; None also if the coordinator cannot answer: the failure itself must come out."""
    try:
        reason: str | None = ray.get(coordinator.gave_up.remote(), timeout=60)
    except (RayError, TimeoutError) as error:
        logger.warning("Whether the failure budget is used up is unknown, the coordinator does not say (%s).", error)
        return None
    return reason


def _close_books(coordinator: Any) -> RunEnd | None:
    """The run's end, its table printed; None if the coordinator cannot answer: a result never depends on the books."""
    try:
        end: RunEnd = ray.get(coordinator.finish.remote(), timeout=60)
    except (RayError, TimeoutError) as error:
        logger.warning("The ledger could not be closed (%s); the run's result is not affected.", error)
        return None
    print(render_table(end.report), flush=True)
    return end


def _max_workers(scaling: ray.train.ScalingConfig) -> int:
    # A range (MIN, MAX) only if elastic, which the annotation does not know.
    return scaling.max_workers if scaling.elasticity_enabled else int(scaling.num_workers)  # type: ignore[arg-type]


def _warn_if_ranks_must_share(name: str, global_batch_size: int, max_workers: int) -> None:
    """No refusal: tensor and pipeline parallel ranks share their samples, and only the loop knows how many do. The
    workers refuse, all alike, when they ask for batches for more data-parallel ranks than a batch has samples."""
    if global_batch_size < max_workers:
        logger.warning(
            "Dataset %r has batches of %d samples for up to %d workers. That many workers need run.batches(%r, "
            "dp_rank=..., dp_world=...) with a dp_world of at most %d (tensor or pipeline parallel ranks that read the "
            "same samples); without it the run ends there. Else set global_batch_size to %d or more, or use fewer.",
            name,
            global_batch_size,
            max_workers,
            name,
            global_batch_size,
            max_workers,
        )


def _asks_for_rays_failure_policy(run_config: ray.train.RunConfig | None) -> bool:
    return (
        run_config is not None and run_config.failure_config is not None and run_config.failure_config.max_failures != 0
    )
