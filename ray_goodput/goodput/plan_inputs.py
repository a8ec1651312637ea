"""What the planner starts from: a job, how often it fails, and what saves and restarts cost. Checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_goodput.core.reliability import YEAR_S, Tier, rate_of_probability
from ray_goodput.errors import ConfigError
from ray_goodput.goodput.simulation import DAY_S, check_tiers

MAX_GPUS = 10_000_000
MAX_DAYS = 3650.0
MAX_FAILURES_A_YEAR = 10_000.0
LOCAL_SHARE = 0.7
"""Share of failures after which the node still stands, so that a copy on it can be restored. An assumption, said where
it is used: published traces range from a half to nine tenths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Failures that were counted, in how many accelerator-years, and the prior mean they are weighed against."""

    failures: int
    gpu_years: float
    prior_per_gpu_year: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """A job to be planned. Times in seconds unless the name says otherwise; rates are failures a year.

    failures_per_gpu_year: of one accelerator, whatever breaks it on its own. failures_per_node_year: of a whole node at
        once, on top; it is one interruption, not one for each of its accelerators.
    stall_s: training stands still for a save. latency_s: from there until it is durable. restart_s: from a failure to
        the first new step, less the work done again. interval_s: of work between saves; None for the best.
    tiers: where saves go, fragile first; none for the two of this package: each save is at once on its own node and,
        `latency_s` later, in storage, with `local_share` of the failures leaving the node up.
    lost_gpus, replacement_s, resize_s: for the choice between going on smaller and waiting: what a failure takes, how
        long until it is back, and what one change of size costs. Default: a node, unknown, a restart.
    evidence: what the rate rests on, if it was counted. sources: input name -> where its value comes from.
    """

    gpus: int
    days: float
    failures_per_gpu_year: float
    failures_per_node_year: float = 0.0
    gpus_per_node: int = 8
    stall_s: float = 0.0
    latency_s: float = 0.0
    restart_s: float = 0.0
    interval_s: float | None = None
    tiers: tuple[Tier, ...] = ()
    local_share: float = LOCAL_SHARE
    lost_gpus: int | None = None
    replacement_s: float | None = None
    resize_s: float | None = None
    cost_per_gpu_hour: float | None = None
    evidence: Evidence | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _within("number of accelerators", self.gpus, 1, MAX_GPUS)
        _within("length of the run in days", self.days, 0, MAX_DAYS, above=True)
        _within("failure rate of an accelerator a year", self.failures_per_gpu_year, 0, MAX_FAILURES_A_YEAR)
        _within("failure rate of a node a year", self.failures_per_node_year, 0, MAX_FAILURES_A_YEAR)
        if self.failures_per_gpu_year + self.failures_per_node_year == 0:
            raise ConfigError("Without any failure there is nothing to plan: give a failure rate above 0.")
        _within("number of accelerators a node", self.gpus_per_node, 1, MAX_GPUS)
        _within("share of failures that leave the node up", self.local_share, 0, 1)
        for name in ("stall", "latency", "restart", "interval", "replacement", "resize"):
            seconds = getattr(self, f"{name}_s")
            if seconds is not None and not (0 <= seconds <= self.run_s and (seconds > 0 or name != "interval")):
                raise ConfigError(
                    f"A time of {seconds:,.10g} s for the {name} makes no sense in a run of {self.days:g} days: "
                    f"it must be {'above' if name == 'interval' else 'at least'} 0 s and not longer than the run."
                )
        if self.lost_gpus is not None:
            _within("number of accelerators lost at once", self.lost_gpus, 1, MAX_GPUS)
        if self.cost_per_gpu_hour is not None:
            _within("cost of an accelerator-hour", self.cost_per_gpu_hour, 0, 1e6)
        if self.tiers:
            check_tiers(self.tiers)

    @property
    def run_s(self) -> float:
        return self.days * DAY_S

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job."""
        nodes = math.ceil(self.gpus / self.gpus_per_node)
        return YEAR_S / (self.gpus * self.failures_per_gpu_year + nodes * self.failures_per_node_year)


def rate_from_afr(afr: float) -> float:
    """Failures a year of an accelerator that fails within a year with probability `afr`: -ln(1 - p).

    Raises:
        ConfigError: not a probability between 0 and 1.
    """
    if not 0 < afr < 1:
        raise ConfigError(
            f"A yearly failure probability of {afr:g} makes no sense: it lies between 0 and 1. For accelerators that "
            "fail about once a year or more often, give the rate (--failures-per-gpu-year)."
        )
    return rate_of_probability(afr)


def rate_from_mtbf(mtbf_s: float, gpus: int) -> float:
    """Failures a year of one accelerator of a job that fails every `mtbf_s` seconds.

    Raises:
        ConfigError: one of the two is not above 0.
    """
    _within("mean time between failures in seconds", mtbf_s, 0, 1e12, above=True)
    _within("number of accelerators", gpus, 1, MAX_GPUS)
    return YEAR_S / (mtbf_s * gpus)


def _within(what: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if not (low <= value <= high) or (above and value == low):  # not a number fails this too
        bound = f"{'above' if above else 'at least'} {low:,.10g}"
        raise ConfigError(f"The {what} is {value:,.10g}: it must be {bound} and at most {high:,.10g}.")
