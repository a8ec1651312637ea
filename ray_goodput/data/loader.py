"""One rank's batches, built ahead of the training loop in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import pyarrow as pa
import torch

from ray_goodput.core.batches import BatchPlan, LanePlaces
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.placement import AnyOrder, live_sets, members_of
from ray_goodput.data.assemble import BatchBuilder, Collate, located_batches
from ray_goodput.data.batch import Batch
from ray_goodput.data.transforms import OnError, SampleTransforms, Transform, WorkerKind
from ray_goodput.errors import ConfigError

__all__ = ["Batch", "BatchLoader", "ShardSource"]

logger = logging.getLogger(__name__)

_MAX_OPEN_SHARDS = 640  # each holds a file open; the usual limit of a process is 1024


class ShardSource(Protocol):
    """Where a rank's data shards come from: the node's cache, kept filled by someone who knows the future."""

    def table(self, data_shard: int) -> pa.Table:
        """The data shard, memory-mapped; blocks until it is there. Raises ShardReadError, ObjectChangedError."""
        ...

    def describe(self, data_shard: int) -> str:
        """The data shard by number and object, for messages."""
        ...

    def counts(self) -> DataCounts:
        """What it knows of: hits, misses, bytes, requests. Costs microseconds."""
        ...

    def advance(self, samples_consumed: int) -> None:
        """The reader needs nothing before that stream position any more. Returns at once."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Prefetching ends, and waiting `table` calls may raise."""
        ...


