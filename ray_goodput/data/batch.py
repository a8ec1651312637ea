"""What the training loop gets: the columns of one rank's share of a global batch, with its place in the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


class Batch(Mapping[str, Any]):
    """Columns by name. A tensor's first dimension is the sample; lists have one entry a sample.

    sample_ids: int64 (num_samples,): which samples, as positions in the manifest's own order.
    weight: factor that makes the average of the ranks' mean gradients that of the global batch (n_r * world / m); 1.0
        if the ranks' batches are equal. 0.0 for padding: one sample that is here only so that no rank lacks a batch,
        with empty `sample_ids`.
    index: number of the global batch.
    samples_end: the cursor's position once this global batch is trained on; equal on all ranks.
    num_skipped: samples of this rank that `transform` could not make and `on_error="skip"` left out. They count in the
        batch's size, but have no row and no id: as if their weight were 0.
    fetch_seconds: how long the consumer waited for it.
    members: of a `Mixture`, which dataset each of `sample_ids` is from, as an index into its `names`; else None.
    """

    __slots__ = ("_columns", "fetch_seconds", "index", "members", "num_skipped", "sample_ids", "samples_end", "weight")

    def __init__(
        self,
        columns: Mapping[str, Any],
        *,
        sample_ids: torch.Tensor,
        weight: float,
        index: int,
        samples_end: int,
        num_skipped: int = 0,
        fetch_seconds: float = 0.0,
        members: torch.Tensor | None = None,
    ) -> None:
        self._columns = dict(columns)
        self.sample_ids = sample_ids
        self.weight = weight
        self.index = index
        self.samples_end = samples_end
        self.num_skipped = num_skipped
        self.fetch_seconds = fetch_seconds
        self.members = members

    @property
    def num_samples(self) -> int:
        """Samples of this rank that count, 0 for padding; `len(batch)` is the number of columns."""
        return len(self.sample_ids)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with all tensors on `device`; `sample_ids` and `members` stay on the CPU."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for asynchronous copies to a device."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(
            {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in self.items()},
            sample_ids=self.sample_ids,
            weight=self.weight,
            index=self.index,
            samples_end=self.samples_end,
            num_skipped=self.num_skipped,
            fetch_seconds=self.fetch_seconds,
            members=self.members,
        )

    def __getitem__(self, name: str) -> Any:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"{name!r}: this batch has the columns {sorted(map(str, self._columns))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        shapes = {n: tuple(v.shape) if isinstance(v, torch.Tensor) else f"list of {len(v)}" for n, v in self.items()}
        return f"Batch(index={self.index}, num_samples={self.num_samples}, weight={self.weight:g}, {shapes})"
