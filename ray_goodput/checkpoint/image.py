"""The bytes of a `.distcp` file, laid out before there is anything to put in.

A record of a `.distcp` file is what `torch.save` writes for one tensor: a zip archive whose entry `data/0` holds the
tensor's bytes. All else in it, the *envelope*, depends only on shape and dtype. So the envelopes are written once and a
save copies each tensor to its place between them: no serialisation, no allocation, no pickling.

Format: records one after the other, each at a multiple of 64 bytes (torch aligns the data inside a record to 64 too).
"""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ray_goodput.errors import CheckpointError

ALIGNMENT = 64
_MAP_NORESERVE = 0x4000  # Linux; Python's mmap module has no name for it before 3.13


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds the data of one tensor record: `head`, then `size_bytes` of data, then `tail`."""

    head: bytes
    size_bytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.size_bytes + len(self.tail)


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor in an image: the record is bytes [offset, offset + length), the data starts at `data_offset`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    length: int
    data_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where everything lies in one `.distcp` file of `size_bytes` bytes."""

    records: tuple[Record, ...]
    size_bytes: int

    @classmethod
    def build(cls, chunks: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> ImageLayout:
        """Lay out one record for each (shape, dtype), in this order."""
        records: list[Record] = []
        end = 0
        for shape, dtype in chunks:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            envelope = envelope_of(tuple(shape), dtype)
            data_offset = offset + len(envelope.head)
            records.append(Record(tuple(shape), dtype, offset, envelope.length, data_offset, envelope.size_bytes))
            end = offset + envelope.length
        return cls(tuple(records), end)

    def write_envelopes(self, buffer: memoryview | mmap.mmap) -> None:
        """All of the image but the data is in `buffer` afterwards."""
        for record in self.records:
            envelope = envelope_of(record.shape, record.dtype)
            buffer[record.offset : record.data_offset] = envelope.head
            tail = record.data_offset + record.size_bytes
            buffer[tail : tail + len(envelope.tail)] = envelope.tail

    def views(self, buffer: memoryview | mmap.mmap) -> list[torch.Tensor]:
        """A contiguous CPU tensor over the data of each record: writing to it is writing the file."""
        return [view_of(buffer, r.data_offset, r.shape, r.dtype) for r in self.records]


def view_of(buffer: memoryview | mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over bytes of `buffer` from `offset`, sharing its memory."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=size_bytes, offset=offset)
    return flat.view(dtype).view(tuple(shape))


@lru_cache(maxsize=4096)
def envelope_of(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """What `torch.save` of this release writes around a contiguous CPU tensor of this shape and dtype."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        whole = io.BytesIO()
        torch.save(torch.empty(shape, dtype=dtype), whole)
        return Envelope(whole.getvalue(), 0, b"")
    # Address space without memory behind it: with skip_data, torch.save never reads the tensor's bytes.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    hollow = view_of(mmap.mmap(-1, size_bytes, flags=flags), 0, shape, dtype)
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(hollow, sink)  # type: ignore[arg-type] (the sink has only what torch calls, not all of IO[bytes])
    if len(sink.skipped) != 1 or sink.skipped[0][1] - sink.skipped[0][0] != size_bytes:
        raise CheckpointError(
            f"torch.save of torch {torch.__version__} does not lay out a tensor of {size_bytes} bytes as expected "
            f"(left out {sink.skipped}): this release of ray_goodput cannot stage checkpoints with it."
        )
    start, _ = sink.skipped[0]
    return Envelope(bytes(sink.written[:start]), size_bytes, bytes(sink.written[start:]))


class _Sink:
    """A file that keeps what is written and notes what is jumped over."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.skipped: list[tuple[int, int]] = []
        self._position = 0

    def write(self, data: bytes) -> int:
        self.written += data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if target != self._position:
            self.skipped.append((self._position, target))
            self._position = target
        return target

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        return None
