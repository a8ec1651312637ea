"""One suite of laws for every kind of object store, against real servers."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_goodput.config import StoreSpec
from ray_goodput.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from ray_goodput.storage import ObjectStore, open_store
from ray_goodput.storage.cloud_options import S3Options
from ray_goodput.storage.faults import FaultyStore
from servers import JuiceFSGateway, MotoServer

MIB = 1 << 20
_unique = itertools.count()
KINDS = ["local", "memory", "fsspec_local", "arrow", "moto", "juicefs"]


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(params=KINDS)
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSpec:
    """The spec of an empty store of each kind."""
    folder = f"prefix-{next(_unique)}/inner"
    match request.param:
        case "local":
            return StoreSpec(uri=str(tmp_path / "store"))
        case "memory":
            return StoreSpec(uri=f"memory://{folder}")
        case "fsspec_local":
            import fsspec

            return StoreSpec(uri=str(tmp_path / "store"), options={"filesystem": fsspec.filesystem("file")})
        case "arrow":
            from pyarrow.fs import LocalFileSystem

            return StoreSpec(uri=str(tmp_path / "store"), options={"filesystem": LocalFileSystem()})
        case "moto":
            server: MotoServer = request.getfixturevalue("moto")
            return StoreSpec(uri=f"{server.uri}/{folder}", options=server.storage_options)
        case _:
            gateway: JuiceFSGateway = request.getfixturevalue("juicefs_gateway")
            return StoreSpec(uri=f"{gateway.uri}/{folder}", options=gateway.storage_options)


@pytest.fixture
def store(spec: StoreSpec) -> ObjectStore:
    return open_store(spec)


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(100_000)], ids=["empty", "one byte", "100 kB"])
def test_what_is_put_is_got(store: ObjectStore, data: bytes) -> None:
    store.put("a/b.bin", data)
    assert store.get("a/b.bin") == data
    info = store.head("a/b.bin")
    assert (info.key, info.size_bytes) == ("a/b.bin", len(data))
    assert list(store.list()) == [info] or [(i.key, i.size_bytes) for i in store.list()] == [("a/b.bin", len(data))]


def test_a_memoryview_of_any_type_is_stored_as_its_raw_bytes(store: ObjectStore) -> None:
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(1000, dtype=numpy.float64)
    store.put("view", memoryview(values))
    assert store.get("view") == values.tobytes()
    store.put("view", memoryview(b"0123456789")[2:5])
    assert store.get("view") == b"234"


def test_put_replaces_whole(store: ObjectStore) -> None:
    store.put("k", b"a long first value")
    store.put("k", b"short")
    assert store.get("k") == b"short"
    assert store.head("k").size_bytes == 5


def test_get_range_gives_exactly_the_bytes_or_says_that_the_object_is_short(store: ObjectStore) -> None:
    store.put("k", b"0123456789")
    assert store.get_range("k", 3, 4) == b"3456"
    assert store.get_range("k", 0, 10) == b"0123456789"
    assert store.get_range("k", 4, 0) == b""
    for start, length in [(8, 5), (10, 1), (50, 3)]:
        with pytest.raises(StorageError, match="ends early"):
            store.get_range("k", start, length)


def test_a_missing_object_is_said_to_be_missing_by_name(store: ObjectStore, tmp_path: Path) -> None:
    store.put("folder/object", b"1")
    for key in ["nothing", "folder", "folder/object/below"]:
        for call in (
            lambda key=key: store.get(key),
            lambda key=key: store.head(key),
            lambda key=key: store.get_range(key, 0, 1),
            lambda key=key: store.get_range(key, 0, 0),
            lambda key=key: store.download_file(key, tmp_path / "file"),
        ):
            with pytest.raises(ObjectNotFoundError, match=key):
                call()


def test_an_empty_store_lists_nothing(store: ObjectStore) -> None:
    assert keys(store) == []
    assert keys(store, "folder/inner") == []
    assert store.list_folders() == []
    assert store.list_folders("folder") == []
    store.delete(["nothing", "folder/nothing"])
    store.delete([])
    assert store.abort_uploads() == 0


def test_listing_is_recursive_in_key_order_and_by_whole_folder_names(store: ObjectStore) -> None:
    names = ["b", "a/1", "a/2/x", "a-1", "a/.metadata", "a.b/z", "ab/1", "Z", "a/10", "step-1/x", "step-10/x", "ü/ö"]
    for name in names:
        store.put(name, name.encode())
    assert keys(store) == sorted(names)
    assert keys(store, "a") == keys(store, "a/") == sorted(["a/1", "a/2/x", "a/.metadata", "a/10"])
    assert keys(store, "step-1") == ["step-1/x"]
    assert keys(store, "b") == []
    assert store.list_folders() == sorted(["a", "a.b", "ab", "step-1", "step-10", "ü"])
    assert store.list_folders("a/") == store.list_folders("a") == ["2"]
    assert store.list_folders("b") == []
    assert {i.key: i.size_bytes for i in store.list()} == {name: len(name.encode()) for name in names}


@pytest.mark.parametrize(
    "key", ["ü ñ/日本 語.bin", "a b+c%20d", "q?x=1&y#z", "e\u0301", "~tilde*'(),;:@$!", "emoji-🚀"]
)
def test_any_unicode_name_is_kept(store: ObjectStore, key: str, tmp_path: Path) -> None:
    store.put(key, key.encode())
    assert keys(store) == [key]
    assert store.get(key) == key.encode()
    store.download_file(key, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == key.encode()
    store.delete([key])
    assert keys(store) == []


@pytest.mark.parametrize("key", ["", "/abs", "../out", "a/../../out", "a//b", "a/", "./a", "a/.", "nul\0"])
def test_a_key_outside_the_root_is_refused(store: ObjectStore, key: str, tmp_path: Path) -> None:
    for call in (lambda: store.put(key, b"1"), lambda: store.get(key), lambda: store.delete([key])):
        with pytest.raises(StorageError, match="key"):
            call()
    assert not (tmp_path / "out").exists()


def test_delete_leaves_none_of_the_keys_and_all_others(store: ObjectStore) -> None:
    for i in range(7):
        store.put(f"d/{i}/x", b"1")
    store.delete(f"d/{i}/x" for i in range(5))
    store.delete(["d/0/x", "d/never"])
    assert keys(store) == ["d/5/x", "d/6/x"]
    assert store.list_folders("d") == ["5", "6"]


def test_create_writes_once_and_then_changes_nothing(store: ObjectStore) -> None:
    assert store.create("once/lock", b"first") is True
    assert store.create("once/lock", b"second") is False
    assert store.create("once/lock", b"first") is False
    assert store.get("once/lock") == b"first"
    store.delete(["once/lock"])
    assert store.create("once/lock", b"third") is True


@pytest.mark.parametrize("size_bytes", [0, 1, 3 * MIB + 7, 40 * MIB + 13])
def test_a_file_goes_up_and_comes_down_unchanged(store: ObjectStore, size_bytes: int, tmp_path: Path) -> None:
    data = (hashlib.sha256(b"seed").digest() * (size_bytes // 32 + 1))[:size_bytes]
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    target.write_bytes(b"old content" * 1000)
    store.upload_file("big/file", source)
    info = store.download_file("big/file", target)
    assert target.read_bytes() == data
    assert info.size_bytes == size_bytes
    if size_bytes > 16 * MIB:
        assert store.get_range("big/file", 16 * MIB - 3, 9) == data[16 * MIB - 3 : 16 * MIB + 6]


@pytest.mark.parametrize("size_bytes", [5 * MIB, 20 * MIB])
def test_part_of_a_file_becomes_one_object(store: ObjectStore, size_bytes: int, tmp_path: Path) -> None:
    data = os.urandom(MIB) * 24
    (tmp_path / "slot").write_bytes(data)
    store.upload_file("slice", tmp_path / "slot", offset=12_345, size_bytes=size_bytes)
    assert store.get("slice") == data[12_345 : 12_345 + size_bytes]
    store.upload_file("tail", tmp_path / "slot", offset=len(data) - 3)
    assert store.get("tail") == data[-3:]
    store.upload_file("none", tmp_path / "slot", offset=5, size_bytes=0)
    assert store.get("none") == b""


def test_a_large_put_arrives_whole(store: ObjectStore) -> None:
    data = os.urandom(MIB) * 40
    store.put("large", memoryview(data))
    assert hashlib.sha256(store.get("large")).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("size_bytes", [10, 40 * MIB])
def test_a_local_file_that_is_too_short_or_missing_leaves_nothing(
    store: ObjectStore, size_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "short").write_bytes(b"x" * (size_bytes // 2))
    with pytest.raises(StorageError, match="short"):
        store.upload_file("k", tmp_path / "short", size_bytes=size_bytes)
    with pytest.raises(StorageError, match="absent"):
        store.upload_file("k", tmp_path / "absent", size_bytes=size_bytes)
    with pytest.raises(StorageError, match="absent"):
        store.upload_file("k", tmp_path / "absent")
    assert keys(store) == []
    assert store.abort_uploads() == 0


def test_download_to_a_place_that_does_not_exist_names_the_local_file(store: ObjectStore, tmp_path: Path) -> None:
    store.put("k", b"1")
    with pytest.raises(StorageError, match="nowhere") as caught:
        store.download_file("k", tmp_path / "nowhere" / "file")
    assert not isinstance(caught.value, ObjectNotFoundError)


@pytest.mark.parametrize("size_bytes", [10, 40 * MIB])
def test_a_pinned_object_downloads_and_a_replaced_one_is_refused_by_name(
    store: ObjectStore, size_bytes: int, tmp_path: Path
) -> None:
    store.put("pinned", b"a" * size_bytes)
    etag = store.head("pinned").etag
    assert etag
    assert [i.etag for i in store.list()] == [etag]
    assert store.download_file("pinned", tmp_path / "file", etag=etag).etag == etag
    store.put("pinned", b"b" * (size_bytes + 1))
    with pytest.raises(ObjectChangedError, match="pinned"):
        store.download_file("pinned", tmp_path / "file", etag=etag)


def test_concurrent_puts_of_one_key_leave_one_of_the_values_whole(store: ObjectStore) -> None:
    values = [bytes([65 + i]) * (1000 + 100 * i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda value: store.put("same", value), values * 2))
    assert store.get("same") in values
    assert keys(store) == ["same"]


def test_concurrent_puts_and_deletes_in_one_folder_do_not_disturb_each_other(store: ObjectStore) -> None:
    def churn(i: int) -> None:
        for n in range(8):
            store.put(f"deep/{i}/er/{n}", b"1")
            store.delete([f"deep/{i}/er/{n}"])
        store.put(f"deep/{i}/kept", b"1")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert keys(store) == [f"deep/{i}/kept" for i in range(4)]


def test_two_stores_of_one_spec_see_each_other_and_a_child_sees_its_folder(spec: StoreSpec) -> None:
    one, two, child = open_store(spec), open_store(spec), open_store(spec.child("runs", "a"))
    one.put("runs/a/x", b"1")
    assert two.get("runs/a/x") == child.get("x") == b"1"
    child.put("y", b"2")
    assert keys(one) == ["runs/a/x", "runs/a/y"]
    assert keys(child) == ["x", "y"]
    two.delete(["runs/a/x"])
    with pytest.raises(ObjectNotFoundError):
        one.get("runs/a/x")


def test_a_store_is_not_pickled_and_its_uri_holds_no_secret(store: ObjectStore, spec: StoreSpec) -> None:
    with pytest.raises(TypeError, match="StoreSpec"):
        pickle.dumps(store)
    assert store.uri == spec.uri
    assert "testsecret" not in repr(store) + repr(spec)


def test_a_store_works_from_many_threads(store: ObjectStore) -> None:
    barrier = threading.Barrier(8)

    def work(i: int) -> bytes:
        barrier.wait(timeout=30)
        store.put(f"t/{i}", str(i).encode())
        return store.get(f"t/{i}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [str(i).encode() for i in range(8)]


def test_the_fault_wrapper_numbers_calls_and_strikes_before_and_after(store: ObjectStore) -> None:
    seen: list[tuple[str, str, str, int]] = []

    def before(op: str, key: str, n: int) -> None:
        seen.append(("before", op, key, n))
        if n == 2:
            raise RuntimeError("struck")

    faulty = FaultyStore(store, before, lambda op, key, n: seen.append(("after", op, key, n)))
    faulty.put("a", b"1")
    faulty.put("b", b"1")
    with pytest.raises(RuntimeError, match="struck"):
        faulty.delete(["a", "b"])
    assert keys(faulty) == ["a", "b"]
    assert faulty.calls == [("put", "a"), ("put", "b"), ("delete", "a"), ("list", "")]
    assert [entry for entry in seen if entry[3] == 2] == [("before", "delete", "a", 2)]
    assert ("after", "list", "", 3) in seen
    assert (faulty.count(), faulty.count("put"), faulty.count("put", "delete")) == (4, 2, 3)


def test_an_s3fs_file_system_of_the_user_obeys_the_main_laws(moto: MotoServer, tmp_path: Path) -> None:
    s3fs = pytest.importorskip("s3fs")
    filesystem = s3fs.S3FileSystem(**moto.storage_options, skip_instance_cache=True)
    store = open_store(StoreSpec(uri=f"{moto.uri}/s3fs/{next(_unique)}", options={"filesystem": filesystem}))
    data = os.urandom(MIB) * 20
    (tmp_path / "file").write_bytes(data)
    store.upload_file("a/big", tmp_path / "file")
    store.put("a/.metadata", b"small")
    assert [(i.key, i.size_bytes) for i in store.list("a")] == [("a/.metadata", 5), ("a/big", len(data))]
    assert store.get_range("a/big", MIB - 1, 3) == data[MIB - 1 : MIB + 2]
    with pytest.raises(StorageError, match="ends early"):
        store.get_range("a/.metadata", 4, 2)
    with pytest.raises(StorageError, match="file"):
        store.upload_file("short", tmp_path / "file", size_bytes=30 * MIB)
    store.download_file("a/big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    store.delete(["a/big", "a/.metadata", "none"])
    assert keys(store) == []


def test_sweeps_of_one_store_share_one_client(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make = S3Options.botocore_client
    monkeypatch.setattr(S3Options, "botocore_client", lambda self: made.append(client := make(self)) or client)
    store = open_store(StoreSpec(uri=f"{moto.uri}/sweeps", options=moto.storage_options))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: store.abort_uploads("step-1"), range(8))) == [0] * 8
    assert len(made) == 1
