"""Laws of saving at several tiers: each at its own interval, a farther save counts for the nearer ones."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ray_goodput.clock import ManualClock
from ray_goodput.config import CheckpointConfig
from ray_goodput.core.cadence import PRIOR_FAILURES_PER_ACCELERATOR_YEAR, AutoCadence, CadenceState
from ray_goodput.core.reliability import YEAR_S
from ray_goodput.core.tier_cadence import MAX_NEAR_INTERVAL_S, TierCadence, TierDecision
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import ConfigError
from ray_goodput.train.saver import Saver
from ray_goodput.train.tier_times import TierTimes
from ray_goodput.train.world import ControlWord, Decisions, World

LOCAL, PEER, STORAGE, NONE = SaveTier.LOCAL, SaveTier.PEER, SaveTier.STORAGE, SaveTier.NONE


def parse(every: int | str = "auto", every_local: int | str | None = None, *, peers: bool = False, world: int = 8):
    return TierCadence.parse(every=every, every_local=every_local, peers=peers, world=world)


@pytest.mark.parametrize(
    ("every", "every_local", "peers", "tiers"),
    [
        (10, None, False, {STORAGE}),
        (10, None, True, {STORAGE}),
        ("auto", None, False, {LOCAL, STORAGE}),
        ("auto", None, True, {LOCAL, PEER, STORAGE}),
        (10, 2, False, {LOCAL, STORAGE}),
        (10, 2, True, {PEER, STORAGE}),
        (10, "auto", True, {LOCAL, PEER, STORAGE}),
    ],
)
def test_the_configuration_says_which_tiers_have_saves_of_their_own(every, every_local, peers, tiers) -> None:
    cadence = parse(every, every_local, peers=peers)
    assert set(cadence.rules) == tiers and cadence.near == (len(tiers) > 1)


def test_a_run_with_steps_saves_near_at_the_finer_and_far_at_the_coarser_interval() -> None:
    clock = ManualClock()
    times = TierTimes(parse(6, 2, world=1), clock, 1)
    saved = []
    for step in range(1, 13):
        tier = times.decide(step, {}).tier
        if tier is not NONE:
            times.begun(tier, step, 0.1)
            saved.append((step, tier))
    assert saved == [(2, LOCAL), (4, LOCAL), (6, STORAGE), (8, LOCAL), (10, LOCAL), (12, STORAGE)]


def test_an_upload_that_takes_long_delays_no_near_save() -> None:
    times = TierTimes(parse("auto", 2, world=1), ManualClock(), 1)
    times.begun(STORAGE, 1, 0.1)
    assert times.decide(2, {STORAGE: 1}).tier is LOCAL


def test_auto_takes_the_pinned_intervals_of_the_tier_formula() -> None:
    """tau_j* = sqrt(2 delta_j M / q_j), to within what Young's formula neglects."""
    mtbf_s, stalls = 10046.512, {LOCAL: 0.5, PEER: 1.0, STORAGE: 9.0}
    cadence = parse(peers=True, world=1)
    shares = cadence.shares({})
    assert shares == pytest.approx({LOCAL: 0.70, PEER: 0.25, STORAGE: 0.05})
    rule = AutoCadence(world=1, failures_per_accelerator_year=YEAR_S / mtbf_s, max_interval_s=1e9)
    for tier, expected_s in {LOCAL: 119.80, PEER: 283.50, STORAGE: 1901.77}.items():
        state = CadenceState(
            step=1, now_mono_s=0.0, last_save_step=0, last_save_mono_s=0.0, stall_s=stalls[tier], share=shares[tier]
        )
        assert rule.interval(state)[0] == pytest.approx(expected_s, rel=0.01)


def test_a_tier_that_is_not_in_use_leaves_its_failures_to_the_next_farther_one() -> None:
    assert parse(10).shares({}) == pytest.approx({STORAGE: 1.0})
    assert parse().shares({}) == pytest.approx({LOCAL: 0.70, STORAGE: 0.30})


def test_the_runs_own_restarts_outweigh_the_prior_shares() -> None:
    shares = parse(peers=True).shares({"local": 0, "peer": 990, "storage": 0, "none": 7})
    assert shares[PEER] > 0.99 and math.isclose(sum(shares.values()), 1.0)


def test_auto_never_leaves_more_than_minutes_between_near_saves() -> None:
    clock = ManualClock()
    times = TierTimes(parse(world=1), clock, 1)
    assert times.decide(1, {}).tier is STORAGE, "the first save of an attempt measures"
    times.begun(STORAGE, 1, 0.01)
    clock.advance(MAX_NEAR_INTERVAL_S - 1)
    assert times.decide(2, {}).tier is NONE
    clock.advance(2)
    decision = times.decide(2, {})
    assert decision.tier is LOCAL and "local" in decision.reason
    assert PRIOR_FAILURES_PER_ACCELERATOR_YEAR < 1  # else the formula alone would have asked for it


