"""A soak: one elastic run of 1 to 3 workers under random faults, and what is left of them at the end.

    make soak [ARGS="--faults 40 --mtbf 20 --seed 1"]

Faults come as a Poisson process; whoever is lost comes back: a new node for one that was lost, a new driver for one
that was killed. At the end: the run ended by itself, every sample was trained on exactly once an epoch, the books
balance, and nothing is left on the machine that a run without faults would not leave: processes, shared memory, file
descriptors, disk. Writes `tests/bench/results/soak.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fault_matrix import Say
from nodes import start_cluster, stop_cluster
from small_job import write_data

FAULTS = 40
TARGETS = ("worker", "vault", "coordinator", "shard-cache", "prefetch", "raylet", "driver")
KINDS = ("kill", "exception", "node-loss", "slow-disk", "slow-network")


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--mtbf", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--json", action="store_true", help="print the JSON object and nothing else")
    args = parser.parse_args()
    say = Say()
    with tempfile.TemporaryDirectory(prefix="rg_soak_") as folder:
        write_data(Path(folder) / "data")
        cluster = start_cluster()
        try:
            from soak_run import soak  # only now: it imports Ray

            found = soak(cluster, Path(folder), args, say)
        finally:
            stop_cluster(cluster)
    write(found, args)
    return 0


def write(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints what was measured. The soak as it is by default is a result; a shorter one, to try something, is none."""
    if args.faults < FAULTS or set(args.targets) < set(TARGETS) or set(args.kinds) < set(KINDS):
        print(json.dumps(found, indent=None if args.json else 1))
        return
    from results_file import report, spread  # beside the benchmarks, whose form the file has

    arms = {
        "run": {name: spread([value]) for name, value in found.items() if isinstance(value, int | float)},
        "faults by kind": {kind: spread([number]) for kind, number in found["kinds"].items()},
    }
    report("soak", arms, [], as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
