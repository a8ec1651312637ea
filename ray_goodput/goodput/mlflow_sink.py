"""Sends a run's metrics to MLflow from a thread of its own. No server, however dead or slow, delays the run.

What the server does not take waits in a bounded spool and is sent when it returns. What is left when the driver ends
goes into the run's storage, from where the next driver, or `ray-goodput mlflow send`, sends it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ray_goodput.config import MlflowConfig
from ray_goodput.errors import GoodputError
from ray_goodput.goodput.mlflow_run import (
    MAX_METRICS_A_REQUEST,
    MlflowRun,
    impatient,
    is_permanent,
    message_of,
    without_credentials,
)
from ray_goodput.goodput.mlflow_spool import FOLDER, Spool, SpoolHead, from_bytes, to_bytes
from ray_goodput.goodput.mlflow_values import Points
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
Artifacts = Callable[[], Mapping[str, bytes]]
"""Gives the files to keep with the run; called in the sender's thread, once the status is sent."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_LAST_CHANCE_S = 2.0


@dataclass(frozen=True, slots=True)
class _End:
    status: Status
    at_ms: int
    artifacts: Artifacts


class MlflowSink:
    """Owner of one sender thread. `start`, then `add` from any thread, then `close` once; none of them raises.

    store: the run's own folder, for what could not be sent. Sending begins with what earlier drivers left there.
    """

    def __init__(
        self,
        config: MlflowConfig,
        *,
        run: str,
        run_key: str,
        store: ObjectStore | None = None,
        params: Mapping[str, str] | None = None,
        max_values: int = 200_000,
        at_s: Callable[[], float] = time.time,
    ) -> None:
        self._uri = config.tracking_uri
        self._head = SpoolHead(
            tracking_uri=without_credentials(config.tracking_uri),
            experiment=config.experiment,
            run_key=run_key,
            run_name=config.run_name or run,
            tags=dict(config.tags or {}),
            params=dict(params or {}),
        )
        self._store = store
        self._at_s = at_s
        self._changed = threading.Condition()
        self._spool = Spool(max_values)
        self._in_flight: list[Points] = []
        self._earlier: list[str] = []
        self._end: _End | None = None
        self._abandoned = False
        self._done = threading.Event()
        self._run: MlflowRun | None = None
        self._down_since: float | None = None
        self._patience = ExitStack()
        self._thread = threading.Thread(target=self._work, name="goodput-mlflow", daemon=True)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run, once the server has answered."""
        return self._run.run_id if self._run is not None else None

    def start(self) -> None:
        self._patience.enter_context(impatient())
        self._thread.start()

    def add(self, points: Sequence[Points]) -> None:
        """The points will be sent, in this order."""
        with self._changed:
            self._spool.add(points)
            self._changed.notify_all()

    def close(self, status: Status, artifacts: Artifacts = dict, *, timeout_s: float = 5.0) -> bool:
        """Everything is in MLflow, with the status, or what is not lies in the run's storage. Returns the former."""
        with self._changed:
            self._end = _End(status, int(self._at_s() * 1000), artifacts)
            self._changed.notify_all()
        # A server that has been away for a while gets one more chance, not the driver's time.
        sent = self._done.wait(timeout_s if self._down_since is None else min(timeout_s, _LAST_CHANCE_S))
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
            left = [*self._in_flight, *self._spool.take(self._spool.num_values)]
        self._patience.close()
        if not sent:
            self._keep(left)
        return sent

    def _keep(self, left: Sequence[Points]) -> None:
        assert self._end is not None
        if self._store is None:
            logger.warning("MLflow at %s did not take the run's end; it is lost there.", self._head.tracking_uri)
            return
        head = replace(self._head, status=self._end.status, ended_at_ms=self._end.at_ms)
        key = f"{FOLDER}/spool-{self._end.at_ms:015d}.jsonl"
        try:
            self._store.put(key, to_bytes(head, left))
            self._store.delete([k for k in self._earlier if k != key])  # their points are in this one, or were sent
        except GoodputError as error:
            logger.warning("MLflow did not take the run's end, and it could not be stored either: %s", error)
            return
        logger.warning(
            "MLflow at %s did not answer: the run's status and %d points are kept in %s/%s. The next driver of this "
            "run sends them, or: ray-goodput mlflow send %s",
            self._head.tracking_uri,
            len(left),
            self._store.uri,
            key,
            self._store.uri,
        )

    # The sender thread.

    def _work(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._abandoned:
            closing = self._end is not None
            try:
                if self._send_some():
                    self._done.set()
                    return
                self._recovered()
                pause = _FIRST_PAUSE_S
            except Exception as error:  # whatever a client library raises, training and the driver go on
                if self._left_out(error):
                    continue
                self._failed(error)
                with self._changed:  # once more at once when the run ends, then often: little time is left
                    self._changed.wait_for(partial(self._hurried, closing), pause)
                pause = _FIRST_PAUSE_S if self._end is not None else min(_LONGEST_PAUSE_S, 2 * pause)

    def _hurried(self, closing: bool) -> bool:
        """Whether the run has ended (or been let go of) in a pause; `closing`: it had before."""
        return self._abandoned or (self._end is not None and not closing)

    def _send_some(self) -> bool:
        """Send what comes next; True once the run's end has been sent."""
        if self._run is None:
            self._load_earlier()
            self._run = MlflowRun.open(self._uri, self._head)
            logger.info("This run is %s of experiment %s in MLflow.", self._run.run_id, self._head.experiment)
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._end is not None or len(self._spool) > 0)
            if self._abandoned:
                return False
            self._in_flight = self._spool.take(MAX_METRICS_A_REQUEST - 2)
            batch, end = self._in_flight, self._end
        if batch:
            self._run.log(batch)
            with self._changed:
                self._in_flight = []
            return False
        if self._earlier and self._store is not None:
            self._store.delete(self._earlier)
            self._earlier = []
        if end is None:
            return False
        self._run.finish(end.status, end.at_ms)
        try:
            for name, data in end.artifacts().items():
                self._run.log_artifact(name, data)
        except Exception as error:  # an artefact store of any kind is behind it, and may need other credentials
            logger.warning(
                "The run's report and ledger are not in MLflow, its metrics and status are: %s",
                message_of(error, self._uri),
            )
        return True

    def _load_earlier(self) -> None:
        if self._earlier or self._store is None:
            return
        waiting: list[Points] = []
        try:
            for info in self._store.list(FOLDER):
                waiting += from_bytes(self._store.get(info.key))[1]
                self._earlier.append(info.key)
        except GoodputError as error:
            logger.warning("What an earlier driver left for MLflow cannot be read: %s", error)
        with self._changed:
            self._spool.put_back(waiting)
            self._spool.add([])  # keep to the bound

    def _left_out(self, error: Exception) -> bool:
        """Whether the server answered that it will never take this batch. The run is looked up anew: it may be gone."""
        with self._changed:
            batch, self._in_flight = self._in_flight, []
            if not batch or not is_permanent(error):
                self._spool.put_back(batch)
                return False
        self._run = None
        logger.warning("MLflow refused %d points, which are left out: %s", len(batch), message_of(error, self._uri))
        return True

    def _failed(self, error: Exception) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            logger.warning(
                "MLflow at %s does not take the run's metrics; they wait, and training goes on: %s",
                self._head.tracking_uri,
                message_of(error, self._uri),
            )

    def _recovered(self) -> None:
        if self._down_since is not None:
            away = time.monotonic() - self._down_since
            self._down_since = None
            with self._changed:
                waiting, dropped = len(self._spool), self._spool.num_dropped
            logger.info(
                "MLflow answers again after %.0f s; %d points wait, %d were thinned out.", away, waiting, dropped
            )


def send_spools(
    store: ObjectStore, artifacts: Artifacts = dict, *, tracking_uri: str | None = None
) -> list[dict[str, object]]:
    """What drivers of a run left in its storage is in MLflow afterwards; says for each spool what was sent.

    tracking_uri: the server, if not the one that the driver knew (or with credentials, which are not stored).

    Raises:
        StorageError: a spool is damaged, or the storage cannot be read.
        mlflow.exceptions.MlflowException: the server does not take it; nothing is removed then.
    """
    sent: list[dict[str, object]] = []
    keys = [info.key for info in store.list(FOLDER)]
    for key in keys:
        head, points = from_bytes(store.get(key))
        with impatient():
            run = MlflowRun.open(tracking_uri or head.tracking_uri, head)
            spool = Spool(max_values=10**9)
            spool.add(points)
            while batch := spool.take(MAX_METRICS_A_REQUEST - 2):
                run.log(batch)
            for name, data in artifacts().items() if key == keys[-1] else ():
                run.log_artifact(name, data)
            if head.status is not None and head.ended_at_ms is not None:
                run.finish(head.status, head.ended_at_ms)
        store.delete([key])
        sent.append({"spool": key, "run_id": run.run_id, "points": len(points), "status": head.status})
    return sent
