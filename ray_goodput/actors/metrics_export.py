"""Tells Ray's metrics, and so Prometheus, what the run's figures are, from a thread of the coordinator's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ray.util.metrics import Gauge

from ray_goodput.goodput.metrics import METRICS, RUN_LABELS, RunFigures, samples

logger = logging.getLogger(__name__)

_EVERY_S = 5.0


class MetricsExporter:
    """Owner of one daemon thread that ends with its process. An error in it is logged once and training goes on.

    figures: asked every five seconds. run_id: Ray Train's, "" until it is known; asked each time.
    """

    def __init__(self, run: str, figures: Callable[[], RunFigures], run_id: Callable[[], str] = str) -> None:
        self._run = run
        self._figures = figures
        self._run_id = run_id
        self._gauges = {
            name: Gauge(name, m.text, tag_keys=(*RUN_LABELS, *([m.label] if m.label else [])))
            for name, m in METRICS.items()
        }
        self._stop = threading.Event()
        self._broken = False

    def start(self) -> None:
        threading.Thread(target=self._work, name="goodput-metrics", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def export(self) -> None:
        """Every metric has its present value, once Ray has told it on (ten seconds at most)."""
        labels = dict(zip(RUN_LABELS, (self._run, self._run_id()), strict=True))
        if not labels["ray_train_run_id"]:
            return  # a series without the label would be another one
        for sample in samples(self._figures()):
            metric = sample.metric
            tags = labels | ({metric.label: sample.label} if metric.label else {})
            self._gauges[metric.name].set(sample.value, tags=tags)

    def _work(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.export()
            except Exception as error:  # figures for people never end a run
                if not self._broken:
                    logger.warning("The run's metrics could not be told to Ray: %r", error)
                self._broken = True
