"""A training process's place in the run: its rank, attempt, node, actors and journal."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.train

from ray_goodput.actors.names import (
    NAMESPACE,
    coordinator_name,
    journal_path,
    journals_dir,
    shard_cache_name,
    stacks_path,
    vault_name,
)
from ray_goodput.actors.remote import RemoteProxy
from ray_goodput.clock import Clock, SystemClock
from ray_goodput.config import environment
from ray_goodput.core.run_state import HeartbeatAnswer, WorkerInfo
from ray_goodput.errors import RunError
from ray_goodput.gates import gate
from ray_goodput.goodput.journal import JournalPage, JournalWriter
from ray_goodput.goodput.recorder import Recorder
from ray_goodput.storage import open_store
from ray_goodput.storage.protocol import ObjectStore
from ray_goodput.train.data_tally import DataTally
from ray_goodput.train.metrics import MetricsBuffer
from ray_goodput.train.orders import RankOrders
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.stacks import StackFile
from ray_goodput.train.world import World

logger = logging.getLogger(__name__)

_ACTOR_WAIT_S = 60.0


@dataclass(kw_only=True)
class WorkerContext:
    """Made by `open_worker`; `close` ends the journal. `orders` is what was said from outside.

    node_of_rank: of each rank, the number of its node; nodes are numbered by their lowest rank.
    """

    world: World
    attempt: int
    node_id: str
    node_of_rank: tuple[int, ...]
    local_dir: Path
    store: ObjectStore
    coordinator: RemoteProxy
    vault: Any
    shard_cache: Any
    recorder: Recorder
    metrics: MetricsBuffer
    orders: RankOrders
    data: DataTally
    stacks: StackFile
    clock: Clock = field(default_factory=SystemClock)

    @property
    def is_first_of_node(self) -> bool:
        """Whether no rank of this node is lower: this one speaks for the node."""
        return self.node_of_rank.index(self.node_of_rank[self.world.world_rank]) == self.world.world_rank

    def close(self) -> None:
        self.recorder.close()
        self.stacks.close()


def open_worker(spec: TrainSpec) -> WorkerContext:
    """Join the run: learn the attempt from the coordinator, find the node's actors, start the journal. Collective.

    Raises:
        RunError: the node's vault or shard cache could not be found.
    """
    context = ray.train.get_context()
    gate("join", rank=context.get_world_rank(), world=context.get_world_size())
    key = spec.run.key
    world = World.join(context.get_world_rank(), context.get_world_size())
    coordinator = RemoteProxy(coordinator_name(key))
    node_id = ray.get_runtime_context().get_node_id()
    me = WorkerInfo(
        world_rank=world.world_rank, pid=os.getpid(), node_id=node_id, node_ip=ray.util.get_node_ip_address()
    )
    infos = tuple(world.gather(me))
    attempt = world.broadcast(coordinator.join_attempt(infos) if world.world_rank == 0 else None)
    local_dir = environment().local_dir
    metrics = MetricsBuffer()
    orders = RankOrders(world.world_rank, infos)
    data = DataTally(speaks_for_node=context.get_local_rank() == 0)

    def beat(page: JournalPage | None) -> int | None:
        numbers = metrics.take()
        try:
            answer: HeartbeatAnswer = coordinator.heartbeat(
                attempt, world.world_rank, page, numbers, data.counts(), orders.start
            )
        except Exception:
            metrics.put_back(numbers)
            raise
        orders.hear(answer)
        if answer.replaced:
            _end_replaced(attempt)
        return answer.next_record

    writer = JournalWriter(
        journal_path(journals_dir(local_dir, key), attempt, world.world_rank),
        run=spec.run.run,
        attempt=attempt,
        world_rank=world.world_rank,
        node=node_id,
    )
    recorder = Recorder(
        writer,
        SystemClock(),
        send=beat,
        on_give_up=lambda: beat(None),
    )
    stacks = StackFile(stacks_path(journals_dir(local_dir, key), attempt, world.world_rank))
    stacks.open()
    recorder.start()
    coordinator.handle.hello.remote(attempt, world.world_rank, recorder.elapsed_s())
    vault = _node_actor(vault_name(key, node_id))
    if context.get_local_rank() == 0:
        vault.adopt.remote(attempt)
    nodes = list(dict.fromkeys(info.node_id for info in infos))
    return WorkerContext(
        world=world,
        attempt=attempt,
        node_id=node_id,
        node_of_rank=tuple(nodes.index(info.node_id) for info in infos),
        local_dir=local_dir,
        store=open_store(spec.run.store),
        coordinator=coordinator,
        vault=vault,
        shard_cache=_node_actor(shard_cache_name(key, node_id)),
        recorder=recorder,
        metrics=metrics,
        orders=orders,
        data=data,
        stacks=stacks,
    )


def _end_replaced(attempt: int) -> None:
    """This process ends: its node was given up while it lived on, and a later attempt trains in its place. Whatever it
    staged is the vault's."""
    logger.error("Attempt %d has been replaced by a later one; this process, left over from it, ends.", attempt)
    os._exit(1)


def _node_actor(name: str) -> Any:
    """The handle of an actor that the controller starts on this node, which may still be on its way.

    Raises:
        RunError: it did not come in time; the next attempt may have more luck.
    """
    deadline = time.monotonic() + _ACTOR_WAIT_S
    while True:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            if time.monotonic() > deadline:
                raise RunError(
                    f"The actor {name} did not appear within {_ACTOR_WAIT_S:.0f} s: "
                    "the log of the Ray Train controller says why."
                ) from None
            time.sleep(0.2)
