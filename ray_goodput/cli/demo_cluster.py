"""A Ray cluster of several nodes on this machine, one of which can be lost, for `ray-goodput demo --kill node`.

Each node is a `ray start --block` of its own, with its own local directory, as on a real cluster; the processes of
a node are the children of that process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from ray_goodput.actors.names import slots_dirs
from ray_goodput.errors import RunError

_START_TIMEOUT_S = 60.0
_STARTED = "Ray runtime started"
# As `cluster/` advises: a lost node is declared dead after 5 s (5 refused checks), a silent one after 15 s.
_HEAD_ENV = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass(frozen=True, slots=True)
class _Node:
    process: subprocess.Popen[bytes]
    local_dir: Path


class DemoCluster:
    """A head without CPUs, and worker nodes with one CPU each. Not thread-safe but for `kill_node_of`."""

    def __init__(self) -> None:
        self._root = Path()
        self._nodes: list[_Node] = []
        self._num_started = 0
        self._environment_before: dict[str, str | None] = {}
        self.address = ""
        self.dashboard_url = ""

    def start(self, *, head_cpus: int = 0, dashboard: bool = False) -> None:
        """The head is up and `address` can be connected to from this process.

        To be called before Ray is imported, which reads `RAY_AUTH_*` once. With `dashboard`, jobs can be submitted to
        `dashboard_url`.

        Raises:
            RunError: it did not come up; the message has the end of its log.
        """
        self._root = Path(tempfile.mkdtemp(prefix="rg_demo_"))  # short: sockets below it have a limit of 107 characters
        self._enter_environment()
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        head = ["--head", f"--port={port}", f"--num-cpus={head_cpus}", f"--temp-dir={self._root}/ray"]
        head.append(f"--include-dashboard={str(dashboard).lower()}")
        if dashboard:
            dashboard_port = _free_port()
            self.dashboard_url = f"http://127.0.0.1:{dashboard_port}"
            head += [f"--dashboard-port={dashboard_port}", f"--dashboard-agent-listen-port={_free_port()}"]
        self._add("head", [*head, f"--ray-client-server-port={_free_port()}"], _HEAD_ENV)
        self._wait_listening(port)

    def add_node(self) -> None:
        """One more node is on its way. Start them one by one: `ray start` gives a raylet 30 s, all of which several at
        once may need on a small machine.
        """
        self._add(f"node-{self._num_started}", [f"--address={self.address}", "--num-cpus=1"], {})

    def wait_for_node(self) -> None:
        """The node added last has said that it runs."""
        log = self._nodes[-1].local_dir / "start.log"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _STARTED not in log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                raise RunError(f"A Ray node did not start within {_START_TIMEOUT_S:.0f} s: {log.read_text()[-500:]}")
            time.sleep(0.2)

    def check(self) -> None:
        """Raises RunError if a node that was not killed is gone."""
        for node in self._nodes:
            if node.process.poll() is not None:
                log = (node.local_dir / "start.log").read_text(errors="replace")
                raise RunError(f"A Ray node of the demo ended with code {node.process.returncode}: {log[-500:]}")

    def kill_node_of(self, pid: int) -> int:
        """The node that runs process `pid` is gone, disk too: SIGKILL to its raylet first, then to all the others.

        Returns how many processes were killed.
        """
        node = self._node_of(pid)
        if node is None:
            raise RunError(f"Process {pid} runs on no node of this cluster.")
        self._nodes.remove(node)
        num_killed = _kill_tree(node.process)
        _forget(node)
        return num_killed

    def drop_ended(self, *, stopped: bool = False) -> int:
        """Forget the nodes that somebody else ended, and what is left of them; returns how many there were.

        stopped: also those whose raylet somebody stopped.
        """
        states = (_State.ENDED, _State.STOPPED) if stopped else (_State.ENDED,)
        dropped = [node for node in self._nodes if _state(node) in states]
        for node in dropped:
            self._nodes.remove(node)
            _kill_tree(node.process)
            _forget(node)
        return len(dropped)

    @property
    def num_running(self) -> int:
        """Nodes that somebody else has neither ended nor stopped, the head among them."""
        return sum(_state(node) is _State.RUNS for node in self._nodes)

    @property
    def local_dirs(self) -> list[Path]:
        """The nodes' local directories, the head's first."""
        return [node.local_dir for node in self._nodes]

    def runs(self, pid: int) -> bool:
        """Whether process `pid` runs on one of the nodes."""
        return self._node_of(pid) is not None

    def local_dir_of(self, pid: int) -> Path | None:
        """The local directory of the node that runs process `pid`, if one does."""
        node = self._node_of(pid)
        return None if node is None else node.local_dir

    def _node_of(self, pid: int) -> _Node | None:
        try:
            ancestors = {p.pid for p in psutil.Process(pid).parents()}
        except psutil.NoSuchProcess:
            return None
        return next((n for n in self._nodes if n.process.pid in ancestors), None)

    def close(self) -> None:
        """Every process this cluster started is gone, and so are its folders."""
        for node in reversed(self._nodes):
            _kill_tree(node.process)
            _forget(node)
        self._nodes.clear()
        self._leave_environment()
        if self._root != Path():
            shutil.rmtree(self._root, ignore_errors=True)

    def _enter_environment(self) -> None:
        """This cluster has a token of its own: nobody else on the network can run code in it, and no token of the
        user's is involved. Ray takes neither from the address, so both sides get them by the environment.
        """
        token = self._root / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
        self._environment_before = {name: os.environ.pop(name, None) for name in names}
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def _leave_environment(self) -> None:
        for name, value in self._environment_before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._environment_before = {}

    def _add(self, name: str, args: list[str], env: dict[str, str]) -> None:
        local_dir = self._root / name
        local_dir.mkdir(parents=True)
        with (local_dir / "start.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *args],
                env={**os.environ, **env, "RAY_GOODPUT_LOCAL_DIR": str(local_dir)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches the driver, which ends the nodes itself
            )
        self._nodes.append(_Node(process, local_dir))
        self._num_started += 1

    def _wait_listening(self, port: int) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise RunError(f"The demo's Ray head did not listen on {self.address} within {_START_TIMEOUT_S:.0f} s.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _forget(node: _Node) -> None:
    """Disk and shared memory of a machine that is gone are gone with it."""
    for slots in slots_dirs(node.local_dir, "run"):
        shutil.rmtree(slots.parent, ignore_errors=True)
    shutil.rmtree(node.local_dir, ignore_errors=True)


def _kill_tree(process: subprocess.Popen[bytes]) -> int:
    try:
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    family.sort(
        key=lambda p: "raylet" not in _name(p)
    )  # the raylet first, so that it cannot tell anyone about the rest
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs([p for p in family if p.pid != process.pid], timeout=10)
    process.wait(timeout=10)
    return len(family)


class _State(Enum):
    RUNS = "runs"
    STOPPED = "stopped"
    ENDED = "ended"


def _state(node: _Node) -> _State:
    """Of `ray start`, and, once it has said that it started, of the raylet below it."""
    if node.process.poll() is not None:
        return _State.ENDED
    try:
        if _STARTED not in (node.local_dir / "start.log").read_text(errors="replace"):
            return _State.RUNS
        raylets = [p.status() for p in psutil.Process(node.process.pid).children() if "raylet" in _name(p)]
    except (OSError, psutil.NoSuchProcess):  # its disk is gone, or it is
        return _State.ENDED
    if not raylets or psutil.STATUS_ZOMBIE in raylets:
        return _State.ENDED
    return _State.STOPPED if psutil.STATUS_STOPPED in raylets else _State.RUNS


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
