"""One rank's time, coarse and bounded: cells of equal length, each with the seconds by bucket and the steps done.

Sums say how much, a timeline says when. Cells are as fine as a bounded number of them allows; when time goes on, two
become one. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ray_goodput.core.buckets import Bucket

CELL_S = 0.25
"""Length of a cell at the start of a run; always this times a power of two."""
MAX_CELLS = 512
"""Cells that the whole run so far may need."""
MAX_RANKS = 1024
"""Ranks with a timeline: those above have sums only, so that the coordinator's memory stays below 32 MiB."""

NUM_BUCKETS = len(Bucket)
_WIDTH = NUM_BUCKETS + 1  # the last column counts steps done


class Timeline:
    """Cells from the start of one rank's journal, by the rank's own clock. Cell i is [i, i + 1) x `cell_s`."""

    def __init__(self, cell_s: float = CELL_S) -> None:
        self.cell_s = cell_s
        self._cells = np.zeros((0, _WIDTH), dtype=np.float32)
        self._changed: tuple[int, int] | None = None

    def add(
        self,
        start_ns: npt.NDArray[np.int64],
        end_ns: npt.NDArray[np.int64],
        buckets: npt.NDArray[np.int64],
        done: npt.NDArray[np.bool_],
    ) -> None:
        """Book stretches of time (ns since the journal's start) and whether each ended with a step done."""
        if not len(start_ns):
            return
        while end_ns[-1] >= self.cell_s * 1e9 * MAX_CELLS:
            self.coarsen(self.cell_s * 2)
        width = round(self.cell_s * 1e9)
        first = start_ns // width
        num = np.maximum(end_ns - 1, start_ns) // width - first + 1
        offsets = np.cumsum(num) - num
        cell = np.repeat(first - offsets, num) + np.arange(int(num.sum()))
        ns = np.minimum(np.repeat(end_ns, num), (cell + 1) * width) - np.maximum(np.repeat(start_ns, num), cell * width)
        low, high = int(cell.min()), int(cell.max()) + 1
        size = (high - low) * _WIDTH
        index = (cell - low) * _WIDTH + np.repeat(buckets, num)
        sums = np.bincount(index, weights=ns / 1e9, minlength=size)
        last = first[done] + num[done] - 1 - low
        sums += np.bincount(last * _WIDTH + NUM_BUCKETS, minlength=size)
        self._grow(high)
        self._cells[low:high] += sums.reshape(-1, _WIDTH).astype(np.float32)
        self._touch(low, high)

    def coarsen(self, cell_s: float) -> None:
        """Make cells at least `cell_s` long."""
        while self.cell_s < cell_s:
            self.cell_s *= 2
            if len(self._cells) % 2:
                self._grow(len(self._cells) + 1)
            self._cells = self._cells[0::2] + self._cells[1::2]
            if self._changed:
                low, high = self._changed
                self._changed = (low // 2, (high + 1) // 2)

    def take_changes(self) -> tuple[int, list[list[int]]] | None:
        """Number of the first cell that changed since the last call, and it and those that follow as they stand.

        A cell is `[steps done, bucket, ms, bucket, ms, ...]`.
        """
        if self._changed is None:
            return None
        low, high = self._changed
        self._changed = None
        return low, self._told(low, high)

    def all_cells(self) -> list[list[int]]:
        """Every cell as it stands, from the first one on."""
        return self._told(0, len(self._cells))

    def put(self, cell_s: float, first: int, cells: Sequence[Sequence[int]]) -> None:
        """Take cells as `take_changes` gave them; what they say replaces what was there."""
        if first < 0 or first + len(cells) > MAX_CELLS or not cell_s > 0:
            raise ValueError(f"cells {first} to {first + len(cells)} of {cell_s} s")
        told = Timeline(cell_s)
        told._grow(first + len(cells))
        for row, (done, *pairs) in zip(told._cells[first:], cells, strict=True):
            row[NUM_BUCKETS] = done
            for bucket, ms in zip(pairs[0::2], pairs[1::2], strict=True):
                row[bucket if 0 <= bucket < NUM_BUCKETS else Bucket.OTHER] += ms / 1e3
        self.coarsen(cell_s)
        told.coarsen(self.cell_s)
        self._grow(len(told._cells))
        low, high = int(first * cell_s / self.cell_s), len(told._cells)
        if self.cell_s == cell_s:
            self._cells[low:high] = told._cells[low:high]
        else:  # written with shorter cells than these: the first and last of them may be told in parts
            self._cells[low:high] = np.maximum(self._cells[low:high], told._cells[low:high])

    @property
    def seconds(self) -> npt.NDArray[np.float32]:
        """Seconds by bucket, shape (cells, buckets)."""
        return self._cells[:, :NUM_BUCKETS]

    @property
    def steps(self) -> npt.NDArray[np.float32]:
        """Steps done, shape (cells,)."""
        return self._cells[:, NUM_BUCKETS]

    def _grow(self, num: int) -> None:
        if num > len(self._cells):
            self._cells = np.concatenate(
                [self._cells, np.zeros((num - len(self._cells), _WIDTH), dtype=self._cells.dtype)]
            )

    def _told(self, low: int, high: int) -> list[list[int]]:
        rows = self._cells[low:high]
        ms = np.rint(rows[:, :NUM_BUCKETS] * 1e3).astype(int)
        cells = [[done] for done in rows[:, NUM_BUCKETS].astype(int).tolist()]
        at, buckets = np.nonzero(ms)
        for i, bucket, value in zip(at.tolist(), buckets.tolist(), ms[at, buckets].tolist(), strict=True):
            cells[i] += (bucket, value)
        return cells

    def _touch(self, low: int, high: int) -> None:
        if self._changed:
            low, high = min(low, self._changed[0]), max(high, self._changed[1])
        self._changed = (low, high)


def cell_length_s(run_s: float) -> float:
    """How long cells must be so that a run of `run_s` fits into the bounded number of them."""
    cell_s = CELL_S
    while run_s > cell_s * MAX_CELLS:
        cell_s *= 2
    return cell_s
