"""Who is slow: found when it is real, and not when it is noise."""

from __future__ import annotations

import random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from journal_pages import page, steps
from ray_goodput.cli.report_tables import straggler_table
from ray_goodput.core.straggler import MIN_STEPS, Pace, Straggler, find_stragglers
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.train.own_time import OwnTime


def paces(*own_ms: float, steps: int = 100) -> dict[int, Pace]:
    return {rank: Pace(own_s=ms * steps / 1e3, steps=steps) for rank, ms in enumerate(own_ms)}


def test_a_rank_that_computes_longer_than_the_others_is_named_with_the_figures() -> None:
    [slow] = find_stragglers(paces(50, 52, 90, 49))
    assert (slow.world_rank, round(slow.ratio, 1)) == (2, 1.8)
    assert slow.sentence == "rank 2 computes 90.0 ms a step, the others 50.0 ms (1.8 x): all wait for it"


def test_of_two_ranks_the_slower_one_and_of_several_slow_ones_the_slowest_first() -> None:
    assert [s.world_rank for s in find_stragglers(paces(50, 80))] == [1]
    assert [s.world_rank for s in find_stragglers(paces(50, 80, 50, 99, 50))] == [3, 1]


def test_each_rank_is_compared_with_the_median_of_the_others() -> None:
    rng = random.Random(5)
    for _ in range(200):
        own_ms = [rng.choice([50.0, 70.0, 90.0, 110.0]) for _ in range(rng.randint(2, 9))]
        usual_ms = {rank: median(own_ms[:rank] + own_ms[rank + 1 :]) for rank in range(len(own_ms))}
        found = {s.world_rank: round(s.usual_s * 1e3, 6) for s in find_stragglers(paces(*own_ms))}
        assert found == {rank: ms for rank, ms in usual_ms.items() if own_ms[rank] >= 1.25 * ms}


@pytest.mark.parametrize(
    "known",
    [
        paces(),
        paces(50),
        paces(50, 60, 55),  # less than a quarter more
        paces(0.5, 0.9, 0.5),  # less than a millisecond more
        paces(50, 200, 50, steps=MIN_STEPS - 1),
        paces(0, 0, 0),
    ],
)
def test_what_is_too_little_to_tell_or_to_notice_is_no_straggler(known: dict[int, Pace]) -> None:
    assert find_stragglers(known) == ()


@pytest.mark.parametrize("seed", range(20))
def test_noise_with_pauses_of_whole_processes_names_nobody(seed: int) -> None:
    chance = random.Random(seed)
    ledger = Ledger(4)
    ledger.run_started(1000)
    ledger.attempt_started(1, 4, 1000)
    for rank in range(4):
        ledger.rank_hello(1, rank, 1000)
        done = 0
        for _ in range(10):  # a page holds some steps, one of which may have had a pause of seconds in it
            own_us = [int(chance.lognormvariate(0, 0.2) * 50_000) for _ in range(20)]
            if chance.random() < 0.3:
                own_us[chance.randrange(20)] += 5_000_000
            script = steps(1, done + 20, 0.1)
            made = page(1, rank, script, first=done, own_us=[0] * done + own_us)
            ledger.page(made, 1001 + done)
            done += 20
    assert ledger.report().stragglers == ()


def test_the_report_names_the_slow_rank_of_the_newest_attempt_also_after_the_coordinators_restart() -> None:
    ledger = Ledger(3)
    ledger.run_started(1000)
    ledger.attempt_started(1, 3, 1000)
    for rank, own_us in enumerate((50_000, 50_000, 75_000)):
        ledger.rank_hello(1, rank, 1000)
        ledger.page(page(1, rank, steps(1, 60, 0.1), own_us=[own_us] * 60), 1010)
    lines = [line for segment in ledger.to_segments() for line in segment.data.splitlines()]
    for books in (ledger, Ledger.from_lines(lines)):
        report = books.report()
        [slow] = report.stragglers
        assert (slow.world_rank, slow.ratio) == (2, pytest.approx(1.5))
        assert "slow: rank 2 computes 75.0 ms a step, the others 50.0 ms (1.5 x)" in report.table()
        assert report.to_dict()["stragglers"] == [{"world_rank": 2, "own_s": 0.075, "usual_s": 0.05}]
    ledger.attempt_ended(1, 1020, "worker")
    ledger.attempt_started(2, 3, 1021)
    assert ledger.report().stragglers == ()


def test_the_report_has_a_table_of_slow_ranks_and_says_so_when_there_are_none() -> None:
    slow = Straggler(world_rank=2, own_s=0.075, usual_s=0.05)
    view: Any = SimpleNamespace(report=SimpleNamespace(stragglers=(slow,)))
    assert straggler_table(view).rows == (("2", "75.0 ms", "50.0 ms", "1.50 x"),)
    view.report.stragglers = ()
    assert straggler_table(view).rows == () and "None stands out" in straggler_table(view).empty


def warm() -> OwnTime:
    """As after the steps that do not count."""
    own = OwnTime()
    own._skip = 0
    return own


def test_the_first_steps_of_an_attempt_are_no_pace() -> None:
    own = OwnTime()
    net = nn.Linear(4, 1)
    own.attach(net)
    told = []
    for _ in range(8):
        own.begin()
        net(torch.ones(2, 4)).sum().backward()
        told.append(own.take() > 0)
    assert told == [False] * 5 + [True] * 3


def test_own_time_ends_where_the_backward_pass_reaches_the_first_parameter() -> None:
    own = warm()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    own.attach(net)
    assert own.take() == 0.0
    own.begin()
    net(torch.ones(2, 4)).sum().backward()
    first = own.take()
    assert first > 0.0
    assert own.take() == 0.0, "a step without a batch of ours"
    own.begin()
    net(torch.ones(2, 4)).sum().backward()
    net(torch.ones(2, 4)).sum().backward()  # a second pass of the same batch
    assert own.take() > 0.0


def test_the_hook_changes_no_gradient() -> None:
    grads = []
    for watched in (False, True):
        torch.manual_seed(3)
        net = nn.Linear(4, 1)
        own = warm()
        if watched:
            own.attach(net)
        own.begin()
        net(torch.ones(2, 4)).sum().backward()
        assert net.weight.grad is not None
        grads.append(net.weight.grad)
    assert torch.equal(*grads)


def test_a_model_without_a_trained_parameter_is_not_measured() -> None:
    own = warm()
    own.attach(nn.Linear(4, 1).requires_grad_(False))
    own.begin()
    assert own.take() == 0.0


def test_on_a_device_the_newest_step_that_it_has_finished_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            Event.made += 1
            self.at_ms = float(Event.made)

        def record(self) -> None: ...

        def query(self) -> bool:
            return Event.done

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = warm()
    net = nn.Linear(4, 1)
    own.attach(net)
    own._on_device = True
    for _ in range(2):
        own.begin()
        net(torch.ones(2, 4)).sum().backward()
        assert own.take() == 0.0
    Event.done = True
    assert own.take() == pytest.approx(1e-3)
