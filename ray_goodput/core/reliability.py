"""How often a job fails, what that costs, and which save interval loses least. Pure formulas.

Symbols used throughout: M `mtbf_s`, mean time between failures of the whole job; tau `interval_s`, seconds of work
between saves; delta `stall_s`, seconds training stands still for a save; L `latency_s`, from the end of the stall until
the save is durable; R `restart_s`, from the failure to the first new step. Any one unit of time may be used for all.

Sources: Young, CACM 17(9) 1974; Daly, FGCS 22(3) 2006; Vaidya, IEEE TC 46(8) 1997; Benoit et al., IEEE TC 66(7) 2017;
Garwood, Biometrika 28 1936. The latency term was derived for this project: durable work at a failure is one latency
older, which costs exactly what a restart longer by the latency would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

YEAR_S = 365.0 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEstimate:
    """A failure rate (events per unit of exposure) with its central interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One place saves go to, and the failures that only this tier survives.

    share: probability (0..1) that a failure has to restore from this tier.
    """

    share: float
    interval_s: float
    stall_s: float
    latency_s: float
    restart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersCost:
    """First-order cost of a set of tiers: seconds lost per failure, share of time in stalls, goodput."""

    per_failure_s: float
    overhead: float
    goodput: float


def interruption_probability(num_accelerators: int, years: float, yearly_probability: float) -> float:
    """Probability of at least one failure of `num_accelerators` within `years`: 1 - (1 - p)^(N t)."""
    return -math.expm1(num_accelerators * years * math.log1p(-yearly_probability))


def interruption_probability_at_rate(num_accelerators: int, years: float, rate_per_year: float) -> float:
    """The same for a constant failure rate of each accelerator: 1 - exp(-rate N t)."""
    return -math.expm1(-rate_per_year * num_accelerators * years)


def rate_of_probability(yearly_probability: float) -> float:
    """The constant yearly rate at which both survival rules agree: -ln(1 - p)."""
    return -math.log1p(-yearly_probability)


def mtbf_of_job(system_mtbf: float, system_size: int, job_size: int) -> float:
    """Mean time between failures of a job that uses `job_size` of a system's `system_size` accelerators."""
    return system_mtbf * system_size / job_size


def goodput_linear(interval_s: float, mtbf_s: float) -> float:
    """1 - tau / 2M: the well-known first-order rule, without stall, latency or restart; negative beyond tau = 2M."""
    return 1.0 - interval_s / (2.0 * mtbf_s)


def goodput_of_interval(
    interval_s: float, mtbf_s: float, *, stall_s: float = 0.0, restart_s: float = 0.0, latency_s: float = 0.0
) -> float:
    """Share of time spent on work that survives, for exponential failures that may also strike during a restart.

    G = tau exp(-(R + L) / M) / (M (exp((tau + delta) / M) - 1)); exact, not first order.
    """
    exponent = (interval_s + stall_s) / mtbf_s
    if exponent > 700.0:  # beyond the range of a double; the goodput is 0 to all digits
        return 0.0
    return interval_s * math.exp(-(restart_s + latency_s) / mtbf_s) / (mtbf_s * math.expm1(exponent))


def lost_work_s(interval_s: float, mtbf_s: float) -> float:
    """Mean work lost by one failure, M - tau / (exp(tau / M) - 1), without stall, latency and restart."""
    ratio = interval_s / mtbf_s
    return mtbf_s if ratio > 700.0 else mtbf_s - interval_s / math.expm1(ratio)


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 delta M) (Young 1974)."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_first_interval_s(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 delta M) - delta (Daly 2006, first order)."""
    return young_interval_s(stall_s, mtbf_s) - stall_s


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, higher order; M when the stall is 2 M or longer."""
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    half = stall_s / (2.0 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - stall_s


def optimal_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The interval that maximises `goodput_of_interval`: M (1 + W0(-exp(-(1 + delta / M)))).

    Restart time and latency scale the goodput of every interval alike and drop out. W0 is Lambert's function. With
    u = tau / M the equation reads u + ln(1 - u) = -delta / M, which is concave and falling on (0, 1): Newton's steps
    from the right of the root come down to it without overshooting.
    """
    cost = stall_s / mtbf_s
    if cost <= 0.0:
        return 0.0
    root = math.sqrt(2.0 * cost)
    if root < 1e-4:  # u + ln(1 - u) cancels here; three terms of its inverse are exact to 1e-12
        return mtbf_s * (root - root**2 / 3.0 + root**3 / 36.0)
    if cost > 30.0:
        return mtbf_s
    u = min(root, -math.expm1(-(1.0 + cost)))
    for _ in range(64):
        change = (u + math.log1p(-u) + cost) * (1.0 - u) / u
        u += change
        if abs(change) <= 1e-15 * u:
            break
    return mtbf_s * u


