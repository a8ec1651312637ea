"""The simulator against the exact formula, and what only it can say."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import pytest

from ray_goodput.core.reliability import YEAR_S, Tier, goodput_of_interval, interruption_probability_at_rate, tiers_cost
from ray_goodput.errors import ConfigError
from ray_goodput.goodput.simulation import DAY_S, Simulation
from ray_goodput.goodput.simulator import simulate
from ray_goodput.goodput.trace import TraceEvent, parse_trace

M_S = 10046.512
GRID = list(
    itertools.product((3600.0, M_S, DAY_S), (300.0, 1800.0, 7200.0), (0.0, 9.0, 522.0), (0.0, 600.0), (0.0, 900.0))
)


def tier(interval: float, stall: float = 0.0, restart: float = 0.0, latency: float = 0.0, share: float = 1.0) -> Tier:
    return Tier(share=share, interval_s=interval, stall_s=stall, latency_s=latency, restart_s=restart)


def job(*tiers: Tier, mtbf_s: float = M_S, cycles: float = 50.0, **fields) -> Simulation:
    """One accelerator that fails each `mtbf_s`, for `cycles` times as long."""
    base = {"gpus": 1, "days": cycles * mtbf_s / DAY_S, "tiers": tiers, "failures_per_gpu_year": YEAR_S / mtbf_s}
    return Simulation(**(base | fields))


def test_it_agrees_with_the_exact_formula_within_its_own_bound_over_a_grid() -> None:
    # Bounds that hold for all cases at once with 99 %; and the usual ones, which must hold in about 95 % of the cases.
    assert len(GRID) >= 50
    apart: list[tuple] = []
    outside_95 = 0
    for seed, (mtbf, tau, delta, restart, latency) in enumerate(GRID):
        sim = job(tier(tau, delta, restart, latency), mtbf_s=mtbf, runs=300, seed=seed, confidence=1 - 0.01 / len(GRID))
        result = simulate(sim).goodput
        exact = goodput_of_interval(tau, mtbf, stall_s=delta, restart_s=restart, latency_s=latency)
        if not result.low <= exact <= result.high:
            apart.append((mtbf, tau, delta, restart, latency, exact, result))
        half_95 = (
            (result.high - result.low) / 2 * NormalDist().inv_cdf(0.975) / NormalDist().inv_cdf(1 - 0.005 / len(GRID))
        )
        outside_95 += abs(result.value - exact) > half_95
        assert result.high - result.low < 0.05, "a bound that wide proves nothing"
    assert apart == []
    assert outside_95 <= 0.12 * len(GRID)


@pytest.mark.parametrize("cycles", [0.1, 1.0, 5.0])
def test_short_runs_do_not_bend_the_long_run_goodput(cycles: float) -> None:
    sim = job(tier(1800.0, 9.0, 600.0, 120.0), cycles=cycles, runs=20_000, confidence=0.999)
    exact = goodput_of_interval(1800.0, M_S, stall_s=9.0, restart_s=600.0, latency_s=120.0)
    assert exact == pytest.approx(0.845323, rel=1e-5)
    result = simulate(sim).goodput
    assert result.low <= exact <= result.high


def test_the_share_of_interrupted_runs_is_that_of_the_survival_formula() -> None:
    sim = Simulation(
        gpus=1024, days=30, tiers=(tier(3600.0),), failures_per_gpu_year=0.01, runs=20_000, confidence=0.999
    )
    result = simulate(sim)
    assert result.interrupted.low <= interruption_probability_at_rate(1024, 30 / 365, 0.01) <= result.interrupted.high
    assert result.interruptions.low <= 1024 * 0.01 * 30 / 365 <= result.interruptions.high


def test_the_same_seed_gives_the_same_result_and_another_a_different_one() -> None:
    assert simulate(job(tier(600.0), seed=1)) == simulate(job(tier(600.0), seed=1))
    assert simulate(job(tier(600.0), seed=1)).goodput != simulate(job(tier(600.0), seed=2)).goodput


def test_tiers_come_out_as_the_first_order_formula_says() -> None:
    rows = [(0.70, 60, 0.5, 0, 60), (0.25, 300, 1, 20, 180), (0.05, 1800, 9, 120, 600)]
    tiers = tuple(tier(t, d, r, lat, q) for q, t, d, lat, r in rows)
    result = simulate(job(*tiers, cycles=500.0, runs=200))
    assert result.goodput.value == pytest.approx(tiers_cost(tiers, M_S).goodput, abs=1.5e-3)
    without = simulate(job(tier(1800.0, 9.0, 600.0, 120.0), cycles=500.0, runs=200))
    assert result.goodput.low > without.goodput.high


def test_a_tier_that_no_failure_spares_is_worth_nothing() -> None:
    useless = simulate(job(tier(60.0, share=0.0), tier(1800.0, 9.0, 600.0, share=1.0), runs=300))
    alone = simulate(job(tier(1800.0, 9.0, 600.0), runs=300))
    assert useless.goodput.value == pytest.approx(alone.goodput.value, abs=0.01)


def test_a_failure_of_a_node_never_restores_from_the_copy_on_the_node() -> None:
    tiers = (tier(60.0, share=1.0), tier(7200.0, share=0.0))
    fields = {"gpus": 8, "failures_per_gpu_year": 0.0, "failures_per_node_year": YEAR_S / M_S, "runs": 300}
    by_node = simulate(job(*tiers, **fields))
    exact = goodput_of_interval(7200.0, M_S)
    assert by_node.goodput.value == pytest.approx(exact, abs=0.01)


def test_correlated_failures_are_one_interruption_a_node_not_one_an_accelerator() -> None:
    fields = {"gpus": 1024, "days": 365.0, "tiers": (tier(3600.0),), "runs": 200}
    result = simulate(Simulation(failures_per_node_year=0.1, gpus_per_node=8, **fields))
    assert result.interruptions.value == pytest.approx(12.8, abs=0.8)


def test_more_spares_wait_less_and_enough_of_them_never() -> None:
    base = {
        "gpus": 1024,
        "days": 180.0,
        "tiers": (tier(3600.0, restart=600.0),),
        "failures_per_node_year": 2.0,
        "runs": 100,
    }
    waits = [simulate(Simulation(spares=spares, repair_s=DAY_S, **base)).waiting for spares in (0, 1, 3, 20)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 0.3
    assert waits[-1] == 0.0
    never = simulate(Simulation(spares=None, **base))
    assert never.goodput == simulate(Simulation(spares=20, repair_s=DAY_S, **base)).goodput


def test_with_no_spare_the_wait_is_what_a_queue_with_constant_repair_says() -> None:
    # One node, no spare: each failure costs the repair, during which a failure starts it again: exp(-repair / M) is up.
    repair = 3600.0
    sim = job(
        tier(1.0),
        gpus=1,
        gpus_per_node=1,
        failures_per_gpu_year=0.0,
        failures_per_node_year=YEAR_S / M_S,
        spares=0,
        repair_s=repair,
        runs=400,
        confidence=0.999,
    )
    result = simulate(sim)
    expected = goodput_of_interval(1.0, M_S, restart_s=repair)
    assert result.goodput.low <= expected <= result.goodput.high


def test_where_the_time_went_adds_up() -> None:
    sim = job(tier(900.0, 30.0, 600.0, 60.0), failures_per_node_year=100.0, spares=0, repair_s=7200.0, runs=50)
    r = simulate(sim)
    assert r.goodput.value + r.restarting + r.waiting + r.stalls_and_lost == pytest.approx(1.0, abs=1e-12)
    assert min(r.restarting, r.waiting, r.stalls_and_lost) > 0


def test_a_hundred_thousand_accelerators_are_simulated_in_seconds() -> None:
    sim = Simulation(
        gpus=100_000,
        days=30,
        tiers=(tier(300.0, 9.0, 600.0, 120.0),),
        failures_per_gpu_year=0.173,
        failures_per_node_year=0.05,
        spares=200,
        runs=50,
    )
    result = simulate(sim)
    exact = goodput_of_interval(300.0, YEAR_S / sim.failures_a_year, stall_s=9.0, restart_s=600.0, latency_s=120.0)
    assert result.goodput.value == pytest.approx(exact, abs=0.01)
    assert result.failures > 50 * 1400


def test_a_trace_is_replayed_to_the_second() -> None:
    # 100 s start; saves at 1000 s of work each, 10 s stall, durable 20 s later. Failures at 2500 s (2 saves at 1110,
    # 2120: durable at 2140) and at 3000 s (start until 2600, no save); the end at 6000 s: saves since 3100 durable at
    # 4130, 5140, 6150 (too late).
    trace = parse_trace(["# of a run", "2500", "", "3000,0  # again"])
    one = Simulation(gpus=1, days=6000 / DAY_S, tiers=(tier(1000.0, 10.0, 100.0, 20.0),), trace=trace, runs=50)
    result = simulate(one)
    assert result.goodput.value == pytest.approx(4000 / 6000, rel=1e-12)
    assert result.goodput.low <= result.goodput.value <= result.goodput.high
    assert (result.interruptions.value, result.failures, result.interrupted.value) == (2.0, 2, 1.0)
    assert result.restarting == pytest.approx(300 / 6000)
    assert result.waiting == 0.0


def test_a_replayed_node_failure_waits_for_its_repair() -> None:
    trace = (TraceEvent(at_s=1000.0, node=True),)
    sim = Simulation(gpus=8, days=6000 / DAY_S, tiers=(tier(100.0),), trace=trace, spares=0, repair_s=2000.0, runs=5)
    result = simulate(sim)
    assert result.waiting == pytest.approx(2000 / 6000)
    assert result.goodput.value == pytest.approx(4000 / 6000)


def test_a_failure_can_cost_more_than_the_work_since_the_last_one() -> None:
    # Work 1000 s, copy on the node each 100 s, in storage each 5000 s. A worker fails at 950 s: 900 s kept. Then the
    # node fails at 1000 s: the storage has nothing, all is lost.
    tiers = (tier(100.0, share=0.5), tier(5000.0, share=0.5))
    trace = (TraceEvent(at_s=950.0), TraceEvent(at_s=1000.0, failure_class=1))
    sim = Simulation(gpus=1, days=2000 / DAY_S, tiers=tiers, trace=trace, runs=2)
    assert simulate(sim).goodput.value == pytest.approx(1000 / 2000)


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["abc"], "'abc'"),
        (["1,2,node,4"], "cannot be read"),
        (["1,0,gpu"], "cannot be read"),
        (["-1"], "cannot be read"),
        (["nan"], "cannot be read"),
        (["inf"], "cannot be read"),
        (["1,-1"], "cannot be read"),
        (["5", "4"], "sort"),
        (["# nothing"], "no failure"),
    ],
)
def test_a_bad_trace_is_refused_in_one_sentence(lines: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_trace(lines)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"gpus": 100_001}, "100,000"),
        ({"gpus": 0}, "100,000"),
        ({"days": 0.0}, "days"),
        ({"days": float("nan")}, "days"),
        ({"runs": 1}, "runs"),
        ({"confidence": 1.0}, "confidence"),
        ({"repair_s": -1.0}, "negative"),
        ({"spares": -1}, "negative"),
        ({"tiers": ()}, "tier"),
        ({"tiers": (tier(60.0, share=0.5),)}, "add up to 1"),
        ({"tiers": (tier(0.0),)}, "interval"),
        ({"tiers": (tier(60.0, stall=float("nan")),)}, "interval"),
        ({"failures_per_gpu_year": 0.0}, "rate above 0"),
        ({"failures_per_gpu_year": 1e12}, "fewer days"),
        ({"trace": (TraceEvent(at_s=1.0, failure_class=1),)}, "class 1"),
        ({"trace": (TraceEvent(at_s=1e9),)}, "more days"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(fields: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        job(*fields.get("tiers", (tier(60.0),)), **{k: v for k, v in fields.items() if k != "tiers"})
