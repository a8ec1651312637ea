"""C3 and C4 in one process: bytes saved equal bytes loaded, by our reader and by stock `dcp.load`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from committing import commit, put_slice
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.reader import LoadReport, LocalFirstSource, VerifiedReader, load_checkpoint
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import StateTree, collect_state
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.errors import CheckpointError, CorruptCheckpointError, StructureMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.complex32, torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip


class Box(nn.Module):
    """Buffers only."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"t{i}", tensor)


class Net(nn.Module):
    """Tied weights, batch norm, a frozen layer, a parameter that gets no gradient, a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.embed(x))) * self.scale)


class Counts:
    """A user's object: keys that are not strings, tensors below them, a growing list, an empty mapping."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"by_class": {0: torch.zeros(3), 1: torch.zeros(3)}, "history": [], "empty": {}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


Save = Callable[..., tuple[Path, CommitRecord]]


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Save]:
    stagers: list[Stager] = []

    def save_state(**state: Any) -> tuple[Path, CommitRecord]:
        folder = tmp_path / f"checkpoint-{len(stagers)}"
        tree = collect_state(**state)
        stager = Stager(Planner(world_rank=0, world_size=1).plan_for(tree), tmp_path / "slots")
        stagers.append(stager)
        staged = stager.stage(tree, CheckpointId(7, 1), rank_state=b'{"rank": 0}', cursors={"train": {"at": 3}})
        assert staged is not None
        record = commit(folder, [staged], put_slice(folder, staged))
        stager.release(staged.slot_path)
        return folder, record

    yield save_state
    for stager in stagers:
        stager.close()
    assert not list((tmp_path / "slots").glob("*"))


def load(folder: Path, record: CommitRecord, **state: Any) -> LoadReport:
    return load_checkpoint(LocalFirstSource(record, [folder]), **state)


def trained(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 3) -> tuple[Net, Any]:
    torch.manual_seed(steps)
    model = Net()
    optimizer = make_optimizer(model)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8) % 11).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    frozen = [p for n, p in params.items() if n.startswith("frozen")]
    rest = [p for n, p in params.items() if not n.startswith("frozen")]
    return [{"params": rest, "lr": 0.01}, {"params": frozen, "lr": 0.5}, {"params": [], "lr": 0.25}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(groups(m)),
    "adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "adam capturable lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), foreach=False),
    "adam fused": lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], fused=True),
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=0.1),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "lbfgs": lambda m: torch.optim.LBFGS([p for p in m.parameters() if p.requires_grad], lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_model_and_optimizer_go_on_exactly_as_the_saved_ones(name: str, save: Save) -> None:
    def advance(model: nn.Module, optimizer: Any) -> None:
        if name != "lbfgs":
            return step(model, optimizer)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.arange(8) % 11).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    for _ in range(3):
        advance(model, optimizer)
    folder, record = save(model=model, optimizer=optimizer)
    fresh = Net()
    fresh_optimizer = OPTIMIZERS[name](fresh)
    report = load(folder, record, model=fresh, optimizer=fresh_optimizer)
    assert (report.step, report.world_size, report.tier, report.rank_state) == (7, 1, "local", b'{"rank": 0}')
    assert same(dict(model.state_dict()), dict(fresh.state_dict()))
    assert same(optimizer.state_dict(), fresh_optimizer.state_dict())
    with_state = {n for n, p in model.named_parameters() if optimizer.state.get(p)}
    assert {n for n, p in fresh.named_parameters() if fresh_optimizer.state.get(p)} == with_state
    for m, o in ((model, optimizer), (fresh, fresh_optimizer)):
        advance(m, o)
    assert same(dict(model.state_dict()), dict(fresh.state_dict()))
    assert same(optimizer.state_dict(), fresh_optimizer.state_dict())


@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd momentum"])
def test_stock_load_reads_model_and_optimizer(name: str, save: Save) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    folder, _ = save(model=model, optimizer=optimizer)
    expected = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    state = copy.deepcopy(expected)
    for tensor in [*state["model"].values(), *[t for s in state["optimizer"]["state"].values() for t in s.values()]]:
        tensor.zero_()
    for group in state["optimizer"]["param_groups"]:
        group["lr"] = -1.0
    dcp_load(state, checkpoint_id=folder)
    assert same(dict(expected["model"]), dict(state["model"]))
    assert same(expected["optimizer"], state["optimizer"])
    with_our_reader = copy.deepcopy(state)
    for tensor in with_our_reader["model"].values():
        tensor.zero_()
    dcp_load(with_our_reader, storage_reader=VerifiedReader(lambda n: folder / n))
    assert same(dict(expected["model"]), dict(with_our_reader["model"]))


