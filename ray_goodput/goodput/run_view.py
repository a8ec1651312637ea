"""All that people want to see of a run, from what it left in storage: accounts, timeline, curves, checkpoints, advice.

Pure: values in, values out. The command `report` shows them as text, Markdown, JSON or a page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.core.buckets import Bucket
from ray_goodput.core.data_flow import DataCounts, bottleneck, figures
from ray_goodput.errors import ConfigError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.metrics_log import MetricsLog
from ray_goodput.goodput.plan import Plan
from ray_goodput.goodput.planner import plan_from_run
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.run_files import RunFiles
from ray_goodput.goodput.run_measures import RunMeasures, measure_run
from ray_goodput.goodput.run_timeline import RunTimeline, place_timelines

MAX_SHOWN = 32
"""Ranks with a timeline in a view."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that became durable: when, by the coordinator's clock."""

    step: int
    attempt: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What saves cost and how old the newest one was; None where the ledger does not tell.

    stall_s: training stood still for a save, mean over ranks. latency_s: from there until it was durable, median.
    newest_age_s: of the newest commit, at the end of the books. longest_age_s: the most it ever was; before the first
    commit it is the time since the start. Ages count the run's own time, without what passed between two drivers.
    """

    saves: int
    stall_s: float | None
    latency_s: float | None
    interval_s: float | None
    newest_step: int | None
    newest_age_s: float | None
    longest_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """An estimate: every rank-second of the target world is paid for, at one price for an accelerator-hour."""

    per_accelerator_hour: float
    total: float
    useful: float
    wasted: float
    by_bucket: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run as of `as_of_s`. advice: the plan from its own figures; None, with the reason, where it cannot be.

    shown_ranks: those in `timeline`, rank 0 always among them.
    """

    uri: str
    as_of_s: float
    report: GoodputReport
    shown_ranks: tuple[int, ...]
    timeline: RunTimeline
    commits: tuple[Commit, ...]
    checkpoints: CheckpointFacts
    measures: RunMeasures
    metrics: tuple[MetricsLog, ...]
    cost: Cost | None
    advice: Plan | None
    no_advice: str
    data: DataCounts | None = None

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    def to_dict(self) -> dict[str, Any]:
        """The report's own keys, and more; plain JSON values. Keys are added, never renamed."""
        body = self.report.to_dict()
        body |= {"uri": self.uri, "as_of_s": self.as_of_s, "checkpoints": asdict(self.checkpoints)}
        body["cost"] = asdict(self.cost) if self.cost else None
        body["next"] = {"reason": self.no_advice}
        body["data"] = None
        if self.data is not None and (held_up_by := bottleneck(self.data)):
            body["data"] = {**figures(self.data), "bottleneck": held_up_by.part, "reason": held_up_by.reason}
        if self.cost is not None:
            for incident in body["incidents"]:
                incident["cost"] = incident["gpu_s"] / 3600.0 * self.cost.per_accelerator_hour
        if plan := self.advice:
            body["next"] = {
                "days": plan.inputs.days,
                "goodput": plan.chosen.exact,
                "interval_s": plan.chosen.interval_s,
                "best_interval_s": plan.best.interval_s,
                "best_goodput": plan.best.exact,
                "sure_interval_gain": plan.interval_gain,
                "lever": plan.lever.name if plan.lever else None,
                "levers": [asdict(lever) for lever in plan.levers],
            }
        return body


def view_run(files: RunFiles, *, cost_per_accelerator_hour: float | None = None, days: float = 30.0) -> RunView:
    """The view of what was read, as of its last event. days: of the next run, which the advice is for.

    Raises:
        StorageError: a line cannot be read, a segment is missing, or a newer release wrote it.
        ConfigError: the cost or the days make no sense.
    """
    if cost_per_accelerator_hour is not None and not 0 <= cost_per_accelerator_hour < 1e9:
        raise ConfigError(f"An accelerator-hour cannot cost {cost_per_accelerator_hour:g}: give zero or more.")
    if not 0 < days < 1e6:
        raise ConfigError(f"A run cannot take {days:g} days: give more than zero.")
    ledger = Ledger.from_lines(files.lines)
    report = ledger.report()
    body = report.to_dict()
    shown = _shown_ranks(report)
    timeline = place_timelines(ledger, shown)
    commits = _commits(files.lines)
    measures = measure_run(body, files.lines)
    advice, no_advice = None, ""
    try:
        advice = plan_from_run(body, files.lines, days=days, cost_per_gpu_hour=cost_per_accelerator_hour)
    except ConfigError as error:
        no_advice = str(error)
    return RunView(
        uri=files.uri,
        as_of_s=ledger.last_at,
        report=report,
        shown_ranks=shown,
        timeline=timeline,
        commits=commits,
        checkpoints=_checkpoints(commits, timeline, measures, report.durable_step),
        measures=measures,
        metrics=files.metrics,
        cost=_cost(report, cost_per_accelerator_hour),
        advice=advice,
        no_advice=no_advice,
        data=files.data,
    )


def commit_ages(commits: Sequence[Commit], timeline: RunTimeline) -> list[tuple[float, float]]:
    """(counted seconds of the run, age of the newest commit) as the corners of a saw: just before and after each."""
    corners, last = [(0.0, 0.0)], 0.0
    for commit in commits:
        at = timeline.counted_s(commit.at_s)
        corners += [(at, at - last), (at, 0.0)]
        last = at
    corners.append((timeline.wall_s, timeline.wall_s - last))
    return corners


def _shown_ranks(report: GoodputReport) -> tuple[int, ...]:
    """All ranks, or those that were lost and others spread evenly."""
    world = report.target_world
    if world <= MAX_SHOWN:
        return tuple(range(world))
    lost = dict.fromkeys(rank for incident in report.incidents for rank in incident.ranks if rank < world)
    chosen = {0, *list(lost)[: MAX_SHOWN // 2]}
    for i in range(MAX_SHOWN):
        if len(chosen) < MAX_SHOWN:
            chosen.add(i * world // MAX_SHOWN)
    return tuple(sorted(chosen))


def _commits(lines: Sequence[bytes]) -> tuple[Commit, ...]:
    found = [json.loads(line) for line in lines if b'"event":"commit"' in line]
    # A segment that was told twice has its commits twice.
    unique = {(c["at"], c["step"], c["attempt"]) for c in found}
    return tuple(Commit(step, attempt, at) for at, step, attempt in sorted(unique))


def _checkpoints(
    commits: Sequence[Commit], timeline: RunTimeline, measures: RunMeasures, durable_step: int | None
) -> CheckpointFacts:
    ages = commit_ages(commits, timeline)
    return CheckpointFacts(
        saves=len(commits),
        stall_s=measures.stall_s,
        latency_s=measures.latency_s,
        interval_s=measures.interval_s,
        newest_step=durable_step,
        newest_age_s=ages[-1][1] if commits else None,
        longest_age_s=max(age for _, age in ages),
    )


def _cost(report: GoodputReport, price: float | None) -> Cost | None:
    if price is None:
        return None
    by_bucket = {name: s / 3600.0 * price for name, s in report.buckets_s.items()}
    total, useful = sum(by_bucket.values()), by_bucket[Bucket.STEP.label]
    return Cost(per_accelerator_hour=price, total=total, useful=useful, wasted=total - useful, by_bucket=by_bucket)
