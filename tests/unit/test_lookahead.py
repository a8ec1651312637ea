"""Laws of the look-ahead: what may be fetched when, and what eviction is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from ray_goodput.core.placement import ShardVisit
from ray_goodput.data.lookahead import LookAhead, Need, first_needs


def needs(num: int = 10, rows: int = 10) -> list[Need]:
    """One shard after the other, each of `rows` samples."""
    return [Need(i * rows, i) for i in range(num)]


def look(needs_: Iterator[Need] | list[Need], **changes: Any) -> LookAhead:
    options: dict[str, Any] = {"shard_bytes": lambda shard: 100, "consumed": 0, "batch_samples": 10, "max_shards": 3}
    return LookAhead(iter(needs_), **(options | changes))


def admitted(ahead: LookAhead, num: int = 10) -> list[int]:
    return [i for i in range(num) if ahead.admitted(i, 0)]


def test_a_shard_is_listed_once_an_epoch_at_its_first_visit() -> None:
    visits = [ShardVisit(0, 0, 4), ShardVisit(1, 0, 2), ShardVisit(5, 0, 4), ShardVisit(8, 1, 4), ShardVisit(9, 1, 2)]
    assert list(first_needs(visits)) == [(0, 4), (1, 2), (8, 4), (9, 2)]


def test_the_next_batch_and_so_many_shards_beyond_it_are_admitted() -> None:
    ahead = look(needs())
    assert (ahead.head, admitted(ahead)) == (1, [0, 1, 2, 3])
    ahead.advance(35)
    assert (ahead.head, admitted(ahead)) == (5, [0, 1, 2, 3, 4, 5, 6, 7])
    ahead.advance(20)  # a late message
    assert ahead.head == 5
    ahead.advance(10_000)
    assert ahead.head == 10


def test_bytes_bound_the_look_ahead_but_never_the_next_shard() -> None:
    assert admitted(look(needs(), max_shards=5, max_bytes=250)) == [0, 1, 2]
    assert admitted(look(needs(), max_shards=5, max_bytes=1)) == [0, 1]


def test_a_batch_that_needs_many_shards_has_them_all_admitted() -> None:
    assert (
        admitted(look([Need(0, i) for i in range(6)] + [Need(50, 7), Need(60, 8)], max_shards=1)) == [*range(7), 8][:7]
    )


def test_an_endless_sequence_is_generated_only_as_far_as_asked() -> None:
    made = 0

    def endless() -> Iterator[Need]:
        nonlocal made
        for i in count():
            made += 1
            yield Need(10 * i, i % 7)

    ahead = look(endless())
    assert ahead.at(50) == (50, Need(500, 1))
    assert made == 51
    ahead.advance(10_000)
    assert ahead.at(0) == (1000, Need(10_000, 6))  # what is done is forgotten


def test_what_may_be_in_use_ranks_nearest_and_each_shard_by_its_next_need() -> None:
    ahead = look([Need(0, 5), Need(10, 6), Need(20, 7), Need(30, 5), Need(40, 8)], live_shards=[1])
    assert ahead.next_uses() == {5: 0.0, 6: 1.0, 7: 2.0, 8: 4.0}
    ahead.advance(20)
    assert ahead.next_uses() == {6: 0.0, 7: 0.0, 5: 1.0, 8: 2.0}
    assert ahead.next_uses(limit=3) == {6: 0.0, 7: 0.0, 5: 1.0}
    ahead.advance(1000)
    assert ahead.next_uses() == {8: 0.0}


def test_a_batch_across_the_end_of_an_epoch_uses_the_shards_of_both() -> None:
    """Two lanes end within one batch; what the first rows of it come from is not needed again for a long time."""
    epoch = [(0, 5), (1, 6), (40, 7), (41, 8)]
    ahead = look([Need(start + position, shard) for start in (0, 80) for position, shard in epoch], live_shards=[2])
    ahead.advance(75)  # the next batch: the last 5 samples, of 7 and 8, and the first of the next epoch, of 5 and 6
    assert ahead.next_uses() == {7: 0.0, 8: 0.0, 5: 0.0, 6: 0.0}
    assert ahead.head == 6
    assert admitted(ahead, 8) == [0, 1, 2, 3, 4, 5, 6, 7]
    ahead.advance(85)
    assert ahead.next_uses() == {5: 0.0, 6: 0.0, 7: 1.0, 8: 2.0}


def test_where_windows_end_with_a_batch_nothing_of_them_is_kept() -> None:
    ahead = look([Need(0, 5), Need(1, 6), Need(40, 7), Need(41, 8), Need(80, 5)], live_shards=[2], lanes=2)
    ahead.advance(40)
    assert ahead.next_uses() == {7: 0.0, 8: 0.0, 5: 1.0}
    ahead.advance(35)  # ignored
    across = look([Need(0, 5), Need(1, 6), Need(40, 7), Need(41, 8)], live_shards=[2], lanes=2, consumed=35)
    assert across.next_uses() == {5: 0.0, 6: 0.0, 7: 0.0, 8: 0.0}


def test_what_a_slower_rank_of_the_node_may_still_open_is_kept() -> None:
    ahead = look([Need(0, 5), Need(1, 6), Need(40, 7), Need(41, 8), Need(80, 5)], live_shards=[2], lanes=2, behind=30)
    ahead.advance(40)  # the fastest
    assert ahead.next_uses() == {5: 0.0, 6: 0.0, 7: 0.0, 8: 0.0}
    ahead.advance(70)
    assert ahead.next_uses() == {7: 0.0, 8: 0.0, 5: 1.0}


@pytest.mark.parametrize("end", ["advance", "close"])
def test_who_waits_is_woken_by_progress_or_by_the_end(end: str) -> None:
    ahead = look(needs())
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(ahead.admitted(5, 30)))
    waiter.start()
    assert not ahead.admitted(5, 0.01)
    if end == "advance":
        ahead.advance(30)
    else:
        ahead.close()
    waiter.join(10)
    assert answers == [end == "advance"]


def test_an_empty_sequence_has_nothing_and_ends_at_once() -> None:
    ahead = look([])
    assert ahead.at(0) is None
    assert ahead.next_uses() == {}
    ahead.advance(100)
    assert ahead.head == 0


def test_what_a_seldom_read_dataset_of_a_mixture_has_in_use_stays_named_while_others_come_and_go() -> None:
    """Data shards below 100 are of the first dataset, of which one is in use at a time, the others of the second."""
    heavy = [Need(10 * i, i) for i in range(1, 60)]
    mixed = sorted([Need(0, 100), Need(1, 101), Need(300, 102), *heavy])
    ahead = look(mixed, live_shards=[1, 2], member_of=lambda shards: (shards >= 100).astype(int))
    ahead.advance(280)
    assert {s for s, use in ahead.next_uses().items() if use == 0} == {100, 101, 27, 28}
    ahead.advance(400)
    assert {s for s, use in ahead.next_uses().items() if use == 0} == {101, 102, 39, 40}
    plain = look(mixed, live_shards=[3])
    plain.advance(280)
    assert 100 not in plain.next_uses()
