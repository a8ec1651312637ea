"""The manifests of a mixture's datasets as one: their data shards follow each other.

Version 1 on disk: 8 bytes of magic, a line of JSON (`version`, and `members`: name and length of each part), each
member's manifest as `Manifest.to_bytes` gives it, then 16 bytes xxh3_128 of all before.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import numpy as np
import xxhash

from ray_goodput.data.manifest import DataShard, Manifest, ShardTotals
from ray_goodput.errors import DataError

MIXTURE_MANIFEST_VERSION = 1
_MAGIC = b"RGMIXTU1"
_CHECKSUM_BYTES = 16


class MixtureManifest(ShardTotals):
    """All data shards of a mixture, member after member. Immutable. The parts keep their own schemas and formats."""

    def __init__(self, members: Mapping[str, Manifest]) -> None:
        self.members = dict(members)
        parts = list(self.members.values())
        self.rows = np.concatenate([part.rows for part in parts])
        self.sizes = np.concatenate([part.sizes for part in parts])
        self.rows.flags.writeable = self.sizes.flags.writeable = False
        self._first_shards = np.concatenate([[0], np.cumsum([part.num_shards for part in parts])])
        named = "".join(f"{name} {part.digest}\n" for name, part in self.members.items())
        self.digest = xxhash.xxh3_128_hexdigest(f"ray_goodput.mixture {MIXTURE_MANIFEST_VERSION}\n{named}".encode())

    @property
    def uri(self) -> str:
        return mixture_title({name: part.uri for name, part in self.members.items()})

    @property
    def format_name(self) -> str:
        return mixture_title({name: part.format_name for name, part in self.members.items()})

    def shard(self, index: int) -> DataShard:
        """Data shard `index` of all; its `index` is that too, its key is relative to its own dataset's root."""
        if not 0 <= index < self.num_shards:
            raise IndexError(f"data shard {index} of {self.num_shards}")
        member = int(np.searchsorted(self._first_shards, index, side="right")) - 1
        own = list(self.members.values())[member].shard(index - int(self._first_shards[member]))
        return dataclasses.replace(own, index=index)

    def to_bytes(self) -> bytes:
        """The persisted form, checksummed."""
        parts = {name: part.to_bytes() for name, part in self.members.items()}
        head = {"version": MIXTURE_MANIFEST_VERSION, "members": {name: len(part) for name, part in parts.items()}}
        body = b"".join([_MAGIC, json.dumps(head).encode() + b"\n", *parts.values()])
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> MixtureManifest:
        """Inverse of `to_bytes`. Raises DataError if a byte is missing or different, or the version is unknown."""
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if not body.startswith(_MAGIC) or xxhash.xxh3_128_digest(body) != checksum:
            raise DataError(
                f"The stored data manifest ({len(data)} bytes) is damaged or of another version of ray_goodput. "
                "Restore the file, or start a new run name."
            )
        head_end = body.index(b"\n")
        head = json.loads(body[len(_MAGIC) : head_end])
        rest = memoryview(body)[head_end + 1 :]
        if head["version"] != MIXTURE_MANIFEST_VERSION:
            raise DataError(
                f"The stored manifest of a mixture has version {head['version']}, this ray_goodput reads version "
                f"{MIXTURE_MANIFEST_VERSION}: resume with the version that wrote it."
            )
        members: dict[str, Manifest] = {}
        for name, length in head["members"].items():
            members[name], rest = Manifest.from_bytes(rest[:length]), rest[length:]
        return cls(members)

    def __repr__(self) -> str:
        return f"MixtureManifest({list(self.members.values())})"


AnyManifest = Manifest | MixtureManifest


def mixture_title(parts: Mapping[str, str]) -> str:
    """What a mixture's manifest calls itself, or its format: both are compared when a run goes on."""
    return "mixture " + " ".join(f"{name}={part}" for name, part in parts.items())


def read_manifest(data: bytes) -> AnyManifest:
    """A stored manifest of either kind. Raises DataError."""
    return MixtureManifest.from_bytes(data) if data.startswith(_MAGIC) else Manifest.from_bytes(data)
