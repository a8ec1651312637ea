"""Ranks for `test_checkpoint_worlds.py`: one gloo world of four, whose first W ranks save and whose first W' load."""

from __future__ import annotations

import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from committing import commit, put_slice
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.reader import LocalFirstSource, load_checkpoint
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.errors import StructureMismatchError
from ray_goodput.storage.checksum import xxh3_128_hex

WORLD = 4
SAVES = [("ddp", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)]
LOADS = [("ddp", 1), ("ddp", 3), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]


class Net(nn.Module):
    """Odd shapes (nothing divides), one table that dwarfs the rest, batch norm, a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1013, 16)
        self.norm = nn.BatchNorm1d(16)
        self.wide = nn.Linear(16, 5)
        self.one = nn.Linear(5, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.wide(self.norm(self.table(x))))


def build(kind: str, seed: int, group: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Net()
    if kind == "ddp":
        model = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    else:
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        model(torch.arange(6) * (rank + step + 1) % 1013).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor whole, on every rank; buffers as rank 0 has them."""
    tree = collect_state(model=model, optimizer=optimizer)
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tree.tensors.items()}


def save(rank: int, kind: str, world: int, group: Any, mesh: DeviceMesh, root: Path) -> None:
    model, optimizer = build(kind, 0, group, mesh)
    train(model, optimizer, rank)
    tree = collect_state(model=model, optimizer=optimizer)

    def gather(value: Any) -> list[Any]:
        answers: list[Any] = [None] * world
        dist.all_gather_object(answers, value, group=group)
        return answers

    planner = Planner(world_rank=rank, world_size=world, gather=gather)
    plan = planner.plan_for(tree)
    assert planner.plan_for(collect_state(model=model, optimizer=optimizer)) is plan
    loads = gather(sum(record.size_bytes for record in plan.layout.records))
    assert max(loads) <= 1.05 * sum(loads) / world, loads
    stager = Stager(plan, root / "slots")
    staged = stager.stage(tree, CheckpointId(world, 0), rank_state=f'{{"rank": {rank}}}'.encode())
    assert staged is not None
    folder = root / f"{kind}-{world}"
    parts = gather((staged, put_slice(folder, staged)))
    whole = full_state(model, optimizer)
    if rank == 0:
        commit(folder, [s for s, _ in parts], [record for _, records in parts for record in records])
        torch.save(whole, root / f"{kind}-{world}.pt")
    stager.release(staged.slot_path)
    stager.close()


def load(rank: int, saved: tuple[str, int], kind: str, world: int, group: Any, mesh: DeviceMesh, root: Path) -> None:
    folder = root / f"{saved[0]}-{saved[1]}"
    expected = torch.load(f"{folder}.pt", weights_only=True)
    record = CommitRecord.from_json((folder / "COMMIT.json").read_bytes(), xxh3_128_hex)
    model, optimizer = build(kind, 1, group, mesh)
    report = load_checkpoint(
        LocalFirstSource(record, [folder]), model=model, optimizer=optimizer, world_rank=rank, world_size=world
    )
    assert report.rank_state == (f'{{"rank": {rank}}}'.encode() if world == saved[1] else None)
    assert optimizer.param_groups[0]["lr"] == 0.01
    check(expected, full_state(model, optimizer))

    model, optimizer = build(kind, 2, group, mesh)
    train(model, optimizer, rank)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if kind == "ddp":
        state["model"] = {name.removeprefix("module."): t for name, t in state["model"].items()}
    dcp_load(state, checkpoint_id=folder, process_group=group)
    check(expected, full_state(model, optimizer))


def check(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), f"{name} differs"


def mismatch(rank: int, group: Any) -> None:
    def gather(value: Any) -> list[Any]:
        answers: list[Any] = [None] * WORLD
        dist.all_gather_object(answers, value, group=group)
        return answers

    tree = collect_state(model=nn.Linear(3, 5 if rank == 2 else 4))
    try:
        Planner(world_rank=rank, world_size=WORLD, gather=gather).plan_for(tree)
    except StructureMismatchError as error:
        assert "rank 0 has model.weight (4, 3) torch.float32, rank 2 has model.weight (5, 3)" in str(error)
    else:
        raise AssertionError("the difference went unnoticed")


def run(rank: int, root: str) -> None:
    """Every case on this rank; a failure is written to `<case>.<rank>.failed`, success of all to `done`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=WORLD)
    groups = {w: dist.new_group(list(range(w))) for w in range(1, WORLD + 1)}
    meshes = {w: DeviceMesh("cpu", torch.arange(w)) for w in range(1, WORLD + 1)}
    replicated = DeviceMesh("cpu", torch.arange(WORLD).reshape(2, 2), mesh_dim_names=("replicate", "shard"))

    def case(name: str, world: int, action: Any) -> None:
        if rank < world:
            try:
                action()
                Path(root, f"{name}.{rank}.passed").touch()
            except Exception:  # reported by the test that stands for this case
                Path(root, f"{name}.{rank}.failed").write_text(traceback.format_exc())
        dist.barrier()

    def mesh_of(kind: str, world: int) -> DeviceMesh:
        return replicated if kind == "hsdp" else meshes[world]

    for kind, w in SAVES:
        case(f"save-{kind}-{w}", w, lambda k=kind, w=w: save(rank, k, w, groups[w], mesh_of(k, w), Path(root)))
    for kind, w in SAVES:
        for to, v in LOADS:
            name = f"{kind}-{w}-to-{to}-{v}"
            case(name, v, lambda s=(kind, w), k=to, v=v: load(rank, s, k, v, groups[v], mesh_of(k, v), Path(root)))
    case("mismatch", WORLD, lambda: mismatch(rank, groups[WORLD]))
    dist.destroy_process_group()
