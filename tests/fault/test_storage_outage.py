"""C5: a storage that fails never stops or slows training, memory stays bounded, and the next commit comes by itself.

The short form; `make bench-outage` runs it with outages of a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ray_goodput as rg
from outages import run_outage
from servers import JuiceFSGateway

STOPPING_JOB = Path(__file__).parents[1] / "stopping_job.py"

MEMORY_BYTES = 128 << 20  # four saves; a client that kept what it could not send would pass it within 3 s


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["stopped", "slow", "503 to half"])
def test_training_goes_on_at_its_pace_and_the_next_commit_comes_by_itself(kind: str, tmp_path: Path) -> None:
    seen = run_outage(kind, tmp_path, quiet_s=2.0, outage_s=3.0, recovery_s=90.0)
    print(seen.line())
    assert seen.outage_steps >= 0.5 * 1.5 * seen.quiet_steps, seen.line()
    assert seen.outage_median_s <= 2 * seen.quiet_median_s, seen.line()
    assert seen.outage_rss_bytes <= seen.quiet_rss_bytes + MEMORY_BYTES, seen.line()
    assert seen.last_committed, seen.line()


def start_two(gateway: JuiceFSGateway, log: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    script = [sys.executable, "-X", "faulthandler", str(STOPPING_JOB)]
    command = [*script, f"{gateway.uri}/run", json.dumps(gateway.storage_options)]
    with Path(f"{log}.output").open("wb") as output:
        return [
            subprocess.Popen([*command, str(log), str(folder), str(rank)], stdout=output, stderr=output, env=os.environ)
            for rank in range(2)
        ]


def told_by(processes: list[subprocess.Popen[bytes]], log: Path, timeout_s: float) -> list[dict]:
    for process in processes:
        process.wait(timeout_s)
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], f"{sorted(log.parent.glob(f'{log.name}-*'))}: {Path(f'{log}.output').read_text()[-8000:]}"
    return [json.loads(Path(f"{log}-{rank}").read_text()) for rank in range(2)]


@pytest.mark.timeout(240)
def test_a_run_that_is_to_stop_leaves_a_storage_that_is_away_and_loses_no_step(tmp_path: Path) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with JuiceFSGateway(tmp_path / "gateway") as gateway:
            root = f"{gateway.uri}/run"
            processes += start_two(gateway, tmp_path / "first", tmp_path)
            deadline = time.monotonic() + 90
            while rg.latest_complete(root, storage_options=gateway.storage_options) is None:
                assert time.monotonic() < deadline, (tmp_path / "first.output").read_text()[-4000:]
                time.sleep(0.1)
            gateway.kill()
            first = told_by(processes, tmp_path / "first", 120)
            print(first[0])
            assert len({(rank["step"], rank["error"]) for rank in first}) == 1, "all ranks at one step"
            last = first[0]["step"]
            for part in ("max_durable_age=3 s allows", f"stopped at step {last}", f"newest of it is of step {last}"):
                assert part in first[0]["error"]
            gateway.start()
            again = tmp_path / "again"
            Path(f"{again}.stop").touch()
            processes += start_two(gateway, again, tmp_path)
            second = told_by(processes[2:], again, 120)
            assert [rank["start"] for rank in second] == [last] * 2, "what was staged in the outage"
            newest = rg.latest_complete(root, storage_options=gateway.storage_options, verify=True)
            assert newest is not None and f"step-{last:010d}" in newest
    finally:
        for process in processes:
            process.kill()
            process.wait()
