"""From a fault to the first new step: stock Ray Train with checkpoints of its own, and ours, in one script.

Each arm trains the same small network on three nodes of one CPU (elastic, 2 to 3 workers), saves every few steps, and
is struck from outside: a worker killed, several times; a node killed with all its processes, in runs of their own. Time
is taken by the train loops themselves: when they were entered, and when each step ended. Budgets: DESIGN section 8.

    make bench-restart [ARGS="--crashes 3 --losses 2 --json"]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results_file import Budget, parser, report, spread

from ray_goodput.errors import GoodputError

EVERY = 5
STEP_S = 0.1
WIDTH = 256
BATCH = 48
ROWS = 4800
PATIENCE_S = 240.0
ARMS = ("stock", "ours")


# what a user would write: one loop an arm


def _network() -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def _note(config: dict[str, Any], event: str, step: int) -> None:
    import ray.train

    context = ray.train.get_context()
    entry = {"event": event, "step": step, "rank": context.get_world_rank(), "world": context.get_world_size()}
    with open(config["log"], "a") as log:
        log.write(json.dumps({**entry, "pid": os.getpid(), "at_s": time.time()}) + "\n")


def stock_loop(config: dict[str, Any]) -> None:
    """Ray Train alone: DCP into a folder of the worker's own, which `ray.train.report` carries to the storage."""
    import ray.train
    import ray.train.torch
    import torch
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    _note(config, "entered", 0)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states, "step": torch.zeros((), dtype=torch.int64)}
            state_dict_loader.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            step = int(state["step"])
    while True:
        step += 1
        generator = torch.Generator().manual_seed(step * 100 + rank)
        x = torch.randn(BATCH // ray.train.get_context().get_world_size(), WIDTH, generator=generator)
        _step(model, optimizer, x)
        _note(config, "step", step)
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                weights, states = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": states, "step": torch.tensor(step)}
                state_dict_saver.save(state, checkpoint_id=folder)
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def our_loop(config: dict[str, Any]) -> None:
    import torch

    import ray_goodput as rg

    run = rg.session()
    _note(config, "entered", 0)
    model = run.prepare_model(_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.restore(model=model, optimizer=optimizer)
    for batch in run.batches("train", epochs=None):
        _step(model, optimizer, batch["x"])
        run.step()
        _note(config, "step", run.step_index)


def _step(model: Any, optimizer: Any, x: Any) -> None:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(STEP_S)


def run_job(arm: str, name: str, folder: Path) -> None:
    """The driver's process: trains until it is killed."""
    import ray.train
    import ray.train.torch

    config = {"log": str(folder / f"{name}.jsonl")}
    scaling = ray.train.ScalingConfig(num_workers=(2, 3), resources_per_worker={"CPU": 1})
    where: dict[str, Any] = {"name": name, "storage_path": str(folder / "runs")}
    if arm == "stock":
        failure = ray.train.FailureConfig(max_failures=-1)
        keep = ray.train.CheckpointConfig(num_to_keep=3)
        run_config = ray.train.RunConfig(**where, failure_config=failure, checkpoint_config=keep)
        ray.train.torch.TorchTrainer(
            stock_loop, train_loop_config=config, scaling_config=scaling, run_config=run_config
        ).fit()
        return
    import ray_goodput as rg

    rg.GoodputTrainer(
        our_loop,
        train_loop_config=config,
        datasets={"train": rg.ShardedDataset(f"{folder}/data/*.parquet", global_batch_size=BATCH)},
        checkpoint=rg.CheckpointConfig(every=EVERY),
        scaling_config=scaling,
        run_config=ray.train.RunConfig(**where),
    ).fit()


# what strikes and measures


class Arm:
    """One living run, and what its ranks wrote down."""

    def __init__(self, arm: str, name: str, folder: Path, address: str) -> None:
        self._log = folder / f"{name}.jsonl"
        self._driver_log = folder / f"{name}.log"
        command = [sys.executable, __file__, "--job", arm, "--name", name, "--folder", str(folder)]
        with self._driver_log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "RAY_ADDRESS": address}
            )

    def until(self, condition: Callable[[list[dict[str, Any]]], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition(self._entries())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The run did not get there:\n{self._driver_log.read_text()[-3000:]}")
            time.sleep(0.05)
        return value

    def _entries(self) -> list[dict[str, Any]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def strike(self, kill: Callable[[int], Any]) -> dict[str, float]:
        """A rank that is not 0 is gone once enough steps are saved; seconds until the loop is entered again, and until
        its first step."""
        begun = self.until(lambda entries: _of_newest(entries, "step"))
        least = begun[0]["step"] + 3 * EVERY
        newest = self.until(lambda entries: [e for e in _of_newest(entries, "step") if e["step"] >= least])
        entered = self.until(lambda entries: _of_newest(entries, "entered"))
        victim = max(entered, key=lambda e: e["rank"])["pid"]
        old = self.until(lambda entries: {e["pid"] for e in entries})  # whoever has said anything, in any attempt
        at_s = time.time()
        kill(victim)

        def first(event: str) -> float:
            found = self.until(
                lambda entries: [e for e in entries if e["event"] == event and e["rank"] == 0 and e["pid"] not in old]
            )
            return found[0]["at_s"] - at_s

        entered_s, step_s = first("entered"), first("step")
        resumed = self.until(lambda entries: _of_newest(entries, "step"))[0]["step"]
        return {
            "fault to loop entered, s": entered_s,
            "loop entered to first new step, s": step_s - entered_s,
            "fault to first new step, s": step_s,
            "steps done twice": max(0, newest[-1]["step"] - resumed + 1),
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)


def _of_newest(entries: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Entries of the newest group of processes; steps only those of rank 0."""
    starts = [e for e in entries if e["event"] == "entered" and e["rank"] == 0]
    if not starts:
        return []
    since = starts[-1]["at_s"]
    if event == "step":
        return [e for e in entries if e["event"] == "step" and e["pid"] == starts[-1]["pid"]]
    group = [e for e in entries if e["event"] == "entered" and abs(e["at_s"] - since) < 30.0]
    alive = [e for e in group if Path(f"/proc/{e['pid']}").exists()]
    return alive if len(alive) == starts[-1]["world"] else []


def _write_data(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH), dtype=np.float32)
    for part, rows in enumerate(np.array_split(x, 8)):
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), WIDTH)})
        pq.write_table(table, folder / f"part-{part}.parquet")


Strikes = dict[str, list[dict[str, float]]]  # {"ARM, EVENT": what each strike cost}


def _measure(arm: str, cluster: Any, folder: Path, crashes: int, losses: int, found: Strikes) -> None:
    def strike(running: Arm, event: str, kill: Callable[[int], Any]) -> None:
        cost = running.strike(kill)
        found.setdefault(f"{arm}, {event}", []).append(cost)
        print(f"{arm}, {event}:", {name: round(value, 1) for name, value in cost.items()}, file=sys.stderr, flush=True)

    if crashes:
        running = Arm(arm, f"{arm}-crash", folder, cluster.address)
        try:
            for _ in range(crashes):
                strike(running, "worker killed", lambda pid: os.kill(pid, signal.SIGKILL))
        finally:
            running.close()
    for number in range(losses):
        running = Arm(arm, f"{arm}-loss-{number}", folder, cluster.address)
        try:
            strike(running, "node lost", cluster.kill_node_of)
        finally:
            running.close()
        cluster.add_node()
        cluster.wait_for_node()


def main() -> None:
    arguments = parser("restart")
    arguments.add_argument("--crashes", type=int, default=3, help="workers killed in each arm")
    arguments.add_argument("--losses", type=int, default=2, help="nodes lost in each arm")
    arguments.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="default: both")
    arguments.add_argument("--job", choices=ARMS, default=None, help=argparse.SUPPRESS)
    arguments.add_argument("--name", help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.job is not None:
        run_job(args.job, args.name, args.folder)
        return
    from ray_goodput.cli.demo_cluster import DemoCluster

    cluster = DemoCluster()
    found: Strikes = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rg_restart_") as folder:
        _write_data(Path(folder) / "data")
        try:
            cluster.start()
            for _ in range(3):
                cluster.add_node()
                cluster.wait_for_node()
            for arm in args.arms:
                try:
                    _measure(arm, cluster, Path(folder), args.crashes, args.losses, found)
                except (RuntimeError, GoodputError) as error:  # the other arm's figures are kept
                    failed.append(arm)
                    print(f"FAILED {arm}: {error}", file=sys.stderr, flush=True)
        finally:
            cluster.close()
    arms = {name: {metric: spread([s[metric] for s in seen]) for metric in seen[0]} for name, seen in found.items()}
    report("restart", arms, _budgets(arms), as_json=args.json)
    sys.exit(f"No or few figures of: {', '.join(failed)}" if failed else 0)


def _budgets(arms: dict[str, dict[str, dict[str, float]]]) -> list[Budget]:
    """Ray's own restart is the stock arm's time from the fault to its loop."""
    budgets = []
    whole, entered = "fault to first new step, s", "fault to loop entered, s"
    if {"ours, worker killed", "stock, worker killed"} <= arms.keys():
        beyond = arms["ours, worker killed"][whole]["median"] - arms["stock, worker killed"][entered]["median"]
        name = "worker killed: restore and first step beyond Ray's own restart, s"
        budgets.append(Budget(name=name, limit=2.0, value=beyond))
    if "ours, node lost" in arms:
        value = arms["ours, node lost"][whole]["median"]
        budgets.append(Budget(name="node lost: first new step, s", limit=35.0, value=value))
    return budgets


if __name__ == "__main__":
    main()
