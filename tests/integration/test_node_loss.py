"""A node of three is lost with all its processes and its disk; the run goes on with the two that are left."""

from collections.abc import Callable, Iterator

import psutil
import pytest

from ray_goodput.cli.demo_cluster import DemoCluster
from running import Finished, Job, assert_books_balance

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


def test_after_the_loss_of_a_node_each_step_trains_on_the_same_samples_as_on_any_world(
    cluster: DemoCluster, job: Callable[..., Job]
) -> None:
    whole: Finished = job("three-nodes", "--workers", "3", "--width", "8").succeed()
    assert whole.outcome["goodput"]["attempts"][0]["world"] == 3

    running = job("node-lost", "--workers", "2:3", "--step-s", "0.3")
    running.wait_for_commit()
    victim = _worker_away_from_rank_0(cluster)
    cluster.kill_node_of(victim)
    lost = running.succeed()
    worlds = [attempt["world"] for attempt in lost.outcome["goodput"]["attempts"]]
    assert worlds[0] == 3 and worlds[-1] == 2
    assert lost.outcome["resumes"][-1][1] > 0
    found, expected = lost.audit(), whole.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert found.steps == expected.steps
    assert_books_balance(lost)


def _worker_away_from_rank_0(cluster: DemoCluster) -> int:
    """Pid of a train worker on some node."""
    workers = [p.pid for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in " ".join(p.info["cmdline"] or [])]
    ours = [pid for pid in workers if cluster.runs(pid)]
    assert ours, "no train worker is running"
    return max(ours)
