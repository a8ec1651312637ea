"""Laws of the file formats: what a manifest says of a file is what reading it gives, and bad input names the file."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pytest
import torch

from ray_goodput.config import StoreSpec
from ray_goodput.data import formats as formats_module
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.formats import (
    CsvFormat,
    JsonlFormat,
    RawFilesFormat,
    ShardFacts,
    ShardFormat,
    TokenFormat,
    WebDatasetFormat,
    format_by_extension,
    get_format,
    register_format,
)
from ray_goodput.data.formats import ranged as ranged_module
from ray_goodput.data.formats.ranged import RangedFile
from ray_goodput.data.manifest import build_manifest
from ray_goodput.data.shard_fetcher import ShardFetcher
from ray_goodput.errors import ConfigError, ObjectChangedError, ShardReadError, StorageError
from ray_goodput.storage import open_store
from ray_goodput.storage.local import LocalStore
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore
from servers import JuiceFSGateway


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def tar_bytes(files: dict[str, bytes], mode: Any = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def npy_bytes(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def read_all(folder: Path, fmt: ShardFormat, pattern: str = "**/*", **options: Any) -> list[pa.Table]:
    """Every data shard of a folder, by manifest, fetcher and cache, as a run would get it."""
    store = LocalStore(folder)
    manifest = build_manifest(store, pattern, fmt)
    cache = NodeCache(folder.parent / "cache", min_free_bytes=0).open()
    fetcher = ShardFetcher(manifest, store, fmt, cache, **options)
    tables = [fetcher.table(i) for i in range(manifest.num_shards)]
    assert [table.num_rows for table in tables] == manifest.rows.tolist()
    assert manifest.schema is not None
    for table in tables:
        if table.num_rows:
            assert {f.name: f.type for f in table.schema} == {f.name: f.type for f in manifest.schema}
    return tables


def rows_of(folder: Path, fmt: ShardFormat, pattern: str = "**/*") -> list[dict[str, Any]]:
    return [row for table in read_all(folder, fmt, pattern) for row in table.to_pylist()]


# JSON lines


def test_json_lines_are_read_plain_and_compressed_and_in_several_streams(folder: Path) -> None:
    lines = [json.dumps({"id": i, "text": f"line {i}"}).encode() + b"\n" for i in range(6)]
    (folder / "a.jsonl").write_bytes(lines[0] + b"\n" + lines[1].rstrip(b"\n"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[2]) + gzip.compress(lines[3]))
    (folder / "c.ndjson.zst").write_bytes(zstd(lines[4]) + zstd(lines[5]))
    (folder / "d.jsonl").write_bytes(b"")
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(b""))
    assert rows_of(folder, JsonlFormat()) == [{"id": i, "text": f"line {i}"} for i in range(6)]


def test_types_of_json_lines_are_those_that_all_files_can_be_read_as(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"x": 1, "when": "2024-01-01 00:00:00", "deep": {"k": 1}, "n": null}\n')
    (folder / "b.jsonl").write_text('{"x": 2.5, "when": "soon", "deep": {"j": 2}, "n": [3]}\n')
    rows = rows_of(folder, JsonlFormat())
    assert [row["x"] for row in rows] == [1.0, 2.5]
    assert [row["when"] for row in rows] == ["2024-01-01 00:00:00", "soon"]
    assert [row["deep"] for row in rows] == [{"k": 1, "j": None}, {"k": None, "j": 2}]
    assert [row["n"] for row in rows] == [None, [3]]


def test_what_comes_late_in_a_file_counts_for_its_types(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_goodput.data.formats.jsonl._READ", pj.ReadOptions(block_size=256))
    lines = ['{"x": 1}'] * 100 + ['{"x": 1.5, "y": "late"}']
    (folder / "a.jsonl").write_text("\n".join(lines))
    rows = rows_of(folder, JsonlFormat())
    assert (len(rows), rows[-1], rows[0]) == (101, {"x": 1.5, "y": "late"}, {"x": 1.0, "y": None})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"id": 1}\n{"id": \n', "JSON parse error"),
        ("bad.jsonl", b"[1, 2]\n", "JSON parse error"),
        ("bad.jsonl", b'{"id": 1}\n{"id": "x"}\n', "changed from number to string"),
        ("bad.jsonl.gz", gzip.compress(b'{"id": 1}\n' * 5000)[:-30], "Truncated|truncated|incorrect"),
        ("bad.jsonl.zst", zstd(bytes(1000))[:-3], "Truncated|truncated|Empty|parse"),
    ],
)
def test_damaged_json_lines_name_the_file(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / "a.jsonl").write_text('{"id": 1}\n')
    (folder / name).write_bytes(content)
    with pytest.raises(ShardReadError, match=rf"{name} is no readable JSON lines file: .*(?:{message})"):
        build_manifest(LocalStore(folder), "*", JsonlFormat())


def test_json_lines_that_no_types_fit_name_both_files(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"x": 1}\n')
    (folder / "b.jsonl").write_text('{"x": [1]}\n')
    with pytest.raises(ShardReadError, match=r"a\.jsonl and .*b\.jsonl have different columns: x \(int64 / list"):
        build_manifest(LocalStore(folder), "*", JsonlFormat())


# CSV


def test_csv_is_read_with_quotes_line_ends_and_compression(folder: Path) -> None:
    (folder / "a.csv").write_text('id,text\n0,"with, comma"\n1,"two\nlines"\n')
    (folder / "b.csv.gz").write_bytes(gzip.compress(b'text,id\n"say ""hi""",2\n'))
    (folder / "c.csv.zst").write_bytes(zstd(b"id,text\n"))
    (folder / "d.csv").write_bytes(b"")
    rows = rows_of(folder, CsvFormat())
    assert rows == [
        {"id": 0, "text": "with, comma"},
        {"id": 1, "text": "two\nlines"},
        {"id": 2, "text": 'say "hi"'},
    ]


