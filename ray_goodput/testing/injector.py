"""Waits for the moment of a fault, strikes, and tells what was done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray_goodput.core.run_state import RunStatus, WorkerInfo
from ray_goodput.errors import ConfigError, RunError
from ray_goodput.gates import Action, Rule
from ray_goodput.testing.agents import Agents, alive_nodes
from ray_goodput.testing.faults import SLOW, Fault, Kind, Phase, Target
from ray_goodput.testing.find import LiveRun

_POLL_S = 0.1
_GRACE_S = 5.0
_SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What was done. `step`, `attempt`: where the run was; `rank`: whose process or node; `pid` 0: the whole node."""

    fault: Fault
    at_s: float
    attempt: int
    step: int
    committed_step: int
    world: int
    rank: int | None
    pid: int
    node_id: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fault": str(self.fault)}


class FaultInjector:
    """Strikes one run. Not thread-safe. Its agents are actors of this process's job: they end with it.

    seed: chooses among processes where a fault does not say which.
    """

    def __init__(self, run: LiveRun, *, seed: int = 0, say: Callable[[str], None] = lambda _: None) -> None:
        self._run = run
        self._chance = random.Random(seed)
        self._say = say
        self._agents = Agents()

    def inject(self, fault: Fault, *, timeout_s: float = 120.0, provoke: Callable[[], None] | None = None) -> Strike:
        """`fault` has struck when this returns; at most `timeout_s` is waited for its moment.

        provoke: called once everything is prepared, to bring about the phase (a node added, for `growing`). By itself
            `restoring` kills a worker.

        Raises:
            ConfigError: the run's nodes have no gates, which this fault needs.
            RunError: its moment did not come, or the run is over; nothing was done.
        """
        deadline = time.monotonic() + timeout_s
        status = self._training(fault, deadline)
        fault = self._with_rank(fault, status)
        self._say(f"step {status.step}: waiting for {fault}" if fault.needs_gates else f"step {status.step}: {fault}")
        if fault.needs_gates:
            for node in alive_nodes():
                if not self._agents.ask(node, "has_gates"):
                    raise ConfigError(
                        f"{fault} needs gates, which node {node} has not: start the Ray nodes with "
                        "RAY_GOODPUT_DRILLS=1 in their environment, or leave out phase=."
                    )
        if fault.kind is Kind.EXCEPTION:
            return self._raise_in_loop(fault, status, deadline)
        if fault.kind in SLOW:
            return self._slow_down(fault, status)
        with self._in_phase(fault, status, deadline, provoke):
            return self._strike(fault, deadline)

    def _training(self, fault: Fault, deadline: float) -> RunStatus:
        """The run has workers that train, at `fault.step` or later if that is not a gate's business."""
        wanted = 0 if fault.needs_gates or fault.step is None else fault.step
        while True:
            status = self._run.status()
            if status is not None and status.step >= wanted and trains(status):
                return status
            if time.monotonic() > deadline:
                where = f"it is at step {status.step}" if status is not None else "its coordinator does not answer"
                raise RunError(f"The moment of {fault} did not come in time in the run {self._run.name}: {where}.")
            time.sleep(_POLL_S)

    def _with_rank(self, fault: Fault, status: RunStatus) -> Fault:
        if fault.rank is None:
            return replace(fault, rank=self._chance.choice(status.workers).world_rank)
        if fault.rank >= len(status.workers):  # not a ConfigError: there may have been more, and may be again
            raise RunError(f"{fault}: the run has {len(status.workers)} workers now, ranks count from 0.")
        return fault

    def _strike(self, fault: Fault, deadline: float) -> Strike:
        status = self._settled(fault, deadline)
        worker = next(w for w in status.workers if w.world_rank == fault.rank)
        node, pid, anywhere = self._victim(fault, worker, deadline)
        if fault.kind is Kind.NODE_LOSS:
            at_s = time.time()
            self._agents.tell(node, "lose_node")
            pid = 0
        elif fault.target is Target.RAYLET:
            at_s = time.time()
            seconds = fault.seconds if fault.kind is Kind.STOP else None
            # Without its raylet the agent may not get its answer out.
            self._agents.tell(node, "signal_raylet", int(_SIGNALS[fault.kind]), resume_after_s=seconds, timeout_s=1.0)
        else:
            arguments = {"resume_after_s": fault.seconds if fault.kind is Kind.STOP else None, "anywhere": anywhere}
            at_s = self._agents.ask(node, "signal", pid, int(_SIGNALS[fault.kind]), **arguments)
        return _tell(fault, status, at_s=at_s, pid=pid, node_id=node)

    def _settled(self, fault: Fault, deadline: float) -> RunStatus:
        """The workers as they are now: in another attempt they are not those of the beginning."""
        while True:
            status = self._run.status()
            if status is not None and len(status.workers) > (fault.rank or 0):
                return status
            if time.monotonic() > deadline:
                raise RunError(f"The run {self._run.name} has no workers to strike with {fault}.")
            time.sleep(_POLL_S)

    def _victim(self, fault: Fault, worker: WorkerInfo, deadline: float) -> tuple[str, int, bool]:
        """Node, pid (0 for a raylet), and whether it need not be a child of the node's raylet."""
        run, node = self._run, worker.node_id
        if fault.target is Target.WORKER:
            return node, worker.pid, False
        if fault.target is Target.RAYLET:
            if run.coordinator().node_id == node:
                raise ConfigError(f"{fault}: the driver and the coordinator are on that node, the run would end.")
            return node, int(self._agents.ask(node, "raylet_pid")), False
        if fault.target is Target.DRIVER:
            return run.coordinator().node_id, run.driver_pid(), True
        if fault.target is Target.PREFETCH:
            return node, self._prefetch(node, deadline), False
        process = {
            Target.VAULT: lambda: run.vault(node),
            Target.SHARD_CACHE: lambda: run.shard_cache(node),
            Target.COORDINATOR: run.coordinator,
        }[fault.target]()
        return process.node_id, process.pid, False

    def _prefetch(self, node: str, deadline: float) -> int:
        job_id = self._run.coordinator().job_id
        while not (pids := self._agents.ask(node, "prefetch_pids", job_id)):
            if time.monotonic() > deadline:
                raise RunError(
                    f"No prefetch actor of the run {self._run.name} is on node {node} now: all it needs is cached."
                )
            time.sleep(_POLL_S)
        return self._chance.choice(pids)

    @contextlib.contextmanager
    def _in_phase(
        self, fault: Fault, status: RunStatus, deadline: float, provoke: Callable[[], None] | None
    ) -> Iterator[None]:
        """Inside, the run is in the fault's phase, held there by one of its processes."""
        if fault.phase is None:
            yield
            return
        with self._agents.rule(gate_of(fault, status, until_at_s=_at_s(deadline))) as rule:
            if provoke is not None:
                provoke()
            if fault.phase is Phase.RESTORING:
                self._provoke_restart(status)
            if not rule.wait_mark(deadline):
                raise self._too_late(fault)
            yield

    def _provoke_restart(self, status: RunStatus) -> None:
        """What makes the run restore: its last worker is killed."""
        last = max(status.workers, key=lambda w: w.world_rank)
        self._say(f"step {status.step}: rank {last.world_rank} is killed, so that the run restores")
        self._agents.ask(last.node_id, "signal", last.pid, int(signal.SIGKILL))

    def _raise_in_loop(self, fault: Fault, status: RunStatus, deadline: float) -> Strike:
        rule = gate_of(replace(fault, phase=Phase.STEP), status, until_at_s=_at_s(deadline))
        with self._agents.rule(replace(rule, action=Action.RAISE)) as placed:
            if not placed.wait_mark(deadline):
                raise self._too_late(fault)
        at_s = time.time()
        worker = next(w for w in status.workers if w.world_rank == fault.rank)
        return _tell(fault, self._run.status() or status, at_s=at_s, pid=worker.pid, node_id=worker.node_id)

    def _slow_down(self, fault: Fault, status: RunStatus) -> Strike:
        """The rule is left where it is: it ends by itself."""
        worker = next(w for w in status.workers if w.world_rank == fault.rank)
        now = time.time()
        rule = Rule(
            place="disk" if fault.kind is Kind.SLOW_DISK else "store",
            action=Action.DELAY,
            until_at_s=now + fault.slow_for_s,
            seconds=fault.delay_s,
            times=None,
        )
        self._agents.ask(worker.node_id, "set_rule", f"slow-{os.getpid()}-{time.time_ns()}", rule)
        return _tell(fault, status, at_s=now, pid=0, node_id=worker.node_id)

    def _too_late(self, fault: Fault) -> RunError:
        return RunError(f"The moment of {fault} did not come in time in the run {self._run.name}.")


