"""Makes the run's actors: the plain classes of this folder, wrapped by Ray where they are used.

All are named, in one namespace, take no CPU (train workers may hold every one) and come back when killed; a task that
was under way is sent again. None is detached: they die with the driver's job, so a killed driver leaves no process
behind.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_goodput.actors.commit_age import CommitAge
from ray_goodput.actors.coordinator import RunCoordinator
from ray_goodput.actors.heap import give_back_large_blocks
from ray_goodput.actors.lease import RunLease, this_process
from ray_goodput.actors.metrics_export import MetricsExporter
from ray_goodput.actors.metrics_tail import MetricsPage
from ray_goodput.actors.names import (
    NAMESPACE,
    coordinator_name,
    journals_dir,
    local_checkpoints_dir,
    slots_dirs,
    vault_name,
)
from ray_goodput.actors.peer_copy import PeerCopier
from ray_goodput.actors.process_look import RankLook
from ray_goodput.actors.remote import CONTROL, RemoteProxy, with_control_threads
from ray_goodput.actors.spec import RunSpec
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.actors.vaults import answering_vaults, connect_vault, failure_domains
from ray_goodput.actors.watchdog import Watchdog
from ray_goodput.clock import SystemClock
from ray_goodput.config import environment
from ray_goodput.core.commit import CheckpointId, LandedSlice
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.run_state import AttemptStart, HeartbeatAnswer
from ray_goodput.errors import RunInUseError, StorageError
from ray_goodput.goodput.journal import JournalPage
from ray_goodput.storage import open_store
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

_IMMORTAL = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "namespace": NAMESPACE}
_NICENESS = 10
_VAULT_TIMEOUT_S = 20.0
_NEAR = "near"  # the group of threads of calls that move copies between nodes
_NEAR_THREADS = 8
_NEAR_TIMEOUT_S = 20.0
_DEAD_DRIVER_WAIT_S = 15.0
_MAX_PAUSE_S = 30.0


class _CoordinatorProcess(RunCoordinator):
    """The coordinator with its own store, opened where it lives; rebuilt from storage in each of its lives."""

    def __init__(self, spec: RunSpec) -> None:
        first_life = not ray.get_runtime_context().was_current_actor_reconstructed
        store = open_store(spec.store)
        super().__init__(
            run=spec.run,
            store=store,
            clock=SystemClock(),
            lease=_lease(spec, store, first_life=first_life) if spec.driver else None,
            restarted=not first_life,
            target_world=spec.target_world,
            run_started_at=spec.started_at_s or None,
            keep_last=spec.checkpoint.keep_last,
            keep_every=spec.checkpoint.keep_every,
            watchdog=spec.watchdog,
            answering=lambda nodes: answering_vaults(spec.key, nodes),
            domains=lambda: failure_domains(spec.key),
            age=CommitAge(
                SystemClock(), spec.checkpoint.max_durable_age_s, stop=spec.checkpoint.on_durable_age == "stop"
            ),
        )
        self._driver_pid = spec.driver_pid
        self._problem: StorageError | RunInUseError | None = None
        try:
            open_patiently(self, first_life=first_life)
        except (StorageError, RunInUseError) as error:  # raised here, it would reach the driver as the actor's death
            self._problem = error
            return
        MetricsExporter(spec.run, self.figures, lambda: self.train_run_id).start()
        Watchdog(
            self.watch,
            vault=functools.partial(_vault_for_the_watchdog, spec.key),
            store=open_store(spec.store),
            clock=SystemClock(),
            found=self.hang_found,
        ).start()
        if not first_life:
            threading.Thread(target=_ask_vaults_again, args=(spec.key,), name="goodput-reminder", daemon=True).start()

    @ray.method(concurrency_group=CONTROL)
    def ping(self) -> str:
        """Raises StorageError if the storage could not be read when the run began, RunInUseError if it is another's."""
        if self._problem is not None:
            raise self._problem
        return super().ping()

    def driver_pid(self) -> int:
        """The process that called `fit`, on this node; for drills."""
        return self._driver_pid

    @ray.method(concurrency_group=CONTROL)
    def heartbeat(
        self,
        attempt: int,
        world_rank: int,
        page: JournalPage | None,
        metrics: MetricsPage,
        data: DataCounts | None = None,
        start: AttemptStart | None = None,
    ) -> HeartbeatAnswer:
        """Taken also while a storage that is away holds every other thread: silent ranks would be taken for hung."""
        return super().heartbeat(attempt, world_rank, page, metrics, data, start)

    @ray.method(concurrency_group=CONTROL)
    def stuck_ranks(self) -> tuple[int, ...]:
        return super().stuck_ranks()


def _lease(spec: RunSpec, store: ObjectStore, *, first_life: bool) -> RunLease:
    heads = [n["NodeID"] for n in ray.nodes() if "node:__internal_head__" in n["Resources"]]
    me = this_process(spec.driver, cluster=heads[0] if heads else "", key=spec.key)
    return RunLease(
        run=spec.run, store=store, me=me, clock=SystemClock(), ttl_s=spec.lease_ttl_s, first_life=first_life
    )


