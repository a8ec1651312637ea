"""`ray-goodput cache`: whose data lies there, what may go, and that nothing goes under a reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import ray_goodput as rg
from ray_goodput.cli.app import app
from ray_goodput.data.cache import NodeCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with four data shards of two data sets, each read once."""
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for i in range(2):
            pq.write_table(pa.table({"x": np.arange(10) + i}), tmp_path / name / f"{i}.parquet")
        data = rg.ShardedDataset(str(tmp_path / name), global_batch_size=5)
        with data.loader(cache_dir=tmp_path / "cache") as batches:
            assert sum(batch.num_samples for batch in batches) == 20
    return tmp_path / "cache"


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def test_ls_tells_dataset_object_size_age_opens_and_use(folder: Path) -> None:
    found = run("ls", "--dir", str(folder), "--json")
    assert found["size_bytes"] == NodeCache(folder).usage_bytes()
    files = found["files"]
    assert sorted((Path(f["dataset"]).name, f["key"]) for f in files) == [
        ("cats", "0.parquet"), ("cats", "1.parquet"), ("dogs", "0.parquet"), ("dogs", "1.parquet"),
    ]  # fmt: skip
    assert all(f["opens"] in (1, None) and not f["in_use"] and f["used_at_s"] >= f["written_at_s"] - 1 for f in files)
    text = run("ls", "--dir", str(folder), "--dataset", "dogs")
    assert "0.parquet" in text and "cats" not in text
    assert "2 files" in text and "0 in use" in text


def test_an_empty_or_missing_cache_is_no_error(tmp_path: Path) -> None:
    assert run("ls", "--dir", str(tmp_path / "none")) == f"Nothing is cached in {tmp_path / 'none'}.\n"
    assert run("purge", "--all", "--dir", str(tmp_path / "none"), "--json")["files"] == 0


def test_purge_takes_what_is_chosen_by_dataset_and_age(folder: Path) -> None:
    assert run("purge", "--dir", str(folder), "--older-than", "1h", "--json")["files"] == 0
    done = run("purge", "--dir", str(folder), "--dataset", "cats", "--older-than", "0", "--json")
    assert done["files"] == 2 and done["freed_bytes"] > 0 and done["kept"] == []
    assert {Path(f["dataset"]).name for f in run("ls", "--dir", str(folder), "--json")["files"]} == {"dogs"}
    assert run("purge", "--dir", str(folder), "--all", "--json")["files"] == 2
    assert NodeCache(folder).usage_bytes() == 0


def test_purge_keeps_what_is_open_and_says_so_by_its_exit_code(folder: Path) -> None:
    cache = NodeCache(folder)
    opened = cache.open_table(cache.ls()[0].name)
    assert opened is not None
    assert sum(f["in_use"] for f in run("ls", "--dir", str(folder), "--json")["files"]) == 1
    done = run("purge", "--dir", str(folder), "--all", "--json", code=1)
    assert done["files"] == 3 and done["kept"] == [opened.name]
    assert opened.table.num_rows == 10
    opened.close()
    assert "Removed 1 files" in run("purge", "--dir", str(folder), "--all")


@pytest.mark.parametrize("arguments", [(), ("--all", "--dataset", "x")])
def test_purge_wants_to_be_told_what(folder: Path, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["cache", "purge", "--dir", str(folder), *arguments])
    assert result.exit_code != 0
    assert "Say what to remove" in str(result.exception) + result.output
    assert len(NodeCache(folder).ls()) == 4


def test_files_of_earlier_versions_without_a_name_are_listed_and_purged_all_the_same(folder: Path) -> None:
    cache = NodeCache(folder)
    cache.write("ab" * 16, pa.table({"x": [1]}))
    nameless = [f for f in run("ls", "--dir", str(folder), "--json")["files"] if f["name"] == "ab" * 16]
    assert nameless[0]["dataset"] == "" and nameless[0]["key"] == ""
    assert run("purge", "--dir", str(folder), "--all", "--json")["files"] == 5


def test_what_is_not_the_caches_own_stays_where_the_folder_was_mistaken(tmp_path: Path) -> None:
    theirs = [tmp_path / name for name in ("en/train.arrow", "en/train.lock", "tmp/notes/today.txt", "tmp/0123-4/x")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    assert run("ls", "--dir", str(tmp_path), "--json")["files"] == []
    assert run("purge", "--all", "--dir", str(tmp_path), "--json")["files"] == 0
    assert [path.read_text() for path in theirs if path.exists()] == ["not ours"] * len(theirs)
