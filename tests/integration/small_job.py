"""The training job of the integration tests: a small network on parquet rows, run as a driver script of its own
process.

    python small_job.py --storage URI --data URI --name NAME --out FILE [--kill SEED ...]

Writes one JSON object to FILE: how the run ended, its final weights as a digest, where its attempts resumed from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_SHARDS = 12
ROWS_PER_SHARD = (40, 33, 1, 47)  # uneven, and one of a single row
GLOBAL_BATCH = 16


def write_data(folder: Path, rows_per_shard: Sequence[int] = ROWS_PER_SHARD * (NUM_SHARDS // 4)) -> int:
    """Write the data set once; returns its number of rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    total = 0
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    for i, rows in enumerate(rows_per_shard):
        x = generator.standard_normal((rows, 8), dtype=np.float32)
        y = (x[:, 0] * 2 - x[:, 1]).astype(np.float32)
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 8), "y": pa.array(y)})
        part = folder / f".part-{i:05d}"
        pq.write_table(table, part)
        part.rename(folder / f"part-{i:05d}.parquet")
        total += rows
    return total


# What a loop does unless its job says otherwise.
LOOP: dict[str, Any] = {
    "epochs": 2,
    "step_s": 0.05,
    "width": 16,
    "fail_at": -1,
    "fail_once_at": [],
    "skip_restore": False,
    "fsdp2": False,
    "step_log": None,
    "pids": None,
    "brake": None,
    "augment": False,
}


