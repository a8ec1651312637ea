"""The ranks of one attempt: small agreements on a CPU group of our own, apart from the trainer's.

Every method but the properties is collective: all ranks call it in the same order, on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import GoodputError, SessionError

T = TypeVar("T")


@dataclass(slots=True)
class World:
    """`group` is a gloo group of all ranks, None when there is only one, and once it was left."""

    world_rank: int
    world_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def join(cls, world_rank: int, world_size: int) -> World:
        """Collective: make the group."""
        group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        return cls(world_rank, world_size, group)

    def leave(self) -> None:
        """The group is gone, and its threads have ended: one that runs on while the interpreter shuts down may want
        its lock there, to let go of a tensor, and then takes the process down (SIGABRT). Once, after the last agreement
        of all ranks; `ControlWord.close` comes before."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():  # else the program has taken all groups down already
            dist.destroy_process_group(group)

    def _joined(self) -> dist.ProcessGroup | None:
        """None for a world of one. Raises SessionError once the group was left: a rank must not agree with itself."""
        if self.group is None and self.world_size > 1:
            raise SessionError("The ranks have left their group: nothing more can be agreed on after the close.")
        return self.group

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        box: list[Any] = [value]
        if (group := self._joined()) is not None:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, ordered by world rank, on every rank."""
        if (group := self._joined()) is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=group)
        return values

    def all_true(self, flag: bool) -> bool:
        """Whether `flag` holds on every rank."""
        if (group := self._joined()) is None:
            return flag
        word = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
        return bool(word.item())

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """What `action` gives or raises (a GoodputError) at rank 0, on every rank."""
        answer: tuple[T | None, GoodputError | None] = (None, None)
        if self.world_rank == 0:
            try:
                answer = action(), None
            except GoodputError as error:
                answer = None, error
        value, error = self.broadcast(answer)
        if error is not None:
            raise error
        return cast("T", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What all ranks do at the same step: save, leave the loop for good, end this attempt. `near`: save, but no farther
    than this tier, unless `save`."""

    save: bool = False
    stop: bool = False
    leave: bool = False
    near: SaveTier = SaveTier.NONE


_NOTHING = Decisions()
_NAMES = tuple(f.name for f in fields(Decisions))
_flags = attrgetter(*_NAMES)
_NO_FLAG = bytes(len(_NAMES))


class ControlWord:
    """Decisions agreed without waiting: posted at the end of one step, read by all ranks at the end of the next.

    A decision counts if any rank posted it. One all-reduce of a byte for each decision runs in the background
    meanwhile; it raises in `read` when a peer is gone, which is how a survivor learns of it if no other collective told
    it.

    It is called once a step, each time with cold caches, where what is cheap in a loop is not. So the word is a plain
    bytearray that the tensor shares, and the all-reduce goes to the group's back end itself: by way of the group it
    passes through torch's dispatcher, and by way of `dist.all_reduce` through checks and logging too.
    """

    def __init__(self, world: World) -> None:
        self._values = bytearray(_NO_FLAG)
        self._word = [torch.frombuffer(self._values, dtype=torch.uint8)]
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._options = options
        self._backend: Any = None if world.group is None else world.group._get_backend(torch.device("cpu"))
        self._work: Any = None
        self._posted = False

    def post(self, decisions: Decisions) -> None:
        self._values[:] = _NO_FLAG if decisions is _NOTHING else bytes(_flags(decisions))
        self._posted = True
        if self._backend is not None:
            self._work = self._backend.allreduce(self._word, self._options)

    def close(self) -> None:
        """What was posted and not read is waited for, and the group let go of. All ranks have posted as often."""
        self.read()
        self._backend = None

    def read(self) -> Decisions:
        """The decisions posted last, agreed; none if nothing was posted since the last read."""
        if not self._posted:
            return _NOTHING
        self._posted = False
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._values == _NO_FLAG:
            return _NOTHING
        save, stop, leave, near = self._values
        return Decisions(save=bool(save), stop=bool(stop), leave=bool(leave), near=SaveTier(near))
