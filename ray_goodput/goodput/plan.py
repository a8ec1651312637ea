"""The planner's answer: plain values, and how they become JSON or a simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ray_goodput.core.reliability import RateEstimate, Tier
from ray_goodput.goodput.bounds import Bounded
from ray_goodput.goodput.plan_inputs import PlanInputs
from ray_goodput.goodput.run_measures import RunMeasures
from ray_goodput.goodput.simulation import Simulation

WORTH_SAYING = 1e-5
"""Of goodput: a thousandth of a point. What gains less for sure is not recommended."""
LeverName = Literal["stall", "latency", "restart", "interval", "failure rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Save intervals by each rule, in seconds of work. best_s: the exact one, or longer where a save takes so long to
    be durable that the next would overtake it.
    """

    young_s: float
    daly_first_s: float
    daly_s: float
    exact_s: float
    shortest_feasible_s: float
    best_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputAt:
    """Goodput of one interval. linear: by the rule 1 - tau / 2M, which knows neither stall nor latency nor restart.

    low, high: exact, at the bounds of the failure rate; equal to exact when the rate was given.
    """

    interval_s: float
    exact: float
    linear: float
    low: float
    high: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """First-order cost of saving to tiers. best_intervals_s: of each alone, None where it has no stall of its own."""

    assumed: bool
    tiers: tuple[Tier, ...]
    per_failure_s: float
    overhead: float
    goodput: float
    best_intervals_s: tuple[float | None, ...]
    goodput_at_best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkOrWait:
    """Going on with fewer accelerators pays when what was lost is away for longer than `pays_after_s`."""

    lost_gpus: int
    resize_s: float
    pays_after_s: float
    replacement_s: float | None
    decision: Literal["shrink", "wait"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What halving one input does to goodput; the interval is chosen anew unless it was given.

    sure_gain: the least it gains within the bounds of the failure rate; equal to `gain` where the rate was given.
    """

    name: LeverName
    now: float
    halved: float
    goodput: float
    gain: float
    sure_gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What goodput is worth over the whole run; money is None without a cost. A point is one part in a hundred."""

    gpu_hours: float
    point_gpu_hours: float
    lost_gpu_hours: float
    point_cost: float | None
    lost_cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a job. `chosen` is at the given interval, or the best; `levers` come best first.

    interrupted: probability of at least one failure. interruptions: how many to expect, with 95 % bounds of the count.
    rate: failures an accelerator-year with its bounds; None when it was given and not counted.
    """

    inputs: PlanInputs
    mtbf_s: float
    rate: RateEstimate | None
    interrupted: float
    interruptions: Bounded
    intervals: Intervals
    chosen: GoodputAt
    best: GoodputAt
    tiers: TierPlan
    shrink: ShrinkOrWait | None
    levers: tuple[Lever, ...]
    worth: Worth
    measured: RunMeasures | None = None

    @property
    def lever(self) -> Lever | None:
        """What to improve next; None where nothing gains as much as a thousandth of a point for sure."""
        return next((lever for lever in self.levers if lever.sure_gain > WORTH_SAYING), None)

    @property
    def interval_gain(self) -> float:
        """What the best interval gains over the chosen one, at least, within the bounds of the failure rate."""
        at_ends = (self.best.low - self.chosen.low, self.best.high - self.chosen.high)
        return min(self.best.exact - self.chosen.exact, *at_ends)

    def simulation(self, **changes: Any) -> Simulation:
        """This plan as something to simulate; `changes` are fields of `Simulation`: runs, seed, spares, trace, ..."""
        i = self.inputs
        one = Tier(
            share=1.0,
            interval_s=self.chosen.interval_s,
            stall_s=i.stall_s,
            latency_s=i.latency_s,
            restart_s=i.restart_s,
        )
        fields: dict[str, Any] = {
            "gpus": i.gpus,
            "days": i.days,
            "tiers": i.tiers or (one,),
            "failures_per_gpu_year": i.failures_per_gpu_year,
            "failures_per_node_year": i.failures_per_node_year,
            "gpus_per_node": i.gpus_per_node,
        }
        return Simulation(**(fields | changes))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; keys are added, never renamed."""
        body = asdict(self)
        body["lever"] = asdict(self.lever) if self.lever else None
        return body
