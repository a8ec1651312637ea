"""Who writes which bytes: a pure rule over shapes, so that every rank finds the same answer by itself.

A *piece* is a rectangular part of a tensor that one or several ranks hold. A piece with one holder stays there. The
pieces that the same set of ranks holds are laid end to end to one line of bytes, and the line is cut so that all its
holders end up at one level (water filling on top of what they already carry). A cut moves to the border of a tensor,
else to the coarsest border of rows, that lies within `TOLERANCE` of the level; only if there is none does it go through
a row. So there are few and coarse boxes, which is what makes loading fast, and max/mean of the bytes stays <= 1.05.

No torch here: shapes and byte counts only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

TOLERANCE = 0.02  # of a rank's level, at each end of its range: 2 x 0.02 + rounding stays below the promised 1.05


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular part of tensor number `tensor`, held by `holders` (world ranks, ascending, at least one).

    rank0: the holders may differ in value and rank 0's is the one that counts (buffers: DDP broadcasts rank 0's).
    """

    tensor: int
    offsets: Shape
    sizes: Shape
    itemsize: int
    holders: tuple[int, ...]
    rank0: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that one rank writes. `offsets` are global, `local` counts from the piece's first element."""

    tensor: int
    offsets: Shape
    local: Shape
    sizes: Shape


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """(offsets, sizes) of the few boxes that make up elements [start, stop) of a row-major array of `shape`.

    At most 2 x ndim - 1 boxes, in the order of the elements.
    """
    if start >= stop:
        return
    if len(shape) <= 1 or (start == 0 and stop == math.prod(shape)):
        yield ((start,), (stop - start,)) if len(shape) == 1 else ((0,) * len(shape), shape)
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _within_row(shape, first, head, tail)
        return
    if head:
        yield from _within_row(shape, first, head, row)
        first += 1
    if last > first:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if tail:
        yield from _within_row(shape, last, 0, tail)


def _within_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for offsets, sizes in boxes_of_range(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def water_fill(base: Sequence[int], total: int) -> list[int]:
    """How much of `total` each holder takes so that the largest `base[i] + taken[i]` is as small as it can be.

    Whole bytes; the sum is exactly `total`.
    """
    by_base = sorted(base)
    carried = 0
    count = len(by_base)
    for k, b in enumerate(by_base):
        if k and b * k >= total + carried:  # the first k holders reach their common level before the next one's base
            count = k
            break
        carried += b
    pool, taken, given, want = total + carried, [], 0, 0
    wet = set(sorted(range(len(base)), key=lambda i: (base[i], i))[:count])
    for i, b in enumerate(base):
        want += (pool - b * count) if i in wet else 0
        taken.append(want // count - given)
        given = want // count
    return taken


def assign(pieces: Sequence[Piece], world_size: int) -> list[list[Box]]:
    """Boxes per world rank: together they cover each piece exactly once, and each lies at a holder of its piece.

    Bytes per rank: max <= 1.05 x max(mean, largest load that cannot move), up to one element. A rank's boxes are in the
    order of the tensors.
    """
    load = [0] * world_size
    placed: list[list[tuple[int, Box]]] = [[] for _ in range(world_size)]
    lines: dict[tuple[int, ...], list[int]] = {}
    for number, piece in enumerate(pieces):
        if len(piece.holders) == 1 or piece.size_bytes == 0:
            _place_whole(piece, number, piece.holders[0], placed, load)
        else:
            lines.setdefault(piece.holders, []).append(number)
    for holders in sorted(lines, key=lambda h: (len(h), h)):  # the least free first
        line = _keep_at_rank0(pieces, lines[holders], holders, placed, load)
        quotas = water_fill([load[r] for r in holders], sum(pieces[n].size_bytes for n in line))
        level = max((load[r] + q for r, q in zip(holders, quotas, strict=True) if q), default=0)
        for rank, number, start, stop in _cut(pieces, line, holders, quotas, int(TOLERANCE * level)):
            piece = pieces[number]
            load[rank] += (stop - start) * piece.itemsize
            for local, sizes in boxes_of_range(piece.sizes, start, stop):
                offsets = tuple(a + b for a, b in zip(piece.offsets, local, strict=True))
                placed[rank].append((number, Box(piece.tensor, offsets, local, sizes)))
    return [[box for _, box in sorted(boxes, key=lambda entry: entry[0])] for boxes in placed]


def _place_whole(piece: Piece, number: int, rank: int, placed: list[list[tuple[int, Box]]], load: list[int]) -> None:
    placed[rank].append((number, Box(piece.tensor, piece.offsets, (0,) * len(piece.sizes), piece.sizes)))
    load[rank] += piece.size_bytes


def _keep_at_rank0(
    pieces: Sequence[Piece],
    line: Sequence[int],
    holders: tuple[int, ...],
    placed: list[list[tuple[int, Box]]],
    load: list[int],
) -> list[int]:
    """Place `rank0` pieces, small ones first, as far as rank 0's fair share goes (or a hundredth of it, when it carries
    more than that already); the rest of the line is returned."""
    if holders[0] != 0:
        return list(line)
    fair = (sum(load[r] for r in holders) + sum(pieces[n].size_bytes for n in line)) // len(holders)
    limit = max(fair, load[0] + fair // 100)
    kept = set()
    for number in sorted((n for n in line if pieces[n].rank0), key=lambda n: (pieces[n].size_bytes, n)):
        if load[0] + pieces[number].size_bytes > limit:
            break
        _place_whole(pieces[number], number, 0, placed, load)
        kept.add(number)
    return [n for n in line if n not in kept]


def _cut(
    pieces: Sequence[Piece], line: Sequence[int], holders: Sequence[int], quotas: Sequence[int], slack: int
) -> Iterator[tuple[int, int, int, int]]:
    """(rank, piece number, first element, last element + 1) for the parts of the line each holder takes."""
    starts = [0]
    for number in line:
        starts.append(starts[-1] + pieces[number].size_bytes)
    begin = position = 0
    for holder, quota in zip(holders, quotas, strict=True):
        position += quota
        if quota == 0:
            continue
        end = max(begin, _snap(pieces, line, starts, position, slack))
        index = bisect_right(starts, begin) - 1
        while index < len(line) and starts[index] < end:
            itemsize = pieces[line[index]].itemsize
            first = max(begin, starts[index]) - starts[index]
            last = min(end, starts[index + 1]) - starts[index]
            yield holder, line[index], first // itemsize, last // itemsize
            index += 1
        begin = end


def _snap(pieces: Sequence[Piece], line: Sequence[int], starts: Sequence[int], position: int, slack: int) -> int:
    """The best place for a cut near byte `position` of the line: a tensor's border, else rows, else an element."""
    if position >= starts[-1]:
        return starts[-1]
    index = bisect_right(starts, position) - 1
    piece = pieces[line[index]]
    border = min(starts[index], starts[index + 1], key=lambda s: abs(s - position))
    if abs(border - position) <= slack or not piece.sizes:
        return border
    inside = position - starts[index]
    for dim in range(len(piece.sizes)):
        row_bytes = math.prod(piece.sizes[dim + 1 :]) * piece.itemsize
        nearest = (inside + row_bytes // 2) // row_bytes * row_bytes
        if abs(nearest - inside) <= slack or dim == len(piece.sizes) - 1:
            return starts[index] + nearest
    return border
