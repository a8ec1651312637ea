"""Law G1 over random histories: every rank-second is in one bucket, and lost work is what a naive count says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from journal_pages import Stretch, page
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.run_timeline import place_timelines

BESIDES = [Bucket.DATA_WAIT, Bucket.CKPT_BLOCK, Bucket.EVAL, Bucket.OTHER]


@dataclass
class History:
    """A ledger that was told a random run, and what a count step by step makes of it."""

    ledger: Ledger
    begun: list[tuple[int, int]] = field(default_factory=list)  # (attempt, resumed step)
    step_s: dict[tuple[int, int], float] = field(default_factory=dict)  # (attempt, step) -> rank-seconds
    wall: float = 0.0
    seal: bool = False
    lines: list[bytes] = field(default_factory=list)

    def maybe_save(self, rng: random.Random) -> None:
        if self.seal and rng.random() < 0.3:
            if rng.random() < 0.4:
                self.ledger.seal_whole(0.0)
                self.lines = self.lines if rng.random() < 0.5 else []  # superseded: there or not is the same
            for segment in self.ledger.to_segments():
                self.lines += segment.data.splitlines()
                self.ledger.saved(segment.number)

    def lost(self) -> float:
        return sum(
            seconds
            for (attempt, step), seconds in self.step_s.items()
            if any(later > attempt and resumed < step for later, resumed in self.begun)
        )


def script_of(
    rng: random.Random, resumed: int, length: float
) -> tuple[list[Stretch], tuple[Bucket, float, int] | None]:
    """What a rank did in `length` seconds; the last stretch may be left open."""
    script: list[Stretch] = [(Bucket.STARTUP, min(length, rng.uniform(0, 3)), -1, False)]
    left, step = length - script[0][1], resumed + 1
    while left > 0:
        if rng.random() < 0.4:
            seconds = min(left, rng.uniform(0, 2))
            script.append((rng.choice(BESIDES), seconds, step, False))
        else:
            seconds = min(left, rng.uniform(0.1, 2))
            script.append((Bucket.STEP, seconds, step, seconds < left))
            step += seconds < left
        left -= seconds
    if rng.random() < 0.5:
        bucket, seconds, step, _ = script.pop()
        return script, (bucket, seconds, step)
    return script, None


def tell_rank(h: History, rng: random.Random, attempt: int, rank: int, at: float, duration: float, resumed: int) -> int:
    """Tell one rank's life; gives the last step it did."""
    delay = rng.uniform(0, duration)
    if rng.random() < 0.1:
        return 0  # never heard of
    h.ledger.rank_hello(attempt, rank, at + delay)
    if rng.random() < 0.1:
        return 0  # said hello, then nothing
    length = (duration - delay) * rng.choice([1.0, rng.uniform(0, 1)])  # the tail may be missing
    script, open_for = script_of(rng, resumed, length)
    cut = rng.randint(0, len(script))
    for first, last in [(0, cut), (0, cut), (cut // 2, len(script)), (0, len(script))]:
        h.ledger.page(page(attempt, rank, script, first=first, last=last, open_for=open_for))
    for bucket, seconds, step, _ in [*script, *([(*open_for, False)] if open_for else [])]:
        if bucket == Bucket.STEP:
            h.step_s[attempt, step] = h.step_s.get((attempt, step), 0.0) + seconds
    return max((step for _, _, step, done in script if done), default=0)


def history(rng: random.Random, seal: bool) -> History:
    target = rng.randint(1, 5)
    h = History(Ledger(target), seal=seal)
    at = 500.0
    h.ledger.run_started(at)
    reached, commits = 0, [0]
    for attempt in range(rng.randint(0, 5)):
        at += rng.choice([0.0, rng.uniform(0, 20)])
        world = rng.randint(1, target)
        h.ledger.attempt_started(attempt, world, at)
        duration = rng.choice([0.0, rng.uniform(1, 40)])
        resumed = rng.choice(commits) if rng.random() < 0.8 else rng.randint(commits[-1], max(commits[-1], reached))
        if rng.random() < 0.9:
            h.ledger.resumed(attempt, resumed)
            h.begun.append((attempt, resumed))
            commits = [c for c in commits if c <= resumed]
            ends = [tell_rank(h, rng, attempt, r, at, duration, resumed) for r in range(world)]
            reached = max(resumed, *ends)
        h.maybe_save(rng)
        for _ in range(rng.randint(0, 2)):
            step = rng.randint(commits[-1], max(commits[-1], reached))
            if step > commits[-1]:
                commits.append(step)
                h.ledger.commit(step, attempt, at + duration)
        at += duration
        if rng.random() < 0.8:
            h.ledger.attempt_ended(attempt, at, rng.choice(["failed", "preempted", "resized", "finished"]))
        h.maybe_save(rng)
    at += rng.uniform(0, 10)
    if rng.random() < 0.7:
        h.ledger.run_ended(at)
    h.wall = at - 500.0
    return h


def check(report: GoodputReport, h: History) -> None:
    total = h.ledger.target_world * h.wall
    buckets = report.buckets_s
    assert report.wall_s == pytest.approx(h.wall)
    assert all(seconds >= -1e-6 for seconds in buckets.values()), buckets
    assert abs(sum(buckets.values()) - total) <= 1e-3 * total + report.uncertainty_s + 1e-6
    # With the clocks of these histories nothing is counted twice, so the law holds exactly.
    assert report.imbalance_s == pytest.approx(0, abs=1e-5)
    assert report.lost_s == pytest.approx(h.lost(), abs=1e-5) == buckets["lost"]
    assert report.committed_s + report.at_risk_s == pytest.approx(buckets["step"], abs=1e-9)
    assert report.committed_s >= 0 and report.at_risk_s >= -1e-5
    assert report.overall == pytest.approx(report.availability * report.runtime)
    assert 0 <= report.overall <= 1 + 1e-9
    if report.attempts:
        for name, seconds in buckets.items():
            assert sum(a.buckets_s[name] for a in report.attempts) == pytest.approx(seconds, abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_every_rank_second_is_in_one_bucket(seed: int, seal: bool) -> None:
    h = history(random.Random(seed), seal)
    at = 500.0 + h.wall
    report = h.ledger.report(at)
    check(report, h)
    h.lines += [line for s in h.ledger.to_segments() for line in s.data.splitlines()]
    assert Ledger.from_lines(h.lines, h.ledger.target_world).report(at) == report


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
@example(125, False)  # a journal that knows of more time than the coordinator has after its hello
@example(2033, True)  # a hello lost with a coordinator, the journal found
def test_the_timeline_of_every_rank_has_no_holes_and_tells_what_the_sums_tell(seed: int, replay: bool) -> None:
    h = history(random.Random(seed), seal=replay)
    ledger = h.ledger
    if replay:
        h.lines += [line for s in ledger.to_segments() for line in s.data.splitlines()]
        ledger = Ledger.from_lines(h.lines, ledger.target_world)
    report, timeline = ledger.report(), place_timelines(ledger)
    if report.wall_s <= 0:
        return
    sums = np.zeros(len(Bucket))
    for rank in range(ledger.target_world):
        spans = [span for r in timeline.ranks if r.world_rank == rank for span in r.spans]
        assert spans[0].start_s == 500.0
        assert all(a.end_s == b.start_s for a, b in pairwise(spans))
        assert spans[-1].end_s == pytest.approx(500.0 + report.wall_s)
        columns = timeline.columns(rank, 7)
        assert columns.sum(axis=1) == pytest.approx(report.wall_s / 7)
        sums += columns.sum(axis=0)
    # A cell at each end and at the border of what was lost; and what the journals know beyond the last event.
    room = 1e-6 + ledger.target_world * max(1, len(report.attempts)) + abs(report.imbalance_s)
    for bucket, seconds in enumerate(sums.tolist()):
        assert seconds == pytest.approx(report.buckets_s[Bucket(bucket).label], abs=room), Bucket(bucket)
