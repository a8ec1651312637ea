"""A run on this Ray cluster, found by its name, and the processes that are its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.names import NAMESPACE, coordinator_name, run_key, shard_cache_name, vault_name
from ray_goodput.config import StoreSpec
from ray_goodput.core.run_state import RunStatus
from ray_goodput.errors import ConfigError, RunError

_PREFIX = coordinator_name("")
_CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One process of a run. `job_id` is that of the driver it belongs to."""

    pid: int
    node_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that has a coordinator on the cluster this process is connected to; `key` is its short name."""

    name: str
    key: str

    def status(self, timeout_s: float = 5.0) -> RunStatus | None:
        """The run's state; None while it has no coordinator, or it does not answer."""
        try:
            status: Any = ray.get(self._actor(coordinator_name(self.key)).status.remote(), timeout=timeout_s)
            return status
        except (ValueError, RayError, TimeoutError):
            return None

    def coordinator(self) -> ProcessInfo:
        return self._process(coordinator_name(self.key))

    def vault(self, node_id: str) -> ProcessInfo:
        return self._process(vault_name(self.key, node_id))

    def shard_cache(self, node_id: str) -> ProcessInfo:
        return self._process(shard_cache_name(self.key, node_id))

    def driver_pid(self) -> int:
        """The driver's process, on the coordinator's node.

        Raises:
            RunError: the coordinator does not answer.
        """
        actor = self._actor(coordinator_name(self.key))
        try:
            pid: int = ray.get(actor.driver_pid.remote(), timeout=_CALL_TIMEOUT_S)
            return pid
        except (RayError, TimeoutError) as error:
            raise RunError(
                f"The coordinator of the run {self.name} does not say who its driver is ({error})."
            ) from error

    def _process(self, name: str) -> ProcessInfo:
        try:
            found: ProcessInfo = ray.get(self._actor(name).__ray_call__.remote(_who), timeout=_CALL_TIMEOUT_S)
            return found
        except (ValueError, RayError, TimeoutError) as error:
            raise RunError(f"The actor {name} of the run {self.name} cannot be found now ({error}).") from error

    @staticmethod
    def _actor(name: str) -> Any:
        return ray.get_actor(name, namespace=NAMESPACE)


def _who(_: Any) -> ProcessInfo:
    context = ray.get_runtime_context()
    return ProcessInfo(pid=os.getpid(), node_id=context.get_node_id(), job_id=context.get_job_id())


def find_run(name: str, store: StoreSpec | None = None) -> LiveRun:
    """The run of that name that is being trained on this cluster.

    store: the run's own folder (`GoodputTrainer.run_store`), needed only where two storages have a run of that name.

    Raises:
        RunError: there is none; the message names those there are.
        ConfigError: there are several.
    """
    if store is not None:
        key = run_key(name, store)
        keys = [key] if key in _keys() else []
    else:
        keys = [key for key in _keys() if _named(key, name)]
    if not keys:
        others = ", ".join(sorted(key.rpartition("-")[0] for key in _keys())) or "none"
        raise RunError(f"No run {name!r} is being trained on this Ray cluster; runs here: {others}.")
    if len(keys) > 1:
        raise ConfigError(f"{len(keys)} runs are named {name!r}, in different storages: say which with the storage.")
    return LiveRun(name, keys[0])


def _keys() -> list[str]:
    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]


def _named(key: str, name: str) -> bool:
    anywhere = run_key(name, StoreSpec(uri=""))
    return key.rpartition("-")[0] == anywhere.rpartition("-")[0]
