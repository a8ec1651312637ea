"""The planner: every pinned value that it gives out, levers, worth, tiers, and what it makes of a run's ledger."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.cli.plan_text import next_step
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.reliability import YEAR_S, Tier
from ray_goodput.errors import ConfigError, StorageError
from ray_goodput.goodput.bounds import future_count
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.plan_inputs import Evidence, PlanInputs, rate_from_afr, rate_from_mtbf
from ray_goodput.goodput.planner import chosen_interval_s, goodput_curve, make_plan, plan_from_run
from ray_goodput.goodput.published import published_table
from ray_goodput.goodput.run_measures import measure_run
from ray_goodput.goodput.simulator import simulate

M_S = 10046.512


def near(value: float, digits: float = 1e-5):
    return pytest.approx(value, rel=digits)


def inputs(**fields) -> PlanInputs:
    """A job of one accelerator that fails each M_S seconds."""
    base = {"gpus": 1, "days": 54.0, "failures_per_gpu_year": rate_from_mtbf(M_S, 1)}
    return PlanInputs(**(base | fields))


@pytest.mark.parametrize(("gpus", "expected"), [(256, 0.190607), (1024, 0.570821)])
def test_survival_by_yearly_probability(gpus: int, expected: float) -> None:
    plan = make_plan(PlanInputs(gpus=gpus, days=30, failures_per_gpu_year=rate_from_afr(0.01)))
    assert plan.interrupted == near(expected)


@pytest.mark.parametrize(("gpus", "expected"), [(256, 0.189749), (1024, 0.568999)])
def test_survival_by_rate(gpus: int, expected: float) -> None:
    assert make_plan(PlanInputs(gpus=gpus, days=30, failures_per_gpu_year=0.01)).interrupted == near(expected)


@pytest.mark.parametrize(
    ("tau", "delta", "restart", "latency", "exact"),
    [
        (1800, 9, 600, 120, 0.845323),
        (7200, 522, 600, 0, 0.583610),
        (300, 9, 600, 120, 0.889903),
        (300, 9, 600, 900, 0.823425),
    ],
)
def test_exact_goodput_of_a_given_interval(
    tau: float, delta: float, restart: float, latency: float, exact: float
) -> None:
    plan = make_plan(inputs(interval_s=tau, stall_s=delta, restart_s=restart, latency_s=latency))
    assert plan.chosen.exact == near(exact)
    assert plan.chosen.feasible is (tau >= latency)


@pytest.mark.parametrize(
    ("minutes", "linear", "exact"),
    [
        (5, 0.985069, 0.985144),
        (15, 0.955208, 0.955877),
        (30, 0.910417, 0.913090),
        (60, 0.820833, 0.831511),
        (120, 0.641667, 0.684106),
        (480, -0.433333, 0.172917),
    ],
)
def test_linear_and_exact_stand_side_by_side(minutes: float, linear: float, exact: float) -> None:
    plan = make_plan(inputs(interval_s=minutes * 60.0))
    assert (plan.chosen.linear, plan.chosen.exact) == (near(linear), near(exact))
    assert goodput_curve(plan.inputs, [minutes * 60.0]) == [(minutes * 60.0, plan.chosen.exact, plan.chosen.linear)]


@pytest.mark.parametrize(
    ("delta", "latency", "restart", "best", "goodput"),
    [
        (522, 0, 0, 2900.36, 0.711307),
        (522, 0, 600, 2900.36, 0.670069),
        (9, 0, 0, 419.27, 0.958267),
        (9, 0, 600, 419.27, 0.902713),
    ],
)
def test_the_best_interval_and_its_goodput(
    delta: float, latency: float, restart: float, best: float, goodput: float
) -> None:
    plan = make_plan(inputs(stall_s=delta, latency_s=latency, restart_s=restart))
    assert plan.intervals.exact_s == near(best, 1.2e-5)
    assert plan.chosen == plan.best
    assert plan.best.exact == near(goodput)


def test_the_best_interval_is_never_shorter_than_a_save_takes_to_be_durable() -> None:
    plan = make_plan(inputs(stall_s=9, latency_s=513))
    assert plan.intervals.exact_s == near(419.27, 1.2e-5)
    assert plan.chosen.interval_s == 513
    assert plan.chosen.feasible
    assert plan.chosen.exact < 0.910564


def test_a_save_that_costs_nothing_is_made_each_second() -> None:
    assert chosen_interval_s(inputs()) == 1.0


def test_a_job_that_hardly_ever_fails_is_saved_once_at_its_end() -> None:
    plan = make_plan(PlanInputs(gpus=1, days=2, failures_per_gpu_year=1e-6, stall_s=60))
    assert plan.intervals.exact_s > plan.inputs.run_s
    assert plan.chosen.interval_s == plan.inputs.run_s


def test_halving_a_restart_of_600_s_gains_2_7_points_and_levers_come_best_first() -> None:
    plan = make_plan(inputs(stall_s=9, restart_s=600))
    gains = {lever.name: lever.gain for lever in plan.levers}
    assert gains["restart"] == pytest.approx(0.027, abs=5e-4)
    assert [lever.gain for lever in plan.levers] == sorted(gains.values(), reverse=True)
    assert set(gains) == {"stall", "latency", "restart", "interval", "failure rate"}
    assert plan.lever == plan.levers[0]
    assert gains["interval"] < 0, "the interval was the best already"
    assert gains["latency"] == 0


def test_the_lever_is_the_interval_when_it_is_what_is_wrong() -> None:
    plan = make_plan(inputs(interval_s=7200, stall_s=9, restart_s=60))
    best = next(lever for lever in plan.levers if lever.name != "failure rate")
    assert (best.name, best.now, best.halved) == ("interval", 7200, 3600)


def test_no_lever_is_named_where_nothing_gains() -> None:
    plan = make_plan(PlanInputs(gpus=1, days=1, failures_per_gpu_year=1e-6, interval_s=10))
    assert plan.lever is None


def test_an_infeasible_half_of_the_interval_is_no_lever() -> None:
    plan = make_plan(inputs(interval_s=300, latency_s=200))
    assert "interval" not in {lever.name for lever in plan.levers}


def test_what_a_point_of_goodput_is_worth() -> None:
    worth = make_plan(PlanInputs(gpus=1024, days=30, failures_per_gpu_year=0.01, cost_per_gpu_hour=2.5)).worth
    assert worth.gpu_hours == 1024 * 720
    assert worth.point_gpu_hours == near(7372.8)
    assert worth.point_cost == near(18432.0)
    assert worth.lost_cost == near(2.5 * worth.lost_gpu_hours)
    assert make_plan(inputs()).worth.point_cost is None


def test_expected_interruptions_with_bounds() -> None:
    plan = make_plan(PlanInputs(gpus=16384, days=54, failures_per_gpu_year=466 / (16384 * 54 / 365)))
    assert plan.interruptions.value == near(466)
    assert (plan.interruptions.low, plan.interruptions.high) == (424, 509)  # quantiles of Poisson(466)


def test_a_rate_known_from_few_failures_gives_wider_bounds_than_a_given_one() -> None:
    evidence = Evidence(failures=3, gpu_years=10, prior_per_gpu_year=0.173)
    given = PlanInputs(gpus=1024, days=30, failures_per_gpu_year=0.25348, stall_s=9, restart_s=600)
    counted = make_plan(dataclasses.replace(given, evidence=evidence))
    plan = make_plan(given)
    assert counted.rate is not None
    assert (counted.rate.mean, counted.rate.high) == (near(0.25348), near(0.55558))
    assert counted.interruptions.low < plan.interruptions.low < plan.interruptions.high < counted.interruptions.high
    assert counted.chosen.low < counted.chosen.exact < counted.chosen.high
    assert plan.chosen.low == plan.chosen.exact == plan.chosen.high


@pytest.mark.parametrize(
    ("mean", "shape", "low", "high"),
    [  # quantiles of the Poisson and the negative binomial law, from tables
        (0.1, math.inf, 0, 1),
        (5, math.inf, 1, 10),
        (1e4, math.inf, 9804, 10196),
        (0.85, 1, 0, 4),
        (5, 4, 0, 13),
        (1000, 3, 205, 2410),
        (1e5, 467, 91114, 109292),
        (0, math.inf, 0, 0),
    ],
)
def test_bounds_of_a_future_count(mean: float, shape: float, low: int, high: int) -> None:
    count = future_count(mean, shape=shape)
    assert (count.low, count.high) == (low, high)


@pytest.mark.parametrize("shape", [math.inf, 3, 5000])
def test_bounds_of_huge_counts_go_on_where_the_exact_ones_end(shape: float) -> None:
    below, above = future_count(1e5, shape=shape), future_count(1.0001e5, shape=shape)
    assert above.low == pytest.approx(below.low, rel=2e-3)
    assert above.high == pytest.approx(below.high, rel=2e-3)


def test_tiers_by_the_pinned_example() -> None:
    rows = [(0.70, 60, 0.5, 0, 60), (0.25, 300, 1, 20, 180), (0.05, 1800, 9, 120, 600)]
    tiers = tuple(Tier(share=q, interval_s=t, stall_s=d, latency_s=lat, restart_s=r) for q, t, d, lat, r in rows)
    plan = make_plan(inputs(tiers=tiers))
    assert not plan.tiers.assumed
    assert plan.tiers.per_failure_s == near(231.5)
    assert plan.tiers.overhead == near(0.016667, 2.1e-5)
    assert plan.tiers.goodput == near(0.960291)
    assert plan.tiers.best_intervals_s == (near(119.80), near(283.50), near(1901.77))
    assert plan.tiers.goodput_at_best > plan.tiers.goodput
    assert plan.simulation().tiers == tiers


def test_without_tiers_given_a_copy_on_the_node_saves_the_latency_of_the_failures_that_leave_it_up() -> None:
    job = inputs(stall_s=9, latency_s=900, restart_s=60, interval_s=900)
    plan = make_plan(job)
    assert plan.tiers.assumed
    assert plan.tiers.overhead == near(9 / 900), "one stall serves both tiers"
    none = make_plan(dataclasses.replace(job, local_share=0.0)).tiers
    assert none.per_failure_s - plan.tiers.per_failure_s == near(0.7 * 900)


def test_shrink_or_wait() -> None:
    job = PlanInputs(gpus=64, days=30, failures_per_gpu_year=0.1, resize_s=120)
    plan = make_plan(job).shrink
    assert plan is not None
    assert (plan.lost_gpus, plan.decision) == (8, None)
    assert plan.pays_after_s == near(274.29, 2e-5)
    decisions = [make_plan(dataclasses.replace(job, replacement_s=w)).shrink for w in (274.0, 275.0)]
    assert [d.decision for d in decisions if d] == ["wait", "shrink"]
    assert make_plan(dataclasses.replace(job, gpus=8)).shrink is None


def test_nodes_that_fail_as_a_whole_come_on_top() -> None:
    job = PlanInputs(gpus=1024, days=30, failures_per_gpu_year=0.01, failures_per_node_year=0.1)
    assert job.mtbf_s == near(YEAR_S / (10.24 + 12.8))
    assert simulate(make_plan(job).simulation(runs=2000)).interrupted.value == pytest.approx(
        make_plan(job).interrupted, abs=0.05
    )


def test_a_plan_simulates_to_its_own_goodput() -> None:
    plan = make_plan(inputs(interval_s=1800, stall_s=9, latency_s=120, restart_s=600))
    result = simulate(plan.simulation(runs=400, seed=3, confidence=0.999)).goodput
    assert result.low <= plan.chosen.exact <= result.high


def test_a_plan_is_json() -> None:
    body = json.loads(json.dumps(make_plan(inputs(stall_s=9)).to_dict()))
    assert body["chosen"].keys() >= {"interval_s", "exact", "linear"}
    assert body["lever"] == body["levers"][0]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"gpus": 0}, "number of accelerators is 0"),
        ({"gpus": -4}, "number of accelerators is -4"),
        ({"gpus": 10**9}, "1,000,000,000.*10,000,000"),
        ({"days": 0.0}, "above 0"),
        ({"days": 1e6}, "at most 3,650"),
        ({"days": math.nan}, "nan"),
        ({"failures_per_gpu_year": -0.1}, "at least 0"),
        ({"failures_per_gpu_year": math.inf}, "inf"),
        ({"failures_per_gpu_year": 0.0}, "Without any failure"),
        ({"stall_s": -9.0}, "for the stall"),
        ({"latency_s": math.nan}, "for the latency"),
        ({"restart_s": 1e9}, "for the restart"),
        ({"interval_s": 0.0}, "for the interval"),
        ({"local_share": 1.1}, "share of failures"),
        ({"lost_gpus": 0}, "lost at once"),
        ({"cost_per_gpu_hour": -1.0}, "cost"),
        ({"gpus_per_node": 0}, "a node"),
        ({"tiers": (Tier(share=0.5, interval_s=1, stall_s=0, latency_s=0, restart_s=0),)}, "add up to 1"),
    ],
)
def test_absurd_inputs_are_refused_in_one_sentence(fields: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        inputs(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("afr", [0.0, 1.0, -0.01, 7.6, math.nan])
def test_a_yearly_probability_outside_0_to_1_is_refused(afr: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        rate_from_afr(afr)


def test_the_published_table_comes_out_of_formula_and_simulation() -> None:
    rows = published_table()
    assert [row.published for row in rows] == [0.19, 0.57, 36.0, 0.64, 0.91]
    for row in rows:
        assert row.formula == pytest.approx(row.published, abs=0.005 if row.unit == "%" else 0.5)
        width = row.simulated.high - row.simulated.low
        assert row.simulated.low - width <= row.exact <= row.simulated.high + width  # six standard errors
        assert width < 0.06 * row.exact
    assert [row.formula for row in rows] == [near(x) for x in (0.190607, 0.570821, 36.1, 0.641667, 0.910417)]
    assert rows[3].exact == near(0.684106)


# Of a run's ledger: 4 ranks; each step takes 10 s, each save 2 s of stall and 15 s until it is durable.

STEP_S, STALL_S, LATENCY_S = 10.0, 2.0, 15.0


def script(first: int, last: int, every: int = 10) -> list[Stretch]:
    rows: list[Stretch] = [(Bucket.STARTUP, 50.0, -1, False)]
    for step in range(first, last + 1):
        rows += steps(step, step, STEP_S)
        if step % every == 0:
            rows.append((Bucket.CKPT_BLOCK, STALL_S, step + 1, False))
    return rows


def a_run(*, fail: bool = True) -> Ledger:
    ledger = Ledger(4)
    ledger.run_started(0.0)
    at, first = 0.0, 1
    for attempt in (1, 2) if fail else (1,):
        ledger.attempt_started(attempt, 4, at)
        if attempt > 1:
            ledger.resumed(attempt, first - 1)
        last = first + 34
        rows = script(first, last)
        for rank in range(4):
            ledger.rank_hello(attempt, rank, at)
        clock, done = at, 0
        for i, (_, seconds, step, step_done) in enumerate(rows, 1):
            clock += seconds
            if step_done and step % 10 == 0:
                ledger.commit(step, attempt, clock + STALL_S + LATENCY_S)
            if i % 7 == 0 or i == len(rows):  # pages come now and then, and so do segments
                for rank in range(4):
                    ledger.page(page(attempt, rank, rows, first=done, last=i))
                done = i
                ledger.to_segments()
        failed = fail and attempt == 1
        ledger.attempt_ended(attempt, clock, "failed" if failed else "finished", ranks=[0] if failed else [])
        at, first = clock + 40.0, last // 10 * 10 + 1
    ledger.run_ended(clock)
    return ledger


def lines(ledger: Ledger) -> list[bytes]:
    return [line for segment in ledger.to_segments() for line in segment.data.splitlines()]


def test_a_ledger_tells_stall_latency_interval_restart_and_failures() -> None:
    ledger = a_run()
    measured = measure_run(ledger.report().to_dict(), lines(ledger))
    assert (measured.gpus, measured.failures, measured.saves) == (4, 1, 6)
    assert measured.stall_s == near(STALL_S)
    assert measured.interval_s == near(10 * STEP_S)
    assert measured.latency_s == pytest.approx(LATENCY_S, abs=STALL_S + 1.0)
    assert measured.restart_s == near(40 + 50 + STEP_S)
    assert measured.exposure_gpu_s == near(4 * measured.wall_s)


def test_a_plan_from_a_run_uses_its_own_figures_and_says_so() -> None:
    ledger = a_run()
    plan = plan_from_run(ledger.report().to_dict(), lines(ledger), days=10)
    assert plan.inputs.evidence is not None
    assert plan.inputs.evidence.failures == 1
    assert plan.rate is not None and plan.inputs.failures_per_gpu_year == plan.rate.mean
    assert plan.inputs.interval_s == near(100.0)
    assert plan.inputs.sources["stall_s"] == "mean over 6 saves"
    assert "1 failure in" in plan.inputs.sources["failures_per_gpu_year"]
    assert plan.measured is not None


def test_a_short_run_is_said_to_be_too_short_and_gives_no_advice() -> None:
    ledger = a_run()
    report = ledger.report().to_dict() | {"wall_s": 599.0}
    with pytest.raises(
        ConfigError, match=r"too short to plan from: it has 599 s and 6 saves, advice needs 600 s and 5"
    ):
        plan_from_run(report, lines(ledger))
    few = [line for line in lines(a_run()) if b'"commit","step":4' not in line and b'"commit","step":5' not in line]
    with pytest.raises(ConfigError, match=r"too short to plan from: it has \d+ s and 4 saves"):
        plan_from_run(a_run().report().to_dict(), few)
    assert plan_from_run(report, few, stall_s=1.0, latency_s=5.0, restart_s=30.0).inputs.stall_s == 1.0


def test_what_the_data_cannot_carry_is_not_recommended() -> None:
    """A short interval pays if it fails often, and costs if it fails rarely: without failures nobody knows which."""
    job = {"gpus": 1000, "days": 10.0, "stall_s": 20.0, "latency_s": 20.0, "restart_s": 0.0, "interval_s": 3600.0}
    known = make_plan(PlanInputs(**job, failures_per_gpu_year=4.0))
    assert known.interval_gain > 1e-3 and "save each" in next_step(known)
    evidence = Evidence(failures=0, gpu_years=0.0, prior_per_gpu_year=4.0)
    guessed = make_plan(PlanInputs(**job, failures_per_gpu_year=4.0, evidence=evidence))
    assert guessed.best.exact - guessed.chosen.exact == known.best.exact - known.chosen.exact
    assert guessed.interval_gain < 0 and "save each" not in next_step(guessed)
    for lever in guessed.levers:
        assert lever.sure_gain <= lever.gain
        assert lever.name not in next_step(guessed) or lever.sure_gain > 0


def test_stall_and_latency_told_with_the_commits_are_exact() -> None:
    report = a_run().report().to_dict()
    told = [line.replace(b'"commit",', b'"commit","stall_s":1.5,"latency_s":7.25,') for line in lines(a_run())]
    measured = measure_run(report, told)
    assert (measured.stall_s, measured.latency_s) == (1.5, 7.25)
    assert measured.sources["latency_s"] == "median of 6 commits"


def test_a_change_of_size_is_no_failure() -> None:
    ledger = a_run()
    report = ledger.report().to_dict()
    report["incidents"][0]["kind"] = "resized"
    measured = measure_run(report, lines(ledger))
    assert measured.failures == 0 and "no failure yet" in measured.sources["restart_s"]


def test_what_is_given_beats_what_was_measured() -> None:
    ledger = a_run()
    plan = plan_from_run(
        ledger.report().to_dict(), lines(ledger), gpus=64, failures_per_gpu_year=0.2, stall_s=1.0, interval_s=None
    )
    assert (plan.inputs.gpus, plan.inputs.stall_s, plan.inputs.evidence, plan.rate) == (64, 1.0, None, None)
    assert plan.inputs.sources.keys() == {"latency_s", "restart_s"}
    assert plan.chosen.interval_s == plan.intervals.best_s


def test_a_run_without_failures_restarts_as_fast_as_it_started() -> None:
    ledger = a_run(fail=False)
    measured = measure_run(ledger.report().to_dict(), lines(ledger))
    assert measured.failures == 0
    assert measured.restart_s == near(50.0)
    assert "no failure yet" in measured.sources["restart_s"]


def test_a_run_without_saves_asks_for_the_stall() -> None:
    ledger = a_run()
    with pytest.raises(ConfigError, match=r"no commit yet.*--stall"):
        plan_from_run(ledger.report().to_dict())
    plan = plan_from_run(ledger.report().to_dict(), stall_s=1.0, latency_s=5.0)
    assert plan.measured is not None and plan.measured.saves == 0


def test_a_run_that_never_took_a_step_is_no_ground_for_a_plan() -> None:
    ledger = Ledger(4)
    ledger.run_started(0.0)
    with pytest.raises(ConfigError, match="The run"):
        plan_from_run(ledger.report(10.0).to_dict(), lines(ledger))


def test_a_line_that_is_no_ledgers_is_refused_by_its_number() -> None:
    report = a_run().report().to_dict()
    with pytest.raises(StorageError, match="Line 2"):
        measure_run(report, [b'{"event":"seen","at":1}', b'{"event":"commit"'])
