"""F1: one process is killed at a random moment, or stands still; the run goes on by itself and ends as if nothing had
happened. In one module, for they share a cluster."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlflow_server import MlflowServer
from ray_goodput.cli.app import app
from ray_goodput.cli.demo_cluster import DemoCluster
from running import Finished, Job, assert_books_balance, assert_nothing_lost, on_s3, stop_job
from servers import JuiceFSGateway
from store_proxy import StoreProxy

pytestmark = pytest.mark.timeout(400)

StartJob = Callable[..., Job]
HEARTBEAT_S = 1.0
HANGING_SCRIPT = Path(__file__).with_name("hanging_job.py")
LAST_STEP = 46


def test_undisturbed_every_sample_is_trained_on_once_an_epoch(undisturbed: Finished) -> None:
    found = undisturbed.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert found.samples == 2 * 363
    assert undisturbed.outcome["metrics"]["loss"] > 0


def test_three_ranks_resume_bit_identically_when_reproducible_through_a_real_s3_server(
    job: StartJob, undisturbed: Finished, data: Path, juicefs_gateway: JuiceFSGateway, proxy: StoreProxy
) -> None:
    """Data and storage of the one that is killed are on S3, those of the one that is not on a local disk. And D2,
    counted at the server: a data shard comes once, whoever is killed, besides the look at it for the manifest."""
    arguments = ("--workers", "3", "--reproducible")
    whole = job("three", *arguments).succeed()
    on_server = on_s3(data, "worker-loss", juicefs_gateway, proxy)
    killed = job("three-killed", *arguments, "--kill", "4", **on_server).succeed()
    asked = proxy.times_fetched(".parquet")
    assert set(asked) == {file.name for file in data.glob("*.parquet")}
    assert max(asked.values()) <= 2
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
    shown = (
        CliRunner()
        .invoke(app, ["report", killed.store.uri, "--storage-options", json.dumps(on_server["storage_options"])])
        .stdout
    )
    assert "are uncertain" in shown


def test_a_run_whose_drivers_are_stopped_and_killed_loses_nothing_and_is_one_mlflow_run_that_never_steps_back(
    job: StartJob, cluster: DemoCluster, undisturbed: Finished, mlflow: MlflowServer
) -> None:
    """A worker killed, the submitted driver stopped by SIGTERM, the next one killed: what each leaves behind."""
    from mlflow import MlflowClient

    client = MlflowClient(mlflow.uri)
    slowly = ("--mlflow", mlflow.uri, "--step-s", "0.4")

    def the_run() -> Any:
        experiment = client.get_experiment_by_name("small jobs")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'restarts'")
        return run

    def attempts_shown() -> set[float]:
        return {m.value for m in client.get_metric_history(the_run().info.run_id, "train/attempt")}

    first = job("restarts", *slowly, "--kill", "4", submit_to=cluster.dashboard_url)
    first.wait_for_commit(attempt=2)
    stop_job(cluster.dashboard_url, "restarts")
    assert first.wait().outcome["exit_code"] == 128 + signal.SIGTERM
    assert the_run().info.status == "KILLED"

    second = job("restarts", *slowly)
    second.wait_for_commit(attempt=3)
    deadline = time.monotonic() + 60
    while 3.0 not in attempts_shown():  # what a killed driver had not sent yet is not in MLflow
        assert time.monotonic() < deadline, second.log[-6000:]
        time.sleep(0.2)
    second.kill()
    assert the_run().info.status == "RUNNING", "nobody is left who could say that it ended"

    third = job("restarts", "--mlflow", mlflow.uri).succeed()
    goodput = third.outcome["goodput"]
    _, stopped, after, _ = attempts = goodput["attempts"]
    assert [a["attempt"] for a in attempts] == [1, 2, 3, 4]
    assert [i["kind"] for i in goodput["incidents"]] == ["worker", "driver"]
    assert after["resumed_step"] == stopped["last_step"] > 0, "a step was lost, though SIGTERM had told"
    assert third.outcome["weights"] == undisturbed.outcome["weights"]
    assert_nothing_lost(third, undisturbed.audit().steps)
    run = the_run()
    assert run.info.status == "FINISHED" and run.info.end_time is not None
    for name in run.data.metrics:
        if name.startswith("goodput/") or name == "fetch_seconds":
            points = sorted(client.get_metric_history(run.info.run_id, name), key=lambda m: m.timestamp)
            steps = [m.step for m in points]
            assert steps == sorted(steps), name
    assert run.data.metrics["fetch_seconds"] == pytest.approx(goodput["buckets_s"]["data_wait"] / 2)
    assert attempts_shown() == {1.0, 2.0, 3.0, 4.0}


def stacks(finished: Finished) -> dict[str, str]:
    """What the watchdog kept, by file name."""
    found = finished.store.list("stacks")
    return {info.key.rpartition("/")[2]: finished.store.get(info.key).decode() for info in found}


@pytest.fixture(scope="module")
def stopped_actors(job: StartJob) -> Finished:
    """A run whose vault and coordinator were stopped in the middle. Nothing else happened to it."""
    how = "stop-_VaultProcess,_CoordinatorProcess"
    return job("stopped-actors", "--how", how, "--step-s", "0.35", script=HANGING_SCRIPT).succeed()


def test_stopped_actors_are_started_anew_while_training_goes_on(stopped_actors: Finished) -> None:
    for actor in ("vault:", "coordinator:"):
        assert re.search(f"The actor {actor}.* has not answered for", stopped_actors.log), f"{actor} was never found"
    goodput = stopped_actors.outcome["goodput"]
    assert [a["attempt"] for a in goodput["attempts"]] == [1], "training was restarted"
    assert goodput["durable_step"] == LAST_STEP
    found = stopped_actors.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert_books_balance(stopped_actors)


def test_a_rank_that_is_stopped_is_named_killed_and_replaced(job: StartJob, stopped_actors: Finished) -> None:
    """One that holds Python's lock, or sleeps: `tests/fault/test_watchdog_of_processes.py`, which needs no Ray."""
    hung = job("stop-rank", "--how", "stop-rank", script=HANGING_SCRIPT).succeed()
    [incident] = hung.outcome["goodput"]["incidents"]
    assert (incident["kind"], incident["ranks"]) == ("hang", [1]), incident
    assert "is stopped (SIGSTOP)" in incident["reason"] and "Hung: rank 1 (process " in incident["reason"]
    assert hung.outcome["goodput"]["buckets_s"]["hang"] > 2 * 4
    assert incident["step_resumed"] >= 10, "a commit before the hang was not used"
    assert hung.outcome["weights"] == stopped_actors.outcome["weights"]
    assert_nothing_lost(hung, stopped_actors.audit().steps)
    assert_books_balance(hung)
    kept = stacks(hung)
    assert set(kept) == {"verdict.txt", "rank-00000.txt", "rank-00001.txt"}
    assert "_engine_run_backward" in kept["rank-00000.txt"], "rank 0 waits for rank 1"
    assert "No stacks: a stopped process" in kept["rank-00001.txt"]
