"""Processes that stand still instead of dying: the run goes on by itself, and nothing is lost that was saved."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from running import Finished, Job, assert_books_balance, assert_nothing_lost

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("hanging_job.py")

LAST_STEP = 46

StartJob = Callable[..., Job]


def stacks(finished: Finished) -> dict[str, str]:
    """What the watchdog kept, by file name."""
    found = finished.store.list("stacks")
    return {info.key.rpartition("/")[2]: finished.store.get(info.key).decode() for info in found}


@pytest.fixture(scope="module")
def stopped_actors(job: StartJob) -> Finished:
    """A run whose vault and coordinator were stopped in the middle. Nothing else happened to it."""
    how = "stop-_VaultProcess,_CoordinatorProcess"
    return job("stopped-actors", "--how", how, "--step-s", "0.35", script=SCRIPT).succeed()


def test_stopped_actors_are_started_anew_while_training_goes_on(stopped_actors: Finished) -> None:
    for actor in ("vault:", "coordinator:"):
        assert re.search(f"The actor {actor}.* has not answered for", stopped_actors.log), f"{actor} was never found"
    goodput = stopped_actors.outcome["goodput"]
    assert [a["attempt"] for a in goodput["attempts"]] == [1], "training was restarted"
    assert goodput["durable_step"] == LAST_STEP
    found = stopped_actors.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert_books_balance(stopped_actors)


def test_a_rank_that_is_stopped_is_named_killed_and_replaced(job: StartJob, stopped_actors: Finished) -> None:
    """One that holds Python's lock, or sleeps: `tests/fault/test_watchdog_of_processes.py`, which needs no Ray."""
    hung = job("stop-rank", "--how", "stop-rank", script=SCRIPT).succeed()
    [incident] = hung.outcome["goodput"]["incidents"]
    assert (incident["kind"], incident["ranks"]) == ("hang", [1]), incident
    assert "is stopped (SIGSTOP)" in incident["reason"] and "Hung: rank 1 (process " in incident["reason"]
    assert hung.outcome["goodput"]["buckets_s"]["hang"] > 2 * 4
    assert incident["step_resumed"] >= 10, "a commit before the hang was not used"
    assert hung.outcome["weights"] == stopped_actors.outcome["weights"]
    assert_nothing_lost(hung, stopped_actors.audit().steps)
    assert_books_balance(hung)
    kept = stacks(hung)
    assert set(kept) == {"verdict.txt", "rank-00000.txt", "rank-00001.txt"}
    assert "_engine_run_backward" in kept["rank-00000.txt"], "rank 0 waits for rank 1"
    assert "No stacks: a stopped process" in kept["rank-00001.txt"]
