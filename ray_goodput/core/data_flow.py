"""What the data plane has done so far, in counts that add up over ranks, and which part of it holds training up."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

Part = Literal["accelerator", "network", "disk", "decode"]
PARTS: tuple[Part, ...] = ("accelerator", "network", "disk", "decode")

STALL_SHARE = 0.05
"""Up to this share of waiting the accelerator is the bottleneck, as it should be."""

_ADVICE = {
    "network": "raise prefetch_shards, cache more of the data, or ask the store for more bandwidth",
    "disk": "put the cache on NVMe (RAY_GOODPUT_LOCAL_DIR), or give the node more memory for its page cache",
    "decode": "give transform= more workers, or store the samples decoded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCounts:
    """Of one rank or, added up, of many; all since the rank began to read.

    batches: given to the loop. waited_s: the loop's waiting for them; elapsed_s: from the first it asked for to now.
    network_s, disk_s, decode_s: what the thread that builds batches spent on waiting for data shards that were not
        cached, on opening cached ones and taking rows out of them, and on `transform`.
    hits, misses: data shards that were cached when they were needed, or not. disk_bytes: of cached files opened.
    store_bytes, requests, refused, lost: of the node: bytes and requests to the store, those it refused (429, 503), and
        those without an answer; each of these was tried again.
    ready, depth: batches that lie ready now, and how many may.
    """

    batches: int = 0
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    network_s: float = 0.0
    disk_s: float = 0.0
    decode_s: float = 0.0
    hits: int = 0
    misses: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0
    requests: int = 0
    refused: int = 0
    lost: int = 0
    ready: int = 0
    depth: int = 0

    def __add__(self, other: DataCounts) -> DataCounts:
        return DataCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def without_queue(self) -> DataCounts:
        """The same, for a queue that is no more."""
        return replace(self, ready=0, depth=0)

    @property
    def stall_share(self) -> float:
        """Share of the loop's time that it waited for data."""
        return self.waited_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def hit_share(self) -> float:
        """Share of the data shards that were cached when they were needed; 1 before the first."""
        opened = self.hits + self.misses
        return self.hits / opened if opened else 1.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The part that holds training up, and one sentence with the figures and what to change."""

    part: Part
    reason: str


def bottleneck(counts: DataCounts) -> Bottleneck | None:
    """What limits the rate of steps, as far as data goes; None before the first batch. Pure."""
    if not counts.batches:
        return None
    stall = counts.stall_share
    if stall <= STALL_SHARE:
        return Bottleneck("accelerator", f"Data is ahead of the accelerator: it waited {stall:.1%} of the time.")
    spent: dict[Part, float] = {"network": counts.network_s, "disk": counts.disk_s, "decode": counts.decode_s}
    part = max(spent, key=lambda name: spent[name])
    total = sum(spent.values())
    share = spent[part] / total if total > 0 else 0.0
    doing = {"network": "fetching", "disk": "reading the cache", "decode": "transform"}[part]
    return Bottleneck(
        part,
        f"The accelerator waited {stall:.1%} of the time for data, mostly for {doing} ({share:.0%} of the time it took "
        f"to build batches): {_ADVICE[part]}.",
    )


def figures(counts: DataCounts) -> dict[str, float]:
    """The counts as they are shown to people, by name."""
    return {
        "stall_ratio": counts.stall_share,
        "hit_ratio": counts.hit_share,
        "queue_depth_ratio": counts.ready / counts.depth if counts.depth else 0.0,
        "fetch_seconds": counts.waited_s,
        "network_seconds": counts.network_s,
        "disk_seconds": counts.disk_s,
        "decode_seconds": counts.decode_s,
        "store_bytes": float(counts.store_bytes),
        "disk_bytes": float(counts.disk_bytes),
        "requests": float(counts.requests),
        "retries": float(counts.refused + counts.lost),
        "throttles": float(counts.refused),
    }
