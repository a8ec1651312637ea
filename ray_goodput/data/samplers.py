"""Index sequences for `rg.DataLoader` that can be taken up anywhere, without reading a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from ray_goodput.core.order import TAG_LOADER, permutation


class EpochSampler(RandomSampler):
    """A permutation of the indices that depends on (seed, epoch) only. A `RandomSampler`, as others look for that."""

    def __init__(self, data_source: Sized, seed: int) -> None:
        if len(data_source):  # RandomSampler refuses to be empty; a loader over nothing is merely over at once
            super().__init__(data_source)
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is in the order of `epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(len(self.data_source), TAG_LOADER, self.seed, self.epoch).tolist())

    def __len__(self) -> int:
        return len(self.data_source)


class SkippingSampler:
    """What the loader draws from: `sampler` without its first `start` entries, with its random state kept.

    sampler: of indices, or of batches of them (a batch sampler that the user gave).
    batch_size: to put indices into batches of, None: pass them on.
    start: entries to leave out of the next iteration; every iteration takes it anew.
    generator: the random state that `sampler` draws from, if it has one. `drawn_from` is that state as it was when the
        current iteration began; `draw_from`, if not None, is put in its place when the next one begins.
    """

    def __init__(
        self, sampler: Iterable[Any], *, batch_size: int | None, drop_last: bool, generator: torch.Generator | None
    ) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._generator = generator
        self.start = 0
        self.draw_from: torch.Tensor | None = None
        self.drawn_from: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        # A generator function: all this happens when the first entry is drawn. Torch's iterators draw numbers of their
        # own before that, possibly from the same generator, but not all of them do.
        start = self.start
        if self._generator is not None:
            if self.draw_from is not None:
                self._generator.set_state(self.draw_from)
                self.draw_from = None
            self.drawn_from = self._generator.get_state()
        rest: Any = islice(iter(self._sampler), start, None)
        yield from rest if self._batch_size is None else BatchSampler(rest, self._batch_size, self._drop_last)

    def __len__(self) -> int:
        """Entries of a whole epoch."""
        entries = len(self._sampler)  # pyright: ignore[reportArgumentType] (as torch: a TypeError says what is missing)
        if self._batch_size is None:
            return entries
        return entries // self._batch_size if self._drop_last else -(-entries // self._batch_size)


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator that a sampler draws from, given to it if it is one of torch's that can have one and has none.

    Those would otherwise draw from the process's stream, whose state at that moment nobody can restore.
    """
    if isinstance(sampler, EpochSampler) or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(torch.initial_seed())
    return sampler.generator if isinstance(sampler.generator, torch.Generator) else None
