"""`transform_shard=`: once a data shard, cached by its version, with the rows that the order counts on."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.data.shard_transforms import source_version
from ray_goodput.errors import ConfigError, ShardReadError, ShardTransformError

pc: Any = pyarrow.compute  # made at run time


def doubled(table: pa.Table) -> pa.Table:
    calls.append(table.num_rows)
    return pa.table({"y": pc.multiply(table["x"], 2)})


def tripled(table: pa.Table) -> pa.Table:
    return pa.table({"y": pc.multiply(table["x"], 3)})


def odd_twice(table: pa.Table) -> pa.Table:
    odd = table.filter(pc.equal(pc.bit_wise_and(table["x"], 1), 1))
    return pa.concat_tables([odd, odd])


def failing(table: pa.Table) -> pa.Table:
    raise KeyError("no such tokenizer")


def no_table(table: pa.Table) -> Any:
    return table.to_pydict()


calls: list[int] = []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for i, n in enumerate([5, 0, 8, 1]):
        pq.write_table(pa.table({"x": np.arange(n) + 10 * i}), data / f"{i}.parquet")
    calls.clear()
    return tmp_path


def read(folder: Path, column: str = "y", **changed: Any) -> list[int]:
    values: dict[str, Any] = {"uri_glob": str(folder / "data"), "global_batch_size": 4, **changed}
    with rg.ShardedDataset(**values).loader(cache_dir=folder / "cache") as loader:
        return sorted(value for batch in loader for value in batch[column].tolist())


def test_the_result_is_what_is_cached_and_is_made_once_a_shard(folder: Path) -> None:
    expected = sorted(2 * (10 * i + k) for i, n in enumerate([5, 0, 8, 1]) for k in range(n))
    assert read(folder, transform_shard=doubled) == expected
    assert read(folder, transform_shard=doubled, columns=["y"], seed=7) == expected
    assert sorted(calls) == [1, 1, 5, 5, 8, 8]  # other columns are kept under another name; the seed does not matter
    assert read(folder, transform_shard=doubled) == expected
    assert len(calls) == 6


def test_another_version_is_other_data_in_the_cache(folder: Path) -> None:
    assert read(folder, transform_shard=doubled)[-1] == 60
    assert read(folder, transform_shard=tripled)[-1] == 90
    assert read(folder, "x")[-1] == 30
    assert read(folder, transform_shard=tripled, transform_version="mine")[-1] == 90
    assert read(folder, transform_shard=doubled, transform_version="mine")[-1] == 90, "the version names the result"


def test_another_number_of_rows_is_an_error_that_names_the_shard_and_the_way_out(folder: Path) -> None:
    with pytest.raises(ShardTransformError, match=r"data/\d.parquet\): .* rows of the .*transform_rows=\"count\""):
        read(folder, "x", transform_shard=odd_twice)


def test_rows_may_be_left_out_or_made_more_if_they_are_counted_after_the_transform(folder: Path) -> None:
    values: dict[str, Any] = {"transform_shard": odd_twice, "transform_rows": "count"}
    odd = [10 * i + k for i, n in enumerate([5, 0, 8, 1]) for k in range(n) if k % 2]
    assert read(folder, "x", **values) == sorted(odd * 2)
    manifest = rg.ShardedDataset(str(folder / "data"), global_batch_size=4, **values).manifest()
    assert manifest.rows.tolist() == [4, 0, 8, 0]


def test_a_cached_result_with_other_rows_is_an_error_instead_of_other_samples(folder: Path) -> None:
    values: dict[str, Any] = {"transform_rows": "count", "transform_version": "1"}
    read(folder, "x", transform_shard=odd_twice, **values)
    with pytest.raises(ShardReadError, match=r"with \d rows, the manifest says \d: .*another transform_version"):
        read(folder, "x", transform_shard=pa.Table.drop_null, **values)


def test_lines_of_text_agree_on_their_types_before_they_are_transformed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.jsonl").write_text("\n".join(json.dumps({"x": i}) for i in range(4)))
    (tmp_path / "data" / "1.jsonl").write_text("\n".join(json.dumps({"x": i + 0.5}) for i in range(3)))
    assert read(tmp_path, format="jsonl", transform_shard=tripled) == [0, 1.5, 3, 4.5, 6, 7.5, 9]
    rows = read(tmp_path, "x", format="jsonl", transform_shard=pa.Table.drop_null, transform_version="1")
    assert rows == [0, 0.5, 1, 1.5, 2, 2.5, 3]


def test_groups_of_small_files_are_transformed_as_one_shard(tmp_path: Path) -> None:
    for name in ("cat/1.txt", "cat/2.txt", "dog/1.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    values: dict[str, Any] = {"format": rg.RawFilesFormat(), "transform_shard": with_length, "global_batch_size": 2}
    assert read(tmp_path, "length", uri_glob=str(tmp_path / "data" / "**" / "*.txt"), **values) == [9, 9, 9]
    with pytest.raises(ConfigError, match="where a row is a file"):
        read(tmp_path, **values, transform_rows="count")


def with_length(table: pa.Table) -> pa.Table:
    return table.append_column("length", pc.binary_length(table["bytes"]))


@pytest.mark.parametrize(
    ("transform", "message"),
    [(failing, r"0|2|3.parquet: KeyError: 'no such tokenizer'"), (no_table, "returned a dict for .*pyarrow.Table")],
)
def test_what_the_transform_does_wrong_is_said_with_the_shard(folder: Path, transform: Any, message: str) -> None:
    with pytest.raises(ShardTransformError, match=message):
        read(folder, transform_shard=transform)


def test_a_version_by_source_sees_the_functions_text_and_defaults_only() -> None:
    def one(table: pa.Table, by: int = 1) -> pa.Table:
        return table.slice(by)

    def two(table: pa.Table, by: int = 2) -> pa.Table:
        return table.slice(by)

    assert source_version(one) == source_version(one) != source_version(two)
    outer = 3

    def closed(table: pa.Table) -> pa.Table:
        return table.slice(outer)

    with pytest.raises(ConfigError, match="uses outer of the function around it: give transform_version"):
        source_version(closed)
    with pytest.raises(ConfigError, match="is no plain function"):
        source_version(functools.partial(one, by=3))
    made: dict[str, Any] = {}
    exec("def made(table): return table", made)
    with pytest.raises(ConfigError, match="no source text"):
        source_version(made["made"])


def test_a_dataset_keeps_its_version_on_the_way_to_other_processes() -> None:
    dataset = rg.ShardedDataset("s3://b/t", global_batch_size=4, transform_shard=doubled)
    back = pickle.loads(pickle.dumps(dataset))
    assert back.transform_version == dataset.transform_version == source_version(doubled)
    assert back.format_id == f"parquet transform={source_version(doubled)} rows=same"
    elsewhere = rg.ShardedDataset("s3://b/t", global_batch_size=4, transform_shard=tripled, transform_version="1")
    again = rg.ShardedDataset("s3://b/t", global_batch_size=4, transform_shard=doubled, transform_version="1")
    assert elsewhere.shard_format() == again.shard_format() != dataset.shard_format()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transform_version": "1"}, "transform_version=...\\) says nothing without transform_shard"),
        ({"transform_rows": "count"}, "transform_rows=...\\) says nothing without"),
        ({"transform_shard": 3}, "transform_shard=3"),
        ({"transform_shard": doubled, "transform_rows": "more"}, "transform_rows='more'"),
        ({"transform_shard": doubled, "transform_version": ""}, "transform_version=''"),
    ],
)
def test_senseless_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rg.ShardedDataset("s3://b/t", global_batch_size=4, **changed)
