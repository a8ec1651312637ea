"""Laws of `rg.DataLoader`: torch's loader with exact state, whatever the workers before and after."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader

from ray_goodput.data import torch_loader, waits
from ray_goodput.data.torch_loader import DataLoader
from ray_goodput.errors import ConfigError, DatasetMismatchError

N = 23


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def listed(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


def taken(loader: DataLoader, count: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The next `count` batches, and the state after them."""
    found = [plain(batch) for _, batch in zip(range(count), loader, strict=False)]
    return found, loader.state_dict()


MAKERS: dict[str, Callable[..., DataLoader]] = {
    "shuffled": lambda w: DataLoader(
        Numbers(), 4, shuffle=True, num_workers=w, generator=torch.Generator().manual_seed(3)
    ),
    "in order": lambda w: DataLoader(Numbers(), 4, num_workers=w, drop_last=True),
    "one by one": lambda w: DataLoader(
        Numbers(), None, shuffle=True, num_workers=w, generator=torch.Generator().manual_seed(3)
    ),
    "own sampler": lambda w: DataLoader(
        Numbers(), 4, num_workers=w, sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(9))
    ),
    "weighted sampler": lambda w: DataLoader(
        Numbers(),
        4,
        num_workers=w,
        sampler=WeightedRandomSampler(range(1, N + 1), N, generator=torch.Generator().manual_seed(9)),
    ),
    "own batches": lambda w: DataLoader(
        Numbers(),
        num_workers=w,
        batch_sampler=BatchSampler(RandomSampler(Numbers(), generator=torch.Generator().manual_seed(4)), 5, False),
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (3, 1)])
def test_a_loader_goes_on_with_exactly_the_next_batch_in_every_epoch(kind: str, before: int, after: int) -> None:
    make = MAKERS[kind]
    loader = make(before)
    states, epochs = [], []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(plain(batch))
            states.append((loader.epoch, len(epochs[-1]), loader.state_dict()))
    assert kind == "in order" or len({str(e) for e in epochs}) == 3
    for epoch, done, state in states[:: 1 if before == after == 0 else 5]:
        resumed = make(after)
        saved = io.BytesIO()
        torch.save(state, saved)
        resumed.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
        assert listed(resumed) == epochs[epoch][done:]
        assert epoch == 2 or listed(resumed) == epochs[epoch + 1]


def test_an_epoch_is_every_sample_once_in_batches_as_torch_makes_them() -> None:
    cases: list[dict[str, Any]] = [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": 30}]
    for options in cases:
        ours = DataLoader(Numbers(), shuffle=True, num_workers=0, **options)
        torchs = TorchDataLoader(Numbers(), shuffle=True, **options)
        assert len(ours) == len(torchs)
        assert [len(b) for b in ours] == [len(b) for b in torchs]
        assert isinstance(ours, TorchDataLoader)
        assert isinstance(ours.sampler, RandomSampler)
    assert sorted(i for b in DataLoader(Numbers(), 4, shuffle=True, num_workers=0) for i in b.tolist()) == [*range(N)]
    in_order = DataLoader(Numbers(), 4, num_workers=0)
    assert listed(in_order) == listed(TorchDataLoader(Numbers(), 4))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        torch.manual_seed(seed)
        loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=0)
        torch.rand(5)
        return [listed(loader), listed(loader)]

    assert epochs(1) == epochs(1)
    assert epochs(1) != epochs(2)
    loader = MAKERS["shuffled"](0)
    first, second = listed(loader), listed(loader)
    loader.set_epoch(0)
    assert listed(loader) == first
    assert loader.epoch == 1
    loader.set_epoch(1)
    assert listed(loader) == second


def test_an_iteration_left_early_is_an_epoch_and_leaves_no_worker_behind() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=1, persistent_workers=False)
    _, state = taken(loader, 2)
    assert (state["epoch"], state["position"]) == (0, 8)
    inner = iter(loader)
    workers = inner._inner._workers
    assert loader.epoch == 1
    del inner
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()


def test_the_batch_size_may_change_with_the_state() -> None:
    loader = MAKERS["shuffled"](0)
    head, state = taken(loader, 3)
    resumed = DataLoader(Numbers(), 7, shuffle=True, num_workers=0)
    resumed.load_state_dict(state)
    tail = listed(resumed)
    assert [len(batch) for batch in tail] == [7, 4]
    whole = [i for batch in MAKERS["shuffled"](0) for i in batch.tolist()]
    assert [i for batch in head + tail for i in batch] == whole


def test_a_distributed_sampler_keeps_its_epoch() -> None:
    def make() -> DataLoader:
        return DataLoader(Numbers(), 2, num_workers=0, sampler=DistributedSampler(Numbers(), 2, 1, seed=5))

    loader = make()
    loader.sampler.set_epoch(7)  # pyright: ignore[reportAttributeAccessIssue] (the sampler given above)
    whole = listed(loader)
    loader.sampler.set_epoch(7)  # pyright: ignore[reportAttributeAccessIssue] (the sampler given above)
    head, state = taken(loader, 2)
    resumed = make()
    resumed.load_state_dict(state)
    assert head + listed(resumed) == whole


