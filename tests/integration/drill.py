"""One run of the small job on a cluster of three nodes, struck by one fault after the other.

Between faults the run is on a leash: rank 0 is held when it comes to a certain step, so that the run cannot end, nor
the next fault come too late, however slow the machine is. When a fault is over, the leash is let out by `SPACING`
steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ray_goodput.cli.demo_cluster import DemoCluster
from ray_goodput.gates import Action, Rule, rule_path
from ray_goodput.testing import Fault, FaultInjector, Kind, LiveRun, Phase, Strike, Target, find_run
from running import Job

SPACING = 12
EVERY = 3  # steps between saves
STEPS_PER_EPOCH = 363 / 16
_STOPPED_DRIVER_S = 10.0  # nobody but the one who stopped it can let it go on
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Recovered:
    """A fault and the seconds until the first step that ended after it, in an attempt that it did not end."""

    strike: Strike
    first_new_step_s: float


class Drill:
    """Starts the run at once; `strike` as often as wanted; `finish`. For one thread."""

    def __init__(
        self,
        cluster: DemoCluster,
        start_job: Callable[..., Job],
        name: str,
        *arguments: str,
        nodes: int = 3,
        elastic: bool = False,
        seed: int = 0,
        say: Callable[[str], None] = print,
        patience_s: float = 180.0,
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._elastic = elastic
        self._patience_s = patience_s
        self._say = say
        self._limit = SPACING
        cluster.drop_ended(stopped=True)  # what a run before may have left
        self._replace_nodes()
        self._leash(self._limit)
        self._step_log = cluster.local_dirs[0] / f"{name}-steps.jsonl"
        self._start = lambda: start_job(
            *(name, "--every", str(EVERY), "--max-failures", "20", "--step-log", str(self._step_log), "--brake"),
            *arguments,
        )
        self.job = self._start()
        self._run = self._find(name)
        self._injector = FaultInjector(self._run, seed=seed, say=say)
        self._wait(lambda: any(s["step"] >= self._limit - 1 for s in self.steps()), "the first steps")
        self._wait(lambda: self._committed() > 0, "the first commit")

    def strike(self, fault: Fault) -> Recovered:
        """`fault` has struck in the next `SPACING` steps, the run trains again, and has saved since.

        Raises:
            GoodputError, AssertionError: something of this did not happen within the patience.
        """
        if fault.phase is Phase.GROWING:
            self._shrink()
        if fault.phase is Phase.STEP:
            fault = replace(fault, step=self._limit + 2 * EVERY + 3)
        if fault.target is Target.DRIVER and fault.kind is Kind.STOP:
            fault = replace(fault, seconds=_STOPPED_DRIVER_S)
        if fault.target is Target.PREFETCH:
            self._forget_cached_data()
        strike = self._injector.inject(fault, timeout_s=self._patience_s, provoke=lambda: self._provoke(fault))
        self._let_out()  # a run that the fault did not end may be at the end of its leash by now
        if fault.target is Target.DRIVER and fault.kind is Kind.KILL:
            self.job.process.wait(30)
            self.job = self._start()
        if fault.target is Target.RAYLET and not self._elastic and strike.world >= self._nodes:
            self._replace_nodes()  # no node is left over: the run waits for a new one
        first = self._wait(lambda: self._new_step(strike), f"a new step after {fault}")
        undisturbed = not self._ends(fault) and fault.phase not in (Phase.RESTORING, Phase.GROWING)
        assert not undisturbed or first["attempt"] == strike.attempt, f"{fault} restarted the training"
        self._wait(lambda: self._committed() > strike.committed_step, f"a commit after {fault}")
        self._say(f"{fault}: a new step after {first['at_s'] - strike.at_s:.1f} s")
        self._mend()
        return Recovered(strike, first["at_s"] - strike.at_s)

    def finish(self) -> Any:
        """The leash is gone, what is left of the run takes little time, and it has ended well."""
        for local_dir in self._cluster.local_dirs:
            for path in (local_dir / "drills" / "rules").glob("leash-*.json"):
                path.unlink()
        self.job.release_brake()
        return self.job.succeed()

    def steps(self) -> list[dict[str, Any]]:
        """When each step ended, as rank 0 noted it down."""
        text = self._step_log.read_text() if self._step_log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _provoke(self, fault: Fault) -> None:
        if fault.phase is Phase.GROWING:
            self._replace_nodes()
        self._let_out()

    def _let_out(self) -> None:
        self._limit += SPACING
        self._leash(self._limit)

    def _shrink(self) -> None:
        """A node is gone, and the run trains on those that are left."""
        lost = self._injector.inject(Fault(kind=Kind.NODE_LOSS, target=Target.RAYLET, rank=self._nodes - 1))
        self._let_out()
        self._wait(lambda: self._new_step(lost), "a step of fewer workers")

    def _mend(self) -> None:
        """As many nodes as in the beginning, and an elastic run on all of them."""
        self._cluster.drop_ended(stopped=True)
        self._replace_nodes()
        if self._elastic:
            self._wait(lambda: self.steps()[-1]["world"] == self._nodes or self._let_out_if_held(), "the full size")

    def _let_out_if_held(self) -> None:
        if self.steps()[-1]["step"] >= self._limit - 1:
            self._let_out()

    def _leash(self, limit: int) -> None:
        rule = Rule(
            place="step",
            action=Action.HOLD,
            until_at_s=time.time() + 3600,
            where={"rank": "0"},
            at_least={"step": float(limit)},
            times=None,
        )
        for local_dir in self._cluster.local_dirs:
            path = rule_path(local_dir / "drills", f"leash-{limit:06d}")
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(rule.to_dict()))
            part.rename(path)
            for old in path.parent.glob("leash-*.json"):
                if old != path:
                    old.unlink()

    def _replace_nodes(self) -> None:
        """There are as many nodes as in the beginning; for one that was killed just now, another one."""
        self._cluster.drop_ended()
        while self._cluster.num_running < self._nodes + 1:
            self._cluster.add_node()
            self._leash(self._limit)
            self._cluster.wait_for_node()

    def _forget_cached_data(self) -> None:
        """No data shard is cached, so that there is something to prefetch."""
        for local_dir in self._cluster.local_dirs:
            for path in (local_dir / "cache").glob("*/*.arrow"):
                path.unlink(missing_ok=True)

    def _new_step(self, strike: Strike) -> dict[str, Any] | None:
        least = strike.attempt + self._ends(strike.fault)
        return next((s for s in self.steps() if s["at_s"] > strike.at_s and s["attempt"] >= least), None)

    @staticmethod
    def _ends(fault: Fault) -> bool:
        """Whether the attempt cannot go on after it."""
        killed_driver = (fault.target, fault.kind) == (Target.DRIVER, Kind.KILL)
        return killed_driver or fault.target in (Target.WORKER, Target.RAYLET)

    def _committed(self) -> int:
        status = self._run.status()
        return status.committed_step if status is not None else -1

    def _find(self, name: str) -> LiveRun:
        def found() -> LiveRun | None:
            try:
                return find_run(name)
            except Exception:  # not there yet, whatever Ray says about it
                return None

        return self._wait(found, "the run's coordinator")

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + self._patience_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what} did not come within {self._patience_s:.0f} s"
            assert self.job.process.poll() is None, (
                f"the driver ended while waiting for {what}:\n{self.job.log[-3000:]}"
            )
            time.sleep(_POLL_S)
        return value


def epochs_for(num_faults: int) -> int:
    """Epochs of the small job that last longer than that many faults."""
    return int((2 * num_faults + 3) * SPACING / STEPS_PER_EPOCH) + 1
