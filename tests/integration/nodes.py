"""A cluster for drills, started before this process imports Ray, which reads the cluster's token once."""

from __future__ import annotations

import os
import signal
import sys

from ray_goodput.cli.demo_cluster import DemoCluster


def start_cluster(nodes: int = 3) -> DemoCluster:
    """A head without CPUs and some nodes of one CPU, all with gates; this process is connected to it."""
    assert "ray" not in sys.modules, "Ray is imported already, and cannot be told this cluster's token any more"
    os.environ["RAY_GOODPUT_DRILLS"] = "1"
    _leave_in_order()
    cluster = DemoCluster()
    try:
        cluster.start()
        for _ in range(nodes):
            cluster.add_node()
            cluster.wait_for_node()
        import ray

        ray.init(cluster.address, log_to_driver=False)
        _leave_in_order()  # Ray has put its own handler there
    except BaseException:
        cluster.close()
        raise
    return cluster


def stop_cluster(cluster: DemoCluster) -> None:
    import ray

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a time limit may send it twice
    ray.shutdown()
    cluster.close()


def _leave_in_order() -> None:
    """SIGTERM, as of a time limit, leaves no process behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