def test_no_tier_waits_longer_than_its_interval_and_a_farther_save_counts_for_the_nearer_tiers() -> None:
    clock = ManualClock()
    times = TierTimes(parse(peers=True, world=1024), clock, 1024)
    times.begin(0, failures=40, exposure_s=40 * 300.0 * 1024)
    reached: dict[SaveTier, list[int]] = {LOCAL: [], PEER: [], STORAGE: []}
    for step in range(1, 1000):
        clock.advance(1.0)
        tier = times.decide(step, {}).tier
        times.arrived(tier, 1.0)
        if tier is not NONE:
            times.begun(tier, step, 0.1)
        for nearer in (t for t in reached if t <= tier):
            reached[nearer].append(step)
    longest = {tier: max(b - a for a, b in pairwise(steps)) for tier, steps in reached.items()}
    mtbf_s = (YEAR_S / PRIOR_FAILURES_PER_ACCELERATOR_YEAR + 40 * 300.0 * 1024) / 41 / 1024
    for tier, share in {LOCAL: 0.70, PEER: 0.25, STORAGE: 0.05}.items():
        assert longest[tier] == pytest.approx(math.sqrt(2 * 0.1 * mtbf_s / share), abs=1.5)


class AskedAtEveryStep(TierCadence):
    def decide(self, states: Mapping[SaveTier, CadenceState]) -> TierDecision:
        return replace(TierCadence.decide(self, states), not_before=((0, 0.0),))


class Counted(TierCadence):
    asked: ClassVar[int] = 0

    def decide(self, states: Mapping[SaveTier, CadenceState]) -> TierDecision:
        Counted.asked += 1
        return TierCadence.decide(self, states)


@pytest.mark.parametrize(
    ("every", "every_local", "peers"),
    [("auto", None, True), ("auto", 5, False), (40, "auto", False), ("20s", 3, True), (7, None, False)],
)
def test_asking_the_rules_only_when_something_changed_changes_no_decision(every, every_local, peers) -> None:
    rules = parse(every, every_local, peers=peers, world=1024).rules
    draw, clock = random.Random(1), ManualClock()
    lazy, eager = TierTimes(Counted(rules), clock, 1024), TierTimes(AskedAtEveryStep(rules), clock, 1024)
    Counted.asked, in_flight, saved = 0, [], 0
    for times in (lazy, eager):
        times.begin(0, failures=40, exposure_s=40 * 300.0 * 1024)
    for step in range(1, 3000):
        clock.advance(draw.choice([0.05, 0.05, 0.3]))
        if in_flight and draw.random() < 0.05:
            arrived = in_flight.pop(0)
            for times in (lazy, eager):
                times.arrived(arrived, latency_s=draw.random())
        tier = lazy.decide(step, in_flight).tier
        assert tier is eager.decide(step, in_flight).tier
        if tier is not NONE:
            saved += 1
            stall_s = None if draw.random() < 0.1 else 0.01 + draw.random() / 10
            for times in (lazy, eager):
                times.begun(tier, step, stall_s)
            in_flight += [tier] if stall_s else []
    assert saved > 10 and Counted.asked < 6 * saved + 10, "it is rank 0's own time, at every step"


def test_all_ranks_read_the_same_tier_from_the_control_word() -> None:
    word = ControlWord(World(0, 1, None))
    for near in (NONE, LOCAL, PEER):
        word.post(Decisions(save=False, near=near))
        assert word.read() == Decisions(near=near)
    word.post(Decisions(save=True, stop=True, near=LOCAL))
    assert word.read() == Decisions(save=True, stop=True, near=LOCAL)


def test_the_saver_of_another_rank_than_0_decides_nothing() -> None:
    worker: Any = SimpleNamespace(world=World(1, 2, None), clock=ManualClock(), coordinator=None, attempt=1)
    spec: Any = SimpleNamespace(checkpoint=CheckpointConfig(every=1, every_local=1))
    assert Saver(spec, worker).due(5) is NONE


@pytest.mark.parametrize("bad", [0, "soon", "0s", True, 1.5])
def test_a_local_interval_that_makes_no_sense_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"every_local|duration"):
        CheckpointConfig(every_local=bad)


def test_a_negative_number_of_peer_copies_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peer_copies=-1"):
        CheckpointConfig(peer_copies=-1)
