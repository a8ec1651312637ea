"""Train on the files of a folder or bucket without Ray: rg.FileDataset, rg.DataLoader and rg.Checkpointer.

    python examples/train_torchrun.py                                        # one process
    torchrun --nproc-per-node 2 examples/train_torchrun.py --storage s3://bucket/digits

Kill it at any moment and start it again, also with another number of processes: it goes on from the newest complete
checkpoint with exactly the next files.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile

import fsspec
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ray_goodput as rg

NUM_CLASSES = 10
SIDE = 16  # pixels of an image


def prepare(storage: str, num_files: int, storage_options: dict | None) -> str:
    """Noisy pictures of ten patterns lie in `class-<n>/` folders, one `.npy` a picture; returns the folder's URL."""
    fs, path = fsspec.url_to_fs(f"{storage}/data/patterns-{num_files}", **(storage_options or {}))
    if not fs.exists(f"{path}.complete"):
        rng = np.random.default_rng(0)
        patterns = rng.random((NUM_CLASSES, SIDE, SIDE), dtype=np.float32)
        for i in range(num_files):
            label = i % NUM_CLASSES
            picture = io.BytesIO()
            np.save(picture, patterns[label] + rng.normal(0, 0.5, (SIDE, SIDE)).astype(np.float32))
            fs.makedirs(f"{path}/class-{label}", exist_ok=True)
            fs.pipe_file(f"{path}/class-{label}/{i:06d}.npy", picture.getvalue())
        fs.pipe_file(f"{path}.complete", b"")
    return fs.unstrip_protocol(path)


def read(file: rg.DataFile, rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    """One sample, in a loader's worker. `rng` is the same for this file and epoch, whatever was restarted before."""
    picture = np.load(io.BytesIO(file.data))
    if rng.random() < 0.5:
        picture = np.ascontiguousarray(picture[:, ::-1])
    return torch.from_numpy(picture), int(file.path.split("/")[0].removeprefix("class-"))


def train(args: argparse.Namespace) -> dict:
    """What each process runs; the last step and its loss."""
    torch.manual_seed(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        prepare(args.storage, args.files, args.storage_options)
    if dist.is_initialized():
        dist.barrier()
    folder = prepare(args.storage, args.files, args.storage_options)  # is there by now: only its URL
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.GELU(), nn.Linear(64, NUM_CLASSES))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    files = rg.FileDataset(folder, read=read, seed=0, drop_uneven=True, storage_options=args.storage_options)
    loader = rg.DataLoader(files, batch_size=args.batch_size, drop_last=True)
    config = rg.CheckpointConfig(every=args.every, keep_last=2)
    step, loss = 0, torch.zeros(())
    with rg.Checkpointer(f"{args.storage}/run", config=config, storage_options=args.storage_options) as saves:
        step = saves.restore(model=model, optimizer=optimizer, loader=loader)
        if rank == 0:
            print(f"Going on after step {step}." if step else "A fresh run.", flush=True)
        while loader.epoch < args.epochs:
            for pictures, labels in loader:  # the first time only what is left of its epoch
                loss = F.cross_entropy(model(pictures), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                saves.step(step)
    return {"step": step, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default=f"{tempfile.gettempdir()}/ray_goodput_patterns", help="folder or s3://...")
    parser.add_argument("--storage-options", type=json.loads, default=None, help='JSON, e.g. {"endpoint_url": ...}')
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=20, help="files a step, of each process")
    parser.add_argument("--every", type=int, default=20, help="checkpoint each N steps")
    args = parser.parse_args()
    if "://" not in args.storage:
        args.storage = os.path.abspath(args.storage)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    done = train(args)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(done))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
