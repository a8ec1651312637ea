"""What a run's time went into: the values, and how they look in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.core.budget import FailureKind
from ray_goodput.core.straggler import Straggler

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One attempt's share of the run, in rank-seconds; includes the gap before it and, for the last, the one after.

    resumed_step: it went on after this step; None when it never said so. last_step: the last one done on any rank.
    """

    attempt: int
    world: int
    outcome: str
    started_at_s: float
    duration_s: float
    resumed_step: int | None
    last_step: int | None
    buckets_s: Mapping[str, float]


RESIZED, DRIVER = "resized", "driver"
"""Kinds of incidents that are not failures of an attempt: a change of size that nobody had to suffer, and the death of
a driver, which is noticed when the next one takes the run up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One interruption.

    ranks: those told to be lost; nodes: where they ran, as far as known. step_reached: the last step done before;
    step_resumed: the next attempt went on after this one (None while it has not). lost_s: rank-seconds of steps rolled
    back.

    down_s: from the first rank's last sign of life to the end of the first new step, or to the end of the books; time
    without a driver is not counted. Its parts: detect_s until the failure was noticed, teardown_s until the processes
    were gone, wait_s until others were there, load_s of loading a checkpoint, start_s for the rest. replay_s: what the
    steps rolled back had taken, and so about what doing them again takes. gpu_s: accelerator-seconds it cost: the whole
    target world while down, and the steps rolled back.
    """

    attempt: int
    kind: str
    reason: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    step_reached: int | None
    step_resumed: int | None
    steps_lost: int
    lost_s: float
    down_s: float
    detect_s: float
    teardown_s: float
    wait_s: float
    start_s: float
    load_s: float
    replay_s: float
    gpu_s: float

    @property
    def is_failure(self) -> bool:
        """Something broke; False for a change of size, and for an attempt that had saved and left after notice."""
        return self.kind not in (RESIZED, FailureKind.DRAIN.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """Where the rank-seconds of a run went. Every one is in exactly one bucket; `lost` is taken out of `step`.

    overall = availability x runtime: the share of `step` in all rank-seconds, the share that had a rank to run on, and
    the share of that which went into steps that survive (so far). `committed_s + at_risk_s` is the bucket `step`.
    uncertainty_s: rank-seconds whose bucket is not known for sure. imbalance_s: sum of the buckets less
    `target_world x wall_s`; its size is at most 0.1 % of that product plus the uncertainty.
    stragglers: ranks of the newest attempt that are slower than the others, the slowest first.
    """

    overall: float
    availability: float
    runtime: float
    wall_s: float
    target_world: int
    buckets_s: Mapping[str, float]
    committed_s: float
    at_risk_s: float
    lost_s: float
    uncertainty_s: float
    imbalance_s: float
    durable_step: int | None
    finished: bool
    attempts: tuple[AttemptReport, ...]
    incidents: tuple[Incident, ...]
    stragglers: tuple[Straggler, ...] = ()

    @property
    def failures(self) -> int:
        """Incidents but changes of size."""
        return sum(incident.is_failure for incident in self.incidents)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; see `to_dict`."""
        return to_dict(self)

    def table(self) -> str:
        """The report as text for a terminal; see `render_table`."""
        return render_table(self)


def to_dict(report: GoodputReport) -> dict[str, Any]:
    """Plain JSON values. The keys are those of the report's fields and stay as they are; new ones may be added."""
    body = asdict(report)
    for name in ("attempts", "incidents", "stragglers"):
        body[name] = list(body[name])
    for incident in body["incidents"]:
        incident |= {"ranks": list(incident["ranks"]), "nodes": list(incident["nodes"])}
    return body


AVAILABILITY = "availability: no rank was missing, whether it trained or was down; down time is in runtime"
"""Said wherever the two stand side by side: most people take availability for being up."""


def headline(report: GoodputReport) -> str:
    """The ratios in a line."""
    return f"goodput {report.overall:.1%} = availability {report.availability:.1%} x runtime {report.runtime:.1%}"


def render_table(report: GoodputReport) -> str:
    """The report as lines of text: buckets largest first, the ratios, the attempts, the incidents."""
    total = sum(report.buckets_s.values())
    lines = [
        headline(report),
        f"({AVAILABILITY})",
        f"{report.target_world} ranks x {_duration(report.wall_s)} = {total:.1f} rank-seconds"
        + (f", of which {report.uncertainty_s:.1f} are uncertain" if report.uncertainty_s >= 0.05 else ""),
        "",
        f"{'bucket':<12} {'rank-seconds':>14} {'share':>7}",
    ]
    rows = [(name, s) for name, s in report.buckets_s.items() if s > 0]
    for name, seconds in sorted(rows, key=lambda row: -row[1]):
        lines.append(f"{name:<12} {seconds:>14.1f} {seconds / total:>7.1%}")
    lines += [
        "",
        f"step time: committed {report.committed_s:.1f}, at risk {report.at_risk_s:.1f}, lost {report.lost_s:.1f}",
    ]
    if report.attempts:
        lines += ["", f"{'attempt':>7} {'ranks':>5} {'outcome':<10} {'duration':>9} {'steps':>13} {'step time':>9}"]
    for a in report.attempts:
        seconds = sum(a.buckets_s.values())
        share = a.buckets_s["step"] / seconds if seconds > 0 else 0.0
        lines.append(
            f"{a.attempt:>7} {a.world:>5} {a.outcome:<10} {_duration(a.duration_s):>9} {_steps(a):>13} {share:>9.1%}"
        )
    if report.incidents:
        lines.append("")
    for i in report.incidents:
        ranks = f" (ranks {', '.join(map(str, i.ranks))})" if i.ranks else ""
        back = f"resumed after step {i.step_resumed}" if i.step_resumed is not None else "not resumed"
        lines.append(
            f"attempt {i.attempt} {i.kind}{ranks}: {back}, {i.steps_lost} steps lost ({i.lost_s:.1f} rank-seconds), "
            f"down {_duration(i.down_s)}"
        )
    if report.stragglers:
        lines += ["", *(f"slow: {straggler.sentence}" for straggler in report.stragglers[:5])]
    return "\n".join(lines)


def loss_curve(points: Sequence[tuple[int, float]], width: int = 60, height: int = 4) -> str:
    """A curve of (step, loss) points in `height` lines of at most `width` characters, and a line of numbers.

    Neighbouring points share a column by their mean; a column whose mean is not finite shows as `x`.
    """
    if not points:
        return "no points"
    num = min(max(1, width), len(points))
    columns = [
        math.fsum(loss for _, loss in part) / len(part) if all(math.isfinite(loss) for _, loss in part) else math.nan
        for part in (points[i * len(points) // num : (i + 1) * len(points) // num] for i in range(num))
    ]
    finite = [c for c in columns if math.isfinite(c)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = height * 8 / (high - low) if high > low else 0.0
    # The lowest column still shows one eighth, so that the curve has no gaps.
    eighths = [max(1, round((c - low) * scale)) if math.isfinite(c) else None for c in columns]
    lines = [
        "".join(
            ("x" if row == 0 else " ") if e is None else _BLOCKS[min(8, max(0, e - 8 * row))] for e in eighths
        ).rstrip()
        for row in reversed(range(max(1, height)))
    ]
    steps = f"steps {points[0][0]} to {points[-1][0]}"
    lowest = min((loss for _, loss in points if math.isfinite(loss)), default=math.nan)
    lines.append(f"{steps}: loss {points[0][1]:.4g} to {points[-1][1]:.4g}, lowest {lowest:.4g}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _steps(attempt: AttemptReport) -> str:
    if attempt.last_step is None:
        return "none"
    return f"{(attempt.resumed_step or 0) + 1} to {attempt.last_step}"
