"""Laws of `checkpoint.balance`: even bytes, each byte once, at a rank that holds it, in few boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_goodput.checkpoint.balance import Box, Piece, assign, boxes_of_range, water_fill

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def _bytes(boxes: list[Box], pieces: list[Piece]) -> int:
    itemsize = {p.tensor: p.itemsize for p in pieces}
    return sum(math.prod(b.sizes) * itemsize[b.tensor] for b in boxes)


def _replicated(sizes: list[tuple[int, ...]], itemsize: int, world: int) -> list[Piece]:
    everyone = tuple(range(world))
    return [Piece(i, (0,) * len(s), s, itemsize, everyone) for i, s in enumerate(sizes)]


@given(shape=st.lists(st.integers(1, 6), max_size=4).map(tuple), data=st.data())
def test_the_boxes_of_a_range_are_that_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total)) if shape else total
    start = start if shape else 0
    numbered = np.arange(total).reshape(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    found = [numbered[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *found]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(base=st.lists(st.integers(0, 1000), min_size=1, max_size=9), total=st.integers(0, 5000))
def test_water_filling_leaves_the_lowest_highest_level(base: list[int], total: int) -> None:
    taken = water_fill(base, total)
    assert sum(taken) == total
    assert min(taken) >= 0
    level = max((b + t for b, t in zip(base, taken, strict=True) if t), default=0)
    assert all(b + t >= level - 1 for b, t in zip(base, taken, strict=True))


@settings(max_examples=300)
@given(
    sizes=st.lists(shapes, min_size=1, max_size=12),
    world=st.integers(1, 9),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    data=st.data(),
)
def test_every_element_is_written_once_by_a_holder_and_the_bytes_are_even(
    sizes: list[tuple[int, ...]], world: int, itemsize: int, data: st.DataObject
) -> None:
    pieces = []
    for index, shape in enumerate(sizes):
        holders = tuple(sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1))))
        holders = data.draw(st.sampled_from([holders, tuple(range(world))]))
        pieces.append(Piece(index, (0,) * len(shape), shape, itemsize, holders, rank0=data.draw(st.booleans())))
    boxes = assign(pieces, world)
    seen = [np.zeros(shape, int) for shape in sizes]
    for rank, rank_boxes in enumerate(boxes):
        for box in rank_boxes:
            assert rank in pieces[box.tensor].holders
            seen[box.tensor][tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assert all((count == 1).all() for count in seen)
    assert all(any(b.tensor == i for r in boxes for b in r) for i in range(len(sizes)))


@settings(max_examples=300)
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=30),
    world=st.integers(1, 17),
    base=st.lists(st.integers(0, 3000), min_size=17, max_size=17),
)
def test_replicated_tensors_even_out_what_the_ranks_already_carry(
    sizes: list[tuple[int, ...]], world: int, base: list[int]
) -> None:
    pieces = _replicated(sizes, 4, world)
    fixed = [Piece(len(sizes) + r, (0,), (base[r],), 1, (r,)) for r in range(world)]
    loads = [_bytes(b, pieces + fixed) for b in assign(pieces + fixed, world)]
    mean = sum(loads) / world
    assert max(loads) <= max(1.05 * max(mean, *base[:world]), mean + 8)


LLM = [(32000, 1024), *[s for _ in range(6) for s in [(1024, 1024)] * 4 + [(2816, 1024)] * 3 + [(1024,)] * 2], (1024,)]
ODD = {
    "one huge embedding": [(1_000_003, 128), (7,), ()],
    "one row": [(1, 10_000_019)],
    "two rows": [(2, 5_000_011), (3,)],
    "three dimensions, nothing divides": [(3, 1009, 2003)],
    "llm": LLM,
    "llm with optimizer": [s for shape in LLM for s in (shape, (), shape, shape)],
    "many small": [(64,)] * 5000,
}


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 32])
@pytest.mark.parametrize("name", ODD)
def test_bytes_per_rank_stay_within_five_percent_of_the_mean_with_few_chunks(name: str, world: int) -> None:
    pieces = _replicated(ODD[name], 4, world)
    boxes = assign(pieces, world)
    loads = [_bytes(b, pieces) for b in boxes]
    assert max(loads) * world / sum(loads) <= 1.05
    assert sum(map(len, boxes)) <= len(pieces) + 3 * world


def test_a_large_share_is_cut_at_borders_of_tensors_and_rows_only() -> None:
    boxes = assign(_replicated(LLM, 4, 8), 8)
    full_rows = [b for rank in boxes for b in rank if b.sizes[1:] == LLM[b.tensor][1:]]
    assert len(full_rows) == sum(map(len, boxes))


def test_a_replicated_shard_is_shared_by_its_own_replicas_only() -> None:
    pieces = [Piece(0, (0, 0), (50, 8), 4, (0, 2)), Piece(0, (50, 0), (50, 8), 4, (1, 3))]
    boxes = assign(pieces, 4)
    assert [_bytes(b, pieces) for b in boxes] == [800] * 4
    assert [b.offsets[0] < 50 for rank in boxes for b in rank] == [True, False, True, False]
    assert boxes[3][0] == Box(0, (75, 0), (25, 0), (25, 8))


def test_values_that_count_at_rank_0_only_are_written_by_rank_0_as_far_as_its_share_goes() -> None:
    everyone = (0, 1)
    pieces = [
        Piece(0, (0,), (100,), 4, everyone),
        Piece(1, (0,), (10,), 4, everyone, rank0=True),
        Piece(2, (0,), (4000,), 4, everyone, rank0=True),
    ]
    boxes = assign(pieces, 2)
    assert [b.tensor for b in boxes[0] if b.tensor == 1] == [1]
    assert {b.tensor for b in boxes[1]} >= {2}
