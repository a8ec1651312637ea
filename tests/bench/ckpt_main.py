"""The command of `bench_checkpoint`: which cases and arms, one after the other, and the table of all."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from ckpt_arms import ARMS
from ckpt_budgets import Figures, budgets
from ckpt_ray import run_ray
from ckpt_restore import run_restore
from ckpt_state import CASES
from ckpt_world import Place, run_arm
from results_file import parser, report

from ray_goodput.config import StoreSpec
from servers import JuiceFSGateway

_EVERY = (*ARMS, "ray")
# Arms of a case, where they are not all: this one is about what saving costs a step, not about who is quicker.
_ARMS_OF = {"one": ("ours", "bare upload")}
_LOWEST_PRIORITY = 19


def _arguments() -> argparse.Namespace:
    result = parser("checkpoint")
    names = [*(case.name for case in CASES), "restore"]
    result.add_argument("--cases", nargs="+", choices=names, default=names, help="default: all")
    result.add_argument("--arms", nargs="+", choices=_EVERY, help="default: all; ours and the bare upload for `one`")
    result.add_argument("--state-mb", type=float, default=768, help="state of DDP at 2 ranks, in MiB (default: 768)")
    result.add_argument("--repeats", type=int, default=5, help="saves after the first, and loads (default: 5)")
    return result.parse_args()


def measure_all(arguments: argparse.Namespace, place: Place, failed: list[str]) -> Figures:
    """{"CASE: ARM": metrics}, case by case, each arm in fresh processes; of one that dies it is told."""
    figures: Figures = {}
    size = {"state_mb": arguments.state_mb, "repeats": arguments.repeats}
    for case in CASES:
        if case.name not in arguments.cases:
            continue
        for arm in arguments.arms or _ARMS_OF.get(case.name, _EVERY):
            started = time.monotonic()
            try:
                outcome = run_ray(case, place, **size) if arm == "ray" else run_arm(case, arm, place, **size)
            except Exception as error:  # whatever another library raises, the other arms' figures are kept
                failed.append(f"{case.name}: {arm}")
                print(f"FAILED {case.title}: {arm}: {error}", file=sys.stderr, flush=True)
                continue
            figures[f"{case.name}: {arm}"] = outcome.metrics()
            _tell(arguments, f"{case.title}: {arm} ({time.monotonic() - started:.0f} s)")
    if "restore" in arguments.cases:
        figures |= {f"restore: {arm}": metrics for arm, metrics in run_restore(place, **size).items()}
        _tell(arguments, "restore")
    return figures


def _lower_priority(pid: int) -> None:
    """Of the store's server, which is elsewhere in a real run: it takes what training and the arms leave."""
    for thread in psutil.Process(pid).threads():  # those to come inherit it
        os.setpriority(os.PRIO_PROCESS, thread.id, _LOWEST_PRIORITY)


def _tell(arguments: argparse.Namespace, what: str) -> None:
    print(f"measured {what}", file=sys.stderr if arguments.json else sys.stdout, flush=True)


def table(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The medians side by side: one line an arm."""
    columns = {
        "stall s": "stall_s",
        "first s": "first_save_s",
        "durable s": "durable_s",
        "memory MiB": "extra_memory_mb_a_rank",
        "max/mean": "slice_max_to_mean",
        "p50 quiet": "step_quiet_p50_s",
        "p50 upload": "step_uploading_p50_s",
        "p99 quiet": "step_quiet_p99_s",
        "p99 upload": "step_uploading_p99_s",
        "restore s": "restore_s",
        "/ memcpy": "stall_to_memcpy",
        "/ bare": "durable_to_bare_upload",
    }
    width = max(map(len, figures))
    lines = [" " * width + "".join(f"{title:>12}" for title in columns)]
    for name, metrics in figures.items():
        cells = [f"{metrics[m]['median']:.4g}" if m in metrics else "" for m in columns.values()]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    arguments, started = _arguments(), time.monotonic()
    failed: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as disk,
        tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir="/dev/shm") as memory,
        JuiceFSGateway(Path(disk) / "s3") as gateway,
    ):
        _lower_priority(gateway.pid)
        store = StoreSpec(uri=f"{gateway.uri}/bench", options=gateway.storage_options)
        figures = measure_all(arguments, Place(disk=Path(disk), memory=Path(memory), store=store), failed)
    found = budgets(figures)
    if not arguments.json:
        print(f"{table(figures)}\n{(time.monotonic() - started) / 60:.1f} minutes")
    report("checkpoint", figures, found, as_json=arguments.json, every_figure=False)
    sys.exit(f"No figures of: {', '.join(failed)}" if failed else 0)