def interval_is_feasible(interval_s: float, stall_s: float, latency_s: float) -> bool:
    """Whether a save is durable before the next one ends its stall, so that only one is ever in flight."""
    return interval_s + stall_s >= stall_s + latency_s


def rate_interval(failures: int, exposure: float, confidence: float = 0.95) -> RateEstimate:
    """Rate of `failures` events in `exposure`, with Garwood's exact interval for a Poisson count."""
    tail = (1.0 - confidence) / 2.0
    low = gamma_quantile(failures, tail) if failures else 0.0
    return RateEstimate(
        mean=failures / exposure, low=low / exposure, high=gamma_quantile(failures + 1, 1.0 - tail) / exposure
    )


def rate_posterior_mean(failures: int, exposure: float, prior_rate: float) -> float:
    """Mean of `rate_posterior`, for a caller that asks at every step: its quantiles cost thousands of times as much."""
    return (1 + failures) / (1.0 / prior_rate + exposure)


def rate_posterior(failures: int, exposure: float, prior_rate: float, confidence: float = 0.95) -> RateEstimate:
    """Rate after `failures` events in `exposure`, for an exponential prior with mean `prior_rate`.

    The posterior is Gamma(1 + failures, 1 / prior_rate + exposure).
    """
    tail = (1.0 - confidence) / 2.0
    total = 1.0 / prior_rate + exposure
    return RateEstimate(
        mean=rate_posterior_mean(failures, exposure, prior_rate),
        low=gamma_quantile(1 + failures, tail) / total,
        high=gamma_quantile(1 + failures, 1.0 - tail) / total,
    )


def gamma_quantile(shape: int, probability: float) -> float:
    """The x below which a Gamma(shape, 1) variable lies with `probability`; for whole shapes >= 1.

    Inverts P(X > x) = sum over i < shape of exp(-x) x^i / i! by bisection to the last digits of a double.
    """
    low, high = 0.0, shape + 10.0 * math.sqrt(shape) + 50.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        if 1.0 - _poisson_below(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _poisson_below(count: int, mean: float) -> float:
    log_mean = math.log(mean)
    return math.fsum(math.exp(i * log_mean - mean - math.lgamma(i + 1)) for i in range(count))


def tiers_cost(tiers: Sequence[Tier], mtbf_s: float) -> TiersCost:
    """First-order cost of saving to several tiers: 1 - sum delta/tau - (1/M) sum q (tau/2 + L + R)."""
    per_failure = sum(t.share * (t.interval_s / 2.0 + t.latency_s + t.restart_s) for t in tiers)
    overhead = sum(t.stall_s / t.interval_s for t in tiers)
    return TiersCost(per_failure_s=per_failure, overhead=overhead, goodput=1.0 - overhead - per_failure / mtbf_s)


def tier_interval_s(stall_s: float, mtbf_s: float, share: float) -> float:
    """Best interval of one tier, sqrt(2 delta M / q): Young's rule for the failures that need this tier."""
    return math.sqrt(2.0 * stall_s * mtbf_s / share)


def shrink_pays_after_s(world: int, lost: int, resize_s: float) -> float:
    """Shrinking to the ranks that are left beats waiting when the replacement takes longer than this.

    (N - k) W > 2 N R_s, where a resize costs R_s for all N ranks, once down and once up.
    """
    return 2.0 * world * resize_s / (world - lost)
