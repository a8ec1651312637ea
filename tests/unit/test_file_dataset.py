"""Laws of `rg.FileDataset`: every file once over ranks and workers, cached at first access, taken up exactly."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from ray_goodput.config import StoreSpec
from ray_goodput.data import file_dataset as module
from ray_goodput.data.file_dataset import DataFile, FileDataset
from ray_goodput.data.torch_loader import DataLoader, ResumableIterable
from ray_goodput.errors import ConfigError, DatasetMismatchError, EmptyDatasetError, ObjectChangedError, ShardReadError
from ray_goodput.storage import open_store
from servers import JuiceFSGateway

N = 19


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for i in range(N):
        path = root / f"part{i % 3}" / f"{i:02d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * (1 + i % 4))
    (root / ".hidden").write_bytes(b"no")
    return root


def number(file: DataFile, rng: np.random.Generator) -> int:
    assert file.path.endswith(f"{file.data[0]:02d}.bin")
    return file.data[0]


def noise(file: DataFile, rng: np.random.Generator) -> tuple[int, float]:
    return file.data[0], rng.random()


def make(folder: Path, **options: Any) -> FileDataset:
    return FileDataset(str(folder), **{"read": number, "cache_dir": folder.parent / "cache", **options})


def plain(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_every_file_comes_once_an_epoch_in_another_order_each(folder: Path) -> None:
    files = make(folder)
    first, second = list(files), list(files)
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second
    assert list(make(folder)) == first
    assert list(make(folder, seed=1)) != first
    assert len(files) == N
    in_order = make(folder, shuffle=False, read=lambda file, rng: file.path)
    assert list(in_order) == sorted(f"part{i % 3}/{i:02d}.bin" for i in range(N))


def test_without_read_a_sample_is_path_and_bytes(folder: Path) -> None:
    samples = {sample["path"]: sample["bytes"] for sample in make(folder, read=None)}
    assert samples == {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("part*/*")}


@pytest.mark.parametrize("world", [1, 2, 5, 20])
@pytest.mark.parametrize("drop_uneven", [False, True])
def test_ranks_share_the_files_of_an_epoch(folder: Path, world: int, drop_uneven: bool) -> None:
    ranks = [make(folder, dp_rank=r, dp_world=world, drop_uneven=drop_uneven) for r in range(world)]
    shares = [list(rank) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(share) for share in shares]
    together = [i for share in shares for i in share]
    assert len(set(together)) == len(together) == (N - N % world if drop_uneven else N)
    if drop_uneven:
        assert len({len(share) for share in shares}) == 1


def test_the_rank_is_that_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(make(folder)) == list(make(folder, dp_rank=1, dp_world=3))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_workers_of_torchs_own_loader_share_the_files_too(folder: Path, workers: int) -> None:
    files = make(folder)
    loader = TorchDataLoader(files, 4, num_workers=workers, persistent_workers=workers > 0)
    epochs = []
    for epoch in range(2):
        files.set_epoch(epoch)
        epochs.append([i for batch in plain(loader) for i in batch])
        assert sorted(epochs[-1]) == list(range(N))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3), (3, 0)])
def test_a_loader_goes_on_in_mid_epoch_with_any_number_of_workers(folder: Path, before: int, after: int) -> None:
    whole = DataLoader(make(folder), 4, num_workers=0)
    epochs = [plain(whole), plain(whole)]
    assert isinstance(whole.dataset, ResumableIterable)
    loader = DataLoader(make(folder), 4, num_workers=before)
    for epoch in range(2):
        for done, batch in enumerate(loader, 1):
            assert batch.tolist() == epochs[epoch][done - 1]
            if done in (1, 4, 5):
                resumed = DataLoader(make(folder), 4, num_workers=after)
                resumed.load_state_dict(loader.state_dict())
                assert plain(resumed) == epochs[epoch][done:]
                if epoch == 0:
                    assert plain(resumed) == epochs[1]
        assert loader.epoch == epoch + 1


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 4)])
def test_another_world_goes_on_with_the_files_that_no_rank_had(folder: Path, worlds: tuple[int, int]) -> None:
    before, after = worlds
    seen: list[int] = []
    states = []
    for rank in range(before):
        loader = DataLoader(make(folder, dp_rank=rank, dp_world=before), 2, num_workers=0)
        for _, batch in zip(range(2), loader, strict=False):
            seen += batch.tolist()
        states.append(loader.state_dict())
    assert len({str(state) for state in states}) == 1
    for rank in range(after):
        loader = DataLoader(make(folder, dp_rank=rank, dp_world=after), 3, num_workers=0)
        loader.load_state_dict(states[0])
        seen += [i for batch in plain(loader) for i in batch]
    assert sorted(seen) == list(range(N))


def test_an_iteration_without_a_loader_is_taken_up_too(folder: Path) -> None:
    whole = list(make(folder))
    files = make(folder)
    for done, _ in enumerate(files, 1):
        if done == 7:
            break
    resumed = make(folder)
    resumed.load_state_dict(files.state_dict())
    assert list(resumed) == whole[7:]
    assert resumed.state_dict()["epoch"] == 1
    with pytest.raises(DatasetMismatchError, match="another seed"):
        make(folder, seed=3).load_state_dict(files.state_dict())
    (folder / "part0" / "new.bin").write_bytes(b"\x00")
    with pytest.raises(DatasetMismatchError, match="added, removed or changed"):
        make(folder).load_state_dict(files.state_dict())
    with pytest.raises(DatasetMismatchError, match="counts positions"):
        DataLoader(make(folder), num_workers=0).load_state_dict(DataLoader(files, num_workers=0).state_dict())


def test_a_files_random_numbers_depend_on_seed_epoch_and_file_only(folder: Path) -> None:
    alone = DataLoader(make(folder, read=noise), None, num_workers=0)
    first = {tuple(sample) for sample in alone}
    assert len({value for _, value in first}) == N
    shared = [DataLoader(make(folder, read=noise, dp_rank=r, dp_world=2), None, num_workers=1) for r in range(2)]
    assert {tuple(sample) for loader in shared for sample in loader} == first
    assert {tuple(sample) for sample in alone}.isdisjoint(first)


def test_a_file_is_fetched_once_whoever_asks_and_then_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(folder)
    assert sorted(i for b in plain(DataLoader(files, 4, num_workers=2)) for i in b) == list(range(N))
    for path in folder.glob("part*/*"):  # the same size and time: what was listed, but no longer the same
        path.unlink()
    assert sorted(pickle.loads(pickle.dumps(files))) == list(range(N))


def test_a_changed_or_missing_file_is_named_unless_changes_are_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_goodput.data.shard_fetcher._FIRST_PAUSE_S", 0.0)
    files, accepting = make(folder), make(folder, on_change="accept")
    gone = make(folder, cache_dir=folder.parent / "other")
    (folder / "part1" / "04.bin").write_bytes(b"\x04 and more")
    with pytest.raises(ObjectChangedError, match=r"part1/04\.bin"):
        list(files)
    assert sorted(accepting) == list(range(N))
    for path in folder.glob("part1/*"):
        path.unlink()
    with pytest.raises(ShardReadError, match=r"part1/\d\d\.bin\) cannot be fetched"):
        list(gone)


def test_an_error_in_read_is_the_users_own_and_names_the_file(folder: Path) -> None:
    def broken(file: DataFile, rng: np.random.Generator) -> int:
        if file.data[0] == 5:
            raise KeyError("label")
        return 0

    with pytest.raises(KeyError, match="label") as caught:
        list(make(folder, read=broken))
    assert "part2/05.bin" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"seed": True},
        {"dp_rank": 1},
        {"dp_rank": 2, "dp_world": 2},
        {"prefetch_files": -1},
        {"on_change": "ignore"},
    ],
)
def test_senseless_arguments_are_refused(folder: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make(folder, **bad)


def test_an_empty_folder_or_pattern_is_told(folder: Path) -> None:
    with pytest.raises(EmptyDatasetError, match=r"none matches '\*\.jpg'"):
        FileDataset(f"{folder}/*.jpg")
    with pytest.raises(EmptyDatasetError, match="There is nothing at"):
        FileDataset(str(folder / "empty"))
    assert len(FileDataset(f"{folder}/part1/*.bin")) == 6


def test_a_small_cache_costs_time_only(folder: Path) -> None:
    files = make(folder, cache_limit_bytes=20_000, prefetch_files=2)
    assert sorted(files) == sorted(files) == list(range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bucket_is_read_by_forked_workers_after_this_process_has_used_its_client(
    tmp_path: Path, juicefs_gateway: JuiceFSGateway, workers: int
) -> None:
    spec = StoreSpec(uri=f"{juicefs_gateway.uri}/file-dataset-{workers}", options=juicefs_gateway.storage_options)
    store = open_store(spec)
    for i in range(9):
        store.put(f"{i:02d}.bin", bytes([i]))
    files = FileDataset(
        spec.uri, read=number, storage_options=spec.options, cache_dir=tmp_path / "cache", prefetch_files=2
    )
    loader = DataLoader(files, 2, num_workers=workers, multiprocessing_context="fork" if workers else None, timeout=0)
    assert sorted(i for batch in plain(loader) for i in batch) == list(range(9))
    store.delete([f"{i:02d}.bin" for i in range(9)])
    assert sorted(i for batch in plain(loader) for i in batch) == list(range(9))
    assert not module._client_lost


@pytest.mark.parametrize(("used_before", "client"), [(False, "CloudStore"), (True, "FsspecStore")])
def test_forked_workers_read_by_the_fast_client_unless_it_has_run_where_they_come_from(
    tmp_path: Path, juicefs_gateway: JuiceFSGateway, used_before: bool, client: str
) -> None:
    uri = f"{juicefs_gateway.uri}/file-dataset-{client}"
    spec = StoreSpec(uri=uri, options=juicefs_gateway.storage_options)
    for i in range(3):
        open_store(spec).put(f"{i}.bin", bytes([i]))
    script = f"""
from ray_goodput.config import StoreSpec
from ray_goodput.data.file_dataset import FileDataset
from ray_goodput.data.torch_loader import DataLoader
from ray_goodput.storage import open_store
options = {spec.options!r}
if {used_before}:
    open_store(StoreSpec(uri={uri!r}, options=options)).get("0.bin")
def client(file, rng):
    return type(files._fetcher()._store).__name__ + str(len(file.data))
files = FileDataset({uri!r}, read=client, storage_options=options, cache_dir={str(tmp_path)!r})
print({{name for batch in DataLoader(files, 1, num_workers=1, multiprocessing_context="fork") for name in batch}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == str({f"{client}1"}), done.stderr