def test_types_of_csv_columns_are_those_that_all_files_can_be_read_as(folder: Path) -> None:
    (folder / "a.csv").write_text("x,code,day\n1,007,2024-01-01\n")
    (folder / "b.csv").write_text("x,code,day\n2.5,A7,soon\n")
    assert rows_of(folder, CsvFormat()) == [
        {"x": 1.0, "code": "007", "day": "2024-01-01"},
        {"x": 2.5, "code": "A7", "day": "soon"},
    ]


def test_another_delimiter_is_another_format(folder: Path) -> None:
    (folder / "a.csv").write_text("x;y\n1;2,5\n")
    semicolons = CsvFormat(delimiter=";")
    assert rows_of(folder, semicolons) == [{"x": 1, "y": "2,5"}]
    (folder / "a.csv").write_text("x;y\n1;2\n")
    assert rows_of(folder, CsvFormat()) == [{"x;y": "1;2"}]
    assert rows_of(folder, semicolons) == [{"x": 1, "y": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x,y\n1,2\n3\n", "Expected 2 columns, got 1"),
        (b"x,x\n1,2\n", "two columns are called 'x'"),
        (b'x,y\n"1,2\n', "parse|Expected|columns"),
        (b"\x1f\x8bnot gzip at all", "gzip|decompress|zlib|incorrect"),
    ],
)
def test_damaged_csv_names_the_file(folder: Path, content: bytes, message: str) -> None:
    (folder / "bad.csv").write_bytes(content)
    with pytest.raises(ShardReadError, match=rf"(?s)bad\.csv is no readable CSV file: .*(?:{message})"):
        build_manifest(LocalStore(folder), "*", CsvFormat())


def test_csv_files_with_other_columns_are_named(folder: Path) -> None:
    (folder / "a.csv").write_text("x,y\n1,2\n")
    (folder / "b.csv").write_text("x,z\n1,2\n")
    with pytest.raises(ShardReadError, match=r"a\.csv and .*b\.csv have different columns: y \(int64 / absent\), z"):
        build_manifest(LocalStore(folder), "*", CsvFormat())


