"""A run as one self-contained page: inline SVG and CSS, no script, nothing from the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from jinja2 import Environment, StrictUndefined

from ray_goodput.cli import report_tables as words
from ray_goodput.cli.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Line, Scale, mark, path, steps_of
from ray_goodput.cli.plan_text import duration
from ray_goodput.cli.report_tables import COLOUR, MEANING
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.metrics_log import MetricsLog, main_metric
from ray_goodput.goodput.report import GoodputReport, headline
from ray_goodput.goodput.run_view import RunView, commit_ages

COLUMNS = 400
_MAX_POINTS = 400
_MAX_CURVES = 3
_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200)
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the waterfall: from `left` to `left + width`, both in percent of all rank-time."""

    name: str
    meaning: str
    amount: str
    share: str
    cost: str
    left: float
    width: float
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rank's timeline: one path for each bucket, in a drawing of COLUMNS x 1. bad: it was lost in some incident."""

    rank: int
    bad: bool
    paths: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A bar of the strip above the timeline, or a moment in it, in percent of the run's time."""

    left: float
    width: float
    text: str
    title: str


def render_page(view: RunView) -> str:
    """The page as HTML text."""
    source = files("ray_goodput.cli").joinpath("report_page.html.j2").read_text(encoding="utf-8")
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    rows = [_row(view, rank) for rank in view.shown_ranks]
    used = [b for b in Bucket if view.report.buckets_s[b.label] > 0]
    return env.from_string(source).render(
        view=view,
        name=view.name,
        headline=headline(view.report),
        scale=words.scale(view),
        state=words.state(view),
        next_step=words.next_step(view),
        data=words.data_line(view),
        figures=_figures(view),
        waterfall=_waterfall(view),
        rows=rows,
        hidden=view.report.target_world - len(rows),
        columns=COLUMNS,
        legend=[(b.label, MEANING[b], COLOUR[b]) for b in used],
        attempts=_attempts(view),
        commits=_commits(view),
        ticks=_ticks(view.timeline.wall_s),
        charts=_charts(view),
        tables={
            "incidents": words.incident_table(view),
            "way_back": words.way_back_table(view),
            "stragglers": words.straggler_table(view),
            "checkpoints": words.checkpoint_table(view),
            "levers": words.lever_table(view),
            "attempts": words.attempt_table(view),
        },
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )


def _figures(view: RunView) -> list[tuple[str, str, str]]:
    """The large numbers: name, value, a word on it."""
    r = view.report
    total = sum(r.buckets_s.values()) or 1.0
    figures = [
        ("Goodput", f"{r.overall:.1%}", "of all rank-time became steps that survive"),
        ("Availability", f"{r.availability:.1%}", "of it had its rank, training or down"),
        ("Runtime", f"{r.runtime:.1%}", "of that went into steps that survive, the rest was down, waiting or lost"),
        ("Rolled back", f"{r.lost_s / total:.1%}", f"{words.hours(r.lost_s)} of steps, done again"),
        ("Failures", str(r.failures), _others(r)),
    ]
    if view.cost is not None:
        note = f"of {words.money(view.cost.total)}, at {view.cost.per_accelerator_hour:g} an accelerator-hour"
        figures.append(("Wasted", words.money(view.cost.wasted), note))
    return figures


def _others(report: GoodputReport) -> str:
    resizes = len(report.incidents) - report.failures
    changes = f", and {resizes} change{'' if resizes == 1 else 's'} of size" if resizes else ""
    return f"in {duration(report.wall_s)}{changes}"


