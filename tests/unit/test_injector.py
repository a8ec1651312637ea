"""Where a fault's phase is held: the facts that each place in our code passes to its gate. No Ray here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_goodput.actors.names import run_key
from ray_goodput.checkpoint.plan import image_name
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId
from ray_goodput.core.run_state import Resume, RunStatus, WorkerInfo
from ray_goodput.errors import RunError
from ray_goodput.gates import Action
from ray_goodput.testing import Fault, FaultInjector, LiveRun, find_run
from ray_goodput.testing.injector import gate_of, trains

WORKERS = tuple(WorkerInfo(world_rank=r, pid=100 + r, node_id=f"n{r}", node_ip="127.0.0.1") for r in range(2))
STATUS = RunStatus(
    run="r", attempt=3, step=12, committed_step=10, workers=WORKERS, resumes=(Resume(attempt=3, step=10, tier="local"),)
)
FOLDER = f"checkpoints/{CheckpointId(15, 3).folder}"


@pytest.mark.parametrize(
    ("phase", "place", "struck", "passed"),
    [
        ("step", "step", {"rank": 1, "step": 20}, {"rank": 1, "step": 19}),
        ("staging", "stage", {"rank": 1, "step": 20}, {"rank": 0, "step": 20}),
        (
            "uploading",
            "store",
            {"op": "upload_file", "key": f"{FOLDER}/{image_name(1)}"},
            {"op": "upload_file", "key": f"{FOLDER}/{image_name(0)}"},
        ),
        (
            "committing",
            "store",
            {"op": "put", "key": f"{FOLDER}/{COMMIT_NAME}"},
            {"op": "get", "key": f"{FOLDER}/{COMMIT_NAME}"},
        ),
        ("restoring", "restore", {"rank": 1, "step": 10, "attempt": 4}, {"rank": 1, "step": 10, "attempt": 3}),
        ("growing", "join", {"rank": 1, "world": 3}, {"rank": 1, "world": 2}),
    ],
)
def test_a_phase_is_held_where_the_run_is_in_it(phase: str, place: str, struck: dict, passed: dict) -> None:
    rule = gate_of(Fault.parse(f"kill:worker:rank=1:step=20:phase={phase}"), STATUS, until_at_s=100.0)
    assert (rule.place, rule.action, rule.times) == (place, Action.HOLD, 1)
    assert rule.strikes(place, struck, 99.0)
    assert not rule.strikes(place, struck, 100.0)
    assert not rule.strikes(place, passed, 99.0)


def test_a_moment_that_does_not_come_is_an_error_that_says_how_far_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRun, "status", lambda self: STATUS)
    with pytest.raises(RunError, match=r"kill:worker:rank=1:step=40 did not come .* it is at step 12"):
        FaultInjector(LiveRun("r", "r-0")).inject(Fault.parse("kill:worker:rank=1:step=40"), timeout_s=0.2)


def test_a_rank_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRun, "status", lambda self: STATUS)
    with pytest.raises(RunError, match="has 2 workers now"):
        FaultInjector(LiveRun("r", "r-0")).inject(Fault.parse("kill:worker:rank=2"))


def test_a_run_is_found_by_its_name_and_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = StoreSpec(uri="/a/llm 1"), StoreSpec(uri="/b/llm 1")
    named = [f"coordinator:{run_key('llm 1', here)}", f"vault:{run_key('other', here)}:n"]
    actors = [{"namespace": "ray_goodput", "name": name} for name in named]
    actors.append({"namespace": "else", "name": "coordinator:llm_2-0"})
    monkeypatch.setattr("ray.util.list_named_actors", lambda all_namespaces: actors)
    assert find_run("llm 1").key == find_run("llm 1", here).key == run_key("llm 1", here)
    for name, store in (("llm 2", None), ("llm 1", there), ("other", None)):
        with pytest.raises(RunError, match=f"No run '{name}' is being trained on this Ray cluster; runs here: llm_1"):
            find_run(name, store)
    actors.append({"namespace": "ray_goodput", "name": f"coordinator:{run_key('llm 1', there)}"})
    with pytest.raises(ValueError, match="2 runs are named 'llm 1'"):
        find_run("llm 1")
    assert find_run("llm 1", there).key == run_key("llm 1", there)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"workers": ()}, False),  # between two attempts
        ({"attempt": 4}, False),  # it restores
        ({"resumes": ()}, True),  # the coordinator was killed meanwhile
        ({"resumes": (), "attempt": 1, "step": -1, "committed_step": -1}, False),  # a run that has just begun
    ],
)
def test_a_run_trains_once_its_present_attempt_has_begun_its_steps(changes: dict, expected: bool) -> None:
    assert trains(replace(STATUS, **changes)) is expected
