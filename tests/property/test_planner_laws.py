"""Laws of the planner that hold for every job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_goodput.cli.plan_page import render_page
from ray_goodput.cli.plan_text import render_plan
from ray_goodput.goodput.plan_inputs import PlanInputs
from ray_goodput.goodput.planner import goodput, make_plan


def times(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(low, high))


JOBS = st.builds(
    PlanInputs,
    gpus=st.integers(1, 1_000_000),
    days=st.floats(1.0, 365.0),
    failures_per_gpu_year=st.floats(1e-6, 20.0),
    failures_per_node_year=times(1e-6, 10.0),
    gpus_per_node=st.sampled_from([1, 8, 72]),
    stall_s=times(1e-3, 3600.0),
    latency_s=times(1e-3, 7200.0),
    restart_s=times(1e-3, 7200.0),
    interval_s=st.one_of(st.none(), st.floats(1.0, 80_000.0)),
    replacement_s=st.one_of(st.none(), times(1.0, 80_000.0)),
    cost_per_gpu_hour=st.one_of(st.none(), st.floats(0.0, 100.0)),
)


@settings(max_examples=150, deadline=None)
@given(job=JOBS)
def test_shares_lie_between_0_and_1_and_halving_a_cost_never_hurts(job: PlanInputs) -> None:
    plan = make_plan(job)
    assert 0.0 <= plan.chosen.exact <= 1.0
    assert 0.0 <= plan.interrupted <= 1.0
    assert plan.interruptions.low <= plan.interruptions.value + 1.0
    assert plan.interruptions.high >= plan.interruptions.value - 1.0
    assert all(lever.gain >= -1e-12 for lever in plan.levers if lever.name != "interval")
    assert 0.0 <= plan.worth.lost_gpu_hours <= plan.worth.gpu_hours


@settings(max_examples=150, deadline=None)
@given(job=JOBS, factor=st.floats(0.1, 10.0))
def test_no_feasible_interval_beats_the_best(job: PlanInputs, factor: float) -> None:
    best = make_plan(replace(job, interval_s=None)).best
    other = best.interval_s * factor
    assume(max(1.0, job.latency_s) <= other <= job.run_s)
    assert goodput(job, other) <= best.exact * (1 + 1e-9) + 1e-12


@settings(max_examples=60, deadline=None)
@given(job=JOBS, nodes=st.integers(2, 5))
def test_a_larger_job_of_the_same_parts_fails_in_proportion(job: PlanInputs, nodes: int) -> None:
    one = replace(job, gpus=job.gpus_per_node)
    assert replace(one, gpus=nodes * one.gpus).mtbf_s == pytest.approx(one.mtbf_s / nodes, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(job=JOBS)
def test_every_plan_can_be_shown(job: PlanInputs) -> None:
    plan = make_plan(job)
    text = render_plan(plan)
    assert not {"nan", "inf"} & set(text.replace(",", " ").split())
    assert 'd="M' in render_page(plan)
