"""Laws of a mixture's order: the promises of `core.order` hold through it, and the proportions are kept."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_goodput.core.batches import BatchPlan, local_slots
from ray_goodput.core.mixture import BLOCK, MixtureOrder, block_counts
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import live_set, rank_lanes, shard_visits
from ray_goodput.errors import ConfigError

laws = settings(max_examples=30, deadline=None)


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
    lanes = draw(st.integers(1, 6))
    names = draw(st.lists(st.sampled_from(["web", "code", "books-2", "x.y"]), min_size=1, max_size=3, unique=True))
    members = {}
    for name in names:
        rows = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda r: sum(r) >= lanes))
        window = draw(st.integers(1, 3))
        members[name] = SampleOrder(rows, seed=draw(st.integers(0, 9)), lanes=lanes, window=window)
    weights = {name: draw(st.floats(0.05, 10)) for name in names}
    return MixtureOrder(members, block_counts(weights), seed=draw(st.integers(0, 2**64 - 1)))


def slow_lane(order: MixtureOrder, lane: int, blocks: int) -> list[tuple[int, int]]:
    """The definition in mixture.py, word for word: (member, position in its own order) of a lane's offsets."""
    drawn = [0] * len(order.members)
    out = []
    for b in range(blocks):
        words = [7, order.seed % 2**32, order.seed // 2**32, b % 2**32, b // 2**32]
        stream = np.random.Philox(key=np.random.SeedSequence(words).generate_state(2, np.uint64))
        raw = iter(stream.random_raw(BLOCK).tolist())
        keys = []
        for m, count in enumerate(order.counts):
            for j in range(count):
                v = ((next(raw) >> 32) + lane * 0x9E3779B9) % 2**32
                keys.append((((j << 32) + v) // count, len(keys), m))
        for _, _, m in sorted(keys):
            own = order.members[m]
            epoch, within = divmod(drawn[m], own.lane_length(lane))
            drawn[m] += 1
            out.append((m, epoch * own.num_samples + within * own.lanes + lane))
    return out


@settings(max_examples=15, deadline=None)
@given(mixtures(), st.data())
def test_a_mixture_is_its_written_definition(order: MixtureOrder, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, order.lanes - 1))
    expected = slow_lane(order, lane, 2)
    members, positions = order.split(np.arange(len(expected)) * order.lanes + lane)
    assert list(zip(members.tolist(), positions.tolist(), strict=True)) == expected


@laws
@given(mixtures(), st.integers(0, 10**6))
def test_every_block_of_a_lane_holds_each_member_by_its_weight(order: MixtureOrder, block: int) -> None:
    for lane in range(order.lanes):
        offsets = np.arange(block * BLOCK, (block + 1) * BLOCK)
        members, _ = order.split(offsets * order.lanes + lane)
        assert np.bincount(members, minlength=len(order.counts)).tolist() == list(order.counts)


@laws
@given(mixtures())
def test_each_lane_sees_all_its_samples_of_a_member_before_one_comes_again(order: MixtureOrder) -> None:
    members, positions = order.split(np.arange(2 * BLOCK * order.lanes))
    for m, own in enumerate(order.members):
        for lane in range(order.lanes):
            mine = positions[(members == m) & (np.arange(len(positions)) % order.lanes == lane)]
            expected = [
                epoch * own.num_samples + offset * own.lanes + lane
                for epoch in range(-(-len(mine) // own.lane_length(lane)))
                for offset in range(own.lane_length(lane))
            ]
            assert mine.tolist() == expected[: len(mine)]


@laws
@given(mixtures(), st.lists(st.integers(0, 10**7), min_size=1, max_size=12), st.data())
def test_seeking_equals_streaming_and_the_way_back(order: MixtureOrder, picks: list[int], data: st.DataObject) -> None:
    shards, rows = order.locate(np.array(picks))
    ids = order.sample_ids(shards, rows)
    members, positions = order.split(np.array(picks))
    assert order.member_of(shards).tolist() == members.tolist()
    assert [(order.first_ids[m] <= i < order.first_ids[m + 1]) for m, i in zip(members, ids, strict=True)]
    for t, shard, row, m, position in zip(picks, shards, rows, members, positions, strict=True):
        assert order.at(t) == (shard, row)
        own = order.members[m]
        lane, offset = t % order.lanes, t // order.lanes
        draw = order.draws_before(lane, offset, int(m))
        assert order.index_of_draw(lane, int(m), draw) == t
        epoch, within = divmod(int(position), own.num_samples)
        assert draw == epoch * own.lane_length(lane) + within // own.lanes
        assert order.passes(np.array([t])) == [epoch]


@laws
@given(mixtures(), st.integers(1, 30), st.integers(1, 17), st.integers(1, 17), st.integers(0, 500))
def test_step_k_trains_on_the_same_samples_at_every_world_size(
    order: MixtureOrder, g: int, world_a: int, world_b: int, k: int
) -> None:
    batch = BatchPlan(num_samples=order.num_samples, global_batch_size=g).batch(k)
    assert batch is not None

    def ids(world: int) -> list[int]:
        parts = [local_slots(order, batch.start, batch.stop, dp_rank=r, dp_world=world) for r in range(world)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        return sorted(order.sample_ids(*order.locate(np.concatenate(parts))).tolist())

    assert ids(world_a) == ids(world_b)


@laws
@given(mixtures(), st.integers(1, 40), st.integers(1, 6), st.booleans(), st.data())
def test_each_shard_is_listed_no_later_than_the_first_batch_that_needs_it(
    order: MixtureOrder, g: int, world: int, endless: bool, data: st.DataObject
) -> None:
    n, epochs = order.num_samples, 3
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    start = data.draw(st.integers(0, n + n // 2))
    places = data.draw(st.none() | st.permutations(range(order.lanes)))
    plan = BatchPlan(num_samples=n, global_batch_size=g, epochs=epochs)
    stop = None if endless else epochs * n
    visits = list(islice(shard_visits(order, start, stop, g, ranks, world, places), 1500))
    listed: dict[tuple[int, int], int] = {}
    for visit in visits:
        listed.setdefault((visit.epoch, visit.data_shard), visit.position)
    position = start
    while (batch := plan.at(position)) is not None:
        if endless and batch.size < g:
            break  # an endless stream has no short batch
        for rank in ranks:
            mine = local_slots(order, batch.start, batch.stop, dp_rank=rank, dp_world=world, lane_places=places)
            shards, _ = order.locate(mine)
            for t, epoch, shard in zip(mine.tolist(), order.passes(mine).tolist(), shards.tolist(), strict=True):
                assert listed[epoch, shard] <= t
        position = batch.samples_end
    positions = [visit.position for visit in visits]
    assert positions == sorted(positions)


def test_batches_hold_the_members_in_proportion() -> None:
    orders = {name: SampleOrder([1000] * 40, seed=i, lanes=64, window=4) for i, name in enumerate(("a", "b", "c"))}
    order = MixtureOrder(orders, block_counts({"a": 0.7, "b": 0.25, "c": 0.05}), seed=1)
    g = 512
    members, _ = order.split(np.arange(400 * g))
    shares = np.array([np.bincount(batch, minlength=3) for batch in members.reshape(400, g)])
    assert np.abs(shares.mean(axis=0) - [0.7 * g, 0.25 * g, 0.05 * g]).max() < 0.5
    drawn_at_random = np.sqrt([g * share * (1 - share) for share in (0.7, 0.25, 0.05)])
    assert (shares.std(axis=0) < 0.6 * drawn_at_random).all()


def test_a_mixture_of_one_dataset_reads_it_in_its_own_order_but_for_the_ends_of_epochs() -> None:
    own = SampleOrder([8, 16, 24], seed=4, lanes=4, window=2)
    order = MixtureOrder({"only": own}, block_counts({"only": 3}), seed=9)
    indices = np.arange(3 * own.num_samples)  # the lanes are of equal length: their passes end together
    assert [part.tolist() for part in order.locate(indices)] == [part.tolist() for part in own.locate(indices)]


def test_a_node_reads_its_lanes_of_every_member_and_no_others() -> None:
    orders = {name: SampleOrder([1] * 500, seed=i, lanes=8, window=3) for i, name in enumerate(("a", "b"))}
    order = MixtureOrder(orders, block_counts({"a": 1, "b": 1}), seed=1)
    assert rank_lanes(order, 16, [1], 4).tolist() == [2, 3]
    assert live_set(order, 16, [1], 4) == 2 * 2 * 3
    slots = np.concatenate([local_slots(order, k * 16, (k + 1) * 16, dp_rank=1, dp_world=4) for k in range(50)])
    assert set(order.lane_of(slots).tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "at least one dataset"),
        ({"a": 0}, "'a' has weight 0: give a positive number"),
        ({"a": -1.0}, "weight -1.0"),
        ({"a": True}, "weight True"),
        ({"a": float("nan")}, "weight nan"),
        ({"a": float("inf")}, "weight inf"),
        ({"a": 1, "b": 1e-5}, "'b' gets no sample in 1000"),
        ({"a b": 1}, "a dataset's name is made of"),
    ],
)
def test_senseless_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        block_counts(weights)


def test_weights_become_counts_by_largest_remainder() -> None:
    assert block_counts({"a": 1, "b": 1, "c": 1}) == (334, 333, 333)
    assert block_counts({"a": 0.7, "b": 0.3}) == (700, 300)
    assert block_counts({"a": 70, "b": 30}) == (700, 300)


def test_a_member_with_fewer_samples_than_lanes_is_refused_with_the_way_out() -> None:
    orders = {"big": SampleOrder([90], seed=0, lanes=8, window=1), "tiny": SampleOrder([5], seed=0, lanes=8, window=1)}
    with pytest.raises(ConfigError, match=r"'tiny' of the mixture has 5 samples, fewer than its 8 lanes: set lanes=5"):
        MixtureOrder(orders, block_counts({"big": 1, "tiny": 1}), seed=0)
