"""F1 beside the fault matrix: through `ray-goodput chaos`, at three ranks, on S3, and with a driver that is drained."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_goodput.cli.demo_cluster import DemoCluster
from ray_goodput.config import StoreSpec
from ray_goodput.storage import open_store
from running import Finished, Job, assert_books_balance, assert_nothing_lost
from servers import JuiceFSGateway

pytestmark = pytest.mark.timeout(400)

StartJob = Callable[..., Job]


def test_undisturbed_every_sample_is_trained_on_once_an_epoch(undisturbed: Finished) -> None:
    found = undisturbed.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert found.samples == 2 * 363
    assert undisturbed.outcome["metrics"]["loss"] > 0
    assert_books_balance(undisturbed)


def test_chaos_kills_the_worker_it_was_told_at_the_step_it_was_told_and_nothing_is_lost(
    job: StartJob, undisturbed: Finished, cluster: DemoCluster
) -> None:
    running = job("chaos", "--step-s", "0.2")
    running.wait_for_commit()
    told = chaos(cluster, "--run", "chaos", "--fault", "kill:worker:rank=1:step=12", "--json")
    [strike] = json.loads(told.stdout)["faults"]
    assert (strike["rank"], strike["attempt"]) == (1, 1) and strike["step"] >= 12 and strike["pid"] > 0
    finished = running.succeed()
    assert [attempt for attempt, _, _ in finished.outcome["resumes"]] == [1, 2]
    assert finished.outcome["goodput"]["incidents"][0]["ranks"] == [1]
    assert finished.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(finished, undisturbed.audit().steps)
    assert_books_balance(finished)
    over = chaos(cluster, "--run", "chaos", "--fault", "kill:worker")
    assert over.returncode == 1 and "No run 'chaos' is being trained on this Ray cluster" in over.stderr


def chaos(cluster: DemoCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray_goodput.cli.app", "chaos", "--address", cluster.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_three_ranks_resume_bit_identically_when_reproducible(job: StartJob, undisturbed: Finished) -> None:
    arguments = ("--workers", "3", "--reproducible")
    whole = job("three", *arguments).succeed()
    killed = job("three-killed", *arguments, "--kill", "4").succeed()
    assert killed.outcome["killed"] and killed.outcome["resumes"][1][1] > 0
    assert killed.outcome["weights"] == whole.outcome["weights"]
    assert_nothing_lost(killed, undisturbed.audit().steps)


def test_the_same_through_a_real_s3_server(
    job: StartJob, undisturbed: Finished, data: Path, juicefs_gateway: JuiceFSGateway
) -> None:
    root = f"s3://{juicefs_gateway.bucket}/worker-loss"
    options = dict(juicefs_gateway.storage_options)
    store = open_store(StoreSpec(uri=f"{root}/data", options=options))
    for file in sorted(data.glob("*.parquet")):
        store.put(file.name, file.read_bytes())
    killed = job("on-s3", "--kill", "5", data=f"{root}/data", storage=f"{root}/runs", storage_options=options).succeed()
    assert killed.outcome["killed"] and killed.outcome["resumes"][1][1] > 0
    assert killed.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(killed, undisturbed.audit().steps)


def test_a_driver_that_gets_sigterm_saves_the_last_step_and_ends_with_143(job: StartJob, undisturbed: Finished) -> None:
    first = job("drained", "--step-s", "0.2")
    first.wait_for_commit()
    first.process.send_signal(signal.SIGTERM)
    drained = first.wait()
    assert drained.code == 128 + signal.SIGTERM, drained.log[-3000:]
    second = job("drained").succeed()
    [before, *_] = second.outcome["goodput"]["attempts"]
    assert second.outcome["resumes"][0][1] == before["last_step"], "a step was lost"
    assert second.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(second, undisturbed.audit().steps)
