"""Plain torch.distributed.checkpoint, with checkpoints that are complete or invisible: only the storage classes change.

python examples/dcp_drop_in.py --storage /tmp/dcp            # or s3://bucket/dcp; again: it goes on
torchrun --nproc-per-node 2 examples/dcp_drop_in.py          # the model sharded by FSDP2
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

import ray_goodput as rg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default=f"{tempfile.gettempdir()}/ray_goodput_dcp", help="folder or s3://...")
    parser.add_argument("--steps", type=int, default=50, help="how many more steps to train")
    parser.add_argument("--every", type=int, default=20, help="checkpoint each N steps")
    args = parser.parse_args()

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    saving_group: Any = None
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        saving_group = dist.new_group(backend="gloo")  # async_save talks in a thread: on training's group it can hang
        model = fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start = 0
    if newest := rg.latest_complete(args.storage):  # whatever was killed while it saved is passed over
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        load(state, storage_reader=rg.StorageReader(newest))  # verified before a tensor changes
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = state["step"]

    saving: Any = None
    for step in range(start + 1, start + args.steps + 1):
        torch.manual_seed(step)  # stands for the data of this step
        sample = torch.randn(32, 64)
        loss = (model(sample) - sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            if saving is not None:
                saving.result()  # one save at a time: DCP's own rule
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            writer = rg.StorageWriter(f"{args.storage}/step-{step:010d}")
            saving = async_save(state, storage_writer=writer, process_group=saving_group)
    if saving is not None:
        saving.result()
    if not dist.is_initialized() or dist.get_rank() == 0:
        newest = rg.latest_complete(args.storage)
        print(f"Went on after step {start}, trained to {start + args.steps}, newest: {newest}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