def _waterfall(view: RunView) -> list[Step]:
    """From all rank-time down to the steps that survive, the largest loss first."""
    total = sum(view.report.buckets_s.values())
    if total <= 0:
        return []
    price = view.cost.per_accelerator_hour / 3600 if view.cost else None

    def step(name: str, meaning: str, s: float, left: float, colour: str) -> Step:
        return Step(
            name=name,
            meaning=meaning,
            amount=words.hours(s),
            share=f"{s / total:.1%}",
            cost="" if price is None else words.money(s * price),
            left=round(100 * left / total, 3),
            width=round(100 * s / total, 3),
            colour=colour,
        )

    steps = [step("all rank-time", "target world x wall-clock time", total, 0.0, "var(--soft)")]
    left = total
    for bucket, s in words.buckets_by_size(view):
        left -= s
        steps.append(step(bucket.label, MEANING[bucket], s, left, COLOUR[bucket]))
    steps.append(step("step", MEANING[Bucket.STEP], view.report.buckets_s["step"], 0.0, COLOUR[Bucket.STEP]))
    return steps


def _row(view: RunView, rank: int) -> Row:
    """Each column is a stack of its buckets' shares; equal neighbours are drawn as one."""
    seconds = view.timeline.columns(rank, COLUMNS)
    total = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, total, out=np.zeros_like(seconds), where=total > 0)
    # Steps at the bottom, where they make an even ground; the rest on top of it.
    order = [Bucket.STEP, *(b for b in Bucket if b is not Bucket.STEP)]
    tops = 1.0 - np.cumsum(shares[:, order], axis=1)
    paths: list[tuple[str, str, str]] = []
    for i, bucket in enumerate(order):
        drawn = _boxes(tops[:, i], shares[:, bucket])
        if drawn:
            paths.append((bucket.label, COLOUR[bucket], drawn))
    lost = any(rank in incident.ranks for incident in view.report.incidents)
    return Row(rank=rank, bad=lost, paths=tuple(paths))


def _boxes(tops: np.ndarray, heights: np.ndarray) -> str:
    tops, heights = np.round(np.maximum(tops, 0.0), 2), np.round(heights, 2)
    parts: list[str] = []
    start = 0
    for i in range(1, len(tops) + 1):
        if i < len(tops) and tops[i] == tops[start] and heights[i] == heights[start]:
            continue
        if heights[start] > 0:
            parts.append(f"M{start} {tops[start]:g}h{i - start}v{heights[start]:g}h{start - i}z")
        start = i
    return "".join(parts)


def _percent(view: RunView, at_s: float) -> float:
    return round(100 * view.timeline.counted_s(at_s) / (view.timeline.wall_s or 1.0), 3)


def _attempts(view: RunView) -> list[Stretch]:
    bars: list[Stretch] = []
    for a in view.report.attempts:
        left, right = _percent(view, a.started_at_s), _percent(view, a.started_at_s + a.duration_s)
        title = f"attempt {a.attempt}: {a.world} ranks, {a.outcome}, {duration(a.duration_s)}"
        bars.append(Stretch(left=left, width=max(0.2, right - left), text=str(a.attempt), title=title))
    return bars


def _commits(view: RunView) -> list[Stretch]:
    """Moments of commits; so many that they would touch are thinned out."""
    marks: dict[int, Stretch] = {}
    for c in view.commits:
        left = _percent(view, c.at_s)
        marks[int(left * 4)] = Stretch(left=left, width=0.0, text="", title=f"step {c.step} became durable")
    return list(marks.values())


def _ticks(wall_s: float, most: int = 6) -> list[tuple[float, str]]:
    """(percent, text) of round moments of the run's time."""
    if wall_s <= 0:
        return []
    size = next((t for t in _TICKS_S if wall_s / t <= most), None)
    size = size if size is not None else _DAY_S * math.ceil(wall_s / _DAY_S / most)
    return [(round(100 * i * size / wall_s, 3), duration(i * size)) for i in range(int(wall_s / size) + 1)]


def _charts(view: RunView) -> list[Chart]:
    wall = view.timeline.wall_s
    if wall <= 0:
        return []
    x = Scale(0.0, wall, LEFT, RIGHT)
    charts = [chart for chart in (_throughput(view, x), *_metrics(view, x)) if chart is not None]
    if view.commits:
        charts.append(_ages(view, x))
    return charts


