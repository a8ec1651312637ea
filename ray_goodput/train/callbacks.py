"""Hooks into Ray Train's controller: they start the node actors and tell the coordinator what happens to workers.

None raises: an exception in a hook would end the run, and bookkeeping never stops a training run. Calls are not waited
for, but at the end of the run: `before_controller_shutdown` gives the vaults up to a minute to finish their uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.factories import start_vault
from ray_goodput.actors.names import NAMESPACE, coordinator_name, shard_cache_name, vault_name
from ray_goodput.actors.shard_cache import shard_cache_actor
from ray_goodput.actors.spec import RunSpec
from ray_goodput.core.node_sequence import NodeSequence
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.train import sigterm
from ray_goodput.train.actor_watch import ActorWatch
from ray_goodput.train.drain_watch import DrainWatch
from ray_goodput.train.ray_compat import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
    draining_nodes,
    order_nodes,
    train_run_id,
    worker_infos,
)

_END_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 2.0  # a coordinator without the processes can neither find a hang nor end it
_TOLD_PER_S = 100.0  # processes; of more than 200 it hears more seldom, for the calls lie there while it is away


def _never_raises(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception:  # whatever our bookkeeping does wrong must not end the run
            logger.exception("ray_goodput: the hook %s failed; training goes on.", hook.__name__)
            return {} if hook.__name__ == "before_init_train_context" else None

    return guarded


async def _awaited(ref: Any) -> None:
    """Wait for a call whose failure only matters to the log of the actor (its node may be gone)."""
    with contextlib.suppress(RayError):
        await ref


class SigtermCallback(WorkerCallback):
    """Runs in the main thread of each worker."""

    @_never_raises
    def after_init_train_context(self) -> None:
        sigterm.install()


class GoodputCallback(WorkerGroupCallback, ControllerCallback):
    """Lives in the controller's process, which owns the node actors: they outlive worker groups and end with the
    run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._node_actors: dict[str, list[Any]] = {}
        self._train_run_id = ""
        self._tell_at_mono_s = 0.0
        self._infos: tuple[WorkerInfo, ...] = ()
        self._nodes = NodeSequence()
        self._watch: ActorWatch | None = None  # made in the controller's process: it has a thread
        self._drains: DrainWatch | None = None

    @_never_raises
    def after_controller_start(self, train_run_context: Any) -> None:
        order_nodes(self._nodes.of)
        self._train_run_id = train_run_id(train_run_context)
        self._tell_train_run()
        self._drains = DrainWatch(draining_nodes, lambda nodes: self._coordinator().nodes_draining.remote(nodes))
        self._drains.start()

    @_never_raises
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        self._tell_train_run()  # again and again: a coordinator that was restarted does not know it

    def _tell_train_run(self) -> None:
        now = time.monotonic()
        if now >= self._tell_at_mono_s:
            self._tell_at_mono_s = now + max(_TELL_EVERY_S, len(self._infos) / _TOLD_PER_S)
            self._coordinator().train_run.remote(self._train_run_id)
            if self._infos:
                self._coordinator().group_lives.remote(self._infos)

    @_never_raises
    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        infos = worker_infos(workers)
        self._nodes.note(list(dict.fromkeys(info.node_id for info in infos)))
        for node_id in sorted({info.node_id for info in infos}):
            found = [start_vault(self._spec, node_id), shard_cache_actor(self._spec.key, node_id)]
            kept = self._node_actors.get(node_id, found)
            # Ray ends an actor with the handle that made it; that of `found` does not count for an actor that lives.
            self._node_actors[node_id] = [old if old == new else new for old, new in zip(kept, found, strict=True)]
        self._coordinator().group_allocated.remote(infos)
        self._infos = infos
        self._keep_watch({w.distributed_context.world_rank: w.actor for w in workers})
        return {}

    def _keep_watch(self, workers: Mapping[int, Any]) -> None:
        key = self._spec.key
        if self._watch is None:
            silent_after_s = self._spec.watchdog.actor_silent_after_s
            self._watch = ActorWatch(silent_after_s=silent_after_s, coordinator=self._coordinator)
        self._watch.watch(coordinator_name(key), self._coordinator(), ray.get_runtime_context().get_node_id())
        for node_id, (vault, cache) in self._node_actors.items():
            self._watch.watch(vault_name(key, node_id), vault, node_id)
            self._watch.watch(shard_cache_name(key, node_id), cache, node_id)
        self._watch.workers(workers)
        self._watch.start()

    def _group_ended(self) -> None:
        self._infos = ()
        if self._watch is not None:
            self._watch.workers({})
        self._coordinator().group_down.remote()

    @_never_raises
    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        self._group_ended()

    @_never_raises
    def after_worker_group_abort(self, worker_group_context: Any) -> None:
        self._group_ended()

    async def before_controller_shutdown(self) -> None:
        """The node actors end with this process: before, the vaults finish what is staged and clean up."""
        if self._watch is not None:
            self._watch.close(timeout_s=0.0)
        if self._drains is not None:
            self._drains.close(0.0)
        try:
            ends = [asyncio.ensure_future(_awaited(vault.end_run.remote())) for vault, _ in self._node_actors.values()]
            if ends:
                await asyncio.wait(ends, timeout=_END_TIMEOUT_S)
        except Exception:  # whatever our bookkeeping does wrong must not end the run
            logger.exception("ray_goodput: the vaults could not be told that the run is over.")

    def _coordinator(self) -> Any:
        return ray.get_actor(coordinator_name(self._spec.key), namespace=NAMESPACE)
