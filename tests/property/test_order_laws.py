"""Laws of the sample order: what promise D1 rests on."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_goodput.core.batches import BatchPlan, batch_slots, batch_weight, local_slots
from ray_goodput.core.order import SampleOrder

SHARD_ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
ORDERS = st.builds(
    SampleOrder,
    SHARD_ROWS,
    seed=st.integers(0, 2**64 - 1),
    lanes=st.integers(1, 12),
    window=st.integers(1, 4),
)
laws = settings(max_examples=60, deadline=None)


def slow_permutation(tag: int, n: int, *numbers: int) -> list[int]:
    words = [tag]
    for number in numbers:
        words += [number % 2**32, number // 2**32]
    raw = np.random.Philox(key=np.random.SeedSequence(words).generate_state(2, np.uint64)).random_raw(n).tolist()
    return sorted(range(n), key=lambda i: (raw[i], i))


def slow_epoch(rows: list[int], seed: int, num_lanes: int, window: int, epoch: int) -> list[tuple[int, int]]:
    """The definition in order.py, word for word, row by row."""
    sequence = [(s, r) for s in slow_permutation(1, len(rows), seed) for r in range(rows[s])]
    short, longer = divmod(len(sequence), num_lanes)
    lanes, begin = [], 0
    for lane in range(num_lanes):
        end = begin + short + (lane < longer)
        parts: list[list[tuple[int, int]]] = []
        for sample in sequence[begin:end]:
            if not parts or parts[-1][0][0] != sample[0]:
                parts.append([])
            parts[-1].append(sample)
        parts = [parts[i] for i in slow_permutation(2, len(parts), seed, epoch, lane)]
        out: list[tuple[int, int]] = []
        for w in range(0, len(parts), window):
            pool = [sample for part in parts[w : w + window] for sample in part]
            out += [pool[i] for i in slow_permutation(3, len(pool), seed, epoch, lane, w // window)]
        lanes.append(out)
        begin = end
    return [lanes[t % num_lanes][t // num_lanes] for t in range(len(sequence))]


@laws
@given(SHARD_ROWS, st.integers(0, 2**64 - 1), st.integers(1, 12), st.integers(1, 4), st.integers(0, 3))
def test_the_order_is_its_written_definition(rows: list[int], seed: int, lanes: int, window: int, epoch: int) -> None:
    order = SampleOrder(rows, seed=seed, lanes=lanes, window=window)
    n = order.num_samples
    shards, shard_rows = order.locate(np.arange(epoch * n, (epoch + 1) * n))
    expected = slow_epoch(rows, seed, lanes, window, epoch)
    assert list(zip(shards.tolist(), shard_rows.tolist(), strict=True)) == expected


@laws
@given(ORDERS, st.integers(0, 10**12))
def test_each_epoch_holds_every_sample_exactly_once(order: SampleOrder, epoch: int) -> None:
    n = order.num_samples
    ids = order.sample_ids(*order.locate(np.arange(epoch * n, (epoch + 1) * n)))
    assert sorted(ids.tolist()) == list(range(n))


@laws
@given(ORDERS, st.data())
def test_seeking_equals_streaming_from_anywhere_in_any_order(order: SampleOrder, data: st.DataObject) -> None:
    n = 3 * order.num_samples
    shards, rows = order.locate(np.arange(n))
    picks = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    some_shards, some_rows = order.locate(np.array(picks, dtype=np.int64))
    assert some_shards.tolist() == shards[picks].tolist()
    assert some_rows.tolist() == rows[picks].tolist()
    for t in picks[:3]:
        assert order.at(t) == (shards[t], rows[t])


@laws
@given(ORDERS, st.integers(0, 200), st.integers(1, 40), st.integers(1, 17), st.data())
def test_ranks_cover_each_batch_without_overlap_and_evenly_wherever_its_lanes_are_read(
    order: SampleOrder, start: int, size: int, n: int, data: st.DataObject
) -> None:
    places = data.draw(st.none() | st.permutations(range(order.lanes)))
    stop = start + size
    parts = [local_slots(order, start, stop, dp_rank=r, dp_world=n, lane_places=places) for r in range(n)]
    union = np.concatenate(parts)
    assert union.tolist() == batch_slots(order, start, stop, places).tolist()
    lanes = order.lane_of(union).tolist()
    assert lanes == sorted(lanes, key=range(order.lanes).index if places is None else places.__getitem__)
    assert sorted(union.tolist()) == list(range(start, start + size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@laws
@given(ORDERS, st.integers(1, 30), st.integers(1, 17), st.data())
def test_weights_make_the_averaged_gradient_that_of_the_batch(
    order: SampleOrder, size: int, n: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, 100))
    gradient = np.random.default_rng(0).normal(size=start + size)
    total = 0.0
    for r in range(n):
        mine = local_slots(order, start, start + size, dp_rank=r, dp_world=n)
        mean = gradient[mine].mean() if len(mine) else 0.0
        total += batch_weight(len(mine), size, n) * mean / n
    np.testing.assert_allclose(total, gradient[start:].mean())


@laws
@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 4), st.booleans())
def test_batches_tile_the_epochs_and_a_restart_at_any_batch_gives_the_same_tail(
    n: int, g: int, epochs: int, drop_last: bool
) -> None:
    if drop_last and g > n:
        g = n
    plan = BatchPlan(num_samples=n, global_batch_size=g, epochs=epochs, drop_last=drop_last)
    batches, position = [], 0
    while (batch := plan.at(position)) is not None:
        batches.append(batch)
        position = batch.samples_end
    assert len(batches) == plan.num_batches()
    assert [b.index for b in batches] == list(range(len(batches)))
    assert batches == [plan.batch(k) for k in range(len(batches))]
    assert plan.at(epochs * n) is None
    assert all(plan.at(b.stop) == plan.at(b.samples_end) for b in batches)
    indices = [t for b in batches for t in range(b.start, b.stop)]
    if drop_last:
        assert indices == [e * n + t for e in range(epochs) for t in range(n // g * g)]
        assert all(b.size == g for b in batches)
    else:
        assert indices == list(range(epochs * n))
        assert all(b.size == g for b in batches[:-1])


@laws
@given(ORDERS, st.integers(1, 30), st.integers(1, 17), st.integers(1, 17), st.integers(0, 10))
def test_step_k_trains_on_the_same_samples_at_every_world_size(
    order: SampleOrder, g: int, world_a: int, world_b: int, k: int
) -> None:
    batch = BatchPlan(num_samples=order.num_samples, global_batch_size=g).batch(k)
    assert batch is not None

    def ids(world: int) -> list[int]:
        mine = [local_slots(order, batch.start, batch.stop, dp_rank=r, dp_world=world) for r in range(world)]
        return sorted(order.sample_ids(*order.locate(np.concatenate(mine))).tolist())

    assert ids(world_a) == ids(world_b)
