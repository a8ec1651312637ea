"""Notice that a node or a process is about to go: the attempt saves and leaves, and no step is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from ray_goodput.cli.demo_cluster import DemoCluster
from running import Job, assert_books_balance

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def cluster() -> Iterator[DemoCluster]:
    """A head without CPUs, and three nodes of one CPU."""
    cluster = DemoCluster()
    try:
        cluster.start()
        for _ in range(3):
            cluster.add_node()
            cluster.wait_for_node()
        yield cluster
    finally:
        cluster.close()


def drain_node_of(pid: int, deadline_s: int, address: str) -> None:
    """`ray drain-node`, as `cluster/drain_node.py` calls it, for the node that runs process `pid`."""
    raylet = next(p for p in psutil.Process(pid).parents() if p.name() == "raylet")
    [node] = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--node_id=")]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={address}", f"--node-id={node}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test"]
    subprocess.run([*command, f"--deadline-remaining-seconds={deadline_s}"], check=True, timeout=60)


def test_a_sigterm_to_a_worker_and_the_drain_of_rank_0s_node_lose_no_step(
    cluster: DemoCluster, job: Callable[..., Job]
) -> None:
    """With a failure budget of 0: neither counts as a failure."""
    run = job("noticed", "--workers", "2:3", "--step-s", "0.3", "--max-failures", "0", "--every", "1000")
    os.kill(run.pid(1, 2), signal.SIGTERM)
    drained = run.pid(2, 0)
    drain_node_of(drained, 30, cluster.address)
    run.pid(3, 0)  # the run goes on while the node still lives
    if psutil.pid_exists(drained):
        cluster.kill_node_of(drained)
    finished = run.succeed()
    first, second, third = finished.outcome["goodput"]["attempts"]
    assert [first["world"], second["world"], third["world"]] == [3, 3, 2]
    assert [first["outcome"], second["outcome"], third["outcome"]] == ["drain", "drain", "finished"]
    resumed = [step for _, step, _ in finished.outcome["resumes"]]
    assert resumed == [0, first["last_step"], second["last_step"]], "a step was lost"
    found = finished.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert_books_balance(finished)
