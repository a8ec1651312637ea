"""Processes that stand still instead of dying: the run goes on by itself, and nothing is lost that was saved."""

from collections.abc import Callable
from pathlib import Path

import pytest

from running import Finished, Job, assert_books_balance, assert_nothing_lost

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("hanging_job.py")

StartJob = Callable[..., Job]


def stacks(finished: Finished) -> dict[str, str]:
    """What the watchdog kept, by file name."""
    found = finished.store.list("stacks")
    return {info.key.rpartition("/")[2]: finished.store.get(info.key).decode() for info in found}


@pytest.mark.parametrize(("how", "told"), [("stop-rank", "is stopped (SIGSTOP)"), ("hold-gil", "Python's lock")])
def test_a_rank_that_stands_still_is_named_killed_and_replaced(
    job: StartJob, undisturbed: Finished, how: str, told: str
) -> None:
    hung = job(how, "--how", how, script=SCRIPT).succeed()
    [incident] = hung.outcome["goodput"]["incidents"]
    assert (incident["kind"], incident["ranks"]) == ("hang", [1]), incident
    assert told in incident["reason"] and "Hung: rank 1 (process " in incident["reason"]
    assert hung.outcome["goodput"]["buckets_s"]["hang"] > 2 * 4
    assert incident["step_resumed"] >= 10, "a commit before the hang was not used"
    assert hung.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(hung, undisturbed.audit().steps)
    assert_books_balance(hung)
    kept = stacks(hung)
    assert set(kept) == {"verdict.txt", "rank-00000.txt", "rank-00001.txt"}
    assert "_engine_run_backward" in kept["rank-00000.txt"], "rank 0 waits for rank 1"
    assert ("stand_still" if how == "hold-gil" else "No stacks: a stopped process") in kept["rank-00001.txt"]


@pytest.mark.parametrize("actor", ["_VaultProcess", "_CoordinatorProcess"])
def test_a_stopped_actor_is_started_anew_while_training_goes_on(
    job: StartJob, undisturbed: Finished, actor: str
) -> None:
    went_on = job(f"stopped{actor}", "--how", f"stop-{actor}", "--step-s", "0.4", script=SCRIPT).succeed()
    assert f"{'vault' if actor == '_VaultProcess' else 'coordinator'}:" in went_on.log
    assert "has not answered for" in went_on.log, "it was never found"
    goodput = went_on.outcome["goodput"]
    assert [a["attempt"] for a in goodput["attempts"]] == [1], "training was restarted"
    assert goodput["durable_step"] == undisturbed.outcome["goodput"]["durable_step"]
    assert went_on.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(went_on, undisturbed.audit().steps)
    assert_books_balance(went_on)
