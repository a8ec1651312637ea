"""Local disk: checksums, atomic writes, and what LocalStore leaves behind when a writer dies or the disk says no."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import xxhash

from ray_goodput.config import StoreSpec
from ray_goodput.errors import ConfigError, StorageAccessError, StorageError
from ray_goodput.storage import disk, open_store
from ray_goodput.storage.checksum import Checksum, checksum_file, xxh3_128_hex
from ray_goodput.storage.local import LocalStore


def test_the_checksum_is_xxh3_128_pinned_by_a_known_value() -> None:
    assert xxh3_128_hex(b"") == "99aa06d3014798d86001c324468d497f"
    assert xxh3_128_hex(b"abc") == xxhash.xxh3_128(b"abc").hexdigest()


@pytest.mark.parametrize("cuts", [[], [0], [1, 1, 7], [4096, 5000], [9999]])
def test_a_checksum_in_pieces_equals_that_of_the_whole(cuts: list[int]) -> None:
    data = os.urandom(10_000)
    checksum, start = Checksum(), 0
    for cut in [*cuts, len(data)]:
        checksum.update(memoryview(data)[start : start + cut])
        start += cut
    assert checksum.hexdigest() == xxh3_128_hex(data)


def test_the_checksum_of_part_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    path = tmp_path / "f"
    path.write_bytes(data)
    assert checksum_file(path) == xxh3_128_hex(data)
    assert checksum_file(path, 5, 100) == xxh3_128_hex(data[5:105])
    assert checksum_file(str(path), offset=1) == xxh3_128_hex(data[1:])
    assert checksum_file(path, 7, 0) == checksum_file(path, len(data)) == xxh3_128_hex(b"")
    with pytest.raises(StorageError, match="cut short"):
        checksum_file(path, 5, len(data))


def test_write_atomic_replaces_whole_makes_parents_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    disk.write_atomic(path, b"one")
    disk.write_atomic(path, memoryview(b"twenty-two"))
    assert path.read_bytes() == b"twenty-two"
    assert os.listdir(path.parent) == ["file"]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    disk.write_atomic(path, b"old")

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        disk.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_only_names_made_by_tmp_path_count_as_temporary(tmp_path: Path) -> None:
    for name in ["COMMIT.json", ".metadata", "ü" * 120, "x" * 255]:
        tmp = disk.tmp_path(tmp_path / name)
        assert disk.is_tmp(tmp.name)
        assert not disk.is_tmp(name)
        tmp.write_bytes(b"fits the file system")
    assert not any(map(disk.is_tmp, [".tmp", ".tmp-", ".tmp-notes", "x.tmp-a-1-00000000"]))


def test_free_bytes_answers_for_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert 0 < disk.free_bytes(tmp_path / "not" / "yet") <= disk.free_bytes(tmp_path) + (1 << 30)


@pytest.mark.parametrize("size_bytes", [1 << 20, 64 << 20])
def test_a_writer_killed_in_mid_upload_leaves_no_object_and_one_leftover_that_can_be_swept(
    tmp_path: Path, size_bytes: int
) -> None:
    script = textwrap.dedent(f"""
        import os, signal, sys
        from ray_goodput.storage.local import LocalStore
        from ray_goodput.storage import local
        def dying(*args):
            yield b"x" * ({size_bytes} // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        local.file_pieces = dying
        LocalStore({str(tmp_path)!r}).upload_file("run/object", "/dev/null")
    """)
    done = subprocess.run([sys.executable, "-c", script], timeout=50)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert list(store.list()) == []
    assert len(os.listdir(tmp_path / "run")) == 1
    assert store.abort_uploads("other") == 0
    assert store.abort_uploads() == 1
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_with_the_free_space_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"MiB are free there: delete files or choose another folder") as caught:
        LocalStore(tmp_path).put("k", b"1")
    assert not isinstance(caught.value, StorageAccessError)
    monkeypatch.undo()
    assert list(LocalStore(tmp_path).list()) == []
    assert LocalStore(tmp_path).abort_uploads() == 0


def test_a_root_below_a_file_is_an_access_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageAccessError, match="file stands where a folder is needed"):
        LocalStore(tmp_path / "file" / "root").put("k", b"1")
    assert list(LocalStore(tmp_path / "file" / "root").list()) == []


def test_a_folder_that_refuses_writes_is_an_access_error_that_says_who_may_not(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/proc/self"):
        LocalStore("/proc/self/goodput").put("k", b"1")


def test_an_object_where_a_folder_is_needed_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    with pytest.raises(StorageError, match="file stands"):
        store.put("a/b", b"2")
    store.put("d/e", b"3")
    with pytest.raises(StorageError, match="file stands"):
        store.put("d", b"4")
    store.delete(["d", "a/b", "d/e/f"])
    assert [info.key for info in store.list()] == ["a", "d/e"]


def test_a_link_that_leads_back_up_does_not_make_the_listing_endless(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/x", b"1")
    (tmp_path / "root" / "a" / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "y").write_bytes(b"2")
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root" / "circle")
    assert store.list_folders() == ["a", "linked"]
    assert [info.key for info in store.list()] == ["a/x", "linked/y"]


def test_delete_never_removes_the_root_nor_anything_above(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/b/c", b"1")
    store.delete(["a/b/c"])
    assert os.listdir(tmp_path / "root") == []


def test_create_without_hard_links_still_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    store = LocalStore(tmp_path)
    assert [store.create("k", b"1"), store.create("k", b"2")] == [True, False]
    assert store.get("k") == b"1"
    assert os.listdir(tmp_path) == ["k"]


def test_local_paths_and_file_urls_open_the_same_folder(tmp_path: Path) -> None:
    odd = tmp_path / "a b#c%d"
    open_store(StoreSpec(uri=str(odd))).put("k", b"1")
    assert open_store(StoreSpec(uri=odd.as_uri())).get("k") == b"1"
    with pytest.raises(ConfigError, match="host"):
        open_store(StoreSpec(uri="file://server/share"))
    with pytest.raises(ConfigError, match="empty"):
        open_store(StoreSpec(uri=""))
    with pytest.raises(ConfigError, match="key"):
        open_store(StoreSpec(uri=str(odd), options={"key": "value"}))


def test_opening_a_local_store_imports_no_cloud_client_and_no_torch_or_ray(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys
        from ray_goodput.config import StoreSpec
        from ray_goodput.storage import open_store
        open_store(StoreSpec(uri={str(tmp_path)!r})).put("k", b"1")
        print([name for name in ("torch", "ray", "obstore", "fsspec", "botocore", "pyarrow") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"
