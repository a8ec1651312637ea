"""Clusters and data of the integration tests. One Ray cluster at a time on a machine: each module has its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_goodput.cli.demo_cluster import DemoCluster

sys.path.insert(0, str(Path(__file__).parent))

from mlflow_server import MlflowServer
from running import Finished, Job
from small_job import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small job's parquet files."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def rays_own_watcher(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray's watcher of nodes that go, an actor in each attempt that only flags workers, is on where nodes are drained
    (`DRAINS_NODES` of the module) and off elsewhere: it takes 1.5 s of a core while a run starts."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "DRAINS_NODES", False):
            patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[DemoCluster]:
    """A head with 3 CPUs and a dashboard that takes jobs; gone afterwards, also when a test fails."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"  # what the jobs of the cluster run
    os.environ["RAY_JOB_STOP_WAIT_TIME_S"] = "60"  # what the doctor asks for: 3 s are not enough for a last save
    cluster = DemoCluster()
    try:
        cluster.start(head_cpus=3, dashboard=True)
        yield cluster
    finally:
        cluster.close()
        os.environ["PATH"] = before
        del os.environ["RAY_JOB_STOP_WAIT_TIME_S"]


@pytest.fixture(scope="module")
def job(cluster: DemoCluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Starts the small job on the module's cluster: `job(name, *arguments)`."""
    folder = tmp_path_factory.mktemp("jobs")
    started: list[Job] = []

    def start(name: str, *arguments: str, **options) -> Job:
        options = {"data": str(data), "address": cluster.address, **options}
        started.append(Job(folder, name, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture(scope="session")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A real server for the whole session: look for runs of your own by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
            yield server


@pytest.fixture(scope="module")
def undisturbed(job: Callable[..., Job]) -> Finished:
    """The small job on two workers, with nothing killed."""
    return job("undisturbed").succeed()