def test_a_state_of_other_data_or_another_kind_of_loader_is_refused() -> None:
    _, state = taken(MAKERS["shuffled"](0), 1)
    with pytest.raises(DatasetMismatchError, match="counts samples of 23 samples, and this one counts samples of 5"):
        DataLoader([1, 2, 3, 4, 5], num_workers=0).load_state_dict(state)
    with pytest.raises(DatasetMismatchError, match="this one counts batches of 23 samples"):
        MAKERS["own batches"](0).load_state_dict(state)
    with pytest.raises(DatasetMismatchError, match="version 9"):
        MAKERS["shuffled"](0).load_state_dict({**state, "version": 9})
    with pytest.raises(ConfigError, match="in_order=False"):
        DataLoader(Numbers(), num_workers=1, in_order=False).state_dict()


# Iterable datasets


class Stream(IterableDataset[int]):
    """Splits by worker as torch's documentation shows; knows nothing of states."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(N) if worker is None else range(worker.id, N, worker.num_workers))


def test_an_iterable_that_knows_no_state_is_read_up_to_the_position_by_as_many_workers() -> None:
    whole = listed(DataLoader(Stream(), 4, num_workers=2))
    head, state = taken(DataLoader(Stream(), 4, num_workers=2), 2)
    resumed = DataLoader(Stream(), 4, num_workers=2)
    resumed.load_state_dict(state)
    assert head + listed(resumed) == whole
    with pytest.raises(DatasetMismatchError, match=r"by 2 workers .* this one counts batches by 1 workers"):
        DataLoader(Stream(), 4, num_workers=1).load_state_dict(state)


class Seekable(IterableDataset[int]):
    """The least that a `ResumableIterable` is."""

    identity = "numbers"

    def __init__(self) -> None:
        self.shared = torch.zeros(3, dtype=torch.int64).share_memory_()

    def begin(self, *, epoch: int, position: int, batch_size: int) -> None:
        self.shared.copy_(torch.tensor([epoch, position, batch_size]))

    def position_after(self, batches: int) -> int:
        return int(self.shared[1] + batches * self.shared[2])

    def __iter__(self) -> Iterator[int]:
        epoch, position, size = self.shared.tolist()
        worker = get_worker_info()
        me, of = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(position, N):
            if (i - position) // size % of == me:
                yield 100 * epoch + i


@pytest.mark.parametrize(("before", "after"), [(0, 3), (2, 0), (3, 2)])
def test_a_resumable_iterable_is_taken_up_by_any_number_of_workers(before: int, after: int) -> None:
    whole = [list(range(k, min(k + 4, N))) for k in range(0, N, 4)]
    loader = DataLoader(Seekable(), 4, num_workers=before)
    for done in (1, 5):
        loader.set_epoch(2 * done)
        head, state = taken(loader, done)
        resumed = DataLoader(Seekable(), 4, num_workers=after)
        resumed.load_state_dict(state)
        assert [[i % 100 for i in batch] for batch in head + listed(resumed)] == whole
        assert {i // 100 for batch in head for i in batch} == {2 * done}
        assert {i // 100 for batch in listed(resumed) for i in batch} == {2 * done + 1}


# Defaults and waiting


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(1, "1", 1), (2, "1", 1), (8, "2", 3), (64, "1", 8), (4, "8", 1)]
)
def test_the_default_workers_are_the_spare_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str, expected: int
) -> None:
    monkeypatch.setattr(torch_loader.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    loader = DataLoader(Numbers(), 4)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (expected, True, 4)
    assert DataLoader(Stream()).num_workers == 1
    given = DataLoader(Numbers(), num_workers=0)
    assert (given.num_workers, given.persistent_workers, given.prefetch_factor) == (0, False, None)
    assert loader.pin_memory == torch.cuda.is_available()


def test_positional_arguments_are_torchs() -> None:
    sampler = SequentialSampler(Numbers())
    loader = DataLoader(Numbers(), 5, None, sampler, None, 0, list, False, True)
    assert (loader.batch_size, loader.sampler, loader.num_workers, loader.drop_last) == (5, sampler, 0, True)
    assert next(iter(loader)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(Numbers(), 5, True, sampler)


def test_waiting_is_measured_and_told_to_whoever_keeps_the_ledger() -> None:
    gate = threading.Event()
    open_waits: list[int] = []

    class Gated(Numbers):
        def __getitem__(self, index: int) -> int:
            assert open_waits
            gate.wait()
            return index

    @contextmanager
    def span() -> Iterator[None]:
        open_waits.append(1)
        yield
        open_waits.pop()

    loader = DataLoader(Gated(), 20, num_workers=0)
    waits.observe_waits(span)
    try:
        threading.Timer(0.1, gate.set).start()
        batches = iter(loader)
        next(batches)
        assert not open_waits
        first = loader.fetch_seconds
        assert 0.02 < first < 30
        next(batches)
        assert loader.fetch_seconds_total == pytest.approx(first + loader.fetch_seconds)
    finally:
        waits.observe_waits(None)


def test_a_loader_over_nothing_is_over_at_once() -> None:
    loader = DataLoader([], shuffle=True, num_workers=0)
    assert list(loader) == []
    assert (len(loader), loader.epoch) == (0, 1)