class BatchLoader:
    """Iterator over one rank's `Batch`es from stream position `start`; one pass. A background thread builds ahead.

    start: samples consumed. If it is no multiple of the batch size (which was changed between runs), batches are
        [start, start + G), and so on: nothing is skipped or repeated.
    epochs: counted from position 0; None: no end. Nothing is left after the last one: an empty iterator.
    lane_places: equal on all ranks; see `core.batches`.
    workers, worker_kind, on_error: how `transform` is run; see `SampleTransforms`.
    depth: batches that are ready ahead of the consumer; with workers, as many more are being transformed.
    device: where the tensors shall be; to a CUDA device they go by pinned memory, asynchronously.

    The loader never moves the cursor: batches in the queue are not trained on yet. It closes `source` when it is
    closed, and closes itself at the end, at an error, and as a context manager.
    """

    def __init__(
        self,
        *,
        order: AnyOrder,
        columns: Sequence[str] | None = None,
        global_batch_size: int,
        source: ShardSource,
        start: int = 0,
        epochs: int | None = 1,
        dp_rank: int = 0,
        dp_world: int = 1,
        lane_places: LanePlaces | None = None,
        drop_last: bool = False,
        transform: Transform | None = None,
        collate: Collate | None = None,
        workers: int = 0,
        worker_kind: WorkerKind = "thread",
        on_error: OnError = "fail",
        depth: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"BatchLoader(depth={depth}): at least 1 batch must be built ahead.")
        if not 0 <= dp_rank < dp_world:
            raise ConfigError(f"BatchLoader: dp_rank={dp_rank} is not in a world of {dp_world}.")
        self.plan = BatchPlan(
            num_samples=order.num_samples, global_batch_size=global_batch_size, epochs=epochs, drop_last=drop_last
        )
        self._source = source
        self._depth = depth
        self._device = None if device is None else torch.device(device)
        self._located = located_batches(
            order, self.plan, start, dp_rank=dp_rank, dp_world=dp_world, lane_places=lane_places
        )
        live = live_sets(order, global_batch_size, [dp_rank], dp_world, lane_places)
        self._transforms = (
            None
            if transform is None
            else SampleTransforms(transform, order.seed, workers=workers, kind=worker_kind, on_error=on_error)
        )
        self._num_begun = depth if workers and transform is not None else 0
        self._builder = BatchBuilder(
            order,
            source.table,
            columns=columns,
            transforms=self._transforms,
            collate=collate,
            dp_world=dp_world,
            max_open=_shares(
                [num + member.window for num, member in zip(live, members_of(order), strict=True)], _MAX_OPEN_SHARDS
            ),
            describe=source.describe,
            misses=lambda: source.counts().misses,
        )
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._finished = False
        self._closed = False
        self._batches = 0
        self._waited_s = 0.0
        self._began_mono_s: float | None = None
        self._ended_mono_s: float | None = None
        self._thread = threading.Thread(target=self._produce, name="ray-goodput-batches", daemon=True)

    @property
    def num_skipped(self) -> int:
        """Samples that `on_error="skip"` has left out so far, also in batches that are not delivered yet."""
        return self._builder.num_skipped

    def counts(self) -> DataCounts:
        """What it has done so far, and its source. Thread-safe; stands still once it is closed."""
        with self._changed:
            now = time.perf_counter() if self._ended_mono_s is None else self._ended_mono_s
            own = DataCounts(
                batches=self._batches,
                waited_s=self._waited_s,
                elapsed_s=0.0 if self._began_mono_s is None else now - self._began_mono_s,
                network_s=self._builder.network_s,
                disk_s=self._builder.disk_s,
                decode_s=self._builder.decode_s,
                ready=len(self._ready),
                depth=0 if self._closed else self._depth,
            )
        return own + self._source.counts()

    def __iter__(self) -> BatchLoader:
        self._start()
        return self

    def __next__(self) -> Batch:
        """The next batch, waiting for it.

        Raises: StopIteration at the end and once closed; what building the batch raised, after all batches before it.
        """
        began = time.perf_counter()
        self._start()
        with self._changed:
            while not (self._ready or self._finished or self._closed):
                self._changed.wait()
            batch = self._ready.popleft() if self._ready and not self._closed else None
            self._changed.notify_all()
        if batch is None:
            self.close()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration
        if self._device is not None:
            batch = batch.to(self._device, non_blocking=True)
        batch.fetch_seconds = time.perf_counter() - began
        with self._changed:
            self._batches += 1
            self._waited_s += batch.fetch_seconds
        return batch

    def close(self, timeout_s: float = 5.0) -> None:
        """The iterator is over and the source closed. May be called from any thread, and again."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            first = not self._closed
            self._closed = True
            if self._ended_mono_s is None:
                self._ended_mono_s = time.perf_counter()
            self._ready.clear()
            self._changed.notify_all()
        if first:
            if self._transforms is not None:
                self._transforms.close()
            self._source.close(timeout_s)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive() and first:
                logger.warning("a batch is still being built %.1f s after its loader was closed", timeout_s)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        with self._changed:
            if not self._closed and self._thread.ident is None:
                self._began_mono_s = time.perf_counter()
                self._thread.start()

    def _produce(self) -> None:
        try:
            for finish in self._begun():
                if self._closed:
                    return
                batch = finish()
                if self._device is not None and self._device.type == "cuda":
                    batch = batch.pin_memory()
                if not self._offer(batch):
                    return
                # The rows are copied: for the source they are consumed, whatever the consumer has got to.
                self._source.advance(batch.samples_end)
        except BaseException as error:
            # Whatever it is, it belongs to the consumer; here it would be lost with the thread.
            self._error = None if self._closed else error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _begun(self) -> Iterator[Callable[[], Batch]]:
        """Batches in order, to be finished, while those after them are in the hands of the transform's workers."""
        begun: deque[Callable[[], Batch]] = deque()
        for located in self._located:
            try:
                begun.append(self._builder.begin(located))
            except Exception:
                yield from begun  # what came before is whole
                raise
            if len(begun) > self._num_begun:
                yield begun.popleft()
        yield from begun

    def _offer(self, batch: Batch) -> bool:
        """Queue the batch once there is room; False if the loader was closed meanwhile."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._ready.append(batch)
            self._changed.notify_all()
            return True


def _shares(wanted: list[int], limit: int) -> list[int]:
    """What each gets of `limit`, in proportion if it is not enough for all."""
    return [max(1, num * limit // max(limit, sum(wanted))) for num in wanted]
