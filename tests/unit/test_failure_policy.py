"""Laws of the failure policy as Ray Train's controller meets it: what is retried, what ends the run, who is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError
from ray.train.v2.api.exceptions import WorkerGroupError

from ray_goodput.config import FailureBudget
from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.run_state import RunStatus, WorkerInfo
from ray_goodput.errors import DrainedError
from ray_goodput.train import policies
from ray_goodput.train.failures import note_step
from ray_goodput.train.policies import ProgressFailurePolicy
from ray_goodput.train.ray_compat import FailureDecision

WORKERS = tuple(WorkerInfo(world_rank=r, pid=r, node_id=f"n{r}", node_ip=f"10.0.0.{r}") for r in range(2))


class Run:
    """A coordinator that Ray's calls reach, and a policy on top of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **budget: Any) -> None:
        self.committed: CheckpointId | None = None
        self.silent = False
        self.told: list[dict[str, Any]] = []
        monkeypatch.setattr(policies, "ray", SimpleNamespace(get_actor=lambda name, namespace: self, get=self._get))
        self.policy = ProgressFailurePolicy(None, budget=FailureBudget(**budget), run_key="run")
        self.last_committed = SimpleNamespace(remote=lambda: self.committed)
        status = RunStatus(run="r", attempt=1, step=0, committed_step=0, workers=WORKERS, resumes=())
        self.status = SimpleNamespace(remote=lambda: status)
        self.failure_seen = SimpleNamespace(remote=lambda **said: self.told.append(said))

    def _get(self, refs: list[Any], timeout: float) -> list[Any]:
        assert 0 < timeout <= 10
        if self.silent:
            raise GetTimeoutError("5 s")
        return refs

    def fails(self, error: Exception, *, step: int = 7) -> bool:
        """Whether rank 1's error is retried."""
        note_step(error, step)
        return self.policy.make_decision(WorkerGroupError("failed", {1: error})) is FailureDecision.RETRY


def test_a_deterministic_error_ends_the_run_the_second_time_and_the_coordinator_gets_the_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, max_failures_without_progress=10)
    assert run.fails(KeyError("z"))
    assert not run.fails(KeyError("z"))
    last = run.told[-1]
    assert (last["kind"], last["retry"], last["ranks"]) == ("worker", False, (1,))
    for part in ("no commit yet", "ranks [1]", "node 10.0.0.1", "step 7", "KeyError: 'z'"):
        assert part in last["reason"]


def test_the_whole_budget_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_failures_without_progress=3, stop_on_repeated_error=False)
    assert [run.fails(KeyError("z")) for _ in range(4)] == [True, True, True, False]
    assert "4 failures in a row" in run.told[-1]["reason"]


def test_an_exception_every_50_steps_with_commits_in_between_never_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_failures_without_progress=1)
    for life in range(1, 101):
        run.committed = CheckpointId(life * 50 - 5, life)
        assert run.fails(RuntimeError("every 50 steps"), step=life * 50), run.told[-1]["reason"]


@pytest.mark.parametrize("error", [DrainedError("node n1 goes", (1,)), ActorDiedError()])
def test_a_drain_is_never_counted_and_a_death_is(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run = Run(monkeypatch, max_failures_without_progress=0)
    drained = isinstance(error, DrainedError)
    assert run.fails(error) == drained
    assert run.told[-1]["kind"] == ("drain" if drained else "worker")


def test_a_silent_coordinator_means_no_progress_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_failures_without_progress=1)
    run.committed = CheckpointId(5, 1)
    assert run.fails(RuntimeError("a"))
    run.silent, run.committed = True, CheckpointId(10, 2)
    assert not run.fails(RuntimeError("b"))
