"""The fault matrix: who dies, how, and while the run does what.

    make fault-matrix [ARGS="--only TEXT --runs fsdp2,ddp,elastic --kinds kill,stop"]

Runs every cell on a real Ray of three nodes and writes `tests/bench/results/fault_matrix_{kill,stop}.json`. SIGKILL
strikes everyone in every phase, but for prefetch actors while ranks restore, when there are none; SIGSTOP strikes
everyone in a step, and in the other phases those who act in it, for whoever waits is only found later. Cells share
runs: the next fault comes when the run has trained and saved after the one before. Of each run is checked that it ends
by itself, that every sample was trained on exactly once an epoch and each step on the same ones as undisturbed, that
the books balance, and, where the number of workers never changed, that the final weights are bit-identical to the
undisturbed run's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nodes import start_cluster, stop_cluster
from ray_goodput.cli.demo_cluster import DemoCluster
from ray_goodput.testing.faults import Fault, Kind, Phase, Target
from running import Finished, Job, assert_books_balance, assert_nothing_lost
from small_job import write_data

NODE_LOST_BUDGET_S = 35.0
UNDISTURBED_S = 600.0
SECONDS, FAILED = "fault to first new step, s", "failed"
_STOPPED_FOR_S = 20.0  # then the watchdog takes a process for hung
_NEVER_S = 600.0  # a run on its leash is not


@dataclass(frozen=True, slots=True)
class Arm:
    """A kind of run. `rank`: the one struck where a cell does not mean rank 0."""

    name: str
    arguments: tuple[str, ...]
    rank: int = 1

    @property
    def elastic(self) -> bool:
        return self.name == "elastic"


ARMS = {
    arm.name: arm
    for arm in (
        Arm("fsdp2", ("--workers", "2", "--fsdp2")),
        Arm("ddp", ("--workers", "3", "--reproducible")),
        # It never waits for a new node, however soon those of the cells before came: what is timed is going on without.
        Arm("elastic", ("--workers", "1:3", "--resize-s", "5", "--replacement-wait", "0")),
    )
}
VICTIMS = {
    "worker": (Target.WORKER, None),
    "rank 0": (Target.WORKER, 0),
    "vault": (Target.VAULT, None),
    "coordinator": (Target.COORDINATOR, None),
    "shard cache": (Target.SHARD_CACHE, None),
    "prefetch actor": (Target.PREFETCH, None),
    "raylet": (Target.RAYLET, None),
    "raylet of rank 0": (Target.RAYLET, 0),
    "driver": (Target.DRIVER, None),
}
ACTS_IN = {
    Phase.STEP: tuple(VICTIMS),
    Phase.STAGING: ("worker", "rank 0"),
    Phase.UPLOADING: ("vault",),
    Phase.COMMITTING: ("coordinator",),
    Phase.RESTORING: ("worker", "rank 0", "vault", "coordinator"),
    Phase.GROWING: ("worker", "coordinator", "driver"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of the matrix."""

    arm: Arm
    victim: str
    kind: Kind
    phase: Phase

    @property
    def fault(self) -> Fault:
        target, rank = VICTIMS[self.victim]
        return Fault(kind=self.kind, target=target, rank=self.arm.rank if rank is None else rank, phase=self.phase)

    def __str__(self) -> str:
        return f"{self.arm.name}: {self.kind.value} {self.victim}, {self.phase.value}"


@dataclass(slots=True)
class Outcome:
    """What came of a cell; `problem` is empty if all was well."""

    cell: Cell
    first_new_step_s: float | None = None
    problem: str = ""


def possible(victim: str, phase: Phase) -> bool:
    """While ranks restore, nobody asks for data, and what was asked for before is there: no prefetch actor lives."""
    return victim != "prefetch actor" or phase is not Phase.RESTORING


