"""Feeds the MLflow sink from the coordinator, in a thread of the driver. Training processes do not know of MLflow."""

from __future__ import annotations

import functools
import logging
import platform
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.exceptions import RayError

import ray_goodput
from ray_goodput.actors.run_end import RunEnd
from ray_goodput.config import MlflowConfig
from ray_goodput.goodput.mlflow_artifacts import run_artifacts
from ray_goodput.goodput.mlflow_sink import MlflowSink, Status
from ray_goodput.goodput.mlflow_values import flat_params, goodput_points, training_points
from ray_goodput.storage import open_store
from ray_goodput.train.spec import TrainSpec

logger = logging.getLogger(__name__)

_METRICS_EVERY_S = 2.0
_GOODPUT_EVERY_S = 10.0
_ASK_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 6.0


class MlflowFeed:
    """Owner of one thread. `start`, then `close` once; neither raises."""

    def __init__(self, config: MlflowConfig, spec: TrainSpec, coordinator: Any, train_loop_config: Any) -> None:
        self._store = open_store(spec.run.store)
        self._coordinator = coordinator
        self._wants_metrics = config.log_training_metrics
        self._sink = MlflowSink(
            config,
            run=spec.run.run,
            run_key=spec.run.key,
            store=self._store,
            params=run_params(spec, train_loop_config),
        )
        self._life, self._upto = 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="goodput-mlflow-feed", daemon=True)

    def start(self) -> None:
        self._sink.start()
        self._thread.start()

    def close(self, status: Status, end: RunEnd | None) -> None:
        """The rest is sent, with `end`'s report and the status, or kept in the run's storage for later."""
        self._stop.set()
        self._thread.join(_ASK_TIMEOUT_S)
        if not self._thread.is_alive():
            self._metrics()
        if end is not None:
            self._sink.add([goodput_points(end.report, time.time(), end.data)])
        self._sink.close(status, functools.partial(run_artifacts, self._store), timeout_s=_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        goodput_mono_s = time.monotonic()
        while not self._stop.wait(_METRICS_EVERY_S):
            self._metrics()
            if time.monotonic() - goodput_mono_s >= _GOODPUT_EVERY_S:
                goodput_mono_s = time.monotonic()
                self._goodput()

    def _metrics(self) -> None:
        while self._wants_metrics:
            news = self._ask("metrics_since", self._life, self._upto)
            if news is None:
                return
            self._life, self._upto = news.life, news.upto
            if not news.rows:
                return
            self._sink.add([training_points(row.attempt, row.step, row.at_s, row.values) for row in news.rows])

    def _goodput(self) -> None:
        now = self._ask("figures")
        if now is not None and now.report.attempts:
            self._sink.add([goodput_points(now.report, time.time(), now.data)])

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._coordinator, method).remote(*args), timeout=_ASK_TIMEOUT_S)
        except (RayError, TimeoutError) as error:  # being restarted: what it has is asked for again
            logger.debug("The coordinator did not answer %s: %s", method, error)
            return None


def run_params(spec: TrainSpec, train_loop_config: Any) -> dict[str, str]:
    """What is fixed for a run, as MLflow's params: the loop's configuration under its own names, ours with a prefix.

    Options of storages are left out: they hold credentials.
    """
    config = flat_params(train_loop_config) if isinstance(train_loop_config, Mapping) else {}
    checkpoint = spec.run.checkpoint
    ours: dict[str, Any] = {
        "target_world": spec.run.target_world,
        "checkpoint": {"every": checkpoint.every, "keep_last": checkpoint.keep_last, "when_full": checkpoint.when_full},
        "storage": spec.run.store.uri,
        "reproducible": spec.reproducible,
        "data": {
            name: {"uri": data.title, "global_batch_size": data.global_batch_size, "seed": data.seed}
            for name, data in spec.datasets.items()
        },
        "version": {
            "ray_goodput": ray_goodput.__version__,
            "ray": ray.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    return {**flat_params({"ray_goodput": ours}), **config}
