"""Two DDP ranks for `test_checkpointer_worlds.py`: train, save, stop; and a second start that goes on."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ray_goodput as rg

WORLD = 2


def start(uri: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, rg.Checkpointer, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 1))
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    config = rg.CheckpointConfig(every=2, when_full="wait")
    saves = rg.Checkpointer(uri, config=config, storage_options=options)
    return wrapped, optimizer, saves, saves.restore(model=wrapped, optimizer=optimizer)


def train(uri: str, options: dict[str, Any], steps: int, rank: int) -> tuple[int, list[torch.Tensor]]:
    model, optimizer, saves, at = start(uri, options)
    with saves:
        for step in range(at + 1, steps + 1):
            model(torch.full((4, 6), float(step + rank))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.step(step)
    assert saves.wait(), "asked once more, after the close"
    return at, [value.clone() for value in model.state_dict().values()]


def run(rank: int, root: str, uri: str, options: dict[str, Any]) -> None:
    """`<rank>.pt` holds what the second start resumed after, and the weights; an undisturbed run's in between."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["RAY_GOODPUT_LOCAL_DIR"] = f"{root}/node"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=WORLD)
    _, whole = train(f"{uri}/whole", options, 6, rank)
    train(f"{uri}/parts", options, 5, rank)
    at, parts = train(f"{uri}/parts", options, 6, rank)
    torch.save({"at": at, "whole": whole, "parts": parts}, Path(root, f"{rank}.pt"))
    dist.destroy_process_group()
