from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ray_goodput.cli.saboteur import STEPS_AFTER_COMMIT, Saboteur, choose_victim
from ray_goodput.core.run_state import Resume, RunStatus, WorkerInfo

WORKERS = tuple(WorkerInfo(world_rank=r, pid=100 + r, node_id="n", node_ip="127.0.0.1") for r in range(3))


def status(step: int, committed_step: int, *, resumes: tuple[Resume, ...] = ()) -> RunStatus:
    return RunStatus(
        run="r", attempt=len(resumes), step=step, committed_step=committed_step, workers=WORKERS, resumes=resumes
    )


def watched(
    observe: Callable[[], RunStatus | None], kill: Callable[[WorkerInfo], None] | None
) -> tuple[Saboteur, list[str]]:
    said: list[str] = []
    return Saboteur(observe, kill, last_step=99, say=said.append), said


@pytest.mark.parametrize(
    ("step", "committed_step", "strikes"),
    [
        (50, -1, False),  # nothing committed: all would be lost
        (40 + STEPS_AFTER_COMMIT - 1, 40, False),  # nothing to lose yet
        (40 + STEPS_AFTER_COMMIT, 40, True),
        (99 - STEPS_AFTER_COMMIT, 80, True),
        (100 - STEPS_AFTER_COMMIT, 80, False),  # it might be over before the signal arrives
    ],
)
def test_the_strike_comes_past_a_commit_and_before_the_end(step: int, committed_step: int, strikes: bool) -> None:
    victim = choose_victim(status(step, committed_step), last_step=99)
    assert victim == (WORKERS[2] if strikes else None)


def test_there_is_one_kill_whatever_comes_after_it() -> None:
    killed: list[int] = []
    seen_after = threading.Event()
    states = iter([status(10, -1), status(30, 19), status(31, 19), status(45, 39)])

    def observe() -> RunStatus | None:
        state = next(states, None)
        if state is None:
            seen_after.set()
        return state

    saboteur, said = watched(observe, lambda worker: killed.append(worker.pid))
    saboteur.start()
    assert seen_after.wait(20)
    saboteur.close()
    assert killed == [102]
    assert saboteur.strike is not None
    assert (saboteur.strike.step, saboteur.strike.committed_step) == (30, 19)
    assert [line for line in said if "SIGKILL" in line] == ["step 30: SIGKILL to rank 2, process 102"]


def test_a_victim_that_was_gone_already_is_no_strike_and_the_next_one_is() -> None:
    attempts: list[int] = []
    done = threading.Event()

    def kill(worker: WorkerInfo) -> None:
        attempts.append(worker.pid)
        if len(attempts) == 1:
            raise ProcessLookupError(worker.pid)
        done.set()

    saboteur, _ = watched(lambda: status(30, 19), kill)
    saboteur.start()
    assert done.wait(20)
    saboteur.close()
    assert attempts == [102, 102]
    assert saboteur.strike is not None


def test_the_watch_survives_an_observer_that_fails_and_keeps_the_last_status() -> None:
    over = threading.Event()
    resumes = (Resume(attempt=1, step=0, tier="none"), Resume(attempt=2, step=19, tier="local"))
    steps: list[Callable[[], RunStatus | None]] = [
        lambda: None,
        lambda: status(1, -1, resumes=resumes[:1]),
        lambda: 1 / 0,  # type: ignore[return-value, list-item] (it raises)
        lambda: status(25, 19, resumes=resumes),
    ]
    calls = iter(steps)

    def observe() -> RunStatus | None:
        step = next(calls, None)
        if step is None:
            over.set()
            return None
        return step()

    saboteur, said = watched(observe, None)
    saboteur.start()
    assert over.wait(20)
    saboteur.close()
    assert saboteur.strike is None
    assert saboteur.last is not None and saboteur.last.resumes == resumes
    assert said == [
        "attempt 1: 3 workers begin",
        "attempt 2: 3 workers go on after step 19, from local",
        "step 25: the checkpoint of step 19 is committed",
    ]
