"""Faults in words, and random ones from a seed."""

from __future__ import annotations

import itertools
import statistics

import pytest

from ray_goodput.errors import ConfigError
from ray_goodput.testing import Fault, Kind, Phase, Target, random_faults


@pytest.mark.parametrize(
    "text",
    [
        "kill:worker",
        "kill:worker:rank=1:step=40",
        "stop:vault:rank=0:seconds=5",
        "kill:coordinator:phase=committing",
        "node-loss:raylet:rank=0:step=7:phase=uploading",
        "slow-network:worker:rank=2:seconds=20:delay=0.25",
        "exception:worker:step=7",
    ],
)
def test_a_fault_reads_back_from_its_own_text(text: str) -> None:
    fault = Fault.parse(text)
    assert Fault.parse(str(fault)) == fault
    assert str(fault) == text or fault.kind in (Kind.SLOW_DISK, Kind.SLOW_NETWORK)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("explode:worker", "Unknown kind 'explode' .* known are kill, stop, exception"),
        ("kill:rank0", "Unknown target 'rank0' .* known are worker, vault"),
        ("kill", "Unknown target ''"),
        ("kill:worker:phase=sleeping", "Unknown phase 'sleeping'"),
        ("kill:worker:rank=x", "Cannot read 'rank=x'"),
        ("kill:worker:colour=red", "Cannot read 'colour=red'"),
        ("kill:worker:rank=-1", "must not be below 0"),
        ("exception:vault", "exception is for worker"),
        ("node-loss:worker", "node-loss is for raylet"),
        ("slow-disk:worker:delay=0", "must be above 0"),
        ("slow-disk:worker:phase=staging", "only kill, stop and node-loss have"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Fault.parse(text)


def test_gates_are_needed_for_phases_and_for_what_only_a_process_can_do_to_itself() -> None:
    assert not Fault(kind=Kind.KILL, target=Target.WORKER, step=4).needs_gates
    assert Fault(kind=Kind.KILL, target=Target.WORKER, phase=Phase.STAGING).needs_gates
    assert Fault(kind=Kind.EXCEPTION, target=Target.WORKER).needs_gates
    assert Fault(kind=Kind.SLOW_NETWORK, target=Target.WORKER).needs_gates


def test_one_seed_gives_the_same_faults_and_another_gives_others() -> None:
    def first(seed: int) -> list[tuple[float, Fault]]:
        return list(itertools.islice(random_faults(seed=seed, mtbf_s=20), 50))

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_the_mean_time_between_random_faults_is_the_one_asked_for() -> None:
    pauses = [pause for pause, _ in itertools.islice(random_faults(seed=1, mtbf_s=20), 4000)]
    assert statistics.mean(pauses) == pytest.approx(20, rel=0.1)
    assert statistics.stdev(pauses) == pytest.approx(20, rel=0.15)  # of an exponential law: its mean


def test_random_faults_are_of_all_the_pairs_that_make_sense_and_no_others() -> None:
    faults = random_faults(seed=1, mtbf_s=1, targets=("worker", "raylet"), kinds=("kill", "node-loss", "stop"))
    pairs = {(fault.kind, fault.target) for _, fault in itertools.islice(faults, 300)}
    assert pairs == {
        (Kind.KILL, Target.WORKER),
        (Kind.KILL, Target.RAYLET),
        (Kind.NODE_LOSS, Target.RAYLET),
        (Kind.STOP, Target.WORKER),
        (Kind.STOP, Target.RAYLET),
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mtbf_s": 0}, "must be above 0"),
        ({"mtbf_s": 1, "targets": ("vault",), "kinds": ("exception",)}, "No fault is of the kinds exception"),
        ({"mtbf_s": 1, "targets": ("moon",)}, "Unknown target 'moon'"),
    ],
)
def test_random_faults_that_cannot_be_are_refused_at_once(arguments: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        random_faults(seed=1, **arguments)
