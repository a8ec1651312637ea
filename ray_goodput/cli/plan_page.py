"""A plan as one self-contained page: inline SVG and CSS, no script, nothing from the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from ray_goodput.cli import plan_text as text
from ray_goodput.cli.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Line,
    Scale,
    error_bar,
    log_space,
    log_ticks,
    mark,
    path,
    percent_ticks,
)
from ray_goodput.goodput.plan import Plan
from ray_goodput.goodput.planner import goodput, goodput_curve
from ray_goodput.goodput.simulation import SimulationResult

_TIMES_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86400, 7 * 86400, 30 * 86400, 365 * 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A lever as a bar: `share` of the largest gain, negative for a loss."""

    name: str
    change: str
    gain: float
    share: float


def render_page(plan: Plan, simulated: SimulationResult | None = None) -> str:
    """The page as HTML text."""
    source = files("ray_goodput.cli").joinpath("plan_page.html.j2").read_text(encoding="utf-8")
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return env.from_string(source).render(
        plan=plan,
        inputs=plan.inputs,
        figures=_figures(plan),
        facts=_facts(plan),
        next_step=text.next_step(plan),
        charts=[_interval_chart(plan, simulated), _restart_chart(plan), _size_chart(plan)],
        bars=_bars(plan),
        goodputs=_goodputs(plan),
        tiers=_tiers(plan),
        tiers_text=text.tiers(plan),
        simulation=text.simulation(simulated) if simulated else [],
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    """The large numbers: name, value, a word on it."""
    n = plan.interruptions
    figures = [
        ("Goodput", f"{plan.chosen.exact:.2%}", f"exact; the linear rule says {plan.chosen.linear:.2%}"),
        ("Interrupted", f"{plan.interrupted:.1%}", f"at least once in {plan.inputs.days:g} days"),
        ("Interruptions", f"{n.value:.3g}", f"{n.low:,.0f} to {n.high:,.0f} with 95 %"),
        ("Save each", text.duration(plan.best.interval_s), f"of work: {plan.best.exact:.2%}"),
    ]
    if plan.measured is not None:
        figures.insert(1, ("Measured", f"{plan.measured.goodput:.2%}", "goodput of the run itself"))
    return figures


def _facts(plan: Plan) -> list[tuple[str, str, str]]:
    """Name, value and source of each input and of what follows from them at once."""
    i = plan.inputs
    rate = f"{i.failures_per_gpu_year:.4g} a year"
    facts = [
        ("Accelerators", f"{i.gpus:,}", ""),
        ("Failures of one", rate, i.sources.get("failures_per_gpu_year", "")),
        ("Time between failures of the job", text.duration(plan.mtbf_s), ""),
        ("Stall of a save", text.duration(i.stall_s), i.sources.get("stall_s", "")),
        ("Until it is durable", text.duration(i.latency_s), i.sources.get("latency_s", "")),
        ("Restart", text.duration(i.restart_s), i.sources.get("restart_s", "")),
        ("Interval", text.duration(plan.chosen.interval_s), i.sources.get("interval_s", "")),
        ("Worth", text.worth(plan), ""),
    ]
    if i.failures_per_node_year:
        facts.insert(2, ("Failures of a node", f"{i.failures_per_node_year:.4g} a year", ""))
    if plan.rate is not None:
        bounds = f"{plan.rate.low:.4g} to {plan.rate.high:.4g} with 95 %"
        facts[1] = ("Failures of one", f"{rate}, {bounds}", facts[1][2])
    if plan.shrink is not None:
        facts.append(("Shrink or wait", text.shrink(plan), ""))
    return facts


def _goodputs(plan: Plan) -> list[tuple[str, str, str, str]]:
    rows = [("chosen", plan.chosen), ("best", plan.best)]
    for name, tau in (
        ("Young", plan.intervals.young_s),
        ("Daly, first order", plan.intervals.daly_first_s),
        ("Daly, higher order", plan.intervals.daly_s),
        ("exact", plan.intervals.exact_s),
    ):
        if tau > 0:
            exact, linear = goodput_curve(plan.inputs, [tau])[0][1:]
            rows.append((name, replace(plan.chosen, interval_s=tau, exact=exact, linear=linear)))
    return [(name, text.duration(at.interval_s), f"{at.exact:.2%}", f"{at.linear:.2%}") for name, at in rows]


def _tiers(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            f"{t.share:.0%}",
            text.duration(t.interval_s),
            text.duration(t.stall_s),
            text.duration(t.latency_s),
            text.duration(t.restart_s),
            "" if best is None else text.duration(best),
        )
        for t, best in zip(plan.tiers.tiers, plan.tiers.best_intervals_s, strict=True)
    ]


