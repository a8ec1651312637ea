"""Nodes that go, with notice and without: the run goes on with those that are left, and grows when one comes back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from augmented import trained_on, unbroken
from ray_goodput.cli.demo_cluster import DemoCluster
from ray_goodput.core.commit import CommitRecord
from ray_goodput.storage.checksum import xxh3_128_hex
from running import Job, on_s3
from servers import JuiceFSGateway
from small_job import GLOBAL_BATCH, train_data, write_data
from store_proxy import StoreProxy

pytestmark = pytest.mark.timeout(500)
DRAINS_NODES = True


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


def test_two_notices_and_a_node_that_comes_lose_no_step_and_change_none_of_a_mixture(
    cluster: DemoCluster, job: Callable[..., Job], data: Path
) -> None:
    """A SIGTERM to a worker, and the drain of rank 0's node. With a failure budget of 0, and no save but those that the
    notices and the growth ask for."""
    run = job(
        *("noticed", "--workers", "2:3", "--step-s", "1", "--brake", "--max-failures", "0", "--every", "1000"),
        *("--resize-s", "2", "--epochs", "6", "--mixture", "--augment"),
    )
    os.kill(run.pid(1, 2), signal.SIGTERM)
    drained = run.pid(2, 0)
    drain_node_of(drained, 30, cluster.address)
    run.pid(3, 0)  # the run goes on while the node still lives
    if psutil.pid_exists(drained):
        cluster.kill_node_of(drained)
    cluster.add_node()
    run.pid(4, 2)
    run.release_brake()
    finished = run.succeed()
    attempts = finished.outcome["goodput"]["attempts"]
    assert [a["world"] for a in attempts] == [3, 3, 2, 3]
    first, second, _, last = (a["outcome"] for a in attempts)
    assert (first, second, last) == ("drain", "drain", "finished")
    resumed = [step for _, step, _ in finished.outcome["resumes"]]
    assert resumed[:3] == [0, attempts[0]["last_step"], attempts[1]["last_step"]], "a step was lost"
    assert resumed[3] > resumed[2], "it grew without a save"
    assert finished.audit().repeated == finished.audit().skipped == 0
    mixed = train_data(str(data), seed=3, augmented=True, mixture=True)
    assert trained_on(finished.pids, finished.outcome["resumes"]) == unbroken(mixed, data, epochs=6)


def drain_node_of(pid: int, deadline_s: int, address: str) -> None:
    """`ray drain-node`, as `cluster/drain_node.py` calls it, for the node that runs process `pid`."""
    raylet = next(p for p in psutil.Process(pid).parents() if p.name() == "raylet")
    [node] = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--node_id=")]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={address}", f"--node-id={node}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test"]
    subprocess.run([*command, f"--deadline-remaining-seconds={deadline_s}"], check=True, timeout=60)


def test_after_the_loss_of_a_node_each_step_trains_on_the_same_tensors_and_only_its_lanes_are_fetched_anew(
    cluster: DemoCluster, job: Callable[..., Job], tmp_path: Path, juicefs_gateway: JuiceFSGateway, proxy: StoreProxy
) -> None:
    """D2, counted at the server. A data shard is a lane, and each batch reads from all of them."""
    data = tmp_path / "data"
    write_data(data, [GLOBAL_BATCH] * GLOBAL_BATCH)
    tiers = ["--every", "1000", "--every-local", "3", "--peer-copies", "1", "--augment"]
    arguments = ["--workers", "2:3", "--epochs", "3", "--step-s", "0.3", "--step-log", str(tmp_path / "steps"), *tiers]
    running = job("node-lost", *arguments, **on_s3(data, "node-loss", juicefs_gateway, proxy))
    _wait_for_steps(running, tmp_path / "steps", 12)
    nodes = [cluster.local_dir_of(running.pid(1, rank)) for rank in range(3)]
    cold, so_far = proxy.times_fetched(".parquet"), len(proxy.requests)
    cluster.kill_node_of(running.pid(1, 2))
    assert [cluster.local_dir_of(running.pid(2, rank)) for rank in range(2)] == nodes[:2], "nodes changed their ranks"
    lost = running.succeed()
    assert len(cold) == GLOBAL_BATCH and set(cold.values()) == {2}, "once to look at it for the manifest, once to read"
    warm = proxy.times_fetched(".parquet", so_far)
    assert (len(warm), set(warm.values())) == (GLOBAL_BATCH - 2 * GLOBAL_BATCH // 3, {1}), "the third rank's lanes"
    worlds = [attempt["world"] for attempt in lost.outcome["goodput"]["attempts"]]
    assert worlds == [3, 2]
    _, step, tier = lost.outcome["resumes"][-1]
    assert (tier, step % 3) == ("peer", 0) and step >= 6, "nothing was committed: only peers had it"
    assert lost.outcome["checkpoint"] is not None, "the last step is"
    newest = f"checkpoints/{max(running.commits()).folder}/COMMIT.json"
    places = CommitRecord.from_json(lost.store.get(newest), xxh3_128_hex).extra["lane_places"]["train"]
    assert sorted(places) == list(range(GLOBAL_BATCH)) != places, "an attempt on two would go on with them"
    expected = unbroken(train_data(str(data), seed=3, augmented=True, mixture=False), data, epochs=3)
    assert trained_on(lost.pids, lost.outcome["resumes"]) == expected
    found = lost.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert found.steps == {step: tuple(i for i, _ in samples) for step, samples in expected.items()}
    incidents = lost.outcome["goodput"]["incidents"]
    assert incidents and all(incident["ranks"] and incident["nodes"] for incident in incidents)


def _wait_for_steps(running: Job, log: Path, steps: int) -> None:
    """Rank 0 has done that many steps."""
    deadline = time.monotonic() + 120
    while not log.exists() or log.read_text().count("\n") < steps:
        assert running.process.poll() is None and time.monotonic() < deadline, running.log[-6000:]
        time.sleep(0.1)
