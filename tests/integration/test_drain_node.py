"""The drain of `cluster/` against a real Ray, with its token authentication on, as KubeRay's manifests have it."""

from __future__ import annotations

import importlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

CLUSTER = Path(__file__).parents[2] / "cluster"
BIN = Path(sys.executable).parent


@pytest.fixture
def drain_node(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CLUSTER)
    module = importlib.import_module("drain_node")
    if module.find_raylet() is not None:
        pytest.fail("Another Ray runs on this machine, and the drain would hit it: one at a time.")
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def address(drain_node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray of one node; its processes are gone afterwards, and nobody else's are touched."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("PATH", f"{BIN}:/usr/bin:/bin")
    # Not pytest's folder: the path of a Unix socket may have no more than 107 characters.
    folder = tempfile.mkdtemp(prefix="rgd")
    port = free_port()
    start = [str(BIN / "ray"), "start", "--head", f"--port={port}", "--num-cpus=1", f"--temp-dir={folder}"]
    start += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=80000000"]
    try:
        subprocess.run(start, check=True, capture_output=True, timeout=60)
        yield f"127.0.0.1:{port}"
    finally:
        ours = [p for p in psutil.process_iter(["cmdline"]) if any(folder in word for word in p.info["cmdline"] or [])]
        for process in ours:
            process.kill()
        psutil.wait_procs(ours, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


HOLD = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
@ray.remote(num_cpus=0)
class Vault:
    def ping(self): return True
vault = Vault.remote()
assert ray.get(vault.ping.remote())
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(180)
def test_a_drained_node_stays_while_an_actor_lives_on_it_and_leaves_when_none_does(
    drain_node: ModuleType, address: str
) -> None:
    raylet = drain_node.find_raylet()
    assert raylet is not None and raylet.gcs_address.endswith(address.rpartition(":")[2])
    driver = subprocess.Popen(
        [sys.executable, "-c", HOLD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None and driver.stdout.readline().strip() == "ready"
        assert drain_node.drain(10, "a test") == f"Node {raylet.node_id} was drained; its time of 10 s is up."
        assert drain_node.is_running(raylet.pid)
    finally:
        driver.kill()
        driver.communicate()
    begun_mono_s = time.monotonic()
    drain_node.drain(100, "a test")
    assert time.monotonic() - begun_mono_s < 90
    assert not drain_node.is_running(raylet.pid)
