"""What a simulation is asked and what it answers: values, checked when made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.core.reliability import YEAR_S, Tier
from ray_goodput.errors import ConfigError
from ray_goodput.goodput.bounds import Bounded
from ray_goodput.goodput.trace import TraceEvent

MAX_GPUS = 100_000
MAX_FAILURES_A_RUN = 300_000
DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What to simulate. Rates are failures a year: of each accelerator on its own, and of each node as a whole.

    tiers: fragile first; `share` of failures restore from that tier at the earliest. The failure of a node never
        restores from the first tier if there are more. One tier for a plain job.
    spares: nodes in reserve; None: replacements are never waited for. repair_s: until a lost node is back.
    trace: failures to replay instead of drawing them, oldest first; run 0 replays it as it was, the others draw its
        gaps anew.
    """

    gpus: int
    days: float
    tiers: tuple[Tier, ...]
    failures_per_gpu_year: float = 0.0
    failures_per_node_year: float = 0.0
    gpus_per_node: int = 8
    spares: int | None = None
    repair_s: float = DAY_S
    trace: tuple[TraceEvent, ...] = ()
    runs: int = 400
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MAX_GPUS:
            raise ConfigError(f"A simulation takes 1 to {MAX_GPUS:,} accelerators, not {self.gpus:,}.")
        if not 0 < self.days <= 36_500:
            raise ConfigError(f"A simulation of {self.days:g} days makes no sense: give a length above 0.")
        if not 2 <= self.runs <= 1_000_000:
            raise ConfigError(f"{self.runs:,} simulated runs give no bounds: ask for 2 to 1,000,000.")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"A confidence of {self.confidence:g} makes no sense: give one between 0 and 1.")
        if self.gpus_per_node < 1 or not self.repair_s >= 0 or (self.spares or 0) < 0:
            raise ConfigError(
                f"{self.gpus_per_node} accelerators a node, {self.spares} spare nodes and a repair of "
                f"{self.repair_s:g} s make no sense: a node has at least 1, and the others must not be negative."
            )
        check_tiers(self.tiers)
        if not self.trace and not 0 < self.failures_a_run <= MAX_FAILURES_A_RUN:
            raise ConfigError(
                f"A run would have {self.failures_a_run:,.3g} failures; the simulation needs a rate above 0 and takes "
                f"up to {MAX_FAILURES_A_RUN:,} failures: simulate fewer days."
            )
        for event in self.trace:
            if not 0 <= event.failure_class < len(self.tiers):
                raise ConfigError(
                    f"The trace has a failure of class {event.failure_class}, there are {len(self.tiers)} tiers: "
                    f"classes go from 0 to {len(self.tiers) - 1}."
                )
        if len(self.trace) > MAX_FAILURES_A_RUN:
            raise ConfigError(
                f"The trace has {len(self.trace):,} failures, the limit is {MAX_FAILURES_A_RUN:,}: cut it."
            )
        if self.trace and self.trace[-1].at_s > self.days * DAY_S:
            raise ConfigError(
                f"The trace goes on to {self.trace[-1].at_s:g} s, the run ends after {self.days * DAY_S:g} s: "
                "simulate more days."
            )

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def failures_a_year(self) -> float:
        """Of the whole job."""
        return self.gpus * self.failures_per_gpu_year + self.nodes * self.failures_per_node_year

    @property
    def failures_a_run(self) -> float:
        return self.failures_a_year * self.days * DAY_S / YEAR_S


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Raises ConfigError unless there is a tier, shares add up to 1 and times make sense."""
    if not tiers:
        raise ConfigError("There is no tier to save to: give at least one.")
    if any(not 0 <= t.share <= 1 for t in tiers) or abs(sum(t.share for t in tiers) - 1) > 1e-6:
        shares = ", ".join(f"{t.share:g}" for t in tiers)
        raise ConfigError(f"The shares of the tiers, {shares}, must be from 0 to 1 and add up to 1.")
    for t in tiers:
        times = (t.interval_s, t.stall_s, t.latency_s, t.restart_s)
        if not all(0 <= s < math.inf for s in times) or t.interval_s == 0:
            raise ConfigError(
                f"A tier with interval {t.interval_s:g} s, stall {t.stall_s:g} s, latency {t.latency_s:g} s and "
                f"restart {t.restart_s:g} s makes no sense: the interval must be above 0, and no time negative."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What came out.

    goodput: in the long run: kept work over time, from whole cycles between failures, so without the edges of a run;
        after a trace: of the replay, with bounds from drawing its gaps anew.
    run_goodput_p5 .. p95: quantiles of the goodput of one run of the given length, whose last, unsaved work is lost.
    interrupted: share of the runs with at least one failure. interruptions: mean number a run.
    mtbf_s: mean time between failures. restarting, waiting: shares of the time until work went on, for restarts and for
        nodes; stalls_and_lost: the rest that is not kept work.
    """

    goodput: Bounded
    run_goodput_p5: float
    run_goodput_p50: float
    run_goodput_p95: float
    interrupted: Bounded
    interruptions: Bounded
    mtbf_s: float
    restarting: float
    waiting: float
    stalls_and_lost: float
    runs: int
    failures: int
    seed: int
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