def train_loop(config: dict[str, Any]) -> str:
    import torch
    from torch import nn

    import ray_goodput as rg

    torch.set_num_threads(1)
    torch.manual_seed(11)
    run = rg.session()
    config = LOOP | config
    width = config["width"]
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1))
    model = shard(net) if config["fsdp2"] else run.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    if config["skip_restore"]:
        run.step({"loss": 0.0})
    run.restore(model=model, optimizer=optimizer, schedule=schedule)
    if config["pids"]:
        Path(config["pids"], f"{run.attempt}-{run.world_rank}").write_text(str(os.getpid()))
    for batch in run.batches("train", epochs=config["epochs"]):
        if config["augment"]:
            note_augmented(Path(config["pids"], augmented_name(run.attempt, run.world_rank)), run.step_index + 1, batch)
        loss = nn.functional.mse_loss(model(batch["x"]).squeeze(-1), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        time.sleep(config["step_s"] if not config["brake"] or Path(config["brake"]).exists() else 0.02)
        run.step({"loss": loss})
        if config["step_log"] and run.world_rank == 0:
            note_step(config["step_log"], run.step_index, run.attempt, run.world_size)
        if run.step_index == config["fail_at"]:
            raise RuntimeError(f"the model exploded at step {run.step_index}")
        if run.step_index in config["fail_once_at"] and run.world_rank == 0:
            failed = Path(config["pids"], f"failed-{run.step_index}")
            if not failed.exists():
                failed.touch()
                raise RuntimeError("a cosmic ray")
    state = {name: whole(tensor).numpy().tobytes() for name, tensor in sorted(net.state_dict().items())}
    return hashlib.sha256(b"".join(state.values())).hexdigest()


def shard(net: Any) -> Any:
    """FSDP2: each layer's parameters lie in rows on the ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def augment(sample: Mapping[str, Any], rng: Any) -> dict[str, Any]:
    """Noise that is another in each epoch, and from the generator that the sample is given alone."""
    return {"x": sample["x"] + rng.normal(0, 0.05, 8).astype("float32"), "y": sample["y"]}


def digest_of(x: Any, y: Any) -> str:
    """Of the numbers that one sample is trained on, as numpy arrays."""
    return hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()[:16]


def augmented_name(attempt: int | str, world_rank: int | str) -> str:
    return f"augmented-{attempt}-{world_rank}.jsonl"


def note_augmented(path: Path, step: int, batch: Any) -> None:
    """One line a step, written at once: which samples this rank is about to train on, and as what tensors."""
    ids, x, y = batch.sample_ids.tolist(), batch["x"].numpy(), batch["y"].numpy()
    with path.open("a") as log:  # a padding sample has no id
        log.write(json.dumps([step, [[i, digest_of(x[at], y[at])] for at, i in enumerate(ids)]]) + "\n")


def train_data(data: str, *, seed: int, augmented: bool, mixture: bool, options: Any = None) -> Any:
    """What the job trains on: all files, or the first ten and the last two as a mixture."""
    import ray_goodput as rg

    def of(files: str) -> rg.ShardedDataset:
        return rg.ShardedDataset(
            f"{data}/{files}.parquet",
            global_batch_size=GLOBAL_BATCH,
            seed=seed,
            window=2,
            transform=augment if augmented else None,
            storage_options=options if data.startswith("s3://") else None,
        )

    if not mixture:
        return of("*")
    return rg.Mixture({"ten": of("part-0000*"), "two": of("part-0001*")}, weights={"ten": 5, "two": 2}, seed=seed)


def note_step(path: str, step: int, attempt: int, world: int) -> None:
    """One line a step, written at once: when it ended."""
    with open(path, "a") as log:
        log.write(json.dumps({"at_s": time.time(), "step": step, "attempt": attempt, "world": world}) + "\n")


def kill_once(observer: Any, seed: int, killed: list[int], stop: threading.Event) -> None:
    """SIGKILL one worker of the first attempt at a random moment after its first commit."""
    chance = random.Random(seed)
    while not stop.wait(0.05):
        status = observer.status()
        if status is not None and status.committed_step > 0 and status.workers and status.attempt == 1:
            break
    else:
        return
    time.sleep(chance.uniform(0.0, 1.5))
    victim = chance.choice([w.pid for w in (observer.status() or status).workers])
    os.kill(victim, signal.SIGKILL)
    killed.append(victim)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", default="2", help="N or MIN:MAX")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--every-local", type=int, default=None)
    parser.add_argument("--peer-copies", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=3, help="of the sample order")
    parser.add_argument("--kill", type=int, default=None, help="seed of the moment and the victim")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--skip-restore", action="store_true")
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--step-log", default=None, help="file to which rank 0 adds a line a step")
    parser.add_argument("--hang-after", type=float, default=60.0, help="seconds without progress")
    parser.add_argument("--resize-s", type=float, default=60.0, help="seconds between looks for more nodes")
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--storage-options", type=json.loads, default=None)
    parser.add_argument("--pids", default=None, help="folder for files ATTEMPT-RANK that hold the workers' pids")
    parser.add_argument("--brake", default=None, help="file without which steps take no time")
    parser.add_argument("--fail-once-at", type=int, nargs="*", default=[], help="steps that raise the first time")
    parser.add_argument("--max-wait", type=float, default=1800.0, help="seconds for which workers are waited for")
    parser.add_argument("--replacement-wait", type=float, default=None, help="seconds a lost node's replacement takes")
    parser.add_argument("--augment", action="store_true", help="and log, beside the pids, what each rank trained on")
    parser.add_argument("--mixture", action="store_true", help="of two datasets")
    parser.add_argument("--mlflow", default=None, help="tracking URI")
    args = parser.parse_args()

    import ray.train

    import ray_goodput as rg
    from ray_goodput.train.observe import RunObserver

    low, _, high = args.workers.partition(":")
    trainer = rg.GoodputTrainer(
        train_loop,
        train_loop_config={
            "epochs": args.epochs,
            "step_s": args.step_s,
            "fail_at": args.fail_at,
            "width": args.width,
            "skip_restore": args.skip_restore,
            "fsdp2": args.fsdp2,
            "step_log": args.step_log,
            "pids": args.pids,
            "brake": args.brake,
            "fail_once_at": args.fail_once_at,
            "augment": args.augment,
        },
        datasets={
            "train": train_data(
                args.data,
                seed=args.seed,
                augmented=args.augment,
                mixture=args.mixture,
                options=args.storage_options,
            )
        },
        checkpoint=rg.CheckpointConfig(
            every=args.every, every_local=args.every_local, peer_copies=args.peer_copies, when_full="wait"
        ),
        watchdog=rg.WatchdogConfig(hang_after_s=args.hang_after, actor_silent_after_s=args.hang_after / 2),
        failure=rg.FailureBudget(
            max_failures_without_progress=args.max_failures,
            max_wait_for_workers_s=args.max_wait,
            replacement_wait_s=args.replacement_wait,
        ),
        mlflow=rg.MlflowConfig(tracking_uri=args.mlflow, experiment="small jobs") if args.mlflow else None,
        storage_options=args.storage_options,
        reproducible=args.reproducible,
        sample_log=True,
        scaling_config=ray.train.ScalingConfig(
            num_workers=(int(low), int(high)) if high else int(low),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=args.resize_s,
        ),
        run_config=ray.train.RunConfig(name=args.name, storage_path=args.storage),
    )
    observer = RunObserver(args.name, trainer.run_store)
    killed: list[int] = []
    stop = threading.Event()
    killer = None
    if args.kill is not None:
        killer = threading.Thread(target=kill_once, args=(observer, args.kill, killed, stop), daemon=True)
        killer.start()
    result = None
    outcome: dict[str, Any] = {}
    try:
        result = trainer.fit()
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
        raise
    except SystemExit as leaving:
        outcome = {"exit_code": leaving.code}
        raise
    finally:
        stop.set()
        if result is not None:
            goodput = result.goodput
            outcome = {
                "weights": result.return_value,
                "metrics": result.metrics,
                "checkpoint": result.checkpoint.path if result.checkpoint else None,
                "resumes": [[r.attempt, r.step, r.tier] for r in result.resumes],
                "killed": killed,
                "goodput": goodput.to_dict() if goodput is not None else None,
            }
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(outcome))
        part.rename(args.out)


if __name__ == "__main__":
    main()
