"""Law G1 when a driver dies without a word: journals found later belong to the time it lived."""

from pathlib import Path

from ray_goodput.clock import ManualClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import JournalPage, JournalWriter, read_journal
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.recorder import Recorder


def journal(path: Path, seconds: float) -> JournalPage:
    """The journal of a rank that took one step a second and died without closing it."""
    clock = ManualClock(mono_s=500.0)
    recorder = Recorder(JournalWriter(path, run="r", attempt=1, world_rank=0, node="n"), clock)
    recorder.start(Bucket.STEP, threads=False)
    recorder.resumed(0)
    for step in range(1, int(seconds) + 1):
        clock.advance(1.0)
        recorder.step_done(step)
    recorder.beat()
    return read_journal(path)


def check_books(ledger: Ledger, *, wall_s: float) -> None:
    report = ledger.report()
    assert abs(report.wall_s - wall_s) < 1e-6
    assert abs(sum(report.buckets_s.values()) - report.target_world * report.wall_s) <= 1e-6 + report.uncertainty_s
    assert report.buckets_s["step"] + report.buckets_s["lost"] >= 8.0 - 1e-6


def test_a_journal_found_after_its_driver_died_extends_the_time_it_is_known_to_have_lived(tmp_path: Path) -> None:
    ledger = Ledger(1)
    ledger.run_started(1000.0)
    ledger.attempt_started(1, 1, 1010.0)  # the last thing that was written down
    [first] = ledger.to_segments()
    again = Ledger.from_lines(first.data.splitlines(), 1)
    again.run_started(1100.0)
    again.attempt_started(2, 1, 1105.0)
    again.page(journal(tmp_path / "j", 8.0))
    again.resumed(2, 5)
    again.run_ended(1110.0)
    check_books(again, wall_s=(1018.0 - 1000.0) + (1110.0 - 1100.0))
    lines = [line for segment in [first, *again.to_segments()] for line in segment.data.splitlines()]
    check_books(Ledger.from_lines(lines, 1), wall_s=28.0)