def _bars(plan: Plan) -> list[Bar]:
    most = max((abs(lever.gain) for lever in plan.levers), default=0.0) or 1.0
    return [
        Bar(
            name=lever.name,
            change=f"{text.lever_value(lever, lever.now)} → {text.lever_value(lever, lever.halved)}",
            gain=lever.gain * 100.0,
            share=lever.gain / most,
        )
        for lever in plan.levers
    ]


def _interval_chart(plan: Plan, simulated: SimulationResult | None) -> Chart:
    """Goodput over the save interval, exact and linear."""
    taus = sorted((plan.chosen.interval_s, plan.best.interval_s))
    x = Scale(max(0.1, taus[0] / 15.0), taus[-1] * 15.0, LEFT, RIGHT, log=True)
    curve = goodput_curve(plan.inputs, log_space(x.low, x.high))
    marked = [plan.chosen.exact, plan.best.exact]
    if simulated is not None and not plan.inputs.tiers:
        marked += [simulated.goodput.low, simulated.goodput.high]
    y = _share_scale([exact for _, exact, _ in curve] + marked)
    best, chosen = plan.best, plan.chosen
    # Below its top and inside its flanks the curve leaves room for texts.
    marks = [mark(best.interval_s, best.exact, f"best {text.duration(best.interval_s)}", x, y, anchor="middle")]
    if chosen != best:
        near = abs(x(chosen.interval_s) - x(best.interval_s)) < 100.0
        side = "start" if chosen.interval_s < best.interval_s else "end"
        name = f"chosen {text.duration(chosen.interval_s)}"
        marks.append(mark(chosen.interval_s, chosen.exact, name, x, y, down=34.0 if near else 18.0, anchor=side))
    if len(marked) > 2 and simulated is not None:
        s = simulated.goodput
        marks.append(error_bar(plan.chosen.interval_s, s.value, s.low, s.high, x, y))
    return Chart(
        title="Goodput and the interval between saves",
        x_label="work between saves",
        x_ticks=log_ticks(x, _TIMES_S, text.duration),
        y_ticks=percent_ticks(y),
        lines=(
            Line(style="exact", path=path([(t, e) for t, e, _ in curve], x, y), label="exact"),
            Line(style="linear", path=path([(t, one) for t, _, one in curve], x, y), label="linear rule 1 − τ/2M"),
        ),
        marks=tuple(marks),
    )


def _restart_chart(plan: Plan) -> Chart:
    """Goodput over the restart time, at the chosen interval."""
    now = max(plan.inputs.restart_s, 1.0)
    x = Scale(now / 30.0, now * 10.0, LEFT, RIGHT, log=True)
    points = [(r, goodput(replace(plan.inputs, restart_s=r), plan.chosen.interval_s)) for r in _restarts(plan, x)]
    y = _share_scale([g for _, g in points])
    return Chart(
        title="Goodput and the restart time",
        x_label="from a failure to the first new step",
        x_ticks=log_ticks(x, _TIMES_S, text.duration),
        y_ticks=percent_ticks(y),
        lines=(Line(style="exact", path=path(points, x, y), label="exact"),),
        marks=(mark(now, plan.chosen.exact, f"now {text.duration(plan.inputs.restart_s)}", x, y),),
    )


def _restarts(plan: Plan, x: Scale) -> list[float]:
    return [r for r in log_space(x.low, x.high) if r <= plan.inputs.run_s]  # no longer than the run


def _size_chart(plan: Plan) -> Chart:
    """Probability of an interruption over the number of accelerators, from where it is rare to where it is sure."""
    gpus = plan.inputs.gpus
    even = gpus * math.log(2.0) * plan.mtbf_s / plan.inputs.run_s
    x = Scale(max(1.0, min(gpus, even) / 8.0), max(8.0, max(gpus, even) * 8.0), LEFT, RIGHT, log=True)
    y = Scale(0.0, 1.0, BOTTOM, TOP)
    points = [(n, -math.expm1(-plan.inputs.run_s / plan.mtbf_s * n / gpus)) for n in log_space(x.low, x.high)]
    powers = [4**i for i in range(16)]
    return Chart(
        title=f"Interrupted at least once in {plan.inputs.days:g} days",
        x_label="accelerators",
        x_ticks=log_ticks(x, powers, lambda n: f"{n:,.0f}"),
        y_ticks=percent_ticks(y),
        lines=(Line(style="exact", path=path(points, x, y), label="1 − (1 − p)^(N t)"),),
        marks=(mark(gpus, plan.interrupted, f"{gpus:,}: {plan.interrupted:.1%}", x, y, down=-8.0, anchor="end"),),
    )


def _share_scale(values: list[float]) -> Scale:
    low = max(0.0, min(values))
    room = max(1e-6, (1.0 - low) * 0.06)
    return Scale(max(0.0, low - room), 1.0, BOTTOM, TOP)
