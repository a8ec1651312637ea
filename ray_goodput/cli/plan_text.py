"""A plan as lines of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ray_goodput.goodput.plan import WORTH_SAYING, GoodputAt, Lever, Plan
from ray_goodput.goodput.published import PublishedRow
from ray_goodput.goodput.simulation import SimulationResult

_LABEL = 22


def render_plan(plan: Plan, simulated: SimulationResult | None = None) -> str:
    """The whole plan; see README.md of goodput/ for what each figure means."""
    i = plan.inputs
    lines = [
        f"{i.gpus:,} accelerators for {i.days:g} days, a failure each {duration(plan.mtbf_s)} "
        f"({i.failures_per_gpu_year:.4g} a year of one accelerator{_nodes(plan)})",
        f"stall {duration(i.stall_s)}, durable {duration(i.latency_s)} later, restart {duration(i.restart_s)}",
        *(f"  {name.removesuffix('_s').replace('_', ' ')}: {source}" for name, source in i.sources.items()),
        "",
        _row("interrupted", f"{plan.interrupted:.1%} likely to be interrupted at least once"),
        _row("interruptions", interruptions(plan)),
        "",
        _row("goodput", f"{'interval':>10} {'exact':>9} {'linear rule':>12}"),
    ]
    if plan.chosen != plan.best:
        lines.append(_goodput("as it is" if plan.measured else "as given", plan.chosen))
    lines.append(_goodput("at the best interval", plan.best))
    if plan.measured is not None:
        lines.append(_row("  the run's own", f"{'':>10} {plan.measured.goodput:>9.2%} (measured)"))
    lines += [
        _row("best by rule", best_by_rule(plan)),
        "",
        _row("what if halved", f"{'now':>12} {'halved':>12} {'goodput':>9} {'gain':>13}"),
    ]
    for lever in plan.levers:
        now, halved = (lever_value(lever, value) for value in (lever.now, lever.halved))
        lines.append(
            _row(f"  {lever.name}", f"{now:>12} {halved:>12} {lever.goodput:>9.2%} {lever.gain * 100:>+6.2f} points")
        )
    lines += [_row("next", next_step(plan)), "", _row("worth", worth(plan)), _row("tiers", tiers(plan))]
    if plan.shrink is not None:
        lines.append(_row("shrink or wait", shrink(plan)))
    if simulated is not None:
        lines += ["", *(_row(name, text) for name, text in simulation(simulated))]
    return "\n".join(line.rstrip() for line in lines)


def render_published(rows: Sequence[PublishedRow]) -> str:
    """The table of published figures beside our own."""
    lines = [f"{'':<48} {'published':>9} {'formula':>9} {'exact':>9}  simulated (95 %)"]
    for row in rows:
        texts = [quantity(value, row.unit) for value in (row.formula, row.exact)]
        s = row.simulated
        bounds = f"{quantity(s.value, row.unit)} ({quantity(s.low, row.unit)} to {quantity(s.high, row.unit)})"
        printed = f"{row.published:.0%}" if row.unit == "%" else f"{row.published:.0f} {row.unit}"
        lines.append(f"{row.what:<48} {printed:>9} {texts[0]:>9} {texts[1]:>9}  {bounds}")
    lines.append("exact: where the formula is an approximation (1 - tau / 2M), what it approximates")
    return "\n".join(lines)


def best_by_rule(plan: Plan) -> str:
    """The best interval by each rule."""
    at = plan.intervals
    rules = (
        f"Young {duration(at.young_s)}, Daly {duration(at.daly_first_s)} and {duration(at.daly_s)}, "
        f"exact {duration(at.exact_s)}"
    )
    if at.shortest_feasible_s == 0:
        return rules
    return f"{rules}; not below the {duration(at.shortest_feasible_s)} until a save is durable"


def interruptions(plan: Plan) -> str:
    """How many to expect."""
    n = plan.interruptions
    return f"{n.value:.3g} expected, {n.low:,.0f} to {n.high:,.0f} with 95 %"


def next_step(plan: Plan) -> str:
    """The advice: one sentence. What the bounds of the failure rate leave open is not recommended."""
    lever, gain = plan.lever, plan.best.exact - plan.chosen.exact
    if plan.interval_gain > WORTH_SAYING and (lever is None or gain >= lever.gain):
        return f"save each {duration(plan.best.interval_s)}: +{gain * 100:.2f} points{_worth_of(plan, gain)}"
    if lever is None:
        if max([gain, *(each.gain for each in plan.levers)]) > WORTH_SAYING:
            return "nothing for sure: too little is known of how often it fails, a longer run would tell"
        return "nothing: no half of anything gains a thousandth of a point"
    now, halved = (lever_value(lever, value) for value in (lever.now, lever.halved))
    gained = f"+{lever.gain * 100:.2f} points{_worth_of(plan, lever.gain)}"
    return f"halve the {lever.name}, {now} to {halved}: {gained}"


def worth(plan: Plan) -> str:
    """What a point of goodput is, and what is lost."""
    w = plan.worth
    point = f"a point of goodput is {w.point_gpu_hours:,.0f} accelerator-hours"
    lost = f"lost in all: {w.lost_gpu_hours:,.0f} of {w.gpu_hours:,.0f}"
    if w.point_cost is None or w.lost_cost is None:
        return f"{point}; {lost}"
    return f"{point}, at cost {w.point_cost:,.0f}; {lost}, at cost {w.lost_cost:,.0f}"


def tiers(plan: Plan) -> str:
    """What the tiers come to, by the first-order rule."""
    t = plan.tiers
    if t.assumed:
        what = f"with a copy on the node, if {t.tiers[0].share:.0%} of the failures leave it up (an assumption)"
        return f"{what}: {t.goodput:.2%}, {duration(t.per_failure_s)} lost a failure, by first order"
    best = ", ".join("as given" if b is None else duration(b) for b in t.best_intervals_s)
    return (
        f"{t.goodput:.2%} by first order, {duration(t.per_failure_s)} lost a failure, {t.overhead:.2%} in stalls; "
        f"best intervals {best}: {t.goodput_at_best:.2%}"
    )


def shrink(plan: Plan) -> str:
    """When going on smaller pays, and if known whether it does here."""
    s = plan.shrink
    assert s is not None
    rule = f"without {s.lost_gpus:,} accelerators, going on smaller pays after {duration(s.pays_after_s)}"
    if s.decision is None or s.replacement_s is None:
        return rule
    return f"{rule}; they are back after {duration(s.replacement_s)}: {s.decision}"


def simulation(s: SimulationResult) -> list[tuple[str, str]]:
    """Name and text of each simulated figure."""
    sure = f"{s.confidence:.0%}"
    return [
        ("simulated", f"{s.runs:,} runs with {s.failures:,} failures, seed {s.seed}"),
        ("  goodput", f"{s.goodput.value:.2%} ({s.goodput.low:.2%} to {s.goodput.high:.2%} with {sure})"),
        ("  one run", f"{s.run_goodput_p5:.2%} to {s.run_goodput_p95:.2%} in nine of ten runs"),
        ("  interrupted", f"{s.interrupted.value:.1%} ({s.interrupted.low:.1%} to {s.interrupted.high:.1%})"),
        (
            "  interruptions",
            f"{s.interruptions.value:.3g} a run ({s.interruptions.low:.3g} to {s.interruptions.high:.3g})",
        ),
        (
            "  not goodput",
            f"restarts {s.restarting:.2%}, waiting for nodes {s.waiting:.2%}, stalls and work lost "
            f"{s.stalls_and_lost:.2%}",
        ),
    ]


def lever_value(lever: Lever, value: float) -> str:
    """A lever's value with its unit."""
    if lever.name != "failure rate":
        return duration(value)
    return f"{value:,.0f} a year" if value >= 100 else f"{value:.3g} a year"


