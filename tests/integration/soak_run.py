"""The run of the soak: `soak.py` starts the cluster first, and imports this, and Ray with it, afterwards."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leaks
from drill import STEPS_PER_EPOCH
from ray_goodput.cli.demo_cluster import DemoCluster
from ray_goodput.errors import GoodputError
from ray_goodput.gates import Action, Rule, rule_path
from ray_goodput.testing import Fault, FaultInjector, Kind, LiveRun, Target, find_run, random_faults
from ray_goodput.testing.injector import trains
from running import Job, assert_books_balance

NODES = 3
STEP_S = 0.05
PATIENCE_S = 180.0
LAST_STEPS_S = 900.0
NAME = "soak"


class Soak:
    """The run, its cluster and what was done to it. For one thread."""

    def __init__(
        self, cluster: DemoCluster, folder: Path, epochs: int, *, seed: int, say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._say = say
        self._epochs = epochs
        self._last_step = int(epochs * STEPS_PER_EPOCH)
        self._throttle()
        self.job = self._start()
        self.run = self._find()
        self._injector = FaultInjector(self.run, seed=seed, say=lambda _: None)
        self.struck: list[dict[str, Any]] = []
        self.left_out = 0

    def _start(self) -> Job:
        return Job(
            self._folder,
            NAME,
            *("--workers", f"1:{NODES}", "--resize-s", "5", "--step-s", "0", "--every", "20"),
            *("--max-failures", "1000", "--epochs", str(self._epochs), "--hang-after", "600"),
            address=self._cluster.address,
            data=str(self._folder / "data"),
        )

    def _throttle(self) -> None:
        """Steps take `STEP_S`, and none goes past the last but a few, until `release`."""
        until_at_s = time.time() + 7200
        slow = Rule(place="step", action=Action.DELAY, until_at_s=until_at_s, seconds=STEP_S, times=None)
        leash = Rule(
            place="step",
            action=Action.HOLD,
            until_at_s=until_at_s,
            where={"rank": "0"},
            at_least={"step": float(self._last_step - 20)},
            times=None,
        )
        for local_dir in self._cluster.local_dirs:
            for name, rule in (("soak-pace", slow), ("soak-leash", leash)):
                path = rule_path(local_dir / "drills", name)
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    part = path.with_suffix(".part")
                    part.write_text(json.dumps(rule.to_dict()))
                    part.rename(path)

    def release(self) -> None:
        for local_dir in self._cluster.local_dirs:
            for name in ("soak-pace", "soak-leash"):
                rule_path(local_dir / "drills", name).unlink(missing_ok=True)

    def strike(self, fault: Fault) -> None:
        """`fault` has struck, or is left out because there is nothing to strike just now (no prefetching, no spare
        node); what was lost is on its way back."""
        try:
            strike = self._injector.inject(fault, timeout_s=20.0)
        except GoodputError as error:
            self.left_out += 1
            self._say(f"left out {fault}: {error}")
            return
        self.struck.append(strike.to_dict())
        self._say(f"{len(self.struck)}. {strike.fault} at step {strike.step}, attempt {strike.attempt}")
        if fault.target is Target.DRIVER and fault.kind is Kind.KILL:
            self.job.process.wait(30)
            self.job = self._start()

    def mend(self) -> None:
        """There are as many nodes as in the beginning, and a driver."""
        self._cluster.drop_ended(stopped=True)
        if self._cluster.num_running < NODES + 1:
            self._cluster.add_node()
            self._throttle()
            self._cluster.wait_for_node()
        assert self.job.process.poll() is None, f"the driver ended by itself:\n{self.job.log[-5000:]}"

    def trains(self) -> Any:
        """The run's state once it has workers that train in their present attempt; None before."""
        status = self.run.status()
        return status if status is not None and trains(status) else None

    def wait_training(self, num_workers: int = 1) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.mend()
            status = self.trains()
            if status is not None and len(status.workers) >= num_workers:
                return status
            assert time.monotonic() < deadline, (
                f"no training within {PATIENCE_S:.0f} s: {status}\n{self.job.log[-3000:]}"
            )
            time.sleep(0.2)

    def _find(self) -> LiveRun:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return find_run(NAME)
            except GoodputError:
                assert time.monotonic() < deadline, self.job.log[-3000:]
                time.sleep(0.2)


def soak(cluster: DemoCluster, folder: Path, args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole of it; returns what was measured.

    Raises:
        AssertionError: something was lost, or is left.
    """
    # Half of the time goes into restarts; a run that gets to its end before the faults do waits there.
    epochs = int(args.faults * args.mtbf * 0.5 / STEP_S / STEPS_PER_EPOCH) + 2
    found = Soak(cluster, folder, epochs, seed=args.seed, say=say)
    found.wait_training(NODES)
    before = leaks.Snapshot.take(cluster.local_dirs, found.run)
    due = time.monotonic()
    started = due
    for pause_s, fault in random_faults(seed=args.seed, mtbf_s=args.mtbf, targets=args.targets, kinds=args.kinds):
        if len(found.struck) >= args.faults:
            break
        due = max(due + pause_s, time.monotonic())
        while time.monotonic() < due:
            found.mend()
            time.sleep(0.2)
        found.strike(fault)
    say(f"{len(found.struck)} faults in {time.monotonic() - started:.0f} s, {found.left_out} left out")
    status = found.wait_training(NODES)
    grown = leaks.Snapshot.take(cluster.local_dirs, found.run)
    leaks.assert_no_more_files_open(before, grown)
    say(f"step {status.step} in attempt {status.attempt}: let go")
    found.release()
    finished = found.job.wait(LAST_STEPS_S)
    assert finished.code == 0, finished.log[-6000:]
    samples = finished.audit()
    assert (samples.repeated, samples.skipped) == (0, 0), f"{samples.repeated} repeated, {samples.skipped} skipped"
    assert samples.samples == epochs * 363, (samples.samples, epochs * 363)
    assert_books_balance(finished)
    leaks.assert_nothing_is_left(cluster.local_dirs, found.run, finished.store)
    goodput = finished.outcome["goodput"]
    return {
        "seed": args.seed,
        "mtbf_s": args.mtbf,
        "faults": len(found.struck),
        "kinds": dict(Counter(s["fault"].partition(":rank")[0] for s in found.struck)),
        "left_out": found.left_out,
        "attempts": len(goodput["attempts"]),
        "worlds": sorted({attempt["world"] for attempt in goodput["attempts"]}),
        "samples": samples.samples,
        "wall_s": goodput["wall_s"],
        "goodput": goodput["overall"],
        "uncertainty_s": goodput["uncertainty_s"],
        "imbalance_s": goodput["imbalance_s"],
    }
