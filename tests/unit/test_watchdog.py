"""The watchdog over simulated nodes: what it asks, whom it has killed, what it keeps, and what it leaves alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.actors.process_look import RankLook
from ray_goodput.actors.progress_watch import ProgressWatch
from ray_goodput.actors.watchdog import FOLDER, Watchdog
from ray_goodput.clock import ManualClock
from ray_goodput.config import WatchdogConfig
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.errors import RunError
from ray_goodput.storage.local import LocalStore

B = Bucket
SCRIPT: list[Stretch] = [(B.STARTUP, 5, -1, False), *steps(1, 30, 1.0)]


class Node:
    """A vault whose processes do what `states` says."""

    def __init__(self, states: dict[int, str], *, silent: bool = False) -> None:
        self.states = states
        self.silent = silent
        self.killed: list[int] = []
        self.looks = 0
        self.seen: dict[str, Any] = {"silent_s": None, "still_s": None, "bucket": None, "step": -1}

    def look(self, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
        self.looks += 1
        if self.silent:
            raise RunError("The actor vault did not answer (GetTimeoutError).")
        return [
            RankLook(
                world_rank=rank,
                state=self.states[rank],
                text=f"rank {rank}, state {self.states[rank]}",
                **self.seen,
            )
            for rank, _ in ranks
        ]

    def kill(self, ranks: Sequence[tuple[int, int]]) -> list[int]:
        if self.silent:
            raise RunError("The actor vault did not answer (GetTimeoutError).")
        self.killed += [rank for rank, _ in ranks]
        return self.killed


class Run:
    """Two ranks on two nodes that have done 30 steps of a second."""

    def __init__(self, folder: Path, *, config: WatchdogConfig | None = None, states: str = "SS") -> None:
        self.clock = ManualClock()
        self.watch = ProgressWatch(self.clock, config or WatchdogConfig(hang_after_s=60))
        self.nodes = {f"node-{r}": Node({r: states[r]}) for r in range(2)}
        self.found: list[int] = []
        self.store = LocalStore(folder)
        self.dog = Watchdog(
            self.watch,
            vault=lambda node: self.nodes[node],
            store=self.store,
            clock=self.clock,
            found=self.found.append,
        )
        self.begin(1)

    def begin(self, attempt: int) -> None:
        workers = [WorkerInfo(world_rank=r, pid=10 + r, node_id=f"node-{r}", node_ip=f"10.0.0.{r}") for r in range(2)]
        self.watch.begin(attempt, workers)
        for rank in range(2):
            self.beat(rank, attempt=attempt)

    def beat(self, rank: int, *, standing_s: float = 0.0, attempt: int = 1, bucket: Bucket = B.STEP) -> None:
        self.watch.take(page(attempt, rank, SCRIPT, open_for=(bucket, standing_s, 31)))

    @property
    def killed(self) -> list[int]:
        return [rank for node in self.nodes.values() for rank in node.killed]


def kept(run: Run, wanted: int) -> dict[str, str]:
    """The stored stacks, once `wanted` objects are there: a thread of the watchdog writes them."""
    while len(infos := list(run.store.list(FOLDER))) < wanted:
        time.sleep(0.01)
    return {info.key: run.store.get(info.key).decode() for info in infos}


def test_a_stopped_rank_is_killed_and_the_stacks_of_all_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, states="ST")
    run.clock.advance(59)
    run.beat(0, standing_s=59)
    assert run.dog.check() is None and not run.nodes["node-0"].looks
    run.clock.advance(2)
    verdict = run.dog.check()
    assert verdict is not None and verdict.culprits == (1,)
    assert run.killed == [1] and run.found == [1]
    assert run.watch.hang_now() == verdict and run.watch.stuck() == (1,)
    folder = "stacks/attempt-0001-step-0000000030"
    texts = kept(run, 3)
    assert texts[f"{folder}/rank-00000.txt"] == "rank 0, state S"
    assert texts[f"{folder}/rank-00001.txt"] == "rank 1, state T"
    assert "rank 1 (process 11 on 10.0.0.1) is stopped" in texts[f"{folder}/verdict.txt"]
    assert run.dog.check() is None, "one verdict an attempt"


def test_a_silent_rank_that_is_not_stopped_is_looked_at_now_and_then_and_left_its_time(tmp_path: Path) -> None:
    run = Run(tmp_path, config=WatchdogConfig(hang_after_s=60, times_p99_step=200))
    for _ in range(130):
        run.clock.advance(1)
        assert run.dog.check() is None
    assert 4 <= run.nodes["node-1"].looks <= 6


def test_a_node_that_does_not_answer_leaves_its_rank_to_ray(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.nodes["node-1"].silent = True
    run.clock.advance(61)
    run.beat(0, standing_s=61)
    verdict = run.dog.check()
    assert verdict is not None and verdict.culprits == (1,)
    assert run.killed == [] and run.watch.stuck() == (1,)
    run.watch.end()
    assert run.watch.stuck() == ()


def test_a_process_that_is_gone_is_no_hang(tmp_path: Path) -> None:
    run = Run(tmp_path, states="S" + "Z")
    run.clock.advance(500)
    run.beat(0, standing_s=500)
    assert run.dog.check() is None and run.killed == []


@pytest.mark.parametrize("bucket", [B.DATA_WAIT, B.EVAL, B.CKPT_BLOCK])
def test_a_living_rank_may_wait_for_data_save_and_evaluate_as_long_as_it_likes(tmp_path: Path, bucket: Bucket) -> None:
    run = Run(tmp_path)
    run.watch.take(page(1, 1, [*SCRIPT, (B.STEP, 0.1, 31, False)], open_for=(bucket, 0.0, 31)))
    for _ in range(1000):
        run.clock.advance(10)
        run.beat(0, standing_s=10)
        run.watch.take(page(1, 1, [*SCRIPT, (B.STEP, 0.1, 31, False)], open_for=(bucket, 10.0, 31)))
        assert run.dog.check() is None
    assert run.nodes["node-0"].looks == 0


def test_the_same_place_gets_twice_the_time_after_each_hang_until_a_new_step_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, states="ST")
    run.clock.advance(61)
    assert run.dog.check() is not None
    run.begin(2)
    run.clock.advance(61)
    assert run.dog.check() is None
    run.clock.advance(60)
    assert run.dog.check() is not None
    run.begin(3)
    run.watch.take(page(3, 0, [*SCRIPT, *steps(31, 31, 1.0)], open_for=(B.STEP, 0.1, 32)))
    run.clock.advance(61)
    assert run.dog.check() is not None, "a step was done since: the bound is the configured one again"


def test_a_verdict_that_comes_after_the_attempt_was_replaced_kills_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path, states="ST")
    run.clock.advance(61)
    before = run.nodes["node-0"].look

    def replaced_meanwhile(attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
        run.watch.end()
        return before(attempt, ranks)

    run.nodes["node-0"].look = replaced_meanwhile  # type: ignore[method-assign] (a stand-in's)
    assert run.dog.check() is None and run.killed == [] and run.found == []


def test_a_rank_whose_journal_is_lost_is_not_taken_for_silent(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.watch.leave_out(1, 1)
    run.clock.advance(100_000)
    run.beat(0)
    assert run.dog.check() is None


def test_heartbeats_that_arrive_during_the_look_count_where_no_vault_answers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.clock.advance(100)  # the coordinator's own process stood still; heartbeats wait to be taken
    run.nodes["node-1"].silent = True
    before = run.nodes["node-0"].look

    def meanwhile(attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
        for rank in range(2):
            script = [*SCRIPT, *steps(31, 130, 1.0)]
            run.watch.take(page(attempt, rank, script, open_for=(B.STEP, 0.5, 131)))
        return before(attempt, ranks)

    run.nodes["node-0"].look = meanwhile  # type: ignore[method-assign] (a stand-in's)
    assert run.dog.check() is None and run.killed == []


def test_none_switches_the_watchdog_off(tmp_path: Path) -> None:
    run = Run(tmp_path, config=WatchdogConfig(hang_after_s=None), states="TT")
    run.clock.advance(100_000)
    assert run.dog.check() is None and run.nodes["node-0"].looks == 0


def test_a_rank_that_stops_between_two_heartbeats_is_judged_by_what_its_journal_says(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.watch.begin(2, run.watch.workers())
    for rank in range(2):  # the last heartbeat that arrived is older than the first step
        run.watch.take(page(2, rank, SCRIPT[:1], open_for=(B.CKPT_LOAD, 0.5, 1)))
    run.clock.advance(61)
    assert run.dog.check() is None, "by heartbeats alone it may still be loading"
    run.nodes["node-1"].seen = {"silent_s": 61.0, "still_s": 61.0, "bucket": B.STEP, "step": 12, "stepped": True}
    run.nodes["node-0"].seen = {"silent_s": 0.5, "still_s": 61.0, "bucket": B.STEP, "step": 12, "stepped": True}
    run.clock.advance(20)
    verdict = run.dog.check()
    assert verdict is not None and verdict.culprits == (1,)
    assert "native code holds Python's lock" in verdict.reason