def test_the_whole_state_converts_to_one_torch_file(save: Save, tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS["adamw"])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    folder, _ = save(model=model, optimizer=optimizer, stateful={"scheduler": scheduler})
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(dict(model.state_dict()), dict(found["model"]))
    assert found["scheduler"] == scheduler.state_dict()
    assert found["optimizer"]["param_groups"][1]["params"] == ["frozen.weight", "frozen.bias"]


def test_a_checkpoint_written_by_stock_save_loads_too(tmp_path: Path, save: Save) -> None:
    model, optimizer = trained(OPTIMIZERS["adamw"])
    _, record = save(model=model, optimizer=optimizer)
    stock = tmp_path / "stock"
    dcp_save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=stock
    )
    state = {"model": Net().state_dict()}
    dcp_load(state, storage_reader=VerifiedReader(lambda n: stock / n))
    assert same(dict(model.state_dict()), dict(state["model"]))
    assert {p.name for p in stock.iterdir()} == {"__0_0.distcp", ".metadata"} and record.world_size == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 2**31),
)
def test_any_shape_dtype_and_layout_comes_back_bit_for_bit(
    kinds: list[tuple[list[int], torch.dtype, bool]], seed: int, save: Save
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shape, dtype, transposed in kinds:
        raw = torch.randint(
            0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), generator=generator
        )
        tensor = raw.to(torch.uint8).view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        tensors.append(tensor.T if transposed and tensor.dim() == 2 else tensor)
    folder, record = save(model=Box(tensors))
    ours, stock = (Box([torch.zeros(t.shape, dtype=t.dtype) for t in tensors]) for _ in range(2))
    load(folder, record, model=ours)
    assert [bits(t) for t in ours.buffers()] == [bits(t) for t in tensors]
    dcp_load({"model": stock.state_dict()}, checkpoint_id=folder)
    assert [bits(t) for t in stock.buffers()] == [bits(t) for t in tensors]


def _nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    key = st.text("ab0", min_size=1, max_size=2)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(key, inner, min_size=1)
        ),
        max_leaves=8,
    )


@given(state=st.dictionaries(st.text("ab", min_size=1, max_size=2), _nested(st.just(torch.ones(2)) | st.integers())))
def test_names_and_paths_are_those_of_dcp(state: dict[str, Any]) -> None:
    tree = StateTree()
    for name, value in state.items():
        tree.add((name,), value)
    flat, paths = flatten_state_dict(state)
    assert tree.paths == paths
    assert {**tree.tensors, **tree.objects}.keys() == flat.keys()
    assert {n for n, v in flat.items() if isinstance(v, torch.Tensor)} == set(tree.tensors)


def test_views_strides_conjugates_and_strided_buffers_are_saved_by_value(save: Save) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    odd = [
        base[::2, 1::3],
        base.T,
        base[1],
        torch.randn(3, dtype=torch.complex64).conj(),
        base.expand(2, 6, 8),
        base[:0],
    ]
    folder, record = save(model=Box(odd))
    fresh = Box([torch.zeros(t.shape, dtype=t.dtype) for t in odd])
    load(folder, record, model=fresh)
    assert all(torch.equal(a, b) for a, b in zip(odd, fresh.buffers(), strict=True))


def test_users_objects_keep_key_types_growing_lists_and_empty_mappings(save: Save) -> None:
    saved, fresh = Counts(), Counts()
    saved.state["by_class"][1] += 5
    saved.state["history"] = [1.0, 2.0, {"x": torch.ones(2)}]
    folder, record = save(stateful={"counts": saved})
    load(folder, record, stateful={"counts": fresh})
    assert same(saved.state, fresh.state)


