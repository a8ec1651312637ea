"""F1: one process is killed at a random moment; the run goes on by itself and ends as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from ray_goodput.cli.demo_cluster import DemoCluster
from ray_goodput.config import StoreSpec
from ray_goodput.storage import open_store
from running import Finished, Job, assert_nothing_lost, stop_job
from servers import JuiceFSGateway

pytestmark = pytest.mark.timeout(400)

StartJob = Callable[..., Job]
HEARTBEAT_S = 1.0


def test_undisturbed_every_sample_is_trained_on_once_an_epoch(undisturbed: Finished) -> None:
    found = undisturbed.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert found.samples == 2 * 363
    assert undisturbed.outcome["metrics"]["loss"] > 0


def test_three_ranks_resume_bit_identically_when_reproducible(job: StartJob, undisturbed: Finished) -> None:
    arguments = ("--workers", "3", "--reproducible")
    whole = job("three", *arguments).succeed()
    killed = job("three-killed", *arguments, "--kill", "4").succeed()
    assert killed.outcome["killed"], "nothing was killed"
    assert [attempt for attempt, _, _ in killed.outcome["resumes"]] == [1, 2]
    assert killed.outcome["resumes"][1][1] > 0
    assert killed.outcome["weights"] == whole.outcome["weights"]
    assert_nothing_lost(killed, undisturbed.audit().steps)
    goodput = killed.outcome["goodput"]
    # Of the killed rank and of those that Ray then ended, at most one heartbeat is unknown, and that is printed.
    assert 0 < goodput["uncertainty_s"] <= 3 * HEARTBEAT_S
    [incident] = goodput["incidents"]
    assert incident["kind"] == "worker" and incident["ranks"] and incident["nodes"]
    shown = CliRunner().invoke(app, ["report", killed.store.uri]).stdout
    assert "are uncertain" in shown


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


def test_a_submitted_job_that_is_stopped_saves_the_last_step_first(
    job: StartJob, cluster: DemoCluster, undisturbed: Finished
) -> None:
    stopped = job("stopped", "--step-s", "0.2", submit_to=cluster.dashboard_url)
    stopped.wait_for_commit()
    stop_job(cluster.dashboard_url, "stopped")
    stopped.wait()
    again = job("stopped").succeed()
    before, _ = again.outcome["goodput"]["attempts"]
    assert again.outcome["resumes"][0][1] == before["last_step"] > 0, "a step was lost"
    assert again.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(again, undisturbed.audit().steps)