# WebDataset


def sample_files(ids: range) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for i in ids:
        files |= {f"set/{i:04d}.jpg": bytes([i]) * i, f"set/{i:04d}.cls": str(i).encode(), f"set/{i:04d}.txt": b"t"}
    return files


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_neighbouring_files_of_a_tar_are_one_sample(folder: Path, mode: str) -> None:
    (folder / "a.tar").write_bytes(tar_bytes(sample_files(range(3)), mode))
    (folder / "b.tar").write_bytes(tar_bytes(sample_files(range(3, 5)), mode))
    (folder / "c.tar").write_bytes(tar_bytes({}, mode))
    assert rows_of(folder, WebDatasetFormat()) == [
        {"__key__": f"set/{i:04d}", "cls": i, "jpg": bytes([i]) * i, "txt": "t"} for i in range(5)
    ]


def test_a_sample_may_lack_a_file_and_extensions_may_have_dots(folder: Path) -> None:
    files = {"a.left.JPG": b"1", "a.txt": b"one", "b.left.jpg": b"2", "README": b"", ".hidden": b"", "c.txt": b"3"}
    (folder / "a.tar").write_bytes(tar_bytes(files))
    assert rows_of(folder, WebDatasetFormat()) == [
        {"__key__": "a", "left.jpg": b"1", "txt": "one"},
        {"__key__": "b", "left.jpg": b"2", "txt": None},
        {"__key__": "c", "left.jpg": None, "txt": "3"},
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"this is no archive, whatever its name" * 50, "truncated|invalid|bad"),
        (tar_bytes(sample_files(range(1, 200)))[:90_000], "unexpected end of data"),
        (tar_bytes(sample_files(range(9)), "w:gz")[:200], "end-of-stream|truncated|Compressed"),
        (zstd(tar_bytes(sample_files(range(2)))), "zstd is not supported"),
        (tar_bytes({"a.jpg": b"1", "a.JPG": b"2"}), "'a' has two files with the extension 'jpg'"),
    ],
)
def test_a_damaged_archive_is_named(folder: Path, content: bytes, message: str) -> None:
    (folder / "bad.tar").write_bytes(content)
    with pytest.raises(ShardReadError, match=rf"bad\.tar is no readable WebDataset archive: .*(?:{message})"):
        build_manifest(LocalStore(folder), "*", WebDatasetFormat())


def test_a_class_that_is_no_number_names_archive_and_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_goodput.data.shard_fetcher._FIRST_PAUSE_S", 0.0)
    (folder / "a.tar").write_bytes(tar_bytes({"x/1.cls": b"cat", "x/1.jpg": b""}))
    with pytest.raises(ShardReadError, match=r"a\.tar.*x/1\.cls holds b'cat', which is no integer"):
        read_all(folder, WebDatasetFormat())


class CountingStore(LocalStore):
    bytes_read = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.bytes_read += length
        return super().get_range(key, start, length)


def test_large_files_in_an_archive_are_skipped_when_rows_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RangedFile.__init__, "__kwdefaults__", {"chunk_bytes": 2048})
    (folder / "a.tar").write_bytes(tar_bytes({f"{i}.bin": bytes(200_000) for i in range(10)}))
    store = CountingStore(folder)
    assert build_manifest(store, "*", WebDatasetFormat()).num_samples == 10
    assert store.bytes_read < 100_000
    assert ranged_module._CHUNK_BYTES >= 1 << 20


# Token arrays


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", "<f4"])
def test_token_arrays_are_rows_of_their_own_type(folder: Path, dtype: str) -> None:
    tokens = np.arange(23).astype(dtype)
    (folder / "a.npy").write_bytes(npy_bytes(tokens))
    (folder / "b.npy").write_bytes(npy_bytes(tokens[:4]))
    tables = read_all(folder, TokenFormat(length=5))
    native = np.dtype(dtype).newbyteorder("=")
    assert tables[0].schema == pa.schema([("tokens", pa.list_(pa.from_numpy_dtype(native), 5))])
    assert tables[0]["tokens"].to_pylist() == tokens[:20].reshape(4, 5).tolist()
    assert tables[1].num_rows == 0


