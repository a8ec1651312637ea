"""The journal's file: what was written is read, and whatever is damaged is left out, never invented."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from ray_goodput.actors.names import journal_path, journals_dir
from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import StorageError
from ray_goodput.goodput import journal
from ray_goodput.goodput.journal import HEADER_BYTES, RECORD_BYTES, JournalWriter, read_journal

GRANULE = 128  # records in a page of memory


def make(path: Path, **sizes: int) -> JournalWriter:
    writer = JournalWriter(path, run="r-1", attempt=3, world_rank=5, node="n-7", **sizes)
    writer.open(1000, 1_700_000_000_000_000_000)
    return writer


def fill(writer: JournalWriter, num: int, start: int = 0) -> None:
    """Record i lasts from 1000 + i to 1001 + i, in step i."""
    for i in range(start, start + num):
        writer.roll(1001 + i, flags=i % 2, step=i, next_bucket=Bucket.STEP, next_step=i + 1)


def test_a_journal_reads_back_while_it_is_open(tmp_path: Path) -> None:
    writer = make(tmp_path / "j")
    fill(writer, 3)
    writer.heartbeat(2500)
    page = read_journal(tmp_path / "j")
    head = page.header
    assert head.wall_anchor_ns == 1_700_000_000_000_000_000
    assert (head.run, head.attempt, head.world_rank, head.node, head.mono_anchor_ns) == ("r-1", 3, 5, "n-7", 1000)
    assert [tuple(row)[:4] for row in page.array.tolist()] == [
        (1000, 1001, 5, 0),
        (1001, 1002, 1, 1),
        (1002, 1003, 1, 0),
    ]
    assert page.array["step"].tolist() == [0, 1, 2]
    assert page.open_record == journal.OpenRecord(1003, Bucket.STEP, 3)
    assert (page.heartbeat_ns, page.closed, page.next_record) == (2500, False, 3)
    assert pickle.loads(pickle.dumps(page)) == page


def test_closing_ends_the_open_record(tmp_path: Path) -> None:
    writer = make(tmp_path / "j")
    fill(writer, 1)
    writer.close(1100, step=9)
    writer.close(1200, step=9)
    page = read_journal(tmp_path / "j")
    assert page.closed and page.open_record is None and page.heartbeat_ns == 1100
    assert [tuple(row)[:2] for row in page.array.tolist()] == [(1000, 1001), (1001, 1100)]
    assert writer.read(0) == page
    writer.release()


def test_pages_join_to_the_whole(tmp_path: Path) -> None:
    writer = make(tmp_path / "j", chunk_records=GRANULE, max_records=8 * GRANULE)
    fill(writer, 700)
    data, at = b"", 0
    while at < 700:
        page = read_journal(tmp_path / "j", at, 90)
        assert page.first_record == at and page.oldest_record == 0
        assert (page.open_record is None) == (page.next_record < 700)
        data, at = data + page.data, page.next_record
    assert data == read_journal(tmp_path / "j").data
    assert read_journal(tmp_path / "j", 700).data == b""


def test_the_file_grows_by_chunks_and_then_overwrites_the_oldest(tmp_path: Path) -> None:
    writer = make(tmp_path / "j", chunk_records=GRANULE, max_records=2 * GRANULE)
    assert os.path.getsize(tmp_path / "j") == HEADER_BYTES + GRANULE * RECORD_BYTES
    for _ in range(5):
        fill(writer, 150, writer.next_record)
        page = read_journal(tmp_path / "j")
        assert page.first_record == page.oldest_record == max(0, writer.next_record + 2 - 2 * GRANULE)
        assert page.array["step"].tolist() == list(range(page.first_record, writer.next_record))
        assert page.open_record is not None
    assert os.path.getsize(tmp_path / "j") == HEADER_BYTES + 2 * GRANULE * RECORD_BYTES


def test_a_full_disk_keeps_the_newest_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = make(tmp_path / "j", chunk_records=GRANULE, max_records=8 * GRANULE)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fill(writer, 500)
    page = read_journal(tmp_path / "j")
    assert page.array["step"].tolist() == list(range(500 + 2 - GRANULE, 500))
    with pytest.raises(OSError):
        make(tmp_path / "other")


def test_a_truncated_file_gives_its_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(make(path), 50)
    os.truncate(path, HEADER_BYTES + 20 * RECORD_BYTES + 7)
    page = read_journal(path)
    assert page.array["step"].tolist() == list(range(20))
    assert page.open_record is None and not page.closed
    os.truncate(path, HEADER_BYTES)
    assert read_journal(path).data == b""


@pytest.mark.parametrize("word", [0, 1])
def test_a_torn_record_ends_the_page_there(tmp_path: Path, word: int) -> None:
    path = tmp_path / "j"
    fill(make(path), 50)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 30 * RECORD_BYTES + 8 * word)
        file.write(bytes(8))
    page = read_journal(path)
    assert page.array["step"].tolist() == list(range(30))
    assert page.open_record is None


@pytest.mark.parametrize("at", [0, 8, 17, 25, 33, 41, 57, 64 + 8, 130])
def test_a_damaged_header_is_a_clear_error(tmp_path: Path, at: int) -> None:
    path = tmp_path / "j"
    fill(make(path), 3)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 8)
    with pytest.raises(StorageError, match=r"journal"):
        read_journal(path)


@pytest.mark.parametrize("size", [0, 5, 4095])
def test_a_cut_header_is_a_clear_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "j"
    make(path)
    os.truncate(path, size)
    with pytest.raises(StorageError, match=f"{size} of 4096"):
        read_journal(path)


def test_a_newer_version_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "j"
    make(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(bytes([2]))
    with pytest.raises(StorageError, match="version 2, this release reads 1"):
        read_journal(path)


def test_reopening_a_path_starts_anew_without_touching_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j"
    first = make(path)
    fill(first, 5)
    second = make(path)
    assert read_journal(path).data == b""
    assert second.next_record == 0
    fill(first, 2, 5)  # a writer of a dead attempt that still lives writes into nothing that anybody reads
    assert read_journal(path).data == b""


def test_paths_are_apart_by_run_attempt_and_rank(tmp_path: Path) -> None:
    paths = {journal_path(journals_dir(tmp_path, run), a, r) for run in ("x", "y") for a in (0, 1) for r in (0, 1)}
    assert len(paths) == 8


def test_sizes_that_cannot_be_mapped_are_refused() -> None:
    for chunk, most in [(0, 128), (100, 200), (128, 200), (256, 128)]:
        with pytest.raises(ValueError, match="multiple"):
            JournalWriter("j", run="r", attempt=0, world_rank=0, node="n", chunk_records=chunk, max_records=most)
