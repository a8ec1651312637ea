"""Bad input ends in one clear sentence, before anything is started, and leaves nothing behind in the storage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.train

import ray_goodput as rg
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.errors import (
    ConfigError,
    DatasetMismatchError,
    EmptyDatasetError,
    GoodputError,
    RunInUseError,
    SessionError,
    StorageAccessError,
)
from ray_goodput.storage import open_store
from ray_goodput.storage.checksum import xxh3_128_hex
from ray_goodput.train import trainer as trainer_module
from ray_goodput.train.datasets import check_dataset, write_dataset
from servers import MotoServer, s3_client


def loop(config: dict[str, Any]) -> None:
    raise AssertionError("nothing may be started")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"x": np.arange(64)}), folder / "part-0.parquet")
    return folder


def trainer(files: Path | str, storage: Path | str, **changes: Any) -> rg.GoodputTrainer:
    dataset = {"global_batch_size": 16, **changes.pop("dataset", {})}
    arguments: dict[str, Any] = {
        "datasets": {"train": rg.ShardedDataset(f"{files}/*.parquet", **dataset)},
        "scaling_config": ray.train.ScalingConfig(num_workers=changes.pop("workers", 2)),
        "run_config": ray.train.RunConfig(name="run", storage_path=str(storage)),
        **changes,
    }
    return rg.GoodputTrainer(loop, **arguments)


def sentence(error: type[GoodputError], action: Callable[[], Any]) -> str:
    """The message of the error `action` raises, checked to be one readable sentence or two."""
    with pytest.raises(error) as raised:
        action()
    message = str(raised.value)
    assert "\n" not in message and 20 < len(message) < 600
    return message


def left_in(storage: Path) -> list[str]:
    return sorted(p.name for p in storage.rglob("*") if p.is_file())


def test_a_dataset_without_files_names_where_it_looked(tmp_path: Path, files: Path) -> None:
    for gone in (tmp_path / "empty", files / "missing"):
        if gone.name == "empty":
            gone.mkdir()
        message = sentence(EmptyDatasetError, trainer(gone, tmp_path / "storage").fit)
        assert gone.name in message
    assert left_in(tmp_path / "storage") == []


def test_a_dataset_without_rows_is_no_dataset(tmp_path: Path, files: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(0)}), files / "part-0.parquet")
    assert "row" in sentence(EmptyDatasetError, trainer(files, tmp_path / "storage").fit)
    assert left_in(tmp_path / "storage") == []


def test_a_global_batch_smaller_than_the_world_is_told_at_once_and_left_to_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, tmp_path, dataset={"global_batch_size": 3}, workers=3)
    assert not caplog.records
    trainer(tmp_path, tmp_path, dataset={"global_batch_size": 2}, workers=3)
    assert "batches of 2 samples for up to 3 workers" in caplog.text and "dp_world of at most 2" in caplog.text


def test_a_global_batch_smaller_than_the_lanes_is_refused_with_both_numbers() -> None:
    message = sentence(ConfigError, lambda: rg.ShardedDataset("x", global_batch_size=4, lanes=8))
    assert "4" in message and "8" in message


def test_a_storage_path_that_cannot_be_written_is_named(tmp_path: Path, files: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert "file/below" in sentence(StorageAccessError, trainer(files, tmp_path / "file" / "below").fit)


def test_wrong_s3_keys_are_named_without_the_secret(tmp_path: Path, files: Path, juicefs_gateway: Any) -> None:
    options = {**juicefs_gateway.storage_options, "secret": "wrong-and-secret"}
    bad = trainer(files, f"s3://{juicefs_gateway.bucket}/runs", storage_options=options)
    message = sentence(StorageAccessError, bad.fit)
    assert juicefs_gateway.bucket in message and "wrong-and-secret" not in message


def test_a_bucket_that_does_not_exist_is_named(files: Path) -> None:
    with MotoServer() as server:
        s3_client(server).list_buckets()
        bad = trainer(files, "s3://no-such-bucket/runs", storage_options=dict(server.storage_options))
        assert "no-such-bucket" in sentence(StorageAccessError, bad.fit)


@pytest.mark.parametrize("change", ["data", "seed"])
def test_another_dataset_or_order_than_the_cursors_is_refused_before_anything_starts(
    tmp_path: Path, files: Path, change: str
) -> None:
    saved = rg.ShardedDataset(f"{files}/*.parquet", global_batch_size=16)
    store = open_store(StoreSpec(uri=str(tmp_path / "storage" / "run")))
    checkpoint = CheckpointId(10, 1)
    record = CommitRecord(
        run="run",
        checkpoint=checkpoint,
        world_size=2,
        structure_digest="",
        cursors={"train": saved.cursor(saved.manifest()).advance(160).to_dict()},
        objects=(),
        committed_at_s=0.0,
    )
    store.put(f"checkpoints/{checkpoint.folder}/COMMIT.json", record.to_json(xxh3_128_hex))
    before = left_in(tmp_path / "storage")
    if change == "data":
        pq.write_table(pa.table({"x": np.arange(8)}), files / "part-1.parquet")
    other = trainer(files, tmp_path / "storage", dataset={"seed": 5} if change == "seed" else {})
    message = sentence(DatasetMismatchError, other.fit)
    assert "160" in message and ("seed" in message if change == "seed" else "data" in message)
    assert left_in(tmp_path / "storage") == before


def test_a_second_driver_changes_nothing_under_a_living_run(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "storage" / "run"
    store = open_store(StoreSpec(uri=str(run)))
    living = rg.ShardedDataset(f"{files}/*.parquet", global_batch_size=16)
    write_dataset(store, check_dataset(store, "train", living, None))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in before} == {"manifest", "order.json"}

    def in_use(spec: Any) -> None:
        raise RunInUseError("The run 'run' is already being trained by another driver on this cluster.")

    monkeypatch.setattr(trainer_module, "start_coordinator", in_use)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"x": np.arange(32)}), other / "part-0.parquet")
    sentence(RunInUseError, trainer(other, tmp_path / "storage", dataset={"seed": 5}).fit)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_session_exists_only_inside_a_worker() -> None:
    assert "GoodputTrainer" in sentence(SessionError, rg.session)


def test_no_workers_and_a_file_system_of_the_users_are_refused(tmp_path: Path, files: Path) -> None:
    assert "num_workers" in sentence(ConfigError, lambda: trainer(files, tmp_path, workers=0))
    import pyarrow.fs

    own = ray.train.RunConfig(name="run", storage_path="/x", storage_filesystem=pyarrow.fs.LocalFileSystem())
    assert "storage_options" in sentence(ConfigError, lambda: trainer(files, tmp_path, run_config=own))