def all_cells(arms: Iterable[str] = ARMS, kinds: Iterable[Kind] = (Kind.KILL, Kind.STOP)) -> list[Cell]:
    """Every cell, arm by arm: half of them under FSDP2, half under DDP; what happens while a run grows, and once more
    each loss of a node, in a run that can shrink and grow."""
    cells = []
    for kind, (i, victim), (j, phase) in itertools.product(kinds, enumerate(VICTIMS), enumerate(Phase)):
        if not possible(victim, phase) or (kind is Kind.STOP and victim not in ACTS_IN[phase]):
            continue
        fixed = "fsdp2" if (i + j) % 2 == 0 else "ddp"
        cells += [Cell(ARMS["elastic" if phase is Phase.GROWING else fixed], victim, kind, phase)]
        if VICTIMS[victim][0] is Target.RAYLET and phase is not Phase.GROWING:
            cells.append(Cell(ARMS["elastic"], victim, kind, phase))
    return [cell for name in arms for cell in cells if cell.arm.name == name]


def sample(seed: int, size: int = 12) -> list[Cell]:
    """Kills drawn by `seed`, in a run under FSDP2 that keeps its size: every victim, and every phase it can have."""
    chance = random.Random(seed)
    phases = [phase for phase in Phase if phase is not Phase.GROWING]
    pairs = []
    for number, victim in enumerate(VICTIMS):
        if number % len(phases) == 0:
            chance.shuffle(phases)
        phase = next(p for p in phases[number % len(phases) :] + phases if possible(victim, p))
        pairs.append((victim, phase))
    rest = [pair for pair in itertools.product(VICTIMS, phases) if pair not in pairs and possible(*pair)]
    pairs += chance.sample(rest, size - len(pairs))
    chance.shuffle(pairs)
    return [Cell(ARMS["fsdp2"], victim, Kind.KILL, phase) for victim, phase in pairs]


def run_cells(
    cluster: DemoCluster,
    start_job: Callable[..., Job],
    name: str,
    cells: Sequence[Cell],
    undisturbed: Finished,
    *,
    epochs: int,
    say: Callable[[str], None],
) -> list[Outcome]:
    """All `cells`, which are of one arm and kind, in one run; in several, if one fails and it has to be begun anew."""
    from drill import Drill  # only now: it imports Ray

    outcomes = [Outcome(cell) for cell in cells]
    left, number = list(outcomes), 0
    while left:
        number += 1
        struck: list[Outcome] = []
        problem = ""
        drill = None
        try:
            hang_after = _STOPPED_FOR_S if cells[0].kind is Kind.STOP else _NEVER_S
            arguments = (*cells[0].arm.arguments, "--epochs", str(epochs), "--hang-after", str(hang_after))
            drill = Drill(cluster, start_job, f"{name}-{number}", *arguments, elastic=cells[0].arm.elastic, say=say)
            while left:
                struck.append(left.pop(0))
                struck[-1].first_new_step_s = drill.strike(struck[-1].cell.fault).first_new_step_s
            check(drill.finish(), undisturbed, [outcome.cell for outcome in struck])
        except Exception as error:  # a cell that fails is reported, and the others have their turn
            problem = f"{type(error).__name__}: {error}"[:600]
            say(f"FAILED: {problem}")
            if drill is not None:
                drill.job.kill()
            if not struck:
                struck.append(left.pop(0))
        if problem and left:
            struck[-1].problem = problem  # those before it had trained on and saved
        elif problem:
            for outcome in struck:
                outcome.problem = problem  # the end of the run shows that something was lost, not by which fault
    return outcomes


def epochs_of(cells: Sequence[Cell]) -> int:
    """Epochs of a run in which all these cells find room."""
    from drill import epochs_for

    return epochs_for(len(cells) * (4 if cells[0].arm.elastic else 1))  # it trains on while it waits to be whole again


def check(finished: Finished, undisturbed: Finished, struck: Sequence[Cell]) -> None:
    """The laws of a run that these faults disturbed, all of one arm and kind."""
    assert_nothing_lost(finished, undisturbed.audit().steps)
    assert_books_balance(finished)
    if not struck[0].arm.elastic:
        assert finished.outcome["weights"] == undisturbed.outcome["weights"], "other final weights"
    drivers = sum(cell.victim == "driver" and cell.kind is Kind.KILL for cell in struck)
    lost = sum(incident["kind"] == "driver" for incident in finished.outcome["goodput"]["incidents"])
    assert lost == drivers, f"{drivers} drivers were killed, the report tells of {lost}"