def _throughput(view: RunView, x: Scale) -> Chart | None:
    at, rate = view.timeline.throughput(120)
    if not len(at):
        return None
    points = list(zip(at.tolist(), rate.tolist(), strict=True))
    return _chart(
        "Steps a second", x, [Line(style="exact", path="", label="rank 0, repeated steps too")], [points], 0.0
    )


def _metrics(view: RunView, x: Scale) -> list[Chart]:
    first = main_metric(view.metrics)
    if first is None:
        return []
    names = list(dict.fromkeys((first, *(name for log in view.metrics for name in log.names))))
    return [_metric(view, name, x) for name in names[:_MAX_CURVES]]


def _metric(view: RunView, name: str, x: Scale) -> Chart:
    """One line an attempt, so that steps done again show as such."""
    lines: list[Line] = []
    curves: list[list[tuple[float, float]]] = []
    for i, log in enumerate(view.metrics):
        points = _curve(view, log, name)
        if points:
            lines.append(Line(style=("exact", "linear", "third")[i % 3], path="", label=f"attempt {log.attempt}"))
            curves.append(points)
    return _chart(name, x, lines, curves, None)


def _curve(view: RunView, log: MetricsLog, name: str) -> list[tuple[float, float]]:
    points = [p for p in log.points if name in p.values]
    points = points[:: max(1, math.ceil(len(points) / _MAX_POINTS))]
    began = next((a.resumed_step for a in view.report.attempts if a.attempt == log.attempt), None) or 0
    ranks = view.timeline.ranks
    rank = next((r for r in ranks if r.attempt == log.attempt and r.world_rank == 0), None)
    # By the rank's own journal if there is one: what the coordinator heard came in bursts.
    at = rank.when([p.step for p in points], began) if rank else None
    times = at if at is not None else [p.at_s for p in points]
    return [(view.timeline.counted_s(t), p.values[name]) for t, p in zip(times, points, strict=True)]


def _ages(view: RunView, x: Scale) -> Chart:
    corners = commit_ages(view.commits, view.timeline)
    if len(corners) > 6 * _MAX_POINTS:  # the tops of the saw, the highest of each stretch
        tops = corners[1::2]
        part = math.ceil(len(tops) / _MAX_POINTS)
        corners = [max(tops[i : i + part], key=lambda c: c[1]) for i in range(0, len(tops), part)]
    scaled, unit = _in_unit(max(age for _, age in corners))
    line = Line(style="exact", path="", label="what a failure would have cost, at least")
    ages = [(at, age / scaled) for at, age in corners]
    return _chart(f"Age of the newest commit ({unit})", x, [line], [ages], 0.0)


def _in_unit(seconds: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in ((3600.0, "h"), (60.0, "min")) if seconds >= 2 * size), (1.0, "s"))


def _chart(
    title: str, x: Scale, lines: Sequence[Line], curves: Sequence[Sequence[tuple[float, float]]], low: float | None
) -> Chart:
    """Curves over the run's time; `low` is the least value of the axis, if it is not the data's."""
    finite = [value for curve in curves for _, value in curve if math.isfinite(value)]
    bottom, top = (min(finite), max(finite)) if finite else (0.0, 1.0)
    bottom = bottom if low is None else low
    room = (top - bottom) * 0.06 or max(abs(top) * 0.1, 1e-12)
    y = Scale(bottom if low is not None else bottom - room, top + room, BOTTOM, TOP)
    bad = [(at, value) for curve in curves for at, value in curve if not math.isfinite(value)]
    return Chart(
        title=title,
        x_label="the run's own time",
        x_ticks=tuple((x(p / 100 * x.high), text) for p, text in _ticks(x.high, 5)),
        y_ticks=tuple((y(v), f"{v:.4g}") for v in steps_of(y.low, y.high, 5)),
        lines=tuple(Line(style=n.style, path=path(c, x, y), label=n.label) for n, c in zip(lines, curves, strict=True)),
        marks=(mark(bad[0][0], y.low, "not a number from here", x, y, down=-8.0),) if bad else (),
    )
