"""When to save: each rule, its bounds, and the reason it gives."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from ray_goodput.core.cadence import AutoCadence, CadenceState, SaveCadence
from ray_goodput.core.reliability import YEAR_S, optimal_interval_s
from ray_goodput.errors import ConfigError

FRESH = CadenceState(step=0, now_mono_s=100.0, last_save_step=0, last_save_mono_s=100.0)


def steps_saved(cadence: SaveCadence, start: int, end: int, *, last: int) -> list[int]:
    saved: list[int] = []
    for step in range(start, end):
        if cadence.decide(replace(FRESH, step=step, last_save_step=last)).save:
            saved.append(step)
            last = step
    return saved


def test_steps_saves_at_multiples_wherever_the_run_resumed() -> None:
    cadence = SaveCadence.steps(10)
    assert steps_saved(cadence, 1, 35, last=0) == [10, 20, 30]
    assert steps_saved(cadence, 14, 35, last=13) == [20, 30]


def test_a_missed_multiple_is_made_up_for_at_the_next_step() -> None:
    cadence = SaveCadence.steps(10)
    decision = cadence.decide(replace(FRESH, step=23, last_save_step=10))
    assert decision.save and "20" in decision.reason


@pytest.mark.parametrize("cadence", [SaveCadence.steps(1), SaveCadence.seconds(1e-9), SaveCadence.auto(world=4)])
def test_no_rule_saves_one_step_twice(cadence: SaveCadence) -> None:
    state = replace(FRESH, step=5, last_save_step=5, now_mono_s=1e9)
    assert not cadence.decide(state).save
    assert cadence.decide(replace(state, step=6)).save


def test_seconds_counts_from_the_last_save() -> None:
    cadence = SaveCadence.seconds(60)
    assert not cadence.decide(replace(FRESH, step=3, now_mono_s=159.9)).save
    assert cadence.decide(replace(FRESH, step=3, now_mono_s=160.0)).save


def test_auto_saves_the_first_step_to_measure() -> None:
    decision = SaveCadence.auto(world=8).decide(replace(FRESH, step=1))
    assert decision.save and "measured" in decision.reason


def test_auto_never_starts_a_save_before_the_previous_is_durable() -> None:
    state = replace(FRESH, step=9, saves_in_flight=1, now_mono_s=1e6, stall_s=0.01, latency_s=1.0)
    assert not SaveCadence.auto(world=8).decide(state).save
    assert SaveCadence.auto(world=8).decide(replace(state, saves_in_flight=0)).save


def test_auto_takes_the_best_interval_between_its_bounds() -> None:
    cadence = SaveCadence.auto(world=1024, max_interval_s=1e9)
    state = replace(FRESH, step=9, stall_s=9.0, latency_s=100.0)
    mtbf_s = YEAR_S / (0.173 * 1024)
    assert cadence.mtbf_s(state) == pytest.approx(mtbf_s)
    assert cadence.interval(state)[0] == pytest.approx(optimal_interval_s(9.0, mtbf_s))


@pytest.mark.parametrize(
    ("stall_s", "latency_s", "expected_s", "why"),
    [
        (9.0, 5.0, 1800.0, "longest"),  # the best, nearly an hour, is above the limit
        (1e-4, 5.0, 6.039, "best"),
        (1e-4, 50.0, 50.0, "durable"),  # a save must land before the next starts
        (200.0, 5.0, 3800.0, "5%"),  # stalls are kept to a twentieth even beyond the limit
        (0.0, 0.0, 0.0, "best"),
    ],
)
def test_auto_bounds(stall_s: float, latency_s: float, expected_s: float, why: str) -> None:
    interval_s, reason = SaveCadence.auto(world=1000).interval(
        replace(FRESH, step=1, stall_s=stall_s, latency_s=latency_s)
    )
    assert interval_s == pytest.approx(expected_s, rel=2e-3)
    assert why in reason


def test_auto_saves_more_often_once_failures_are_seen() -> None:
    cadence = SaveCadence.auto(world=8, max_interval_s=1e9)
    quiet = replace(FRESH, step=1, stall_s=0.1, exposure_s=8 * 86400)
    failing = replace(quiet, failures=5)
    assert cadence.mtbf_s(failing) == pytest.approx(cadence.mtbf_s(quiet) / 6)
    assert cadence.interval(failing)[0] < cadence.interval(quiet)[0] / 2


def test_parse_reads_what_the_configuration_takes() -> None:
    assert SaveCadence.parse(50, world=2) == SaveCadence.steps(50)
    assert SaveCadence.parse("10min", world=2) == SaveCadence.seconds(600)
    assert SaveCadence.parse("auto", world=2) == AutoCadence(world=2)
    for every in (50, "10min", "auto"):
        cadence = SaveCadence.parse(every, world=2)
        assert pickle.loads(pickle.dumps(cadence)) == cadence


def test_senseless_rules_are_refused() -> None:
    for make in (
        lambda: SaveCadence.steps(0),
        lambda: SaveCadence.seconds(0),
        lambda: SaveCadence.auto(world=0),
        lambda: SaveCadence.auto(world=1, failures_per_accelerator_year=0),
    ):
        with pytest.raises(ConfigError):
            make()
