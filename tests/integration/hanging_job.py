"""A small training job in which a process stands still, once, in the way it is told; a driver of its own process.

    python hanging_job.py --storage FOLDER --data FOLDER --name NAME --out FILE --how HOW

HOW: stop-rank, hold-gil, sleep (one rank, in its code between two steps), or stop-CLASS,CLASS (the run's actors of
those classes).

The weights are what `small_job.py` computes on the same data. Writes one JSON object to FILE.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from small_job import GLOBAL_BATCH
from small_job import train_loop as small_loop

HANG_AT = 12
HANGING_RANK = 1
FOREVER_S = 1000


def stand_still(how: str) -> None:
    """What this process, or an actor of its run, does from now on."""
    if how == "stop-rank":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hold-gil":
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # unlike CDLL, PyDLL keeps Python's lock
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # for ever, and unlike sleep() no signal ends it
    elif how == "sleep":
        time.sleep(FOREVER_S)
    else:
        for name in how.removeprefix("stop-").split(","):
            for pid in actor_pids(name):
                os.kill(pid, signal.SIGSTOP)


def actor_pids(class_name: str) -> list[int]:
    """Processes of the cluster's living actors of one class; Ray names them `ray::Class`."""
    import psutil

    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if f"ray::{class_name}" in " ".join(p.info["cmdline"] or [])
    ]


def train_loop(config: dict[str, Any]) -> str:
    """`small_job.train_loop` with a pause in it: the session's `step` is where every loop passes by."""
    import ray_goodput as rg

    run = rg.session()
    step = run.step

    def step_and_hang(metrics: Any = None) -> None:
        if run.attempt == 1 and run.step_index == HANG_AT and run.world_rank == HANGING_RANK:
            stand_still(config["how"])
        step(metrics)

    run.step = step_and_hang  # type: ignore[method-assign] (struck on purpose)
    return small_loop(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--how", required=True)
    parser.add_argument("--step-s", type=float, default=0.05)
    args = parser.parse_args()

    import ray.train

    import ray_goodput as rg

    trainer = rg.GoodputTrainer(
        train_loop,
        train_loop_config={"step_s": args.step_s, "how": args.how},
        datasets={
            "train": rg.ShardedDataset(f"{args.data}/*.parquet", global_batch_size=GLOBAL_BATCH, seed=3, window=2)
        },
        checkpoint=rg.CheckpointConfig(every=5, when_full="wait"),
        watchdog=rg.WatchdogConfig(hang_after_s=8, times_p99_step=5, actor_silent_after_s=4),
        sample_log=True,
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name=args.name, storage_path=args.storage),
    )
    result = trainer.fit()
    assert result.goodput is not None
    outcome = {
        "weights": result.return_value,
        "resumes": [[r.attempt, r.step, r.tier] for r in result.resumes],
        "goodput": result.goodput.to_dict(),
    }
    part = args.out.with_suffix(".part")
    part.write_text(json.dumps(outcome))
    part.rename(args.out)


if __name__ == "__main__":
    main()
