"""One rank's time as fixed-size records in a mapped file, which outlives a SIGKILL of its writer.

A store into a shared mapping is in the kernel's page cache the moment it is made, so nothing that happens to the
process afterwards can take it back (losing the node's kernel can). The timeline has no holes: a record ends where the
next one starts, and the last one is open. README.md of this folder documents the bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import StorageError

VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 32
CHUNK_RECORDS = 32768
MAX_RECORDS = 64 * CHUNK_RECORDS
STEP_DONE = 1
"""Flag of a record: it ended because its step was done."""

RECORD = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("bucket", "u1"),
        ("flags", "u1"),
        ("_pad", "V2"),
        ("own_us", "<u4"),
        ("step", "<i8"),
    ]
)

_MAGIC = int.from_bytes(b"RGJRNL01", "little")
# Words of 8 bytes in the header; those from _HEARTBEAT on change while the file is written.
_VERSION, _ATTEMPT, _RANK, _WALL, _MONO, _TEXT_BYTES, _CRC, _HEARTBEAT, _COUNT, _CAPACITY, _CLOSED = range(1, 12)
_TEXT_AT = 128
_MAX_OWN_US = 2**31 - 1  # half an hour: the words of a record are signed


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeader:
    """Whose time a journal holds, and one moment on both clocks of its node (ns)."""

    run: str
    attempt: int
    world_rank: int
    node: str
    wall_anchor_ns: int
    mono_anchor_ns: int


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """What the rank was doing when last seen: since when (ns, its own monotonic clock), in which step."""

    start_ns: int
    bucket: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPage:
    """Records `first_record` and following of a journal; picklable, and cheap to send.

    data: whole records of 32 bytes, as in the file; `array` views them.
    oldest_record: first one the file still holds. A `first_record` above the wanted one means that those between were
        overwritten.
    heartbeat_ns: last sign of life, on the rank's own monotonic clock.
    open_record: what the rank was doing then; None once the journal is closed, or when older records than the newest
        were asked for.
    """

    header: JournalHeader
    first_record: int
    data: bytes
    oldest_record: int
    heartbeat_ns: int
    open_record: OpenRecord | None
    closed: bool

    @property
    def array(self) -> npt.NDArray[np.void]:
        """The records as a structured array of dtype `RECORD` (read-only view)."""
        return np.frombuffer(self.data, dtype=RECORD)

    @property
    def next_record(self) -> int:
        """Number of the record after the last one of this page."""
        return self.first_record + len(self.data) // RECORD_BYTES


class JournalWriter:
    """Appends to one journal; not thread-safe (the recorder holds a lock).

    The file grows by `chunk_records` up to `max_records`, then the oldest records are overwritten; a full disk has the
    same effect earlier. `open` does the work and raises OSError; after it `roll` raises only when not even one chunk
    could be kept.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        run: str,
        attempt: int,
        world_rank: int,
        node: str,
        chunk_records: int = CHUNK_RECORDS,
        max_records: int = MAX_RECORDS,
    ) -> None:
        granule = mmap.ALLOCATIONGRANULARITY // RECORD_BYTES
        if chunk_records < 1 or chunk_records % granule or max_records < chunk_records or max_records % chunk_records:
            raise ValueError(
                f"chunk_records={chunk_records} must be a multiple of {granule} and divide max_records={max_records}"
            )
        self.path = Path(path)
        self.header = JournalHeader(
            run=run, attempt=attempt, world_rank=world_rank, node=node, wall_anchor_ns=0, mono_anchor_ns=0
        )
        self._chunk = chunk_records
        self._chunk_words = chunk_records * RECORD_BYTES // 8
        self._capacity = max_records
        self._allocated = 0  # records the file has room for
        self._count = 0  # records finished; the open one has this number
        self._open_bucket = 0
        self._fd = -1
        self._head: memoryview | None = None
        self._words: memoryview | None = None  # the chunk that holds the open record
        self._at = 0  # where the open record begins in it, in words

    def open(self, at_ns: int, wall_ns: int, bucket: Bucket = Bucket.STARTUP, step: int = -1) -> None:
        """Create the file (replacing an older one) with one open record that starts at `at_ns`, wall time `wall_ns`."""
        if sys.byteorder != "little":  # the format is little-endian, and words are stored by plain assignment
            raise OSError("Journals are written on little-endian machines only.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)  # never write over a file that a reader may have mapped
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        head = self.header
        self.header = JournalHeader(
            run=head.run,
            attempt=head.attempt,
            world_rank=head.world_rank,
            node=head.node,
            wall_anchor_ns=wall_ns,
            mono_anchor_ns=at_ns,
        )
        os.posix_fallocate(self._fd, 0, HEADER_BYTES)
        os.pwrite(self._fd, _encode_header(self.header), 0)
        self._head = memoryview(mmap.mmap(self._fd, HEADER_BYTES)).cast("q")
        self._head[_HEARTBEAT] = at_ns
        self._head[_CAPACITY] = self._capacity
        self._enter_chunk(0)
        self._begin(at_ns, bucket, step)

    @property
    def next_record(self) -> int:
        """Number of finished records."""
        return self._count

    def roll(self, at_ns: int, *, flags: int, step: int, next_bucket: int, next_step: int, own_us: int = 0) -> None:
        """Finish the open record at `at_ns` with its true step, and begin the next one there.

        own_us: how long the rank computed by itself in the step that is done, 0 if that is not known.
        """
        words, head = self._words, self._head
        assert words is not None and head is not None
        count, at = self._count, self._at
        # The count last: killed in between, a reader finds the open record as before, with or without an end.
        words[at + 3] = step
        words[at + 2] = self._open_bucket | flags << 8 | (own_us & _MAX_OWN_US) << 32
        words[at + 1] = at_ns
        at += 4
        if at >= self._chunk_words:
            self._enter_chunk(count + 1)  # begins with this record
            at = 0
        self._at = at
        self._begin(at_ns, next_bucket, next_step)
        self._count = head[_COUNT] = count + 1

    def set_step(self, step: int) -> None:
        """Correct the step of the open record."""
        if self._words is not None:
            self._words[self._at + 3] = step

    def heartbeat(self, at_ns: int) -> None:
        """The rank was alive at `at_ns`. One aligned 8-byte store, safe beside `roll` in another thread."""
        head = self._head  # `close` may take it away meanwhile
        if head is not None:
            head[_HEARTBEAT] = at_ns

    def read(self, from_record: int, max_records: int = 4096) -> JournalPage:
        """The page from `from_record` on, read through the writer's own file."""
        return _read(self._fd, self.path, from_record, max_records)

    def close(self, at_ns: int, *, step: int) -> None:
        """Finish the open record, mark the journal closed and unmap it. Idempotent; `read` works until `release`."""
        words, head = self._words, self._head
        if words is None or head is None:
            return
        words[self._at + 3] = step
        words[self._at + 1] = at_ns
        self._count += 1
        head[_COUNT] = self._count
        head[_HEARTBEAT] = at_ns
        head[_CLOSED] = 1
        self._words = self._head = None

    def release(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _begin(self, at_ns: int, bucket: int, step: int) -> None:
        words, at = self._words, self._at
        assert words is not None
        words[at + 1] = 0
        words[at] = at_ns
        words[at + 2] = self._open_bucket = int(bucket)
        words[at + 3] = step

    def _enter_chunk(self, number: int) -> None:
        """Map the chunk that holds record `number`, growing the file, or wrapping where it cannot grow."""
        slot = number % self._capacity
        if slot >= self._allocated:
            try:
                offset = HEADER_BYTES + slot * RECORD_BYTES
                os.posix_fallocate(self._fd, offset, self._chunk * RECORD_BYTES)
                self._allocated += self._chunk
            except OSError:
                if not self._allocated:
                    raise
                # No room to grow: overwrite the oldest. Each record so far lies at its own number, so a smaller
                # capacity moves none of them.
                assert self._head is not None
                self._capacity = self._allocated
                self._head[_CAPACITY] = self._capacity
                slot = number % self._capacity
        self._words = None  # unmaps the chunk before
        offset = HEADER_BYTES + slot * RECORD_BYTES
        self._words = memoryview(mmap.mmap(self._fd, self._chunk * RECORD_BYTES, offset=offset)).cast("q")


def read_journal(path: str | Path, from_record: int = 0, max_records: int | None = None) -> JournalPage:
    """The records of a journal from `from_record` on, also while it is written or after its writer was killed.

    Stops before the first record that is not whole (a truncated file, a torn tail). At most `max_records`, all when
    None.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the header cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(fd, Path(path), from_record, max_records)
    finally:
        os.close(fd)


def read_journal_end(path: str | Path, num_records: int) -> JournalPage:
    """The last records of a journal and the open one; raises as `read_journal` does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = os.pread(fd, HEADER_BYTES, 0)
        _decode_header(head, Path(path))
        return _read(fd, Path(path), max(0, memoryview(head).cast("q")[_COUNT] - num_records), None)
    finally:
        os.close(fd)


def _read(fd: int, path: Path, from_record: int, max_records: int | None) -> JournalPage:
    head = os.pread(fd, HEADER_BYTES, 0)
    header = _decode_header(head, path)
    words = memoryview(head).cast("q")
    count, capacity = words[_COUNT], words[_CAPACITY]
    if count < 0 or capacity < 1:
        raise StorageError(f"The journal {path} counts {count} records in room for {capacity}: its header is damaged.")
    oldest = _oldest(count, capacity)
    first = max(from_record, oldest, 0)
    end = count if max_records is None else min(count, first + max_records)
    wanted = max(0, end - first)
    # One record more than asked for: after the last finished one comes the open one.
    data = _read_slots(fd, first, wanted + 1, capacity)
    # The writer may have gone round meanwhile, and has then overwritten what was read first.
    again = memoryview(os.pread(fd, HEADER_BYTES, 0)).cast("q")
    oldest = _oldest(again[_COUNT], again[_CAPACITY])
    if oldest > first:
        data = data[(oldest - first) * RECORD_BYTES :]
        first, wanted = oldest, max(0, end - oldest)
    records = np.frombuffer(data, dtype=RECORD)
    good = _whole(records[:wanted])
    open_record = None
    if good == wanted and end == count and not words[_CLOSED] and len(records) > wanted:
        row = records[wanted]
        follows = not wanted or int(records[wanted - 1]["end_ns"]) == int(row["start_ns"])
        if follows and int(row["start_ns"]) >= header.mono_anchor_ns:
            open_record = OpenRecord(int(row["start_ns"]), int(row["bucket"]), int(row["step"]))
    return JournalPage(
        header=header,
        first_record=first,
        data=data[: good * RECORD_BYTES],
        oldest_record=oldest,
        heartbeat_ns=words[_HEARTBEAT],
        open_record=open_record,
        closed=bool(words[_CLOSED]) and good == wanted,
    )


def _oldest(count: int, capacity: int) -> int:
    # Number `count` is the open record, and the writer may just be laying out the one after it.
    return max(0, count + 2 - capacity)


def _read_slots(fd: int, first: int, num: int, capacity: int) -> bytes:
    """Whole records first .. first + num, as far as the file holds them."""
    parts: list[bytes] = []
    while num > 0:
        slot = first % capacity
        run = min(num, capacity - slot)
        part = os.pread(fd, run * RECORD_BYTES, HEADER_BYTES + slot * RECORD_BYTES)
        parts.append(part[: len(part) // RECORD_BYTES * RECORD_BYTES])
        if len(parts[-1]) < run * RECORD_BYTES:
            break
        first, num = first + run, num - run
    return b"".join(parts)


def _whole(records: npt.NDArray[np.void]) -> int:
    """How many records from the start form one timeline without holes."""
    start, end = records["start_ns"], records["end_ns"]
    good = end >= start
    good[1:] &= start[1:] == end[:-1]
    bad = np.flatnonzero(~good)
    return int(bad[0]) if len(bad) else len(records)


def _encode_header(header: JournalHeader) -> bytes:
    text = json.dumps({"run": header.run, "node": header.node}).encode()
    if len(text) > HEADER_BYTES - _TEXT_AT:
        raise ValueError(f"The run's and node's names take {len(text)} bytes, {HEADER_BYTES - _TEXT_AT} fit.")
    fixed = [
        _MAGIC,
        VERSION | RECORD_BYTES << 32,
        header.attempt,
        header.world_rank,
        header.wall_anchor_ns,
        header.mono_anchor_ns,
        len(text),
    ]
    body = np.array(fixed, dtype="<i8").tobytes()
    crc = zlib.crc32(text, zlib.crc32(body))
    return (body + crc.to_bytes(8, "little")).ljust(_TEXT_AT, b"\0") + text


def _decode_header(data: bytes, path: Path) -> JournalHeader:
    if len(data) < HEADER_BYTES:
        raise StorageError(f"The journal {path} is cut off in its header ({len(data)} of {HEADER_BYTES} bytes).")
    words = memoryview(data).cast("q")
    if words[0] != _MAGIC:
        raise StorageError(f"{path} is not a journal: it does not start with the mark of one.")
    if words[_VERSION] != VERSION | RECORD_BYTES << 32:
        raise StorageError(
            f"The journal {path} has format version {words[_VERSION] & 0xFFFFFFFF}, this release reads {VERSION}: use "
            "the release that wrote it."
        )
    text = data[_TEXT_AT : _TEXT_AT + max(0, words[_TEXT_BYTES])]
    if zlib.crc32(text, zlib.crc32(data[: _CRC * 8])) != words[_CRC]:
        raise StorageError(f"The header of the journal {path} does not match its checksum.")
    names = json.loads(text)
    return JournalHeader(
        run=names["run"],
        attempt=words[_ATTEMPT],
        world_rank=words[_RANK],
        node=names["node"],
        wall_anchor_ns=words[_WALL],
        mono_anchor_ns=words[_MONO],
    )
