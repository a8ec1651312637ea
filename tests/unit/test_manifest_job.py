"""The manifest's job without Ray: what its tasks return, put together, is what threads of the driver find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.actors import manifest_job
from ray_goodput.errors import ShardReadError


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rg.ShardedDataset:
    for i in range(23):
        names = ["x", "y"] if i % 5 else ["y", "x"]
        pq.write_table(pa.table({name: list(range(i % 4)) for name in names}), tmp_path / f"{i:02d}.parquet")
    monkeypatch.setattr(manifest_job, "WORTH_IT", 10)
    monkeypatch.setattr(manifest_job, "_OBJECTS_PER_TASK", 7)
    return rg.ShardedDataset(str(tmp_path), global_batch_size=4)


def without_ray(spec: Any, listing: Any, fmt: Any) -> list[pa.Table]:
    """The tasks one after another, the last block first, as tasks end in any order."""
    parts = reversed(manifest_job.blocks(listing))
    return [manifest_job.inspect_block(part, spec=spec, fmt=fmt) for part in parts]


def test_the_jobs_manifest_is_that_of_threads(dataset: rg.ShardedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_job, "_facts", without_ray)
    made = dataset.manifest(inspect=manifest_job.inspect_in_cluster)
    expected = dataset.manifest()
    assert made.digest == expected.digest
    assert made.rows.tolist() == expected.rows.tolist()
    assert made.schema is not None and expected.schema is not None
    assert sorted(made.schema.names) == sorted(expected.schema.names)


def test_a_bad_file_comes_out_of_a_task_as_itself(
    dataset: rg.ShardedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_job, "_facts", without_ray)
    (tmp_path / "09.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ShardReadError, match=r"09\.parquet is no readable parquet"):
        dataset.manifest(inspect=manifest_job.inspect_in_cluster)


def test_few_files_start_no_job_and_a_job_that_fails_is_done_by_threads(
    dataset: rg.ShardedDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(spec: Any, listing: Any, fmt: Any) -> list[pa.Table]:
        raise RuntimeError("the cluster is full")

    monkeypatch.setattr(manifest_job, "_facts", broken)
    expected = dataset.manifest().digest
    assert dataset.manifest(inspect=manifest_job.inspect_in_cluster).digest == expected
    assert "the cluster is full" in caplog.text
    caplog.clear()
    monkeypatch.setattr(manifest_job, "WORTH_IT", 24)
    assert dataset.manifest(inspect=manifest_job.inspect_in_cluster).digest == expected
    assert not caplog.text
