"""Look at a living run from outside: its step, its processes, its newest commit."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.names import NAMESPACE, coordinator_name, run_key
from ray_goodput.config import StoreSpec
from ray_goodput.core.run_state import RunStatus


class RunObserver:
    """Asks the coordinator of a run; works from any process connected to the same Ray cluster.

    store: the run's own folder (`GoodputTrainer.run_store`).
    """

    def __init__(self, run: str, store: StoreSpec) -> None:
        self._name = coordinator_name(run_key(run, store))

    def status(self, timeout_s: float = 5.0) -> RunStatus | None:
        """The run's state, or None while it has no coordinator (not started yet, or over) or it does not answer."""
        if not ray.is_initialized():  # asking would start a Ray of its own, in the middle of somebody's ray.init()
            return None
        try:
            coordinator = ray.get_actor(self._name, namespace=NAMESPACE)
            status: Any = ray.get(coordinator.status.remote(), timeout=timeout_s)
            return status
        except (ValueError, RayError, TimeoutError):
            return None