def test_arrays_of_more_dimensions_are_rows_as_they_are(folder: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    (folder / "a.npy").write_bytes(npy_bytes(array))
    (table,) = read_all(folder, TokenFormat())
    assert table["tokens"].to_pylist() == array.tolist()


def test_a_raw_file_needs_length_and_dtype(folder: Path) -> None:
    (folder / "a.bin").write_bytes(np.arange(7, dtype="<u2").tobytes())
    (table,) = read_all(folder, TokenFormat(length=3, dtype="uint16"))
    assert table["tokens"].to_pylist() == [[0, 1, 2], [3, 4, 5]]
    for fmt in (TokenFormat(), TokenFormat(length=3), TokenFormat(dtype="uint16")):
        with pytest.raises(ConfigError, match=r"a\.bin does not say what it holds"):
            build_manifest(LocalStore(folder), "*", fmt)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.npy", b"", "no .npy header in its 0 bytes"),
        ("bad.npy", npy_bytes(np.arange(10))[:-1], r"needs 208 bytes and it has 207"),
        ("bad.npy", npy_bytes(np.array(["a", "b"])), "1-dimensional array of <U1"),
        ("bad.npy", npy_bytes(np.asfortranarray(np.ones((3, 2)))), "Fortran order"),
        ("bad.npy", npy_bytes(np.ones((3, 2))), r"its shape is \(3, 2\) and not \(rows, 4\)"),
        ("bad.npy", npy_bytes(np.array(3.0)), "0-dimensional"),
        ("bad.npy", b"\x93NUMPY\x01\x00\x10\x00garbage", "EOF|header|parse"),
        ("bad.bin", b"\x00" * 9, "9 bytes are no whole number of uint16"),
    ],
)
def test_a_damaged_token_file_is_named(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ShardReadError, match=rf"{name} is no readable token file: .*(?:{message})"):
        build_manifest(LocalStore(folder), "*", TokenFormat(length=4, dtype="uint16"))


def test_another_length_is_other_data_for_manifest_and_cache(folder: Path) -> None:
    (folder / "a.npy").write_bytes(npy_bytes(np.arange(12)))
    assert [t.num_rows for n in (3, 4) for t in read_all(folder, TokenFormat(length=n))] == [4, 3]
    manifests = [build_manifest(LocalStore(folder), "*", TokenFormat(length=n)) for n in (3, 4)]
    assert manifests[0].format_name != manifests[1].format_name


@pytest.mark.parametrize("bad", [{"length": 0}, {"length": True}, {"dtype": "text"}, {"dtype": "bool"}])
def test_senseless_token_formats_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="TokenFormat"):
        TokenFormat(**bad)


# Raw files


def write_images(folder: Path, classes: dict[str, int]) -> dict[str, bytes]:
    written = {}
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            written[f"{name}/{i}.JPEG"] = f"{name} {i}".encode()
            (folder / name / f"{i}.JPEG").write_bytes(written[f"{name}/{i}.JPEG"])
    return written


def test_small_files_share_data_shards_that_mix_their_folders(folder: Path) -> None:
    written = write_images(folder, {"dog": 40, "cat": 40})
    tables = read_all(folder, RawFilesFormat(group_files=20))
    assert [t.num_rows for t in tables] == [20, 20, 20, 20]
    rows = [row for t in tables for row in t.to_pylist()]
    assert {row["path"]: row["bytes"] for row in rows} == written
    assert all(row["path"].startswith(row["class_name"] + "/") for row in rows)
    assert {(row["class_name"], row["label"]) for row in rows} == {("cat", 0), ("dog", 1)}
    assert all(len(set(t["label"].to_pylist())) == 2 for t in tables)


