"""Two ranks for `test_storage_writer_worlds.py`: `dcp.save` and `dcp.load` of an FSDP2 model through our classes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_goodput as rg

WORLD = 2


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=DeviceMesh("cpu", torch.arange(WORLD)))
    return model


def whole(model: nn.Module) -> list[torch.Tensor]:
    state: dict[str, Any] = model.state_dict()
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in state.values()]


def run(rank: int, root: str, uri: str, options: dict[str, Any]) -> None:
    """`<rank>.passed` exists afterwards if what was saved came back."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["RAY_GOODPUT_LOCAL_DIR"] = f"{root}/node"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=WORLD)
    saved, loaded = make(1), make(2)
    dcp_save({"model": saved.state_dict()}, storage_writer=rg.StorageWriter(uri, storage_options=options))
    state = {"model": loaded.state_dict()}
    dcp_load(state, storage_reader=rg.StorageReader(uri, storage_options=options))
    expected = whole(saved)  # collective
    assert all(torch.equal(a, b) for a, b in zip(expected, whole(loaded), strict=True))
    if rank == 0:
        torch.save(expected, f"{root}/whole.pt")
    dist.barrier()
    Path(root, f"{rank}.passed").touch()
    dist.destroy_process_group()