def _at_s(deadline: float) -> float:
    """A moment of the monotonic clock as one of the wall clock, and a little later."""
    return time.time() + max(0.0, deadline - time.monotonic()) + _GRACE_S


def gate_of(fault: Fault, status: RunStatus, *, until_at_s: float) -> Rule:
    """Where the process that makes the fault's phase is held. Pure."""
    rank = str(fault.rank)
    place, where, least = "step", {"rank": rank}, {}
    if fault.step is not None:
        least = {"step": float(fault.step)}
    if fault.phase is Phase.STAGING:
        place = "stage"
    elif fault.phase is Phase.UPLOADING:
        place, where, least = "store", {"op": "upload_file", "key": f"checkpoints/*/__{rank}_0.distcp"}, {}
    elif fault.phase is Phase.COMMITTING:
        place, where, least = "store", {"op": "put", "key": "checkpoints/*/COMMIT.json"}, {}
    elif fault.phase is Phase.RESTORING:
        place, least = "restore", {"attempt": float(status.attempt + 1)}
    elif fault.phase is Phase.GROWING:
        place, least = "join", {"world": float(len(status.workers) + 1)}
    return Rule(place=place, action=Action.HOLD, until_at_s=until_at_s, where=where, at_least=least)


def _tell(fault: Fault, status: RunStatus, *, at_s: float, pid: int, node_id: str) -> Strike:
    return Strike(
        fault=fault,
        at_s=at_s,
        attempt=status.attempt,
        step=status.step,
        committed_step=status.committed_step,
        world=len(status.workers),
        rank=fault.rank,
        pid=pid,
        node_id=node_id,
    )


def trains(status: RunStatus) -> bool:
    """Whether the present attempt has begun its steps. Pure.

    A coordinator that was killed knows the workers again, but not where attempts began.
    """
    if any(r.attempt == status.attempt for r in status.resumes):
        return bool(status.workers)
    return bool(status.workers) and not status.resumes and status.step > 0
