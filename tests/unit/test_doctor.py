"""The doctor: each trap is found in a run or on a node that has it, with its cost and cure, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from journal_pages import Stretch, page, steps
from ray_goodput.cli.app import app
from ray_goodput.cli.doctor_node import NodeFacts, gather, judge
from ray_goodput.cli.doctor_storage import try_storage
from ray_goodput.config import StoreSpec
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.doctor import Finding, diagnose_run
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.run_files import RunFiles
from ray_goodput.goodput.run_view import RunView, view_run
from servers import JuiceFSGateway


def lines_of(ledger: Ledger) -> list[bytes]:
    return [line for segment in ledger.to_segments() for line in segment.data.splitlines()]


def view_of(ledger: Ledger) -> RunView:
    return view_run(RunFiles("/runs/r", lines_of(ledger), ()))


def train(
    ledger: Ledger, attempt: int, script: list[Stretch], at: float, *, world: int = 2, closed: bool = True
) -> float:
    """One attempt that does `script` on every rank; returns when it is done."""
    ledger.attempt_started(attempt, world, at)
    for rank in range(world):
        ledger.rank_hello(attempt, rank, at)
        ledger.page(page(attempt, rank, script, closed=closed), at)
    return at + sum(seconds for _, seconds, _, _ in script)


def healthy() -> Ledger:
    """An hour of quick steps, saved each minute for next to nothing."""
    ledger = Ledger(2)
    ledger.run_started(0)
    script = [s for step in range(1, 3601) for s in [(Bucket.STEP, 1.0, step, True)]]
    ledger.attempt_started(1, 2, 0)
    for rank in (0, 1):
        ledger.rank_hello(1, rank, 0)
        ledger.page(page(1, rank, script, closed=True), 3600)
    for minute in range(1, 61):
        ledger.commit(60 * minute, 1, 60.0 * minute + 1)
    ledger.attempt_ended(1, 3602, "finished")
    ledger.run_ended(3602)
    return ledger


def by_check(found: list[Finding]) -> Mapping[str, Finding]:
    assert len({f.check for f in found}) == len(found)
    return {f.check: f for f in found}


def test_a_healthy_run_has_no_problem() -> None:
    found = diagnose_run(view_of(healthy()), now_s=10_000)
    assert [f for f in found if f.level != "ok"] == []
    assert {"driver", "data", "save interval", "save stall"} <= set(by_check(found))


def dead_driver() -> Ledger:
    ledger = Ledger(2)
    ledger.run_started(0)
    end = train(ledger, 1, steps(1, 100, 1.0), 0, closed=False)
    ledger.commit(50, 1, end)
    return ledger


def taken_up() -> Ledger:
    ledger = dead_driver()
    ledger.run_started(500)
    end = train(ledger, 2, steps(51, 100, 1.0), 510)
    ledger.resumed(2, 50)
    ledger.attempt_ended(2, end, "finished")
    ledger.run_ended(end)
    return ledger


def old_commit() -> Ledger:
    ledger = Ledger(2)
    ledger.run_started(0)
    ledger.attempt_started(1, 2, 0)
    ledger.commit(5, 1, 10)
    for rank in (0, 1):
        ledger.rank_hello(1, rank, 0)
        ledger.page(page(1, rank, steps(1, 2000, 1.0)), 2000)
    return ledger


def data_bound() -> Ledger:
    ledger = Ledger(2)
    ledger.run_started(0)
    script = [
        s for step in range(1, 101) for s in [(Bucket.DATA_WAIT, 0.5, step, False), (Bucket.STEP, 1.0, step, True)]
    ]
    end = train(ledger, 1, script, 0)
    ledger.attempt_ended(1, end, "finished")
    ledger.run_ended(end)
    return ledger


def too_rare() -> Ledger:
    ledger = Ledger(2048)
    ledger.run_started(0)
    at, step = 0.0, 1
    for attempt in range(1, 5):  # fails every two hours, saves every hour
        script = [
            *steps(step, step + 3599, 1.0),
            (Bucket.CKPT_BLOCK, 1.0, step + 3600, False),
            *steps(step + 3600, step + 7100, 1.0),
        ]
        train(ledger, attempt, script, at)
        ledger.resumed(attempt, step - 1)
        ledger.commit(step + 1799, attempt, at + 1810)
        ledger.commit(step + 3599, attempt, at + 3610)
        at += 7200
        step += 3600
        ledger.attempt_ended(attempt, at, "worker" if attempt < 4 else "finished", ranks=[0])
        at += 60
    ledger.run_ended(at)
    return ledger


def stalls() -> Ledger:
    ledger = Ledger(2)
    ledger.run_started(0)
    script: list[Stretch] = []
    for step in range(1, 101):
        script += [
            (Bucket.STEP, 1.0, step, True),
            *([(Bucket.CKPT_BLOCK, 5.0, step + 1, False)] if step % 20 == 0 else []),
        ]
    end = train(ledger, 1, script, 0)
    for step in range(20, 101, 20):
        ledger.commit(step, 1, step * 1.25 + 1)
    ledger.attempt_ended(1, end, "finished")
    ledger.run_ended(end)
    return ledger


def gave_up() -> Ledger:
    ledger = dead_driver()
    ledger.attempt_ended(1, 101, "worker", ranks=[1], reason="SIGKILL")
    ledger.run_ended(102)
    return ledger


def reports_each_step() -> Ledger:
    ledger = Ledger(2)
    ledger.run_started(0)
    end = train(ledger, 1, steps(1, 50, 2.02), 0)
    ledger.attempt_ended(1, end, "finished")
    ledger.run_ended(end)
    return ledger


def hung() -> Ledger:
    ledger = dead_driver()
    ledger.attempt_ended(1, 705, "worker", ranks=[1], reason="health check timed out")
    end = train(ledger, 2, steps(51, 60, 1.0), 720)
    ledger.attempt_ended(2, end, "finished")
    ledger.run_ended(end)
    return ledger


def half_empty() -> Ledger:
    ledger = Ledger(4)
    ledger.run_started(0)
    end = train(ledger, 1, steps(1, 50, 1.0), 0)
    ledger.attempt_ended(1, end, "finished")
    ledger.run_ended(end)
    return ledger


@pytest.mark.parametrize(
    ("make", "check", "level"),
    [
        (dead_driver, "driver", "problem"),
        (taken_up, "drivers before", "note"),
        (old_commit, "newest commit", "problem"),
        (data_bound, "data", "problem"),
        (too_rare, "save interval", "problem"),
        (stalls, "save stall", "problem"),
        (gave_up, "failure budget", "problem"),
        (reports_each_step, "report each step", "note"),
        (hung, "health timeout", "problem"),
        (half_empty, "idle nodes", "note"),
    ],
)
def test_a_trap_is_found_with_its_cost_and_cure(make: Callable[[], Ledger], check: str, level: str) -> None:
    view = view_of(make())
    late = 10_000 if make is dead_driver else 10
    found = by_check(diagnose_run(view, now_s=view.as_of_s + late))
    assert found[check].level == level
    assert found[check].found and found[check].costs and found[check].mend
    healthy_finding = by_check(diagnose_run(view_of(healthy()), now_s=10_000)).get(check)
    assert healthy_finding is None or healthy_finding.level == "ok"


def test_a_run_that_never_began_is_said_so() -> None:
    ledger = Ledger(2)
    ledger.run_started(0)
    assert [f.level for f in diagnose_run(view_of(ledger), now_s=0)] == ["note"]


FACTS = NodeFacts(
    node="n1",
    shm_total=64 * 1024**3,
    local_dir="/nvme",
    local_dir_chosen=True,
    local_dir_fs="ext4",
    rotational=False,
    local_free=10**12,
    open_files=65536,
    python="3.11.9",
    env={"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60", "RAY_JOB_STOP_WAIT_TIME_S": "60"},
)


def test_a_node_as_it_should_be_has_no_finding() -> None:
    assert {f.level for f in judge(FACTS)} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"shm_total": 64 * 1024**2}, "shared memory", "problem"),
        ({"shm_total": None}, "shared memory", "problem"),
        ({"local_dir_fs": "tmpfs"}, "local disk", "problem"),
        ({"local_dir_fs": "nfs4"}, "local disk", "problem"),
        ({"local_dir_fs": "fuse.juicefs"}, "local disk", "problem"),
        ({"local_dir_chosen": False}, "local disk", "note"),
        ({"rotational": True}, "local disk", "note"),
        ({"local_free": 10**9}, "local disk space", "problem"),
        ({"open_files": 1024}, "open files", "note"),
        ({"clock_ahead_s": -30.0}, "clock", "note"),
        ({"env": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}, "health timeout", "note"),
        ({"env": {"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60"}}, "job stop", "note"),
        ({"env": {**FACTS.env, "AWS_ENDPOINT_URL": "http://minio:9000"}}, "upload checksums", "note"),
    ],
)
def test_a_node_with_a_trap_is_told_its_cost_and_cure(changes: dict[str, Any], check: str, level: str) -> None:
    found = [f for f in judge(dataclasses.replace(FACTS, **changes)) if f.level != "ok"]
    assert [(f.check, f.level, f.where) for f in found] == [(check, level, "n1")]
    assert found[0].costs and found[0].mend


def test_shared_memory_is_held_against_what_the_run_stages() -> None:
    finding = judge(FACTS, staging_bytes=100 * 1024**3)[0]
    assert finding.level == "problem" and "100.0 GiB" in finding.found and "64.0 GiB" in finding.found


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = gather({"RAY_GOODPUT_LOCAL_DIR": str(tmp_path / "not" / "there"), "AWS_SECRET_ACCESS_KEY": "x"})
    assert facts.local_dir_chosen and facts.local_free > 0 and facts.open_files > 0
    assert facts.local_dir_fs != "unknown" and "x" not in facts.env.values()


def test_a_folder_that_works_passes_and_one_that_does_not_is_a_problem(tmp_path: Path) -> None:
    assert [f.level for f in try_storage(StoreSpec(uri=str(tmp_path)))] == ["ok"]
    assert list(tmp_path.rglob(".doctor*")) == []
    (tmp_path / "file").write_text("not a folder")
    found = try_storage(StoreSpec(uri=str(tmp_path / "file" / "run")))
    assert [f.level for f in found] == ["problem"] and "cannot be written" in found[0].found


def test_a_server_on_which_pyarrows_uploads_vanish_is_found_out(
    juicefs_gateway: JuiceFSGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = StoreSpec(uri=f"{juicefs_gateway.uri}/doctor", options=juicefs_gateway.storage_options)
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION", raising=False)
    found = {f.check: f for f in try_storage(spec)}
    assert found["storage"].level == "ok"
    assert found["upload checksums"].level == "problem" and "when_required" in found["upload checksums"].mend
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    assert {f.level for f in try_storage(spec)} == {"ok"}, "the cure works"


def write_run(folder: Path, ledger: Ledger) -> Path:
    (folder / "ledger").mkdir(parents=True)
    for segment in ledger.to_segments():
        (folder / "ledger" / segment.name).write_bytes(segment.data)
    return folder


def test_the_command_says_it_as_text_and_as_json_and_by_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = write_run(tmp_path / "good", healthy()), write_run(tmp_path / "bad", data_bound())
    env = {"RAY_GOODPUT_LOCAL_DIR": str(tmp_path)}
    assert CliRunner().invoke(app, ["doctor", "--run", str(bad)], env=env).exit_code == 1
    text = capfd.readouterr().out
    assert text.startswith("PROBLEM") and "costs:" in text and "mend:" in text
    assert CliRunner().invoke(app, ["doctor", "--run", str(bad), "--json"], env=env).exit_code == 1
    body = json.loads(capfd.readouterr().out)
    assert body["problem"] >= 1
    data = next(f for f in body["findings"] if f["check"] == "data")
    assert data["level"] == "problem" and data["costs"] and data["mend"]
    CliRunner().invoke(app, ["doctor", "--run", str(good), "--json"], env=env)
    clean = json.loads(capfd.readouterr().out)
    assert [f for f in clean["findings"] if f["level"] == "problem" and not f["where"]] == []


def test_a_run_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--run", str(tmp_path / "nothing")])
    assert result.exit_code == 1 and "There is no ledger" in str(result.exception)
