"""What Prometheus is told about a run: names, kinds, units, and values from the run's figures. Pure, no Ray.

Names follow the field's rules: base units as suffix, `_ratio` for shares, `_total` for what only grows; Ray adds the
prefix `ray_`. Labels are bounded: 14 buckets, a handful of incident kinds, nothing by rank or node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ray_goodput.core.budget import FailureKind
from ray_goodput.core.data_flow import PARTS, DataCounts, bottleneck
from ray_goodput.goodput.report import DRIVER, RESIZED, GoodputReport

RUN_LABELS = ("ray_train_run_name", "ray_train_run_id")
"""As Ray Train labels its own series, so that they can be joined."""

PREFIX = "ray_goodput_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. name: without Ray's prefix. label: the one label besides the run's.

    A counter tells its total from 0 on. Ray's own `Counter` cannot be 0, so its first growth would be invisible to
    `increase()`, and begins anew with each life of the process; so counters are exported through gauges.
    """

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    label: str = ""

    @property
    def series(self) -> str:
        """The name in Prometheus."""
        return f"ray_{self.name}"


METRICS = {
    m.name: m
    for m in (
        Metric(name="goodput_overall_ratio", kind="gauge", text="Share of rank-seconds in steps that survive, so far."),
        Metric(
            name="goodput_availability_ratio", kind="gauge", text="Share of rank-seconds that had a rank to run on."
        ),
        Metric(name="goodput_runtime_ratio", kind="gauge", text="Share of the available rank-seconds in such steps."),
        Metric(
            name="goodput_rank_seconds",
            kind="gauge",
            text="Where rank-seconds went since the run began. A gauge: a rollback moves time from step to lost.",
            label="bucket",
        ),
        Metric(name="goodput_at_risk_rank_seconds", kind="gauge", text="Time in steps that no commit holds yet."),
        Metric(name="goodput_uncertain_rank_seconds", kind="gauge", text="Rank-seconds whose bucket is not sure."),
        Metric(name="goodput_wall_seconds", kind="gauge", text="Length of the run, without time between drivers."),
        Metric(name="goodput_target_ranks", kind="gauge", text="Ranks the run asks for."),
        Metric(name="goodput_ranks", kind="gauge", text="Ranks of the current attempt, 0 between two."),
        Metric(name="goodput_attempt", kind="gauge", text="Number of the current attempt."),
        Metric(name="goodput_step", kind="gauge", text="Newest optimizer step of the current attempt."),
        Metric(name="goodput_durable_step", kind="gauge", text="Step of the newest commit, -1 for none."),
        Metric(
            name="goodput_checkpoint_age_seconds",
            kind="gauge",
            text="Time since the newest commit or, before the first, since the run was taken up.",
        ),
        Metric(name="goodput_commits_total", kind="counter", text="Checkpoints that became durable."),
        Metric(
            name="goodput_saves_skipped_total", kind="counter", text="Saves left out because both slots were taken."
        ),
        Metric(name="goodput_incidents_total", kind="counter", text="Interruptions of the run.", label="kind"),
        Metric(
            name="goodput_slowest_rank_ratio",
            kind="gauge",
            text="Own computing time of the slowest rank over that of a usual one; 1 while none stands out.",
        ),
        Metric(name="goodput_steps_lost_total", kind="counter", text="Steps rolled back."),
        Metric(name="goodput_data_stall_ratio", kind="gauge", text="Share of its time that the loop waited for data."),
        Metric(name="goodput_data_hit_ratio", kind="gauge", text="Share of data shards cached when they were needed."),
        Metric(name="goodput_data_queue_ratio", kind="gauge", text="Batches that lie ready, of those that may."),
        Metric(
            name="goodput_data_seconds",
            kind="gauge",
            text="Rank-seconds of this attempt by what they went into, on the way to batches.",
            label="part",
        ),
        Metric(
            name="goodput_data_bytes",
            kind="gauge",
            text="Bytes read in this attempt from the store and from cached files.",
            label="source",
        ),
        Metric(
            name="goodput_data_requests",
            kind="gauge",
            text="Requests to the store: all, those tried again, and those it refused.",
            label="kind",
        ),
        Metric(
            name="goodput_data_bottleneck",
            kind="gauge",
            text="1 for the part that limits the rate of steps: accelerator, network, disk or decode.",
            label="part",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run as of now. ranks: of the living worker group. commit_age_s: see `goodput_checkpoint_age_seconds`.

    data: of all ranks of the newest attempt that has read through `run.batches`; None if none has.
    """

    report: GoodputReport
    attempt: int
    ranks: int
    step: int
    committed_step: int
    commits: int
    saves_skipped: int
    commit_age_s: float
    data: DataCounts | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric."""

    metric: Metric
    value: float
    label: str = ""


def samples(figures: RunFigures) -> Iterator[Sample]:
    """Every metric's value or values."""
    report = figures.report
    single = {
        "goodput_overall_ratio": report.overall,
        "goodput_availability_ratio": report.availability,
        "goodput_runtime_ratio": report.runtime,
        "goodput_at_risk_rank_seconds": report.at_risk_s,
        "goodput_uncertain_rank_seconds": report.uncertainty_s,
        "goodput_wall_seconds": report.wall_s,
        "goodput_target_ranks": report.target_world,
        "goodput_ranks": figures.ranks,
        "goodput_attempt": figures.attempt,
        "goodput_step": figures.step,
        "goodput_durable_step": figures.committed_step,
        "goodput_checkpoint_age_seconds": figures.commit_age_s,
        "goodput_commits_total": figures.commits,
        "goodput_saves_skipped_total": figures.saves_skipped,
        "goodput_slowest_rank_ratio": report.stragglers[0].ratio if report.stragglers else 1.0,
        "goodput_steps_lost_total": sum(i.steps_lost for i in report.incidents),
    }
    for name, value in single.items():
        yield Sample(METRICS[name], float(value))
    for bucket, seconds in report.buckets_s.items():
        yield Sample(METRICS["goodput_rank_seconds"], seconds, bucket)
    kinds = Counter({kind: 0 for kind in (*(kind.value for kind in FailureKind), DRIVER, RESIZED)})
    kinds.update(i.kind for i in report.incidents)
    for kind, count in kinds.items():
        yield Sample(METRICS["goodput_incidents_total"], float(count), kind)
    if figures.data is not None:
        yield from _data_samples(figures.data)


def _data_samples(counts: DataCounts) -> Iterator[Sample]:
    yield Sample(METRICS["goodput_data_stall_ratio"], counts.stall_share)
    yield Sample(METRICS["goodput_data_hit_ratio"], counts.hit_share)
    yield Sample(METRICS["goodput_data_queue_ratio"], counts.ready / counts.depth if counts.depth else 0.0)
    seconds = {"wait": counts.waited_s, "network": counts.network_s, "disk": counts.disk_s, "decode": counts.decode_s}
    for part, value in seconds.items():
        yield Sample(METRICS["goodput_data_seconds"], value, part)
    for source, value in {"store": counts.store_bytes, "disk": counts.disk_bytes}.items():
        yield Sample(METRICS["goodput_data_bytes"], float(value), source)
    requests = {"all": counts.requests, "retried": counts.refused + counts.lost, "refused": counts.refused}
    for kind, value in requests.items():
        yield Sample(METRICS["goodput_data_requests"], float(value), kind)
    found = bottleneck(counts)
    for part in PARTS:
        yield Sample(METRICS["goodput_data_bottleneck"], float(found is not None and found.part == part), part)
