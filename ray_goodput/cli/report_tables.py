"""A run as tables of plain text, which a terminal, Markdown and a page show each in its way; and the words they use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray_goodput.cli.plan_text import duration, lever_value
from ray_goodput.cli.plan_text import next_step as planned_step
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.data_flow import bottleneck
from ray_goodput.goodput.report import DRIVER, RESIZED, AttemptReport, Incident
from ray_goodput.goodput.run_view import RunView

MEANING = {
    Bucket.STEP: "training steps that survive",
    Bucket.LOST: "steps that were rolled back",
    Bucket.DATA_WAIT: "waiting for a batch",
    Bucket.CKPT_BLOCK: "standing still for a save",
    Bucket.CKPT_LOAD: "loading a checkpoint",
    Bucket.STARTUP: "starting up",
    Bucket.RESTART: "between two attempts",
    Bucket.DETECT: "until a failure was noticed",
    Bucket.HANG: "hanging",
    Bucket.IDLE_NODES: "ranks that were missing",
    Bucket.EVAL: "evaluation",
    Bucket.DRAIN: "leaving after a notice",
    Bucket.SHUTDOWN: "shutting down",
    Bucket.OTHER: "anything else, or unknown",
}
COLOUR = {
    Bucket.STEP: "#2f9e6e",
    Bucket.LOST: "#d9480f",
    Bucket.DATA_WAIT: "#e0a100",
    Bucket.CKPT_BLOCK: "#7048c6",
    Bucket.CKPT_LOAD: "#b197e8",
    Bucket.STARTUP: "#4d8fd6",
    Bucket.RESTART: "#2b5797",
    Bucket.DETECT: "#c2255c",
    Bucket.HANG: "#7d0c2f",
    Bucket.IDLE_NODES: "#8b95a1",
    Bucket.EVAL: "#12a5b5",
    Bucket.DRAIN: "#a86a3d",
    Bucket.SHUTDOWN: "#6b7684",
    Bucket.OTHER: "#adb5bd",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Rows of text. right: columns of numbers. empty: what to say instead of a table without rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    empty: str = ""


def scale(view: RunView) -> str:
    """How much time the accounts are about, and how sure they are."""
    r = view.report
    text = f"{r.target_world} ranks x {duration(r.wall_s)} = {hours(r.target_world * r.wall_s)}"
    if r.uncertainty_s >= 0.05:
        text += f", of which {hours(r.uncertainty_s)} are uncertain"
    return text


def state(view: RunView) -> str:
    if view.report.finished:
        return f"ended {moment(view.as_of_s)}"
    return f"still going on, or its driver died: as of {moment(view.as_of_s)}"


def next_step(view: RunView) -> str:
    """What to change next, as a sentence."""
    if view.advice is None:
        return f"no advice: {view.no_advice}"
    return f"{planned_step(view.advice)} (of {view.advice.inputs.days:g} days of the same job)"


def data_line(view: RunView) -> str:
    """Which part of the data plane holds training up, as a sentence; "" where nothing was read through it."""
    found = bottleneck(view.data) if view.data is not None else None
    return "" if found is None else found.reason


def tables(view: RunView) -> list[TextTable]:
    """All tables, most important first."""
    return [
        waterfall_table(view),
        incident_table(view),
        way_back_table(view),
        straggler_table(view),
        checkpoint_table(view),
        attempt_table(view),
        lever_table(view),
    ]


def buckets_by_size(view: RunView) -> list[tuple[Bucket, float]]:
    """(bucket, rank-seconds) of what was lost, the most first; the steps that survive are not among them."""
    seconds = view.report.buckets_s
    rows = [(b, seconds[b.label]) for b in Bucket if b is not Bucket.STEP and seconds[b.label] > 0]
    return sorted(rows, key=lambda row: -row[1])


def waterfall_table(view: RunView) -> TextTable:
    total = sum(view.report.buckets_s.values()) or 1.0
    rows = []
    for bucket, s in [(Bucket.STEP, view.report.buckets_s["step"]), *buckets_by_size(view)]:
        row = (bucket.label, MEANING[bucket], hours(s), f"{s / total:.1%}")
        rows.append(row if view.cost is None else (*row, money(view.cost.by_bucket[bucket.label])))
    header = ("bucket", "what it is", "rank-time", "share")
    return TextTable(
        title="Where the time went",
        header=header if view.cost is None else (*header, "cost"),
        rows=tuple(rows),
        right=frozenset({2, 3, 4}),
    )


def incident_table(view: RunView) -> TextTable:
    """What each interruption was and cost; rank-time lost is the whole target world while down, and the steps lost."""
    header = ("attempt", "what", "ranks", "resumed after", "steps lost", "down", "rank-time lost", "reason")
    price = view.cost.per_accelerator_hour if view.cost else None
    if price is not None:
        header = (*header[:-1], "cost", header[-1])
    rows = []
    for i in view.report.incidents:
        row = (str(i.attempt), i.kind, _ranks(i), _back(i), str(i.steps_lost), duration(i.down_s), hours(i.gpu_s))
        rows.append((*row, *([] if price is None else [money(i.gpu_s / 3600 * price)]), _short(i.reason)))
    right = frozenset({0, 4, 5, 6} if price is None else {0, 4, 5, 6, 7})
    return TextTable(title="Incidents", header=header, rows=tuple(rows), right=right, empty="There were none.")


def way_back_table(view: RunView) -> TextTable:
    """Where the time down went, incident by incident."""
    rows = []
    for i in view.report.incidents:
        parts = (i.detect_s, i.teardown_s, i.wait_s, i.start_s, i.load_s, i.down_s, i.replay_s)
        rows.append((str(i.attempt), *map(duration, parts), _nodes(i)))
    return TextTable(
        title="The way back",
        header=("attempt", "noticed", "torn down", "waited", "started", "loaded", "down", "steps again", "nodes"),
        rows=tuple(rows),
        right=frozenset(range(8)),
        empty="There was no incident.",
    )


def straggler_table(view: RunView) -> TextTable:
    """Ranks that the others wait for, of the newest attempt."""
    rows = [
        (str(s.world_rank), f"{s.own_s * 1e3:.1f} ms", f"{s.usual_s * 1e3:.1f} ms", f"{s.ratio:.2f} x")
        for s in view.report.stragglers
    ]
    return TextTable(
        title="Slow ranks",
        header=("rank", "computes a step in", "the others in", "slower by"),
        rows=tuple(rows),
        right=frozenset(range(4)),
        empty="None stands out, as far as the ranks' own times are known.",
    )


def checkpoint_table(view: RunView) -> TextTable:
    c, r, source = view.checkpoints, view.report, view.measures.sources.get("latency_s", "")
    rows = [
        ("saves that became durable", str(c.saves)),
        ("training stood still for each", _known(c.stall_s)),
        (f"durable later by{' (to some seconds)' if 'some seconds' in source else ''}", _known(c.latency_s)),
        ("work between saves", _known(c.interval_s)),
        ("newest", "none" if c.newest_step is None else f"step {c.newest_step}"),
        ("its age at the end" if r.finished else "its age", _known(c.newest_age_s)),
        ("the oldest that the newest ever was", duration(c.longest_age_s)),
        ("step time committed", hours(r.committed_s)),
        ("step time at risk", hours(r.at_risk_s)),
    ]
    return TextTable(title="Checkpoints", header=("", ""), rows=tuple(rows), right=frozenset({1}))


def attempt_table(view: RunView) -> TextTable:
    rows = []
    for a in view.report.attempts:
        seconds = sum(a.buckets_s.values())
        share = a.buckets_s["step"] / seconds if seconds > 0 else 0.0
        rows.append((str(a.attempt), str(a.world), a.outcome, duration(a.duration_s), _steps(a), f"{share:.1%}"))
    return TextTable(
        title="Attempts",
        header=("attempt", "ranks", "outcome", "duration", "steps", "surviving step time"),
        rows=tuple(rows),
        right=frozenset({0, 1, 3, 4, 5}),
        empty="There was none.",
    )


def lever_table(view: RunView) -> TextTable:
    rows = []
    for lever in view.advice.levers if view.advice else ():
        now, halved = lever_value(lever, lever.now), lever_value(lever, lever.halved)
        rows.append((lever.name, f"{now} → {halved}", f"{lever.gain * 100:+.2f}"))
    return TextTable(
        title="Points of goodput from halving",
        header=("", "now → halved", "points"),
        rows=tuple(rows),
        right=frozenset({1, 2}),
        empty="There is no advice yet.",
    )


def hours(seconds: float) -> str:
    """Rank-time: `7200 -> "2.00 h"`, in minutes or seconds while it is little."""
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.2f} h"


def money(amount: float) -> str:
    return f"{amount:,.2f}" if amount < 1000 else f"{amount:,.0f}"


def moment(at_s: float) -> str:
    """Wall-clock time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


def _known(seconds: float | None) -> str:
    return "not known" if seconds is None else duration(seconds)


def _short(reason: str, most: int = 160) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _ranks(incident: Incident, most: int = 8) -> str:
    return shortened(incident.ranks, most) or _nobody(incident)


def _nodes(incident: Incident, most: int = 4) -> str:
    """Ray's ids of nodes are long: their beginning tells them apart."""
    names = [name[:8] for name in incident.nodes]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else _nobody(incident)


def _nobody(incident: Incident) -> str:
    """Where no rank is named: a change of size loses none, and a driver's death takes all."""
    return {RESIZED: "none", DRIVER: "all"}.get(incident.kind, "not known")


def shortened(numbers: Sequence[int], most: int) -> str:
    """`0, 1, 2 and 61 more`."""
    text = ", ".join(map(str, numbers[:most]))
    return text if len(numbers) <= most else f"{text} and {len(numbers) - most} more"


def _back(incident: Incident) -> str:
    return "not resumed" if incident.step_resumed is None else f"step {incident.step_resumed}"


def _steps(attempt: AttemptReport) -> str:
    if attempt.last_step is None:
        return "none"
    return f"{(attempt.resumed_step or 0) + 1} to {attempt.last_step}"
