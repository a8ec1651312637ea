"""The ranks of one attempt: small agreements on a CPU group of our own, apart from the trainer's.

Every method but the properties is collective: all ranks call it in the same order, on the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """`group` is a gloo group of all ranks, None when there is only one."""

    world_rank: int
    world_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def join(cls, world_rank: int, world_size: int) -> World:
        """Collective: make the group."""
        group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        return cls(world_rank, world_size, group)

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        box: list[Any] = [value]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, ordered by world rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_true(self, flag: bool) -> bool:
        """Whether `flag` holds on every rank."""
        if self.group is None:
            return flag
        word = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self.group)
        return bool(word.item())


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What all ranks do at the same step."""

    save: bool = False
    stop: bool = False


_NOTHING = Decisions()


class ControlWord:
    """Decisions agreed without waiting: posted at the end of one step, read by all ranks at the end of the next.

    A decision counts if any rank posted it. One all-reduce of two bytes a step runs in the background meanwhile; it
    raises in `read` when a peer is gone, which is how a survivor learns of it if no other collective told it.
    """

    def __init__(self, world: World) -> None:
        self._group = world.group
        self._values = np.zeros(2, dtype=np.uint8)  # the same memory as `_word`: numpy reads and writes it faster
        self._word = [torch.from_numpy(self._values)]
        self._options: Any = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX
        self._work: Any = None
        self._posted = False

    def post(self, decisions: Decisions) -> None:
        self._values[:] = (decisions.save, decisions.stop)
        self._posted = True
        if self._group is not None:
            # The group's own method: `dist.all_reduce` adds checks and logging that cost more than the call itself.
            self._work = self._group.allreduce(self._word, self._options)

    def read(self) -> Decisions:
        """The decisions posted last, agreed; none if nothing was posted since the last read."""
        if not self._posted:
            return _NOTHING
        self._posted = False
        if self._work is not None:
            self._work.wait()
            self._work = None
        if not self._values.any():
            return _NOTHING
        return Decisions(save=bool(self._values[0]), stop=bool(self._values[1]))
