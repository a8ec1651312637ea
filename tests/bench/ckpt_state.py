"""What is trained and saved in `bench_checkpoint`: transformers by their shapes, with AdamW's state, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BYTES_A_PARAMETER = 12  # float32 weight and AdamW's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One world and the state it trains.

    size: share of `--state-mb`. embedding: share of the parameters that lies in the embedding table.
    """

    name: str
    title: str
    kind: Literal["ddp", "fsdp"]
    world_size: int
    size: float
    embedding: float = 0.1


CASES = (
    Case(name="ddp2", title="DDP, 2 ranks", kind="ddp", world_size=2, size=1.0),
    Case(name="ddp4", title="DDP, 4 ranks", kind="ddp", world_size=4, size=0.5),
    Case(name="fsdp2", title="FSDP2, 2 ranks", kind="fsdp", world_size=2, size=0.25),
    Case(name="embedding", title="DDP, a huge embedding", kind="ddp", world_size=2, size=0.25, embedding=0.8),
    Case(name="one", title="one rank, a core to spare", kind="ddp", world_size=1, size=0.25),
)


class Block(nn.Module):
    """The parameters of a transformer's layer; it is never run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Net(nn.Module):
    def __init__(self, state_mb: float, embedding: float) -> None:
        super().__init__()
        numel = state_mb * 2**20 / BYTES_A_PARAMETER
        width = 512 if numel > 2e7 else 256
        self.table = nn.Embedding(max(1, int(numel * embedding / width)), width)
        rest = numel - self.table.weight.numel()
        self.blocks = nn.ModuleList(Block(width) for _ in range(max(1, round(rest / (12 * width * width)))))


@dataclass(slots=True)
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    case: Case

    def stock_state(self) -> dict[str, Any]:
        """What PyTorch's documentation tells its users to save."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def whole_state(self) -> dict[str, Any]:
        """The same with every tensor whole, at rank 0: what `torch.save` needs. Collective where it is sharded."""
        if self.case.kind != "fsdp":
            return self.stock_state()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}


def build(case: Case, state_mb: float, group: Any = None) -> Training:
    """The model of `case` and an optimizer that has stepped; every page of it was written. Collective."""
    with torch.device("meta"):
        net = Net(state_mb * case.size, case.embedding)
    if case.kind == "fsdp":
        mesh = init_device_mesh("cpu", (case.world_size,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    net.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    model: nn.Module = net
    if case.kind == "ddp" and case.world_size > 1:
        model = DistributedDataParallel(net, process_group=group, init_sync=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {name: torch.full_like(parameter, 0.25) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return Training(model, optimizer, case)
