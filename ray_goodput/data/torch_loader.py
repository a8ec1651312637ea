"""`rg.DataLoader`: torch's, with defaults for speed, exact state in mid-epoch, and the waiting measured."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler

from ray_goodput.data.samplers import EpochSampler, SkippingSampler, generator_of
from ray_goodput.data.waits import waiting
from ray_goodput.errors import ConfigError, DatasetMismatchError

logger = logging.getLogger(__name__)

_MAX_WORKERS = 8
_PREFETCH_FACTOR = 4
_VERSION = 1


@runtime_checkable
class ResumableIterable(Protocol):
    """What an iterable dataset offers to be taken up exactly, with any number of loader workers. `FileDataset` does."""

    @property
    def identity(self) -> str:
        """Changes whenever positions mean something else."""
        ...

    def begin(self, *, epoch: int, position: int, batch_size: int) -> None:
        """The next iteration, in every worker process, starts there: worker w of W yields the samples of batches w,
        w + W, w + 2W, ... from `position` on, so that the loader's batches do not depend on W."""
        ...

    def position_after(self, batches: int) -> int:
        """The position once that many batches since `begin` are done."""
        ...


class DataLoader(TorchDataLoader[Any]):
    """`torch.utils.data.DataLoader` with all its arguments, and with:

    - defaults: worker processes that stay (one for each spare core of this rank, 1 to 8), four batches ahead of each,
      pinned memory when there is CUDA. What is given counts, `num_workers=0` too.
    - `state_dict()` in mid-epoch: the batches that the loop has been given are done, those on the way are not.
      `load_state_dict` into a loader with any number of workers goes on with exactly the next one. With
      `shuffle=True` the order depends on (seed, epoch), the seed being the generator's (or torch's initial one). A
      sampler of your own is run again from the start of its epoch (its `generator` and `epoch` are put back) and
      skipped ahead, without reading samples; so it must give the same sequence again. Batch sizes may change unless you
      give a `batch_sampler`. Random numbers drawn in workers are seeded as torch does, so they are not part of this.
    - iterable datasets: exact if they are a `ResumableIterable` (`rg.FileDataset`); others are read and dropped up to
      the position, which needs the same number of workers (their default is one).
    - `fetch_seconds`: how long the loop waited for the last batch, `fetch_seconds_total` for all of them. In a
      `GoodputTrainer` the waiting counts as `data_wait`.

    Each `iter` is an epoch, also after one that was left early.

    In a `GoodputTrainer`, `run.register("loader", loader)` before `run.restore()` saves and restores its state. There
    rank 0's counts for all, so make the loaders of all ranks alike: the same `generator` seed, a `DistributedSampler`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        **torch_arguments: Any,
    ) -> None:
        iterable = isinstance(dataset, IterableDataset)
        self._data: Any = dataset
        self._resumable = iterable and isinstance(dataset, ResumableIterable)
        if num_workers is None:
            num_workers = 1 if iterable and not self._resumable else default_workers()
            if multiprocessing.current_process().daemon:  # which may have no children
                num_workers = 0
        if num_workers > 0 and prefetch_factor is None:
            prefetch_factor = _PREFETCH_FACTOR
        self._seed = generator.initial_seed() if generator is not None else torch.initial_seed()
        self._seed &= 2**63 - 1
        if shuffle and not iterable and sampler is None and batch_sampler is None:
            sampler, shuffle = EpochSampler(dataset, self._seed), None
        self._epoch = 0
        self._position = 0
        self._running: object | None = None  # a token of the iteration that counts: it must not be kept alive
        self._sampler_epoch: int | None = None
        self.fetch_seconds = 0.0
        self.fetch_seconds_total = 0.0
        self._skipping: SkippingSampler | None = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            torch.cuda.is_available() if pin_memory is None else pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            **torch_arguments,
        )
        self._of_batches = batch_sampler is not None
        if not iterable:
            drawn_from = getattr(batch_sampler, "sampler", batch_sampler) if self._of_batches else self.sampler
            self._stateful_sampler: Any = drawn_from
            walked: Any = self.batch_sampler if self._of_batches else self.sampler  # torch says an Iterable, too
            self._skipping = SkippingSampler(
                walked,
                batch_size=None if self._of_batches else self.batch_size,
                drop_last=self.drop_last,
                generator=generator_of(drawn_from),
            )

    @property
    def epoch(self) -> int:
        """Epoch of the iteration that runs, or else of the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is `epoch`, from its start unless it is the one that was taken up or is running."""
        if epoch != self._epoch:
            self._epoch, self._position, self._running = epoch, 0, None

    def __iter__(self) -> Any:
        if self._running is not None:  # left early
            self._epoch, self._position = self._epoch + 1, 0
        skip = 0
        if self._skipping is not None:
            if isinstance(self._stateful_sampler, EpochSampler):
                self._stateful_sampler.seed = self._seed
                self._stateful_sampler.set_epoch(self._epoch)
            else:
                self._sampler_epoch = getattr(self._stateful_sampler, "epoch", None)
            self._skipping.start = self._position
            self._skipping.drawn_from = None
        elif self._resumable:
            self._data.begin(epoch=self._epoch, position=self._position, batch_size=self.batch_size or 1)
        else:
            skip = self._position
        epoch = _Epoch(self, super().__iter__(), self._position, skip)
        self._running = epoch.token
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: every batch it was given counts as done.

        Numbers, texts and one tensor, always with the same keys.

        Raises:
            ConfigError: with `in_order=False`, where nobody knows which batches have been given.
        """
        if not getattr(self, "in_order", True):
            raise ConfigError("DataLoader(in_order=False) has no exact state: leave it out to resume in mid-epoch.")
        drawn_from = None
        if self._skipping is not None:
            drawn_from = self._skipping.drawn_from if self._running is not None else None
            if drawn_from is None:
                drawn_from = self._skipping.draw_from
            if drawn_from is None and (generator := generator_of(self._stateful_sampler)) is not None:
                drawn_from = generator.get_state()
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "position": self._position,
            "unit": self._unit(),
            "seed": self._seed,
            "identity": self._identity(),
            "sampler_epoch": -1 if self._sampler_epoch is None else self._sampler_epoch,
            "sampler_state": torch.empty(0, dtype=torch.uint8) if drawn_from is None else drawn_from.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where `state` was taken.

        Raises:
            DatasetMismatchError: it was taken over other data, or with other arguments that it depends on.
        """
        if state.get("version") != _VERSION:
            raise DatasetMismatchError(
                f"The DataLoader's state has version {state.get('version')}, this ray_goodput reads version {_VERSION}."
            )
        for name, now in (("unit", self._unit()), ("identity", self._identity())):
            if state[name] != now:
                raise DatasetMismatchError(
                    f"The DataLoader's state counts {state['unit']} of {state['identity']}, and this one counts "
                    f"{self._unit()} of {self._identity()}: make the loader as it was, or start its epoch anew."
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._seed = int(state["seed"])
        self._running = None
        if self._skipping is None:
            return
        if len(state["sampler_state"]):
            self._skipping.draw_from = state["sampler_state"].clone()
        if state["sampler_epoch"] >= 0:
            self._sampler_epoch = int(state["sampler_epoch"])
            if hasattr(self._stateful_sampler, "set_epoch"):
                self._stateful_sampler.set_epoch(self._sampler_epoch)

    @property
    def _index_sampler(self) -> Any:
        # Torch's iterators draw from it; until it is made, torch's constructor asks for its own.
        return super()._index_sampler if self._skipping is None else self._skipping

    def _unit(self) -> str:
        if self._resumable:
            return "positions"
        if self._skipping is None:
            return f"batches by {self.num_workers} workers"
        return "batches" if self._of_batches else "samples"

    def _identity(self) -> str:
        if self._resumable:
            return self._data.identity
        return "an iterable" if self._skipping is None else f"{len(self._data)} samples"

    def _delivered(self, epoch: _Epoch, seconds: float) -> None:
        self.fetch_seconds = seconds
        self.fetch_seconds_total += seconds
        if epoch.token is not self._running:  # another iteration has begun since: it is the one that counts
            return
        if self._resumable:
            self._position = self._data.position_after(epoch.batches)
        elif self._skipping is None or self._of_batches:
            self._position = epoch.start + epoch.batches
        else:
            self._position = epoch.start + epoch.batches * (self.batch_size or 1)

    def _ended(self, epoch: _Epoch) -> None:
        if epoch.token is self._running:
            self._epoch, self._position, self._running = self._epoch + 1, 0, None


class _Epoch:
    """One iteration: counts what the loop has been given, and how long it waited."""

    def __init__(self, loader: DataLoader, batches: Iterator[Any], start: int, skip: int) -> None:
        self._loader = loader
        self._inner = batches
        self._skip = skip
        self.token = object()
        self.start = start
        self.batches = 0

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            with waiting():
                while self._skip:
                    next(self._inner)
                    self._skip -= 1
                batch = next(self._inner)
        except StopIteration:
            self._loader._ended(self)
            raise
        self.batches += 1
        self._loader._delivered(self, time.perf_counter() - began)
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # pyright: ignore[reportArgumentType] (torch's iterator has a length, its stub does not)


def default_workers() -> int:
    """Worker processes of one rank: the cores that this process may use, shared with the other ranks of the node, less
    the one that trains; 1 to 8."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1)
    return max(1, min(_MAX_WORKERS, cores - 1))