@dataclass(slots=True)
class Say:
    """Prints with the seconds since the start; to standard error, which `--json` leaves free."""

    started: float = field(default_factory=time.monotonic)

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self.started:7.1f} s  {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fault_matrix", description=__doc__)
    parser.add_argument("--runs", default=",".join(ARMS), help="kinds of runs, of " + ", ".join(ARMS))
    parser.add_argument("--kinds", default="kill,stop", help="kill, stop, or both with a comma")
    parser.add_argument("--only", action="append", default=[], help="only cells whose name holds this text, or another")
    parser.add_argument("--sample", type=int, default=None, help="seed of 12 cells, instead of all; no file is written")
    parser.add_argument("--limit", type=int, default=None, help="at most so many cells of each kind of run")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the cluster is stopped
    say = Say()
    if args.sample is not None:
        chosen = sample(args.sample)
    else:
        chosen = all_cells(args.runs.split(","), [Kind(k) for k in args.kinds.split(",")])
    chosen = [c for c in chosen if not args.only or any(text in str(c) for text in args.only)]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="rg_matrix_") as folder:
        data = Path(folder) / "data"
        write_data(data)
        cluster = start_cluster()
        try:

            def start_job(name: str, *arguments: str) -> Job:
                return Job(Path(folder), name, *arguments, address=cluster.address, data=str(data))

            for arm in args.runs.split(","):
                groups = [[c for c in chosen if c.arm.name == arm and c.kind is kind][: args.limit] for kind in Kind]
                groups = [cells for cells in groups if cells]
                if not groups:
                    continue
                epochs = max(epochs_of(cells) for cells in groups)
                say(f"{arm}: {sum(map(len, groups))} cells, {epochs} epochs")
                arguments = (*ARMS[arm].arguments, "--epochs", str(epochs), "--step-s", "0", "--every", "1000")
                whole = start_job(f"{arm}-whole", *arguments).succeed(UNDISTURBED_S)  # saves change no step
                for cells in groups:
                    name = f"{arm}-{cells[0].kind.value}"
                    ran = run_cells(cluster, start_job, name, cells, whole, epochs=epochs, say=say)
                    outcomes += ran
                    if args.sample is None:  # at once: the next run may end this script
                        write(cells[0].kind, ran)
        finally:
            stop_cluster(cluster)
    failed = [o for o in outcomes if o.problem]
    for outcome in failed:
        say(f"FAILED {outcome.cell}: {outcome.problem.splitlines()[0]}")
    return 1 if failed or not outcomes else 0


def write(kind: Kind, outcomes: Sequence[Outcome]) -> None:
    """The table of all cells of `kind` and its file, in which cells that ran now replace what is told of them."""
    from results_file import RESULTS, Budget, report, spread  # beside the benchmarks, whose form the file has

    topic = f"fault_matrix_{kind.value}"
    path = RESULTS / f"{topic}.json"
    arms = json.loads(path.read_text())["arms"] if path.exists() else {}
    for outcome in outcomes:
        seconds = outcome.first_new_step_s
        told = {FAILED: spread([float(bool(outcome.problem))])}
        arms[str(outcome.cell)] = told | ({SECONDS: spread([seconds])} if seconds and not outcome.problem else {})
    cells = {str(cell): cell for cell in all_cells(kinds=[kind])}
    arms = {name: arms[name] for name in cells if name in arms}  # what is no cell any more is dropped
    well = {name: cells[name] for name, told in arms.items() if not told[FAILED]["median"]}
    budgets = [Budget(name="cells that failed, or never ran", limit=0, value=len(cells) - len(well))]
    lost = [
        arms[name][SECONDS]["median"]
        for name, cell in well.items()
        if VICTIMS[cell.victim][0] is Target.RAYLET and cell.arm.name != "ddp"  # which has to wait for a new node
    ]
    if lost:
        budgets.append(Budget(name="node lost: first new step, s, worst", limit=NODE_LOST_BUDGET_S, value=max(lost)))
    report(topic, arms, budgets, as_json=False, every_figure=False)


if __name__ == "__main__":
    sys.exit(main())
