"""C1: whatever storage call a save dies at, the next start resumes from the newest commit, and its save works."""

import json
import multiprocessing as mp
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from fault.save_process import build, digest, resume, resume_and_save
from ray_goodput.actors.commits import CommitLog
from ray_goodput.clock import SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.storage import open_store
from servers import JuiceFSGateway

# A server that has imported torch once and nothing else: a process for each crash point costs milliseconds, not
# seconds. Only modules that are found without the tests' `sys.path`, which Python 3.11's server drops: it leaves out
# silently what it cannot import, and then each process takes seconds to import torch, and `torch._dynamo` for its
# first optimizer.
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "ray_goodput.checkpoint.reader", "ray_goodput.actors.vault"])


def run(spec: StoreSpec, scratch: Path, die_before: int = -1) -> dict[str, Any] | None:
    """What the process said, None if it was killed at the storage call it had to die at."""
    scratch.mkdir(parents=True, exist_ok=True)
    out = scratch / "out.json"
    process = SERVER.Process(target=resume_and_save, args=(spec, scratch, die_before, out), daemon=True)
    process.start()
    process.join(60)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == (0 if die_before < 0 else -signal.SIGKILL), f"{scratch.name}: {process.exitcode}"
    return json.loads(out.read_text()) if out.exists() else None


def done(spec: StoreSpec, scratch: Path) -> dict[str, Any]:
    told = run(spec, scratch)
    assert told is not None
    return told


def newest(spec: StoreSpec, scratch: Path) -> tuple[int, str]:
    """(step, digest of the weights) of what a further start would resume from."""
    model, optimizer = build()
    store = open_store(spec)
    log = CommitLog(run="run", store=store, clock=SystemClock())
    log.open()
    return resume(log, store, log.highest_attempt + 1, scratch, model, optimizer), digest(model)


def die_and_go_on(spec: StoreSpec, scratch: Path, call: int, ends: dict[int, str]) -> int:
    """Die before storage call `call` and start again; the step resumed from, whose weights must be those of `ends`."""
    assert run(spec, scratch / f"dies-{call}", die_before=call) is None
    after = done(spec, scratch / f"after-{call}")
    assert after["start"] == ends[after["resumed"]], f"storage call {call}"
    assert newest(spec, scratch / f"again-{call}") == (after["resumed"] + 1, after["end"])
    return after["resumed"]


@pytest.mark.timeout(180)
def test_a_save_killed_before_any_of_its_storage_calls_resumes_from_the_newest_commit(tmp_path: Path) -> None:
    base = tmp_path / "base"
    first = done(StoreSpec(uri=str(base)), tmp_path / "s0")
    second = done(StoreSpec(uri=str(base)), tmp_path / "s1")
    assert second["resumed"] == 1 and second["start"] == first["end"]
    whole = done(StoreSpec(uri=str(shutil.copytree(base, tmp_path / "whole"))), tmp_path / "s2")
    assert whole["resumed"] == 2

    # Either the commit before, or the one under way if its record was already there: never anything else.
    ends = {2: second["end"], 3: whole["end"]}
    tried = {}
    for call in range(len(whole["calls"])):
        spec = StoreSpec(uri=str(shutil.copytree(base, tmp_path / f"storage-{call}")))
        tried[call] = die_and_go_on(spec, tmp_path, call, ends)
    print(f"crash points tried: {len(tried)}; resumed from: {tried}")
    assert set(tried.values()) == {2, 3}


@pytest.mark.timeout(120)
def test_a_save_to_s3_killed_round_its_commit_resumes_from_the_newest_commit(
    tmp_path: Path, juicefs_gateway: JuiceFSGateway
) -> None:
    def spec(name: str) -> StoreSpec:
        return StoreSpec(uri=f"{juicefs_gateway.uri}/crash-{name}", options=juicefs_gateway.storage_options)

    first = done(spec("whole"), tmp_path / "s0")
    ends = {0: first["start"], 1: first["end"]}
    ops = [f"{op} {key.rpartition('/')[2]}" for op, key in first["calls"]]
    commit = ops.index("put COMMIT.json")
    points = [ops.index("upload_file __0_0.distcp"), ops.index("put .metadata"), commit, commit + 1]
    resumed = [die_and_go_on(spec(str(call)), tmp_path, call, ends) for call in points]
    assert resumed == [0, 0, 0, 1]