def test_schedulers_go_on_where_they_were(save: Save) -> None:
    def make(model: nn.Module, optimizer: Any) -> Any:
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [4])

    def rates(optimizer: Any, scheduler: Any, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer = trained(OPTIMIZERS["adamw"])
    scheduler = make(model, optimizer)
    rates(optimizer, scheduler, 3)
    folder, record = save(model=model, optimizer=optimizer, stateful={"scheduler": scheduler})
    fresh, fresh_optimizer = trained(OPTIMIZERS["adamw"], steps=0)
    fresh_scheduler = make(fresh, fresh_optimizer)
    load(folder, record, model=fresh, optimizer=fresh_optimizer, stateful={"scheduler": fresh_scheduler})
    assert rates(fresh_optimizer, fresh_scheduler, 8) == rates(optimizer, scheduler, 8)


def test_several_optimizers_keep_apart(save: Save) -> None:
    def two(model: Net) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([model.scale], lr=0.1, momentum=0.5), torch.optim.Adam(model.norm.parameters(), lr=0.2)]

    torch.manual_seed(0)
    model, fresh = Net(), Net()
    optimizers, fresh_optimizers = two(model), two(fresh)
    model(torch.arange(8)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    folder, record = save(model=model, optimizer=optimizers)
    load(folder, record, model=fresh, optimizer=fresh_optimizers)
    assert same([o.state_dict() for o in optimizers], [o.state_dict() for o in fresh_optimizers])


def test_state_that_did_not_exist_at_the_save_is_dropped(save: Save) -> None:
    model, optimizer = trained(OPTIMIZERS["adamw"], steps=0)
    folder, record = save(model=model, optimizer=optimizer)
    later, later_optimizer = trained(OPTIMIZERS["adamw"], steps=2)
    load(folder, record, model=later, optimizer=later_optimizer)
    assert not any(later_optimizer.state.get(p) for p in later.parameters())
    assert same(dict(model.state_dict()), dict(later.state_dict()))


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def test_a_modules_extra_state_goes_through_its_own_method(save: Save) -> None:
    model, fresh = WithExtra("a"), WithExtra("b")
    folder, record = save(model=model)
    load(folder, record, model=fresh)
    assert fresh.extra == "a"
    assert same(dict(model.inner.state_dict()), dict(fresh.inner.state_dict()))


def test_a_different_model_is_refused_by_name_before_anything_changes(save: Save) -> None:
    folder, record = save(model=nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)}))
    other = nn.ModuleDict({"a": nn.Linear(2, 4), "c": nn.Linear(1, 1), "b": nn.Linear(2, 2).double()})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(StructureMismatchError) as error:
        load(folder, record, model=other)
    for part in (
        "model.c.weight",
        "model.a.weight (saved (3, 2), now (4, 2))",
        "model.b.bias (saved torch.float32, now",
    ):
        assert part in str(error.value)
    assert same(dict(before), dict(other.state_dict()))


def test_not_strict_loads_what_fits(save: Save) -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)})
    folder, record = save(model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.5))
    other = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 2), "c": nn.Linear(1, 1)})
    load(folder, record, model=other, strict=False)
    before, after = saved.state_dict(), other.state_dict()
    assert [name for name in before if same(before[name], after[name])] == ["a.weight", "a.bias", "b.bias"]


def test_another_optimizer_or_other_groups_are_refused(save: Save) -> None:
    model, optimizer = trained(OPTIMIZERS["sgd momentum"])
    folder, record = save(model=model, optimizer=optimizer)
    with pytest.raises(StructureMismatchError, match=r"param_groups\.0\.betas"):
        load(folder, record, model=model, optimizer=torch.optim.Adam(model.parameters()))
    fewer = torch.optim.SGD([model.scale], lr=0.1)
    with pytest.raises(StructureMismatchError, match=r"norm\.weight"):
        load(folder, record, model=model, optimizer=fewer)
    with pytest.raises(StructureMismatchError, match="only in the checkpoint"):
        load(folder, record, model=model)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", ".metadata", "rank-00000.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_anywhere_is_found_and_nothing_is_loaded(name: str, damage: str, save: Save) -> None:
    model, optimizer = trained(OPTIMIZERS["adamw"])
    folder, record = save(model=model, optimizer=optimizer)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data if damage == "flip" else data[:-1])
    fresh, fresh_optimizer = trained(OPTIMIZERS["adamw"], steps=0)
    before = copy.deepcopy(fresh.state_dict())
    expected = CheckpointError if damage != "gone" else Exception
    with pytest.raises(expected) as error:
        load(folder, record, model=fresh, optimizer=fresh_optimizer)
    assert damage == "gone" or isinstance(error.value, CorruptCheckpointError)
    assert name in str(error.value)
    assert same(dict(before), dict(fresh.state_dict()))
    assert not any(fresh_optimizer.state.get(p) for p in fresh.parameters())
