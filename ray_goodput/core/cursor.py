"""Where in the global sample order a run stands: the data part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ray_goodput.errors import DatasetMismatchError


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Position in the global sample order; equal on every rank, so any world size can resume from it.

    samples_consumed: stream position: samples of all ranks over all epochs that have been trained on.
    manifest_digest: which data (`Manifest.digest`).
    order_digest: which order over it (`SampleOrder.digest`, readable: `version=1 seed=0 lanes=64 window=8`).

    The global batch size and the world size are not part of it: a cursor is good for any of them.
    """

    VERSION: ClassVar[int] = 1

    samples_consumed: int
    manifest_digest: str
    order_digest: str

    def __post_init__(self) -> None:
        if self.samples_consumed < 0:
            raise ValueError(f"A cursor cannot stand before the first sample ({self.samples_consumed}).")

    def advance(self, num_samples: int) -> DataCursor:
        """The cursor after `num_samples` more samples of the global stream."""
        return self.moved_to(self.samples_consumed + num_samples)

    def moved_to(self, samples_consumed: int) -> DataCursor:
        """The cursor at a position, as `Batch.samples_end` gives it."""
        return replace(self, samples_consumed=samples_consumed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a few hundred bytes."""
        return {
            "format": "ray_goodput.cursor",
            "version": self.VERSION,
            "samples_consumed": self.samples_consumed,
            "manifest_digest": self.manifest_digest,
            "order_digest": self.order_digest,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataCursor:
        """Inverse of `to_dict`. Raises DatasetMismatchError when `data` is no cursor of a known version."""
        if data.get("format") != "ray_goodput.cursor" or data.get("version") != cls.VERSION:
            raise DatasetMismatchError(
                f"Cannot read a data cursor of format {data.get('format')!r}, version {data.get('version')!r}; this "
                f"version of ray_goodput reads ray_goodput.cursor {cls.VERSION}. Resume with the version that saved it."
            )
        try:
            position = data["samples_consumed"]
            if isinstance(position, bool) or not isinstance(position, int):
                raise TypeError(f"samples_consumed is {position!r}")
            return cls(position, str(data["manifest_digest"]), str(data["order_digest"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetMismatchError(f"The data cursor in the checkpoint is damaged: {error!r}.") from error


def check(cursor: DataCursor, expected: DataCursor) -> None:
    """Returns if `cursor` belongs to the data and order of `expected`; else DatasetMismatchError says what differs."""
    if cursor.manifest_digest != expected.manifest_digest:
        raise DatasetMismatchError(
            f"The checkpoint stands at sample {cursor.samples_consumed} of other data (manifest "
            f"{cursor.manifest_digest[:12]}, now {expected.manifest_digest[:12]}): files were added, removed or "
            "changed, so its position means nothing here. Restore the old files or start a new run name."
        )
    if cursor.order_digest != expected.order_digest:
        raise DatasetMismatchError(
            f"The checkpoint stands at sample {cursor.samples_consumed} of another sample order: "
            f"{_differences(cursor.order_digest, expected.order_digest)}. Use the saved values again, or start a new "
            "run name to train in the new order."
        )


def _differences(saved: str, now: str) -> str:
    before, after = _fields(saved), _fields(now)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{n} was {before.get(n, 'unset')} and is {after.get(n, 'unset')}" for n in names)


def _fields(order_digest: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for pair in order_digest.split():
        name, _, value = pair.partition("=")
        fields[name] = value
    return fields
