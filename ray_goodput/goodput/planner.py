"""The planner: what a job's goodput will be, which save interval is best, and what to improve first. Pure.

`make_plan(PlanInputs(...))` plans by hand, `plan_from_run(report, lines)` from a run's ledger; plan.py has the answer.

Formulas and their sources are in core/reliability.py. Every figure is of the long run, for exponential failures; what
these formulas leave out (spares, saves that outlive one another, a trace) the simulator has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_goodput.core import reliability as formulas
from ray_goodput.core.cadence import PRIOR_FAILURES_PER_ACCELERATOR_YEAR
from ray_goodput.core.reliability import YEAR_S, RateEstimate, Tier
from ray_goodput.errors import ConfigError
from ray_goodput.goodput.bounds import future_count
from ray_goodput.goodput.plan import GoodputAt, Intervals, Lever, LeverName, Plan, ShrinkOrWait, TierPlan, Worth
from ray_goodput.goodput.plan_inputs import Evidence, PlanInputs
from ray_goodput.goodput.run_measures import RunMeasures, measure_run

SHORTEST_INTERVAL_S = 1.0
"""Nobody saves more often, even where a save costs nothing."""
ENOUGH_S, ENOUGH_SAVES = 600.0, 5
"""Of a run that is to be planned from: less says more about its start than about the job."""


def make_plan(inputs: PlanInputs, measured: RunMeasures | None = None) -> Plan:
    """The plan for `inputs`.

    Survival: 1 - exp(-T / M), which is 1 - (1 - p)^(N t) for a yearly probability p. Goodput: `goodput_of_interval`.
    """
    mtbf = inputs.mtbf_s
    evidence = inputs.evidence
    rate = None
    if evidence is not None:
        rate = formulas.rate_posterior(evidence.failures, evidence.gpu_years, evidence.prior_per_gpu_year)
    chosen = _goodput_at(inputs, chosen_interval_s(inputs), rate)
    gpu_hours = inputs.gpus * inputs.days * 24.0
    cost = inputs.cost_per_gpu_hour
    lost = (1.0 - chosen.exact) * gpu_hours
    return Plan(
        inputs=inputs,
        mtbf_s=mtbf,
        rate=rate,
        interrupted=-math.expm1(-inputs.run_s / mtbf),
        interruptions=future_count(inputs.run_s / mtbf, shape=1.0 + evidence.failures if evidence else math.inf),
        intervals=_intervals(inputs),
        chosen=chosen,
        best=_goodput_at(inputs, chosen_interval_s(replace(inputs, interval_s=None)), rate),
        tiers=_tier_plan(inputs, chosen.interval_s),
        shrink=_shrink(inputs),
        levers=_levers(inputs, rate),
        worth=Worth(
            gpu_hours=gpu_hours,
            point_gpu_hours=gpu_hours / 100.0,
            lost_gpu_hours=lost,
            point_cost=None if cost is None else cost * gpu_hours / 100.0,
            lost_cost=None if cost is None else cost * lost,
        ),
        measured=measured,
    )


def plan_from_run(
    report: Mapping[str, Any], lines: Iterable[str | bytes] = (), *, days: float = 30.0, **given: Any
) -> Plan:
    """The plan of a job like the one whose ledger says `report` (`GoodputReport.to_dict()`), with its own figures.

    lines: of the ledger's segments; without them the number of saves is not known, nor what one costs. given: fields
    of `PlanInputs` that are not to be taken from the run. The failure rate is the posterior mean of what was counted,
    from the prior of the automatic cadence.

    Raises:
        ConfigError: the run is too short, or cannot say what a save or a restart costs, and it is not `given`.
    """
    measured = measure_run(report, lines)
    needs_run = not {"stall_s", "latency_s", "restart_s"} <= given.keys()
    if needs_run and measured.wall_s < ENOUGH_S:
        raise _too_short(measured)
    values: dict[str, Any] = {"gpus": measured.gpus, "days": days}
    sources: dict[str, str] = {}
    for name in ("stall", "latency", "restart"):
        value = getattr(measured, f"{name}_s")
        if value is not None:
            values[f"{name}_s"], sources[f"{name}_s"] = value, measured.sources[f"{name}_s"]
        elif f"{name}_s" not in given:
            raise ConfigError(
                f"The run does not say how long its {name} is ({measured.sources[f'{name}_s']}): give it (--{name})."
            )
    if not {"stall_s", "latency_s"} <= given.keys() and measured.saves < ENOUGH_SAVES:
        raise _too_short(measured)
    if "failures_per_gpu_year" not in given:
        evidence = Evidence(
            failures=measured.failures,
            gpu_years=measured.exposure_gpu_s / YEAR_S,
            prior_per_gpu_year=PRIOR_FAILURES_PER_ACCELERATOR_YEAR,
        )
        prior = evidence.prior_per_gpu_year
        values["evidence"] = evidence
        values["failures_per_gpu_year"] = formulas.rate_posterior(evidence.failures, evidence.gpu_years, prior).mean
        sources["failures_per_gpu_year"] = (
            f"{evidence.failures} failure{'' if evidence.failures == 1 else 's'} in {evidence.gpu_years:.3g} "
            f"accelerator-years, prior {prior:g} a year"
        )
    if measured.interval_s is not None:
        values["interval_s"], sources["interval_s"] = measured.interval_s, measured.sources["interval_s"]
    sources = {name: source for name, source in sources.items() if name not in given}
    return make_plan(PlanInputs(**(values | given), sources=sources), measured)


def _too_short(measured: RunMeasures) -> ConfigError:
    return ConfigError(
        f"The run is too short to plan from: it has {measured.wall_s:.0f} s and "
        f"{measured.saves} save{'' if measured.saves == 1 else 's'}, advice needs {ENOUGH_S:.0f} s and {ENOUGH_SAVES} "
        "saves. Plan from a longer run, or give what it would have to tell (--stall, --latency, --restart)."
    )


def chosen_interval_s(inputs: PlanInputs) -> float:
    """The given interval, or the best that still lets a save become durable before the next: at least the latency.

    At most the run: a job that hardly ever fails is saved once, at its end.
    """
    if inputs.interval_s is not None:
        return inputs.interval_s
    best = formulas.optimal_interval_s(inputs.stall_s, inputs.mtbf_s)
    return min(max(best, inputs.latency_s, SHORTEST_INTERVAL_S), inputs.run_s)


def goodput(inputs: PlanInputs, interval_s: float, mtbf_s: float | None = None) -> float:
    """Exact goodput of `inputs` at an interval, and if given at another mean time between failures."""
    return formulas.goodput_of_interval(
        interval_s,
        inputs.mtbf_s if mtbf_s is None else mtbf_s,
        stall_s=inputs.stall_s,
        restart_s=inputs.restart_s,
        latency_s=inputs.latency_s,
    )


def goodput_curve(inputs: PlanInputs, intervals_s: Sequence[float]) -> list[tuple[float, float, float]]:
    """(interval, exact, linear) for each interval, for a curve."""
    return [(tau, goodput(inputs, tau), formulas.goodput_linear(tau, inputs.mtbf_s)) for tau in intervals_s]


def _goodput_at(inputs: PlanInputs, interval_s: float, rate: RateEstimate | None) -> GoodputAt:
    exact = goodput(inputs, interval_s)
    low = high = exact
    if rate is not None and inputs.failures_per_node_year == 0:
        high, low = (goodput(inputs, interval_s, YEAR_S / (inputs.gpus * r)) for r in (rate.low, rate.high))
    return GoodputAt(
        interval_s=interval_s,
        exact=exact,
        linear=formulas.goodput_linear(interval_s, inputs.mtbf_s),
        low=low,
        high=high,
        feasible=formulas.interval_is_feasible(interval_s, inputs.stall_s, inputs.latency_s),
    )


def _intervals(inputs: PlanInputs) -> Intervals:
    stall, mtbf = inputs.stall_s, inputs.mtbf_s
    return Intervals(
        young_s=formulas.young_interval_s(stall, mtbf),
        daly_first_s=formulas.daly_first_interval_s(stall, mtbf),
        daly_s=formulas.daly_interval_s(stall, mtbf),
        exact_s=formulas.optimal_interval_s(stall, mtbf),
        shortest_feasible_s=inputs.latency_s,
        best_s=chosen_interval_s(replace(inputs, interval_s=None)),
    )


def _levers(inputs: PlanInputs, rate: RateEstimate | None) -> tuple[Lever, ...]:
    levers: list[Lever] = []

    def gain(changed: PlanInputs, share: float) -> tuple[float, float]:
        """Goodput after the change and what it gains, if the job fails `share` times as often as is most likely."""
        after = goodput(changed, chosen_interval_s(changed), changed.mtbf_s / share)
        return after, after - goodput(inputs, chosen_interval_s(inputs), inputs.mtbf_s / share)

    def add(name: LeverName, now: float, changed: PlanInputs) -> None:
        after, most_likely = gain(changed, 1.0)
        ends = [] if rate is None or rate.mean == 0 else [rate.low / rate.mean, rate.high / rate.mean]
        sure = min([most_likely, *(gain(changed, share)[1] for share in ends if share > 0)])
        levers.append(Lever(name=name, now=now, halved=now / 2.0, goodput=after, gain=most_likely, sure_gain=sure))

    interval = chosen_interval_s(inputs)
    add("stall", inputs.stall_s, replace(inputs, stall_s=inputs.stall_s / 2.0))
    add("latency", inputs.latency_s, replace(inputs, latency_s=inputs.latency_s / 2.0))
    add("restart", inputs.restart_s, replace(inputs, restart_s=inputs.restart_s / 2.0))
    if formulas.interval_is_feasible(interval / 2.0, inputs.stall_s, inputs.latency_s):
        add("interval", interval, replace(inputs, interval_s=interval / 2.0))
    calmer = replace(
        inputs,
        failures_per_gpu_year=inputs.failures_per_gpu_year / 2.0,
        failures_per_node_year=inputs.failures_per_node_year / 2.0,
    )
    add("failure rate", YEAR_S / inputs.mtbf_s, calmer)
    return tuple(sorted(levers, key=lambda lever: -lever.gain))


def _tier_plan(inputs: PlanInputs, interval_s: float) -> TierPlan:
    """The given tiers, or the two that this package saves to: one stall serves both."""
    assumed = not inputs.tiers
    mtbf = inputs.mtbf_s
    tiers = inputs.tiers
    if assumed:
        local = Tier(
            share=inputs.local_share,
            interval_s=interval_s,
            stall_s=inputs.stall_s,
            latency_s=0.0,
            restart_s=inputs.restart_s,
        )
        remote = replace(local, share=1.0 - inputs.local_share, stall_s=0.0, latency_s=inputs.latency_s)
        tiers = (local, remote)
        shared = chosen_interval_s(replace(inputs, interval_s=None))
        best: tuple[float | None, ...] = (shared, None)
        at_best = tuple(replace(t, interval_s=shared) for t in tiers)
    else:
        best = tuple(
            formulas.tier_interval_s(t.stall_s, mtbf, t.share) if t.stall_s > 0 and t.share > 0 else None for t in tiers
        )
        at_best = tuple(
            replace(t, interval_s=max(b, t.latency_s)) if b is not None else t for t, b in zip(tiers, best, strict=True)
        )
    cost = formulas.tiers_cost(tiers, mtbf)
    return TierPlan(
        assumed=assumed,
        tiers=tiers,
        per_failure_s=cost.per_failure_s,
        overhead=cost.overhead,
        goodput=cost.goodput,
        best_intervals_s=best,
        goodput_at_best=formulas.tiers_cost(at_best, mtbf).goodput,
    )


def _shrink(inputs: PlanInputs) -> ShrinkOrWait | None:
    lost = inputs.lost_gpus if inputs.lost_gpus is not None else inputs.gpus_per_node
    if lost >= inputs.gpus:
        return None
    resize = inputs.resize_s if inputs.resize_s is not None else inputs.restart_s
    after = formulas.shrink_pays_after_s(inputs.gpus, lost, resize)
    wait = inputs.replacement_s
    return ShrinkOrWait(
        lost_gpus=lost,
        resize_s=resize,
        pays_after_s=after,
        replacement_s=wait,
        decision=None if wait is None else "shrink" if wait > after else "wait",
    )
