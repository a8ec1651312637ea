"""Every pinned value of the goodput mathematics, to 1e-5 relative (or the digits that were pinned)."""

from __future__ import annotations

import math
import random

import pytest

from ray_goodput.core import reliability as r

M_S = 10046.512
M_H = 2.790698


def near(value: float, digits: float = 1e-5):
    return pytest.approx(value, rel=digits)


@pytest.mark.parametrize(("n", "by_probability", "by_rate"), [(256, 0.190607, 0.189749), (1024, 0.570821, 0.568999)])
def test_survival_of_a_job(n: int, by_probability: float, by_rate: float) -> None:
    assert r.interruption_probability(n, 30 / 365, 0.01) == near(by_probability)
    assert r.interruption_probability_at_rate(n, 30 / 365, 0.01) == near(by_rate)
    assert r.interruption_probability_at_rate(n, 30 / 365, r.rate_of_probability(0.01)) == near(by_probability)


def test_mtbf_scales_with_the_share_of_the_system() -> None:
    assert r.mtbf_of_job(1.9, 608, 32) == near(36.1)


@pytest.mark.parametrize(
    ("tau_h", "linear", "exact", "with_restart"),
    [
        (5 / 60, 0.985069, 0.985144, 0.928031),
        (15 / 60, 0.955208, 0.955877, 0.900461),
        (30 / 60, 0.910417, 0.913090, 0.860155),
        (1, 0.820833, 0.831511, 0.783305),
        (2, 0.641667, 0.684106, 0.644445),
        (8, -0.433333, 0.172917, 0.162892),
    ],
)
def test_goodput_of_an_interval(tau_h: float, linear: float, exact: float, with_restart: float) -> None:
    assert r.goodput_linear(tau_h, M_H) == near(linear)
    assert r.goodput_of_interval(tau_h, M_H) == near(exact)
    assert r.goodput_of_interval(tau_h, M_H, restart_s=600 / 3600) == near(with_restart)


@pytest.mark.parametrize(
    ("tau", "delta", "restart", "latency", "expected"),
    [
        (1800, 9, 600, 120, 0.845323),
        (7200, 522, 600, 0, 0.583610),
        (300, 9, 600, 120, 0.889903),
        (300, 9, 600, 900, 0.823425),
    ],
)
def test_goodput_with_stall_restart_and_latency(
    tau: float, delta: float, restart: float, latency: float, expected: float
) -> None:
    value = r.goodput_of_interval(tau, M_S, stall_s=delta, restart_s=restart, latency_s=latency)
    assert value == near(expected)


@pytest.mark.parametrize(
    ("mtbf", "delta", "young", "daly1", "daly", "exact"),
    [
        (1440, 5, 120.000, 115.000, 116.6898, 116.6901),
        (360, 5, 60.000, 55.000, 56.7130, 56.7140),
        (15, 5, 12.247, 7.247, 9.1409, 9.1665),
        (M_S, 522, 3238.60, 2716.60, 2899.95, 2900.36),
        (M_S, 9, 425.25, 416.25, 419.27, 419.27),
        (600, 600, 848.53, 248.53, 495.67, 504.84),
    ],
)
def test_optimal_intervals(mtbf: float, delta: float, young: float, daly1: float, daly: float, exact: float) -> None:
    assert r.young_interval_s(delta, mtbf) == near(young, 5e-5)
    assert r.daly_first_interval_s(delta, mtbf) == near(daly1, 7e-5)
    assert r.daly_interval_s(delta, mtbf) == near(daly)
    assert r.optimal_interval_s(delta, mtbf) == near(exact, 1.2e-5)


def test_daly_gives_the_mtbf_for_stalls_of_two_mtbf_and_more() -> None:
    assert r.daly_interval_s(1200, 600) == 600


@pytest.mark.parametrize(
    ("delta", "latency", "no_restart", "restart_600"),
    [(522, 0, 0.711307, 0.670069), (9, 0, 0.958267, 0.902713), (9, 513, 0.910564, 0.857775)],
)
def test_goodput_at_the_optimum(delta: float, latency: float, no_restart: float, restart_600: float) -> None:
    tau = r.optimal_interval_s(delta, M_S)
    assert r.goodput_of_interval(tau, M_S, stall_s=delta, latency_s=latency) == near(no_restart)
    assert r.goodput_of_interval(tau, M_S, stall_s=delta, latency_s=latency, restart_s=600) == near(restart_600)


