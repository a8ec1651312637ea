"""Step time by step, for one attempt, in bounded memory.

What is behind a commit can only be lost as a whole, so its steps are kept as one sum; each step after the last commit
is kept on its own, since a later attempt may resume anywhere there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

MAX_SEGMENTS = 4096


class StepTimes:
    """Rank-nanoseconds of steps, summed over ranks. Exact at every bound that was settled, pro rata in between."""

    def __init__(self) -> None:
        self._bounds: list[int] = []  # segment i holds the steps in (bounds[i - 1], bounds[i]]
        self._sums: list[int] = []
        self._open: dict[int, int] = {}
        self._changes: dict[int, int] = {}
        self.first: int | None = None
        """The lowest step seen."""

    def add(self, step: int, ns: int) -> None:
        """Book `ns` for `step`, also when its segment is settled already (a page that came late)."""
        if self.first is None or step < self.first:
            self.first = step
        if self._bounds and step <= self._bounds[-1]:
            at = bisect_left(self._bounds, step)
            self._sums[at] += ns
            step = self._bounds[at]
        else:
            self._open[step] = self._open.get(step, 0) + ns
        self._changes[step] = self._changes.get(step, 0) + ns

    def settle(self, bound: int) -> None:
        """Keep the steps up to `bound` as one sum from now on."""
        if self._bounds and bound <= self._bounds[-1]:
            return
        self._sums.append(_pop_up_to(self._open, bound))
        self._bounds.append(bound)
        # A change stays with a step of its segment, so that `add` puts it there again.
        settled = [
            step for step in self._changes if step <= bound and (len(self._bounds) < 2 or step > self._bounds[-2])
        ]
        moved = sum(self._changes.pop(step) for step in settled)
        if moved:
            self._changes[bound] = moved
        if len(self._bounds) > MAX_SEGMENTS:  # halve the resolution of the older half
            half = MAX_SEGMENTS // 2
            self._sums[:half] = [a + b for a, b in zip(self._sums[0:half:2], self._sums[1:half:2], strict=True)]
            self._bounds[:half] = self._bounds[1:half:2]

    @property
    def has_open(self) -> bool:
        """Whether there are steps that are not settled."""
        return bool(self._open)

    def up_to(self, step: int) -> int:
        """Nanoseconds of the steps up to and including `step`."""
        total, below = 0, self.first - 1 if self.first is not None else 0
        for bound, ns in zip(self._bounds, self._sums, strict=True):
            if step < bound:
                inside = max(0, step - below)
                return total + (ns * inside // (bound - below) if bound > below else 0)
            total, below = total + ns, max(below, bound)
        return total + sum(ns for s, ns in self._open.items() if s <= step)

    def total(self) -> int:
        return sum(self._sums) + sum(self._open.values())

    def take_changes(self) -> list[tuple[int, list[int]]]:
        """What was added since the last call, as runs (first step, nanoseconds of it and those that follow)."""
        runs = _runs(self._changes)
        self._changes = {}
        return runs

    def dump(self) -> tuple[list[tuple[int, int]], list[tuple[int, list[int]]]]:
        """All of it: the settled sums as (bound, nanoseconds), and the other steps as runs."""
        return list(zip(self._bounds, self._sums, strict=True)), _runs(self._open)

    def load(self, settled: Iterable[tuple[int, int]]) -> None:
        """Take the settled sums as `dump` gave them, instead of all that is here."""
        pairs = [(int(bound), int(ns)) for bound, ns in settled]
        self._bounds, self._sums = [bound for bound, _ in pairs], [ns for _, ns in pairs]
        self._open, self._changes, self.first = {}, {}, None

    def num_kept(self) -> int:
        """How many numbers are held."""
        return len(self._sums) + len(self._open)


def _runs(times: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    runs: list[tuple[int, list[int]]] = []
    for step in sorted(times):
        if runs and step == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(times[step])
        else:
            runs.append((step, [times[step]]))
    return runs


def _pop_up_to(times: dict[int, int], bound: int) -> int:
    return sum(times.pop(step) for step in [s for s in times if s <= bound])
