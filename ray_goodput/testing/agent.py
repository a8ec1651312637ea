"""The hand of a fault injector on one node: an actor that ends processes, or the node, and sets rules at gates."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_goodput.config import environment
from ray_goodput.gates import Rule, drills_folder, mark_path, rule_path
from ray_goodput.storage.disk import write_atomic

_POLL_S = 0.01


class NodeAgent:
    """Lives under the node's raylet, so what it may touch is what is there too. Thread-safe.

    Every method that strikes returns the wall clock at which it did.
    """

    def __init__(self) -> None:
        self._raylet = psutil.Process(os.getppid())
        self._folder = drills_folder()

    def has_gates(self) -> bool:
        return self._folder is not None

    def signal(self, pid: int, signum: int, *, resume_after_s: float | None = None, anywhere: bool = False) -> float:
        """Send `signum` to a process of this node; SIGCONT after `resume_after_s`.

        anywhere: also if it is no child of this raylet, as a driver that somebody started by hand.

        Raises:
            ProcessLookupError: no such process under this raylet.
        """
        if not anywhere and pid != self._raylet.pid and pid not in {p.pid for p in self._family()}:
            raise ProcessLookupError(f"Process {pid} does not run under this node's raylet {self._raylet.pid}.")
        now = time.time()
        os.kill(pid, signum)
        if resume_after_s is not None:
            timer = threading.Timer(resume_after_s, _wake, (pid,))
            timer.daemon = True
            timer.start()
        return now

    def signal_raylet(self, signum: int, *, resume_after_s: float | None = None) -> float:
        return self.signal(self._raylet.pid, signum, resume_after_s=resume_after_s)

    def raylet_pid(self) -> int:
        return self._raylet.pid

    def lose_node(self) -> None:
        """SIGKILL to the raylet, so that it can tell nobody about the rest, then to all its processes, this one last.
        The local directory is deleted, as a disk that goes with its machine."""
        family = self._family()
        os.kill(self._raylet.pid, signal.SIGKILL)
        for process in family:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if self._folder is not None:  # only a node that was set up for drills loses its disk
            shutil.rmtree(environment().local_dir, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def prefetch_pids(self, job_id: str) -> list[int]:
        """Living prefetch actors of a job on this node."""
        found = []
        for process in self._family():
            try:
                ours = process.environ().get("RAY_JOB_ID", "") == job_id
                if ours and "PrefetchActor" in " ".join(process.cmdline()):
                    found.append(process.pid)
            except psutil.Error:  # it is just ending
                continue
        return sorted(found)

    def set_rule(self, name: str, rule: Rule) -> None:
        """From now on processes of this node obey `rule` at their gates."""
        assert self._folder is not None
        write_atomic(rule_path(self._folder, name), json.dumps(rule.to_dict()).encode())

    def wait_mark(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        """What the first process wrote that came to the gate of rule `name`, None if none came in time."""
        assert self._folder is not None
        path = mark_path(self._folder, name, 0)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                mark: dict[str, Any] = json.loads(path.read_text())
                return mark
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    return None
            time.sleep(_POLL_S)

    def drop_rule(self, name: str) -> None:
        """The rule is gone: whoever is held goes on."""
        assert self._folder is not None
        rule_path(self._folder, name).unlink(missing_ok=True)
        for mark in (self._folder / "marks").glob(f"{name}-*.json"):
            mark.unlink(missing_ok=True)

    def _family(self) -> list[psutil.Process]:
        try:
            return self._raylet.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def start_agent(node_id: str) -> Any:
    """A `NodeAgent` on a node, owned by the calling process."""
    return (
        ray.remote(NodeAgent)
        .options(
            num_cpus=0,
            max_concurrency=16,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )


def _wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
