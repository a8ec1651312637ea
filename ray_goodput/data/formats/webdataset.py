"""WebDataset: a tar archive in which neighbouring files of one base name are one sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from ray_goodput.data.formats.base import ShardFacts, damaged, title_of
from ray_goodput.data.formats.ranged import RangedFile, codec_of
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_KIND = "WebDataset archive"
_INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_TEXTS = frozenset({"txt", "text", "transcript", "json"})
_KEY = "__key__"


@dataclass(frozen=True, slots=True)
class WebDatasetFormat:
    """One column an extension, and `__key__`: the path up to the first dot of the file name.

    `.cls`, `.id` and the like become integers, `.txt` and `.json` texts; everything else stays bytes, for `transform=`
    to decode. A manifest reads the headers only where files are larger than a few MiB, else the whole archive, once.
    """

    name: str = "webdataset"
    extensions: tuple[str, ...] = (".tar", ".tar.gz", ".tgz")

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        try:
            with _open(RangedFile(store, info)) as archive:
                extensions: dict[str, None] = {}
                rows = 0
                for _, files in _samples(archive, read=False):
                    extensions.update(dict.fromkeys(files))
                    rows += 1
                return ShardFacts(rows, _schema(extensions))
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            raise damaged(title_of(store, info), _KIND, error) from error

    def read_table(self, path: Path) -> pa.Table:
        try:
            with path.open("rb") as file, _open(file) as archive:
                samples = list(_samples(archive, read=True))
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            raise damaged(str(path), _KIND, error) from error
        schema = _schema(dict.fromkeys(name for _, files in samples for name in files))
        columns: dict[str, list[Any]] = {_KEY: [key for key, _ in samples]}
        for field in schema:
            if field.name != _KEY:
                columns[field.name] = [_value(path, key, field, files.get(field.name)) for key, files in samples]
        return pa.table(columns, schema=schema)


def _open(file: IO[bytes] | RangedFile) -> tarfile.TarFile:
    codec = codec_of(file.read(4) or b"")
    file.seek(0)
    if codec == "zstd":
        raise ValueError("zstd is not supported for archives, use gzip or none")
    return tarfile.open(fileobj=file, mode="r:" if codec is None else "r:gz")  # pyright: ignore (typeshed wants IO)


def _samples(archive: tarfile.TarFile, *, read: bool) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(key, extension -> content, empty unless `read`) of each sample, in the archive's order."""
    key: str | None = None
    files: dict[str, bytes] = {}
    for member in archive:
        folder, slash, name = member.name.rpartition("/")
        stem, dot, extension = name.partition(".")
        if not member.isfile() or not stem or not dot:
            continue  # folders, hidden files, and files without an extension are no part of a sample
        own = folder + slash + stem
        if own != key:
            if key is not None:
                yield key, files
            key, files = own, {}
        extension = extension.lower()
        if extension in files:
            raise ValueError(f"the sample {own!r} has two files with the extension {extension!r}")
        opened = archive.extractfile(member) if read else None
        files[extension] = b"" if opened is None else opened.read()
        archive.members = []  # pyright: ignore[reportAttributeAccessIssue] (it would keep one object a file)
    if key is not None:
        yield key, files


def _schema(extensions: dict[str, None]) -> pa.Schema:
    return pa.schema([(_KEY, pa.string()), *((name, _type(name)) for name in sorted(extensions))])


def _type(extension: str) -> pa.DataType:
    last = extension.rpartition(".")[2]
    if last in _INTEGERS:
        return pa.int64()
    return pa.string() if last in _TEXTS else pa.large_binary()


def _value(path: Path, key: str, field: pa.Field, raw: bytes | None) -> Any:
    try:
        if raw is None or field.type == pa.large_binary():
            return raw
        text = raw.decode()
        return int(text) if field.type == pa.int64() else text
    except ValueError:
        assert raw is not None
        what = "no integer" if field.type == pa.int64() else "not UTF-8"
        raise damaged(str(path), _KIND, f"{key}.{field.name} holds {raw[:40]!r}, which is {what}") from None