def quantity(value: float, unit: str) -> str:
    """`0.57 -> "57.0%"`, or with another unit."""
    return f"{value:.1%}" if unit == "%" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """`5400 -> "90.0 min"`; up to two of each unit stay in the smaller one."""
    for limit, length, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if abs(seconds) < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400.0:,.1f} d"


def _row(name: str, text: str) -> str:
    return f"{name:<{_LABEL}} {text}"


def _goodput(name: str, at: GoodputAt) -> str:
    bounds = f"   {at.low:.2%} to {at.high:.2%} by what is known of failures" if at.low != at.high else ""
    if not at.feasible:
        bounds += "   too short: the next save begins before this one is durable"
    return _row(f"  {name}", f"{duration(at.interval_s):>10} {at.exact:>9.2%} {at.linear:>12.2%}{bounds}")


def _nodes(plan: Plan) -> str:
    rate = plan.inputs.failures_per_node_year
    return f", {rate:.4g} of a node with {plan.inputs.gpus_per_node}" if rate else ""


def _worth_of(plan: Plan, gain: float) -> str:
    text = f", {plan.worth.gpu_hours * gain:,.0f} accelerator-hours"
    return text if plan.worth.point_cost is None else f"{text} at cost {plan.worth.point_cost * gain * 100:,.0f}"