class _VaultProcess(CheckpointVault):
    """The vault with its own store, at low priority: checksums and uploads yield to training."""

    def __init__(self, spec: RunSpec, node_id: str) -> None:
        os.nice(_NICENESS)
        give_back_large_blocks()
        try:
            psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
        except (OSError, psutil.Error, AttributeError) as error:
            logger.info("The vault's I/O priority could not be lowered (%s).", error)
        local_dir = environment().local_dir
        # Proxies have an actor's methods by name, which no type checker can see.
        coordinator: Any = RemoteProxy(coordinator_name(spec.key))
        near: Any = RemoteProxy(coordinator_name(spec.key), timeout_s=_NEAR_TIMEOUT_S)
        peers = PeerCopier(
            node_id=node_id,
            copies=spec.checkpoint.peer_copies,
            peers=near,
            connect=lambda node: connect_vault(spec.key, node),
        )
        super().__init__(
            node_id=node_id,
            store=open_store(spec.store),
            coordinator=coordinator,
            local_checkpoints=local_checkpoints_dir(local_dir, spec.key),
            slots=slots_dirs(local_dir, spec.key, spec.checkpoint.staging_dir),
            journals=journals_dir(local_dir, spec.key),
            near=near,
            peers=peers if spec.checkpoint.peer_copies else None,
        )

    @ray.method(concurrency_group=CONTROL)
    def ping(self) -> str:
        """Answers also while uploads hold every other thread: a vault that is silent costs its node the run."""
        return super().ping()

    @ray.method(concurrency_group=CONTROL)
    def look(self, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
        return super().look(attempt, ranks)

    @ray.method(concurrency_group=CONTROL)
    def kill(self, ranks: Sequence[tuple[int, int]]) -> list[int]:
        return super().kill(ranks)

    @ray.method(concurrency_group=CONTROL)
    def hurry(self) -> None:
        super().hurry()

    # Copies have threads of their own: two vaults that copy to each other must not wait for each other's uploads.

    @ray.method(concurrency_group=_NEAR)
    def hold(self, attempt: int) -> None:
        super().hold(attempt)

    @ray.method(concurrency_group=_NEAR)
    def receive(self, checkpoint: CheckpointId, name: str, sender: str, offset: int, data: bytes) -> None:
        super().receive(checkpoint, name, sender, offset, data)

    @ray.method(concurrency_group=_NEAR)
    def received(self, landed: LandedSlice, sender: str) -> None:
        super().received(landed, sender)

    @ray.method(concurrency_group=_NEAR)
    def read(self, checkpoint: CheckpointId, name: str, offset: int, size_bytes: int) -> bytes:
        return super().read(checkpoint, name, offset, size_bytes)


class _Opens(Protocol):
    def open(self) -> None: ...


def open_patiently(coordinator: _Opens, *, first_life: bool, sleep: Callable[[float], None] = time.sleep) -> None:
    """Open the coordinator; in a later life as often as it takes, since Ray does not restart an actor whose constructor
    raised, and a run goes on without its coordinator for a while.

    Raises:
        StorageError: the storage cannot be read, in the first life: the driver waits, and tells its user.
    """
    pause_s = 1.0
    while True:
        try:
            return coordinator.open()
        except StorageError as error:
            if first_life:
                raise
            logger.warning("The restarted coordinator cannot read the storage, next try in %.0f s: %s", pause_s, error)
        sleep(pause_s)
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)


def start_coordinator(spec: RunSpec) -> Any:
    """Start the run's coordinator on this (the driver's) node and wait until it has read the storage.

    Raises:
        RunInUseError: a living driver already runs this run name in this storage.
        StorageError: the storage cannot be read.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = with_control_threads(_CoordinatorProcess).options(
        name=coordinator_name(spec.key), max_concurrency=64, scheduling_strategy=here, **_IMMORTAL
    )
    handle: Any
    deadline = time.monotonic() + _DEAD_DRIVER_WAIT_S
    while True:
        try:
            handle = actor.remote(spec)
            break
        except ValueError as error:
            # Of a driver that was just killed, Ray ends the actors within seconds; those of a living one stay.
            if time.monotonic() > deadline:
                raise RunInUseError(
                    f"The run {spec.run!r} in {spec.store.uri} is already being trained by another driver on this "
                    "cluster. Wait for it, stop it, or choose another RunConfig(name=...)."
                ) from error
            time.sleep(0.5)
    try:
        ray.get(handle.ping.remote())
    except RayTaskError as error:
        ray.kill(handle)
        raise error.cause from error
    return handle


def _ask_vaults_again(key: str) -> None:
    """Every vault of the run says once more what has landed: the coordinator's life before died with its notes, and a
    save whose other slices are still on their way would never be committed."""
    for node in ray.nodes():
        if node["Alive"]:
            with contextlib.suppress(ValueError, RayError):  # no vault on that node
                ray.get_actor(vault_name(key, node["NodeID"]), namespace=NAMESPACE).land_again.remote()


def _vault_for_the_watchdog(key: str, node_id: str) -> Any:
    return RemoteProxy(vault_name(key, node_id), timeout_s=_VAULT_TIMEOUT_S)


def vault_class() -> Any:
    return with_control_threads(_VaultProcess, near=_NEAR_THREADS)


def start_vault(spec: RunSpec, node_id: str) -> Any:
    """The vault of a node, started if there is none; returns at once. Owned by the calling process."""
    return (
        vault_class()
        .options(
            name=vault_name(spec.key, node_id),
            get_if_exists=True,
            max_concurrency=32,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            **_IMMORTAL,
        )
        .remote(spec, node_id)
    )