def test_a_data_shard_of_files_keeps_to_its_bytes_and_large_files_stand_alone(folder: Path) -> None:
    for i in range(12):
        (folder / f"{i}.txt").write_bytes(b"x" * (1000 if i == 5 else 30))
    manifest = build_manifest(LocalStore(folder), "*", RawFilesFormat(label=None, group_bytes=100))
    assert manifest.num_samples == 12
    assert all(size <= 100 or rows == 1 for size, rows in zip(manifest.sizes, manifest.rows, strict=True))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (lambda path: int(path[0]), [0, 1, 2]),
        (lambda path: float(path[0]) / 2, [0.0, 0.5, 1.0]),
        (lambda path: "odd" if path[0] == "1" else "even", [0, 1, 0]),
        (None, None),
    ],
)
def test_labels_come_from_a_function_that_only_the_driver_runs(
    folder: Path, rule: Callable[[str], Any] | None, expected: list[float] | None
) -> None:
    for i in range(3):
        (folder / f"{i}.txt").write_bytes(b"")
    fmt = RawFilesFormat(label=rule)
    store = LocalStore(folder)
    manifest = build_manifest(store, "*", fmt)
    there = pickle.loads(pickle.dumps(fmt))  # a lambda does not travel, its labels do
    cache = NodeCache(folder.parent / "cache", min_free_bytes=0).open()
    table = ShardFetcher(manifest, store, there, cache).table(0).sort_by("path")
    assert (table["label"].to_pylist() if expected is not None else "label" in table.column_names) == (
        expected if expected is not None else False
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [(lambda path: [1], "returned list"), (lambda path: {}[path], r"raised KeyError.* for 'a\.txt'")],
)
def test_a_label_function_that_fails_names_the_file(folder: Path, rule: Any, message: str) -> None:
    (folder / "a.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        build_manifest(LocalStore(folder), "*", RawFilesFormat(label=rule))


def test_one_changed_file_of_a_group_is_named(folder: Path) -> None:
    write_images(folder, {"a": 5})
    store, fmt = LocalStore(folder), RawFilesFormat()
    manifest = build_manifest(store, "**/*", fmt)
    (folder / "a" / "3.JPEG").write_bytes(b"changed, and longer")
    cache = NodeCache(folder.parent / "cache", min_free_bytes=0).open()
    with pytest.raises(ObjectChangedError, match=r"a/3\.JPEG"):
        ShardFetcher(manifest, store, fmt, cache).table(0)
    assert ShardFetcher(manifest, store, fmt, cache, pin=False).table(0).num_rows == 5
    (folder / "a" / "3.JPEG").unlink()
    with pytest.raises(ShardReadError, match=r"a group of 5 files.*a/3\.JPEG"):
        ShardFetcher(manifest, store, fmt, cache).table(0)


# Together


def test_names_and_extensions_find_their_formats() -> None:
    for uri, name in [
        ("x.tar", "webdataset"),
        ("x.TAR.gz", "webdataset"),
        ("x.jsonl", "jsonl"),
        ("c4-train.json.gz", "jsonl"),
        ("x.csv.zst", "csv"),
        ("x.bin", "tokens"),
        ("**/*.JPEG", "files"),
        ("x.parquet", "parquet"),
    ]:
        fmt = format_by_extension(uri)
        assert fmt is not None
        assert (fmt.name, fmt) == (name, get_format(name))
    assert format_by_extension("one-document.json") is None


@pytest.mark.parametrize("name", ["jsonl", "csv", "webdataset", "tokens", "files", "parquet"])
def test_a_format_survives_pickle(name: str) -> None:
    fmt = get_format(name)
    assert pickle.loads(pickle.dumps(fmt)) == fmt


def test_a_folder_of_images_streams_through_the_loader(folder: Path, tmp_path: Path) -> None:
    written = write_images(folder, {"cat": 7, "dog": 6})

    def decode(sample: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"length": len(sample["bytes"]), "label": sample["label"], "path": sample["path"]}

    data = ShardedDataset(
        str(folder), global_batch_size=4, format=RawFilesFormat(group_files=3), lanes=2, transform=decode
    )
    with data.loader(epochs=1, cache_dir=tmp_path / "cache") as loader:
        batches = list(loader)
    assert sorted(p for b in batches for p in b["path"]) == sorted(written)
    for batch in batches:
        assert batch["length"].tolist() == [len(written[path]) for path in batch["path"]]
        assert batch["label"].tolist() == [int(path.startswith("dog")) for path in batch["path"]]


def test_a_run_of_token_files_gives_tensors(folder: Path, tmp_path: Path) -> None:
    (folder / "a.bin").write_bytes(np.arange(50, dtype="<u2").tobytes())
    data = ShardedDataset(f"{folder}/*.bin", global_batch_size=2, format=TokenFormat(length=9, dtype="uint16"))
    with data.loader(cache_dir=tmp_path / "cache") as loader:
        rows = [row for batch in loader for row in batch["tokens"].long().tolist()]
    assert sorted(rows) == np.arange(45).reshape(5, 9).tolist()


def test_something_that_is_no_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a format's name, or a ShardFormat"):
        ShardedDataset("/x", global_batch_size=1, format=3)  # pyright: ignore[reportArgumentType] (on purpose)


class BrokenStore(LocalStore):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        raise StorageError("The store does not answer.")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tar", "a.npy", "a.parquet"])
def test_a_store_that_fails_is_not_taken_for_a_damaged_file(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"x" * 100)
    fmt = format_by_extension(name)
    assert fmt is not None
    with pytest.raises(StorageError, match="does not answer"):
        build_manifest(BrokenStore(folder), "*", fmt)


class LinesOfText:
    """What a user would write: a format of their own."""

    name = "lines"
    extensions = (".lines",)

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        return ShardFacts(store.get(info.key).count(b"\n"), pa.schema([("line", pa.string())]))

    def read_table(self, path: Path) -> pa.Table:
        return pa.table({"line": path.read_text().splitlines()})


def test_a_registered_format_is_found_by_its_extension(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_module, "_FORMATS", dict(formats_module._FORMATS))
    (folder / "a.lines").write_text("one\ntwo\n")
    register_format(LinesOfText())
    data = ShardedDataset(f"{folder}/*.lines", global_batch_size=1)
    assert data.manifest().format_name == "lines"
    assert rows_of(folder, data.format_impl()) == [{"line": "one"}, {"line": "two"}]


@pytest.mark.parametrize("kind", ["jsonl", "tar", "files"])
def test_a_bucket_gives_what_a_folder_gives(
    folder: Path, tmp_path: Path, juicefs_gateway: JuiceFSGateway, kind: str
) -> None:
    spec = StoreSpec(uri=f"{juicefs_gateway.uri}/formats-{kind}", options=juicefs_gateway.storage_options)
    store = open_store(spec)
    contents: dict[str, bytes] = {
        "jsonl": {f"{i}.jsonl.gz": gzip.compress(f'{{"id": {i}}}\n'.encode() * (i + 1)) for i in range(3)},
        "tar": {f"{i}.tar": tar_bytes(sample_files(range(1, 3 + i))) for i in range(3)},
        "files": {f"{name}/{i}.JPEG": bytes([i]) for name in ("a", "b") for i in range(4)},
    }[kind]
    for key, content in contents.items():
        store.put(key, content)
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_bytes(content)
    name = {"jsonl": "jsonl", "tar": "webdataset", "files": "files"}[kind]

    def batches(uri: str, options: Any) -> list[Any]:
        data = ShardedDataset(uri, global_batch_size=3, format=name, storage_options=options)
        with data.loader(cache_dir=tmp_path / "cache") as loader:
            return [{n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in b.items()} for b in loader]

    assert batches(spec.uri, spec.options) == batches(str(folder), None) != []
