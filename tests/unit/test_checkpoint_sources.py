"""Objects are fetched once a node, verified by everyone, and local copies are used only when they are whole."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ray_goodput.checkpoint.sources import LocalFirstSource, StoreSource
from ray_goodput.core.commit import CheckpointId, CommitRecord, ObjectRecord
from ray_goodput.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from ray_goodput.storage.checksum import xxh3_128_hex
from ray_goodput.storage.local import LocalStore
from ray_goodput.storage.protocol import ObjectInfo

CONTENT = {"__0_0.distcp": b"tensors" * 100, ".metadata": b"metadata", "rank-00000.json": b""}
FOLDER = "checkpoints/step-0000000005-0"


class CountingStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.downloads: list[str] = []

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        self.downloads.append(key)
        return super().download_file(key, path, etag=etag)


@pytest.fixture
def record() -> CommitRecord:
    return CommitRecord(
        run="test",
        checkpoint=CheckpointId(5, 0),
        world_size=1,
        structure_digest="d",
        cursors={},
        objects=tuple(
            ObjectRecord(name=n, size_bytes=len(data), xxh3_128=xxh3_128_hex(data)) for n, data in CONTENT.items()
        ),
        committed_at_s=0.0,
    )


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    store = CountingStore(tmp_path / "store")
    for name, data in CONTENT.items():
        store.put(f"{FOLDER}/{name}", data)
    return store


def test_processes_of_a_node_download_each_object_once(
    store: CountingStore, record: CommitRecord, tmp_path: Path
) -> None:
    sources = [StoreSource(record, store, FOLDER, tmp_path / "cache") for _ in range(4)]
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda s=s: found.extend(s.path(name).read_bytes() for name in CONTENT))
        for s in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(list(CONTENT.values()) * 4)
    assert sorted(store.downloads) == sorted(f"{FOLDER}/{name}" for name in CONTENT)
    assert {source.tier for source in sources} == {"storage"}


def test_a_cached_file_that_rotted_is_downloaded_again(
    store: CountingStore, record: CommitRecord, tmp_path: Path
) -> None:
    path = StoreSource(record, store, FOLDER, tmp_path / "cache").path("__0_0.distcp")
    path.write_bytes(b"x" + CONTENT["__0_0.distcp"][1:])
    assert (
        StoreSource(record, store, FOLDER, tmp_path / "cache").path("__0_0.distcp").read_bytes()
        == CONTENT["__0_0.distcp"]
    )
    assert len(store.downloads) == 2


@pytest.mark.parametrize("damaged", [b"tensorz" * 100, b"tensors" * 99, b""])
def test_an_object_damaged_in_storage_is_named_and_not_kept(
    damaged: bytes, store: CountingStore, record: CommitRecord, tmp_path: Path
) -> None:
    store.put(f"{FOLDER}/__0_0.distcp", damaged)
    with pytest.raises(CorruptCheckpointError, match=f"{FOLDER}/__0_0.distcp is damaged"):
        StoreSource(record, store, FOLDER, tmp_path / "cache").path("__0_0.distcp")
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".lock-")] == []


def test_a_cache_folder_that_cannot_be_used_is_a_storage_error(
    store: CountingStore, record: CommitRecord, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    with pytest.raises(StorageError, match=r"__0_0\.distcp \(700 bytes\) cannot be kept in .*RAY_GOODPUT_LOCAL_DIR"):
        StoreSource(record, store, FOLDER, tmp_path / "cache").path("__0_0.distcp")


def test_a_missing_object_is_not_found(store: CountingStore, record: CommitRecord, tmp_path: Path) -> None:
    store.delete([f"{FOLDER}/.metadata"])
    source = StoreSource(record, store, FOLDER, tmp_path / "cache")
    for name in (".metadata", "unknown"):
        with pytest.raises(ObjectNotFoundError, match=name):
            source.path(name)


def test_local_copies_are_used_where_they_verify_and_the_store_where_they_do_not(
    store: CountingStore, record: CommitRecord, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    for name, data in CONTENT.items():
        (local / name).write_bytes(data)
    source = LocalFirstSource(
        record, [tmp_path / "none", local], StoreSource(record, store, FOLDER, tmp_path / "cache")
    )
    assert source.path("__0_0.distcp") == local / "__0_0.distcp"
    assert (source.tier, store.downloads) == ("local", [])
    (local / ".metadata").write_bytes(b"mEtadata")
    assert source.path(".metadata").read_bytes() == CONTENT[".metadata"]
    assert (source.tier, store.downloads) == ("storage", [f"{FOLDER}/.metadata"])


def test_without_a_store_a_damaged_or_missing_local_copy_is_an_error(record: CommitRecord, tmp_path: Path) -> None:
    source = LocalFirstSource(record, [tmp_path])
    with pytest.raises(ObjectNotFoundError, match="No local copy"):
        source.path(".metadata")
    (tmp_path / ".metadata").write_bytes(b"mEtadata")
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        source.path(".metadata")
