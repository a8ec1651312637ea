"""Which ranks are slower than the others, and by how much. A pure rule; nobody is killed for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_STEPS = 50
_MIN_RATIO = 1.25
_MIN_EXCESS_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A rank's own computing in `steps` steps, without its waits for others."""

    own_s: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A slow rank. own_s: its own time a step; usual_s: that of a middling one of the others."""

    world_rank: int
    own_s: float
    usual_s: float

    @property
    def ratio(self) -> float:
        return self.own_s / self.usual_s

    @property
    def sentence(self) -> str:
        return (
            f"rank {self.world_rank} computes {self.own_s * 1e3:.1f} ms a step, the others {self.usual_s * 1e3:.1f} ms "
            f"({self.ratio:.1f} x): all wait for it"
        )


def find_stragglers(paces: Mapping[int, Pace]) -> tuple[Straggler, ...]:
    """Ranks that need a quarter (and a millisecond) more than the median of the others, over at least 50 steps each;
    the slowest first.

    Few steps, ranks of which nothing is known, and differences that nobody would notice give none.
    """
    known = {rank: pace.own_s / pace.steps for rank, pace in paces.items() if pace.steps >= MIN_STEPS}
    if len(known) < 2:
        return ()
    # Once: thousands of ranks are judged every few seconds, under the ledger's lock.
    ordered = sorted(known.values())
    found: list[Straggler] = []
    for rank, own_s in known.items():
        usual_s = _median_without(ordered, bisect_left(ordered, own_s))
        if usual_s > 0 and own_s >= usual_s * _MIN_RATIO and own_s - usual_s >= _MIN_EXCESS_S:
            found.append(Straggler(world_rank=rank, own_s=own_s, usual_s=usual_s))
    return tuple(sorted(found, key=lambda s: -s.ratio))


def _median_without(ordered: Sequence[float], place: int) -> float:
    """The median of what is left of at least two sorted values when the one at `place` is taken out."""
    num_left = len(ordered) - 1
    low, high = (ordered[i + (i >= place)] for i in ((num_left - 1) // 2, num_left // 2))
    return (low + high) / 2
