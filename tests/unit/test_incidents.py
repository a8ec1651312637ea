"""Incidents: their class, the parts of the way back, and what they cost."""

from __future__ import annotations

import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.ledger import Ledger

B = Bucket
FIRST: list[Stretch] = [(B.STARTUP, 10, -1, False), *steps(1, 30, 2)]
AGAIN: list[Stretch] = [(B.STARTUP, 6, -1, False), (B.CKPT_LOAD, 4, -1, False), *steps(21, 60, 2)]


def tell(ledger: Ledger, attempt: int, world: int, at: float, script: list[Stretch], resumed: int) -> float:
    ledger.attempt_started(attempt, world, at)
    for rank in range(world):
        ledger.rank_hello(attempt, rank, at + 1)
        ledger.page(page(attempt, rank, script))
    ledger.resumed(attempt, resumed)
    return at + 1 + sum(seconds for _, seconds, _, _ in script)


def interrupted(*, back: bool = True) -> Ledger:
    """Rank 1 falls silent at 1071; noticed at 1080, gone at 1083, others at 1100, who do their first step by 1113."""
    ledger = Ledger(3)
    ledger.run_started(1000)
    tell(ledger, 1, 3, 1000, FIRST, 0)
    ledger.commit(20, 1, 1055)
    ledger.attempt_ended(1, 1080, "worker", ranks=[1], reason="gone")
    ledger.group_down(1, 1083)
    if back:
        end = tell(ledger, 2, 3, 1100, AGAIN, 20)
        ledger.attempt_ended(2, end, "finished")
        ledger.run_ended(end)
    return ledger


def test_the_way_back_is_told_part_by_part_and_the_parts_are_the_whole() -> None:
    [incident] = interrupted().report().incidents
    assert (incident.detect_s, incident.teardown_s, incident.wait_s) == (9, 3, 17)
    assert (incident.load_s, incident.start_s) == (4, 1 + 6 + 2)
    assert (
        incident.down_s
        == 42
        == sum((incident.detect_s, incident.teardown_s, incident.wait_s, incident.start_s, incident.load_s))
    )
    assert incident.replay_s == 10 * 2 and incident.lost_s == 3 * 20
    assert incident.gpu_s == 3 * 42 + 3 * 20
    assert incident.nodes == ("n",) and incident.is_failure


def test_an_incident_that_is_not_overcome_yet_is_down_until_now() -> None:
    ledger = interrupted(back=False)
    [incident] = ledger.report(1090).incidents
    assert (incident.detect_s, incident.teardown_s, incident.wait_s, incident.start_s) == (9, 3, 7, 0)
    assert incident.step_resumed is None and incident.down_s == 19


def test_an_attempt_that_ended_well_before_another_one_was_resized_and_is_no_failure() -> None:
    ledger = Ledger(3)
    ledger.run_started(1000)
    end = tell(ledger, 1, 2, 1000, FIRST, 0)
    ledger.commit(20, 1, 1055)
    ledger.attempt_ended(1, end, "finished")  # what the coordinator can tell then
    ledger.group_down(1, end)
    end = tell(ledger, 2, 3, end + 5, AGAIN, 20)
    ledger.attempt_ended(2, end, "finished")
    ledger.run_ended(end)
    for books in (ledger, Ledger.from_lines(b"".join(s.data for s in ledger.to_segments()).splitlines())):
        report = books.report()
        assert [a.outcome for a in report.attempts] == ["resized", "finished"]
        [incident] = report.incidents
        assert incident.kind == "resized" and not incident.is_failure and report.failures == 0
        assert incident.steps_lost == 10 and report.buckets_s["detect"] == 0


def test_the_next_driver_after_a_finished_run_resizes_nothing() -> None:
    ledger = interrupted()
    ledger.run_started(2000)
    tell(ledger, 3, 3, 2000, AGAIN, 60)
    assert [a.outcome for a in ledger.report().attempts] == ["worker", "finished", "running"]


@pytest.mark.parametrize("whole", [False, True])
def test_the_death_of_a_driver_is_named(whole: bool) -> None:
    ledger = Ledger(3)
    ledger.run_started(1000)
    heard = tell(ledger, 1, 3, 1000, FIRST, 0)
    ledger.commit(20, 1, heard)
    ledger.run_started(1500)  # the first driver never said that it ended
    ledger.commit(30, 1, 1501)  # what its vaults still had
    end = tell(ledger, 2, 3, 1510, AGAIN, 20)
    ledger.attempt_ended(2, end, "finished")
    ledger.run_ended(end)
    if whole:
        ledger.seal_whole(end)
    report = Ledger.from_lines(b"".join(s.data for s in ledger.to_segments()).splitlines()).report()
    assert report == ledger.report()
    [incident] = report.incidents
    assert incident.kind == "driver" and incident.is_failure and "the next one took the run up" in incident.reason
    assert [a.outcome for a in report.attempts] == ["driver", "finished"]
    assert incident.down_s < 30, "time without a driver is not counted"
    assert report.imbalance_s == pytest.approx(0)
