"""The report's table, JSON and loss curve."""

from __future__ import annotations

import json
import math

import pytest

from journal_pages import page, steps
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport, loss_curve, render_table, to_dict


@pytest.fixture
def report() -> GoodputReport:
    ledger = Ledger(3)
    ledger.run_started(0)
    ledger.attempt_started(0, 2, 10)
    for rank in (0, 1):
        ledger.rank_hello(0, rank, 12)
        ledger.page(page(0, rank, [*steps(1, 9, 10), (Bucket.CKPT_BLOCK, 3, 10, False)]))
    ledger.commit(5, 0, 80)
    ledger.attempt_ended(0, 110, "failed", ranks=[1], reason="killed")
    ledger.attempt_started(1, 2, 120)
    ledger.resumed(1, 5)
    return ledger.report(at=130)


def test_the_json_has_stable_keys_and_is_plain(report: GoodputReport) -> None:
    body = to_dict(report)
    assert json.loads(json.dumps(body)) == body == report.to_dict()
    assert {
        "overall",
        "availability",
        "runtime",
        "wall_s",
        "target_world",
        "buckets_s",
        "committed_s",
        "at_risk_s",
        "lost_s",
        "uncertainty_s",
        "imbalance_s",
        "durable_step",
        "finished",
        "attempts",
        "incidents",
        "stragglers",
    } == set(body)
    assert set(body["buckets_s"]) == {b.label for b in Bucket}
    assert body["incidents"][0]["ranks"] == [1] and body["incidents"][0]["steps_lost"] == 4
    assert body["attempts"][0]["buckets_s"]["lost"] == 2 * 4 * 10


def test_the_table_tells_the_same_numbers(report: GoodputReport) -> None:
    text = render_table(report)
    assert text == report.table()
    lines = text.splitlines()
    assert f"{report.overall:.1%} = availability {report.availability:.1%} x runtime {report.runtime:.1%}" in lines[0]
    for name, seconds in report.buckets_s.items():
        row = [line.split() for line in lines if line.startswith(f"{name} ") and ":" not in line]
        assert row == ([[name, f"{seconds:.1f}", f"{seconds / 390:.1%}"]] if seconds else [])
    assert "attempt 0 failed (ranks 1): resumed after step 5, 4 steps lost (80.0 rank-seconds)" in text
    assert max(map(len, lines)) <= 120


def test_an_empty_ledger_has_a_table() -> None:
    assert "0.0%" in Ledger(2).report().table()


def test_the_loss_curve_falls_from_left_to_right() -> None:
    curve = loss_curve([(step, 10.0 / step) for step in range(1, 101)], width=20, height=3)
    *rows, numbers = curve.splitlines()
    assert len(rows) == 3 and len(rows[-1]) == 20
    assert rows[0][0] == "█" and rows[-1][-1] == "▁"
    assert numbers == "steps 1 to 100: loss 10 to 0.1, lowest 0.1"


@pytest.mark.parametrize(
    ("points", "shown"),
    [([], "no points"), ([(3, 2.0)], "steps 3 to 3"), ([(1, math.nan), (2, 1.0)], "x"), ([(1, math.inf)], "x")],
)
def test_odd_losses_still_make_a_curve(points: list[tuple[int, float]], shown: str) -> None:
    assert shown in loss_curve(points)


def test_an_incident_that_a_later_driver_overcame_is_down_only_while_there_was_a_driver() -> None:
    ledger = Ledger(1)
    for start, first in ((1000.0, 1), (90_000.0, 6)):
        ledger.run_started(start)
        ledger.attempt_started(first, 1, start + 10)
        ledger.rank_hello(first, 0, start + 10)
        ledger.page(page(first, 0, steps(first, first + 4, 2.0)), at=start + 20)
        ledger.attempt_ended(first, start + 30, "worker")
        ledger.run_ended(start + 35)
    first, _ = ledger.report().incidents
    # From 1020 to the first driver's end, then to the end of the second attempt's first step.
    assert first.down_s == pytest.approx(15 + 10 + 2)