@pytest.mark.parametrize("cost", [1e-17, 1e-12, 4.9e-9, 5.1e-9, 1e-3, 0.3, 1.0, 5.0, 29.0, 31.0])
def test_the_optimum_satisfies_its_equation_at_every_scale(cost: float) -> None:
    u = r.optimal_interval_s(cost, 1.0)
    assert 0 < u <= 1
    if u < 1e-4:  # compare with the series, the equation itself cancels here
        assert u == near(math.sqrt(2 * cost) - 2 * cost / 3, 1e-9)
    elif cost < 20:
        assert u + math.log1p(-u) == near(-cost, 1e-7)
    best = r.goodput_of_interval(u, 1.0, stall_s=cost)
    assert all(r.goodput_of_interval(u * f, 1.0, stall_s=cost) <= best * (1 + 1e-12) for f in (0.8, 0.99, 1.01, 1.25))


def test_edges_do_not_overflow() -> None:
    assert r.optimal_interval_s(0.0, 100.0) == 0.0
    assert r.goodput_of_interval(1e9, 1.0) == 0.0
    assert r.lost_work_s(1e9, 2.0) == 2.0


def test_lost_work_is_half_an_interval_when_failures_are_rare() -> None:
    assert r.lost_work_s(60, 1e6) == near(30, 2e-5)
    # goodput, lost work and failures are one balance: useful + lost = time up
    tau, mtbf = 3600.0, M_S
    assert r.goodput_of_interval(tau, mtbf) + r.lost_work_s(tau, mtbf) / mtbf == near(1.0, 1e-12)


@pytest.mark.parametrize(("tau", "latency", "ok"), [(100, 100, True), (99, 100, False), (300, 0, True)])
def test_an_interval_is_feasible_when_one_save_is_in_flight(tau: float, latency: float, ok: bool) -> None:
    assert r.interval_is_feasible(tau, 9, latency) is ok


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(0, 0, 3.6889), (1, 0.0253, 5.5716), (3, 0.6187, 8.7673), (10, 4.7954, 18.3904), (466, 424.6452, 510.2942)],
)
def test_garwood_interval(n: int, low: float, high: float) -> None:
    estimate = r.rate_interval(n, 1.0)
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))
    assert r.rate_interval(n, 4.0).high == near(estimate.high / 4)


def test_posterior_of_a_rate() -> None:
    estimate = r.rate_posterior(3, 10, 0.173)
    assert (estimate.mean, estimate.low, estimate.high) == (near(0.25348), near(0.06906, 1e-4), near(0.55558))
    assert r.rate_posterior(0, 0, 0.173).mean == near(0.173)


def test_tiers() -> None:
    rows = [(0.70, 60, 0.5, 0, 60), (0.25, 300, 1, 20, 180), (0.05, 1800, 9, 120, 600)]
    tiers = [r.Tier(share=q, interval_s=t, stall_s=d, latency_s=lat, restart_s=rs) for q, t, d, lat, rs in rows]
    cost = r.tiers_cost(tiers, M_S)
    assert cost.per_failure_s == near(231.5)
    assert cost.overhead == near(0.016667, 2.1e-5)
    assert cost.goodput == near(0.960291)
    assert [r.tier_interval_s(t.stall_s, M_S, t.share) for t in tiers] == [near(119.80), near(283.50), near(1901.77)]


def test_shrink_or_wait() -> None:
    assert r.shrink_pays_after_s(64, 8, 120) == near(274.29, 2e-5)


def test_the_exact_formula_agrees_with_a_simulation() -> None:
    rng = random.Random(7)
    tau, mtbf, delta, restart = 900.0, 3000.0, 30.0, 200.0
    total = useful = 0.0
    for _ in range(20_000):  # one cycle: restart (repeated until it survives), then intervals until a failure
        while (fail := rng.expovariate(1 / mtbf)) < restart:
            total += fail
        up = fail - restart
        total += restart + up
        useful += (up // (tau + delta)) * tau
    assert useful / total == pytest.approx(r.goodput_of_interval(tau, mtbf, stall_s=delta, restart_s=restart), abs=4e-3)
