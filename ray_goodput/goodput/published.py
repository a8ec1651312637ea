"""Figures on goodput that others have published, beside what the formulas and the simulator of this package say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.core import reliability as formulas
from ray_goodput.core.reliability import YEAR_S, Tier
from ray_goodput.goodput.bounds import Bounded
from ray_goodput.goodput.simulation import Simulation
from ray_goodput.goodput.simulator import simulate

AFR = 0.01
MTBF_608_H = 1.9
MTBF_LLAMA3_S = 86400.0 / 8.6
"""8.6 interruptions a day: 466 in 54 days of Llama 3's pre-training (arXiv 2407.21783)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One figure. published: as printed, rounded. formula: by the same rule, unrounded. exact: by the rule without its
    approximation, where it has one. simulated: of what `exact` says, or `formula` where there is no other.
    """

    what: str
    unit: str
    published: float
    formula: float
    rule: str
    exact: float
    simulated: Bounded

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def published_table(seed: int = 0) -> list[PublishedRow]:
    """The table, simulated anew; the same for the same seed.

    Survival: 1 - (1 - p)^(N t), p = 1 % a year and 30 days, the back-of-envelope rate. Mean time between failures: of
    32 accelerators, when that of 608 is 1.9 h (M_sys N_sys / N_job). Goodput: saves each 2 h and 30 min at 8.6
    interruptions a day, by 1 - tau / 2M; that rule is of first order and too low for long intervals, exact says more.
    """
    rows: list[PublishedRow] = []
    for gpus, published in ((256, 0.19), (1024, 0.57)):
        value = formulas.interruption_probability(gpus, 30.0 / 365.0, AFR)
        rate = formulas.rate_of_probability(AFR)
        one = Tier(share=1.0, interval_s=3600.0, stall_s=0.0, latency_s=0.0, restart_s=0.0)
        sim = simulate(
            Simulation(gpus=gpus, days=30.0, tiers=(one,), failures_per_gpu_year=rate, runs=20_000, seed=seed)
        )
        rows.append(
            PublishedRow(
                what=f"{gpus} accelerators, 30 days: interrupted",
                unit="%",
                published=published,
                formula=value,
                rule="1 - (1 - p)^(N t)",
                exact=value,
                simulated=sim.interrupted,
            )
        )
    hours = formulas.mtbf_of_job(MTBF_608_H, 608, 32)
    rate = YEAR_S / (MTBF_608_H * 3600.0 * 608)
    hour = Tier(share=1.0, interval_s=3600.0, stall_s=0.0, latency_s=0.0, restart_s=0.0)
    sim = simulate(Simulation(gpus=32, days=30.0, tiers=(hour,), failures_per_gpu_year=rate, runs=4000, seed=seed))
    low, high = (30.0 * 24.0 / n for n in (sim.interruptions.high, sim.interruptions.low))
    rows.append(
        PublishedRow(
            what="32 of 608 accelerators: time between failures",
            unit="h",
            published=36.0,
            formula=hours,
            rule="M_sys N_sys / N_job",
            exact=hours,
            simulated=Bounded(value=30.0 * 24.0 / sim.interruptions.value, low=low, high=high),
        )
    )
    for minutes, published in ((120, 0.64), (30, 0.91)):
        tau = minutes * 60.0
        tier = Tier(share=1.0, interval_s=tau, stall_s=0.0, latency_s=0.0, restart_s=0.0)
        rate = YEAR_S / MTBF_LLAMA3_S
        sim = simulate(Simulation(gpus=1, days=54.0, tiers=(tier,), failures_per_gpu_year=rate, runs=400, seed=seed))
        rows.append(
            PublishedRow(
                what=f"8.6 failures a day, saves each {minutes} min: goodput",
                unit="%",
                published=published,
                formula=formulas.goodput_linear(tau, MTBF_LLAMA3_S),
                rule="1 - tau / 2M",
                exact=formulas.goodput_of_interval(tau, MTBF_LLAMA3_S),
                simulated=sim.goodput,
            )
        )
    return rows
