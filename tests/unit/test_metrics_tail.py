"""Who asks again and again gets every row once."""

from __future__ import annotations

from ray_goodput.actors.metrics_tail import MetricsTail


def rows(*steps: int) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"loss": float(step)}) for step in steps]


def test_each_row_is_given_once_and_in_order() -> None:
    tail = MetricsTail(7.0)
    tail.add(1, 5.0, rows(1, 2, 3))
    news = tail.since(0.0, 0)
    assert [(r.attempt, r.step, r.at_s) for r in news.rows] == [(1, 1, 5.0), (1, 2, 5.0), (1, 3, 5.0)]
    assert tail.since(news.life, news.upto).rows == ()
    tail.add(2, 6.0, rows(2))
    assert [r.step for r in tail.since(news.life, news.upto).rows] == [2]


def test_a_long_tail_comes_in_parts() -> None:
    tail = MetricsTail(7.0)
    tail.add(1, 5.0, rows(*range(10)))
    life, upto, seen = 0.0, 0, []
    while news := tail.since(life, upto, max_rows=4).rows:
        seen += [r.step for r in news]
        answer = tail.since(life, upto, max_rows=4)
        life, upto = answer.life, answer.upto
    assert seen == list(range(10))


def test_a_reader_that_was_away_too_long_goes_on_with_what_is_left() -> None:
    tail = MetricsTail(7.0, max_rows=3)
    tail.add(1, 5.0, rows(*range(10)))
    news = tail.since(7.0, 2)
    assert [r.step for r in news.rows] == [7, 8, 9] and news.upto == 10


def test_a_new_life_of_the_coordinator_counts_anew() -> None:
    old, new = MetricsTail(7.0), MetricsTail(8.0)
    old.add(1, 5.0, rows(*range(100)))
    new.add(1, 6.0, rows(100, 101))
    seen = old.since(0.0, 0)
    assert [r.step for r in new.since(seen.life, seen.upto).rows] == [100, 101]
