"""Bad input is one sentence that names the file and says what to do, before a step is taken on it."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.errors import ConfigError, EmptyDatasetError, ShardReadError


def write(path: Path, table: pa.Table | None = None, **options: Any) -> None:
    pq.write_table(pa.table({"x": np.arange(10)}) if table is None else table, path, **options)


def read(folder: Path, **arguments: Any) -> tuple[int, int, float]:
    """(samples, samples left out, sum of the batches' weights)."""
    data = rg.ShardedDataset(str(folder), **{"global_batch_size": 4, **arguments})
    with data.loader(cache_dir=folder.with_name("cache")) as batches:
        found = [(batch.num_samples, batch.num_skipped, batch.weight) for batch in batches]
    samples, skipped, weight = (sum(column) for column in zip(*found, strict=True))
    return samples, skipped, weight


def other_columns(folder: Path) -> None:
    write(folder / "b.parquet", pa.table({"y": ["a"] * 10}))


def other_types(folder: Path) -> None:
    write(folder / "b.parquet", pa.table({"x": ["a"] * 10}))


def broken_footer(folder: Path) -> None:
    (folder / "b.parquet").write_bytes(b"PAR1" + os.urandom(1000) + b"PAR1")


def cut_short(folder: Path) -> None:
    write(folder / "b.parquet")
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:50])


def broken_page(folder: Path) -> None:
    path = folder / "b.parquet"
    write(path, compression="none", use_dictionary=False, write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[raw.index(np.arange(10).tobytes()) + 12] ^= 1
    path.write_bytes(raw)


def missing_numbers(folder: Path) -> None:
    write(folder / "b.parquet", pa.table({"x": pa.array([1, None, 3])}))


def nothing(folder: Path) -> None: ...


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (other_columns, {}, ShardReadError, r"a\.parquet and \S*b\.parquet have different columns: x .*, y .*\. Write"),
        (other_types, {}, ShardReadError, r"a\.parquet and \S*b\.parquet have different columns: x \(int64 / string\)"),
        (broken_footer, {}, ShardReadError, r"b\.parquet is no readable parquet file: .*Replace it, or leave it out"),
        (cut_short, {}, ShardReadError, r"b\.parquet is no readable parquet file: .*Replace it, or leave it out"),
        (
            broken_page,
            {},
            ShardReadError,
            r"Data shard 1 \(\S*b\.parquet\) .*CRC.*If the object is damaged, r",
        ),
        (missing_numbers, {}, ShardReadError, r"Column 'x' of data shard 1 \(\S*b\.parquet\) has 1 rows without a val"),
        (nothing, {"columns": ["z"]}, ConfigError, r"has no column 'z'; it has 'x'"),
    ],
)
def test_bad_parquet_is_named(
    tmp_path: Path, make: Callable[[Path], None], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.parquet")
    make(folder)
    with pytest.raises(error, match=message) as caught:
        read(folder, **arguments)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_and_files_without_rows_are_told_and_one_shard_without_rows_is_no_matter(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(EmptyDatasetError, match=r"There is nothing at \S*/data"):
        read(folder)
    write(folder / "a.parquet", pa.table({"x": np.arange(0)}))
    with pytest.raises(EmptyDatasetError, match="have no rows"):
        read(folder)
    write(folder / "b.parquet")
    assert read(folder)[:2] == (10, 0)


def decode(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    from PIL import Image

    with Image.open(io.BytesIO(sample["bytes"])) as image:
        return {"image": np.array(image.convert("RGB"))}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    from PIL import Image

    folder = tmp_path / "data" / "cats"
    folder.mkdir(parents=True)
    for i in range(8):
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(folder / f"{i}.png")
    (folder / "3.png").write_bytes(b"this is no picture")
    return folder.parent


def test_a_picture_that_cannot_be_decoded_ends_the_run_by_name(photos: Path) -> None:
    from PIL import UnidentifiedImageError

    with pytest.raises(UnidentifiedImageError) as caught:
        read(photos, format="files", transform=decode)
    assert "(cats/3.png)" in "".join(traceback.format_exception(caught.value))


def test_or_it_is_left_out_counted_told_and_the_others_keep_their_weight(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples, skipped, weight = read(photos, format="files", transform=decode, on_error="skip")
    assert (samples, skipped) == (7, 1)
    assert weight == pytest.approx(1 + 3 / 4)  # two batches of 4, in one of which 3 count
    assert "left out (1 so far): UnidentifiedImageError" in caplog.text and "(cats/3.png)" in caplog.text
