"""`ray-goodput chaos`: what it refuses before it touches anything, and what it tells. No Ray here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from ray_goodput.core.run_state import RunStatus, WorkerInfo
from ray_goodput.errors import ConfigError, GoodputError, RunError
from ray_goodput.testing import Fault, LiveRun, Strike

WORKERS = tuple(WorkerInfo(world_rank=r, pid=100 + r, node_id="n", node_ip="127.0.0.1") for r in range(2))
STATUS = RunStatus(run="r", attempt=1, step=9, committed_step=5, workers=WORKERS, resumes=())


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fault]]:
    """A run `r` on a Ray that is not there; what is injected into it is kept."""
    struck: list[Fault] = []

    class Injector:
        def __init__(self, run: LiveRun, *, seed: int, say: Callable[[str], None]) -> None:
            assert run.name == "r"

        def inject(self, fault: Fault, *, timeout_s: float) -> Strike:
            if fault.rank == 9:
                raise RunError("There is no rank 9 now.")
            struck.append(fault)
            common: dict[str, Any] = {"at_s": 1.0, "attempt": 1, "step": 9, "committed_step": 5, "world": 2}
            return Strike(fault=fault, rank=fault.rank, pid=101, node_id="n", **common)

    def find(name: str, store: Any) -> LiveRun:
        if name != "r":
            raise RunError(f"No run {name!r} is being trained on this Ray cluster; runs here: r.")
        return LiveRun("r", "r-0")

    monkeypatch.setattr("ray.init", lambda *args, **kwargs: None)
    monkeypatch.setattr("ray_goodput.testing.find_run", find)
    monkeypatch.setattr("ray_goodput.testing.FaultInjector", Injector)
    monkeypatch.setattr(LiveRun, "status", lambda self: STATUS)
    yield struck


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["chaos", *arguments])


def error_of(result: Any) -> str:
    assert isinstance(result.exception, GoodputError), result.output
    return str(result.exception)


@pytest.mark.parametrize("arguments", [(), ("--fault", "kill:worker", "--mtbf", "20s")])
def test_what_is_to_go_wrong_must_be_said_in_one_way(struck: list[Fault], arguments: tuple[str, ...]) -> None:
    result = run("--run", "r", *arguments)
    assert "either --fault" in error_of(result) and isinstance(result.exception, ConfigError)
    assert not struck


def test_a_run_that_is_not_there_is_refused_and_those_that_are_are_named(struck: list[Fault]) -> None:
    assert "runs here: r." in error_of(run("--run", "other", "--fault", "kill:worker"))
    assert not struck


def test_faults_are_injected_in_their_order_and_told_as_json(struck: list[Fault], capfd: pytest.CaptureFixture) -> None:
    texts = ["kill:worker:rank=1:step=40", "kill:vault:rank=0"]
    result = run("--run", "r", "--fault", texts[0], "--fault", texts[1], "--json")
    assert result.exit_code == 0, result.exception
    assert [str(fault) for fault in struck] == texts
    told = json.loads(capfd.readouterr().out)
    assert (told["run"], told["ended"]) == ("r", "done")
    assert [fault["fault"] for fault in told["faults"]] == texts
    assert told["faults"][0]["pid"] == 101


def test_a_fault_whose_moment_does_not_come_ends_with_an_error(struck: list[Fault]) -> None:
    assert "no rank 9" in error_of(run("--run", "r", "--fault", "kill:worker:rank=9", "--fault", "kill:worker"))
    assert not struck


def test_random_faults_are_those_of_the_seed_and_as_many_as_asked_for(struck: list[Fault]) -> None:
    arguments = ("--run", "r", "--mtbf", "0.01", "--count", "5", "--seed", "4")
    assert run(*arguments).exit_code == 0
    first = list(struck)
    struck.clear()
    assert run(*arguments).exit_code == 0
    assert struck == first and len(first) == 5


def test_random_faults_end_with_the_run(struck: list[Fault], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_goodput.cli.chaos._GONE_AFTER_S", 0.0)
    monkeypatch.setattr(LiveRun, "status", lambda self: None)
    assert run("--run", "r", "--mtbf", "100").exit_code == 0
    assert not struck
