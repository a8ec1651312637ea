"""A user's `transform` over the samples of a batch: here, in threads, or in spawned processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np

from ray_goodput.core.order import TAG_TRANSFORM, philox
from ray_goodput.errors import ConfigError, DataError

Transform = Callable[..., Mapping[str, Any]]
WorkerKind = Literal["thread", "process"]
OnError = Literal["fail", "skip"]
SampleKey = tuple[int, int]
"""(epoch, sample id)"""

_in_worker: Transform | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """In place of a sample that `transform` could not make."""

    reason: str


class SampleTransforms:
    """Runs `transform(sample, rng)` for all samples of a batch; `rng` depends on (seed, epoch, sample) alone.

    workers: 0: in the thread that asks for the result; else as many threads, or spawned processes, which are started at
        the first batch. Threads do for code that lets go of the interpreter's lock (image decoders, numpy); processes
        get the samples, and give back the results, by pickle.
    on_error: "fail": what `transform` raises is raised; "skip": the sample's result is `Skipped`.

    Raises:
        ConfigError: `transform` cannot be sent to processes.
    """

    def __init__(
        self,
        transform: Transform,
        seed: int,
        *,
        workers: int = 0,
        kind: WorkerKind = "thread",
        on_error: OnError = "fail",
    ) -> None:
        self._transform = transform
        self._seed = seed
        self._on_error: OnError = on_error
        self._workers = workers
        self._kind: WorkerKind = kind
        self._pool: Executor | None = None
        self._closed = False
        self._sent = _pickled(transform) if workers and kind == "process" else b""

    def begin(self, keys: Sequence[SampleKey], samples: Sequence[Any]) -> Callable[[], list[Any]]:
        """The work has begun, if there are workers; calling what is returned waits for the results, in order.

        It raises what `transform` raises, with a note that names the sample; DataError if a process died.
        """
        if not self._workers:
            return lambda: transform_all(self._transform, self._seed, self._on_error, keys, samples)
        pool = self._opened()
        size = -(-len(samples) // (2 * self._workers))  # twice as many as workers: they are rarely ready together
        jobs: list[Future[list[Any]]] = []
        try:
            for start in range(0, len(samples), size):
                part = self._seed, self._on_error, keys[start : start + size], samples[start : start + size]
                if self._kind == "process":
                    jobs.append(pool.submit(_transform_in_worker, *part))
                else:
                    jobs.append(pool.submit(transform_all, self._transform, *part))
        except BrokenProcessPool as error:
            raise _died(error) from error
        return lambda: _results(jobs)

    def close(self) -> None:
        """No more work is begun; what runs is left to end by itself."""
        self._closed = True
        pool = self._pool
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _opened(self) -> Executor:
        if self._pool is None:
            if self._kind == "thread":
                self._pool = ThreadPoolExecutor(self._workers, "ray-goodput-transform")
            else:
                self._pool = ProcessPoolExecutor(
                    self._workers,
                    multiprocessing.get_context("spawn"),
                    initializer=_start_worker,
                    initargs=(self._sent,),
                )
            if self._closed:  # between two lines of another thread's `close`
                self._pool.shutdown(wait=False, cancel_futures=True)
        return self._pool


def transform_all(
    transform: Transform,
    seed: int,
    on_error: OnError,
    keys: Sequence[SampleKey],
    samples: Sequence[Any],
) -> list[Any]:
    """`transform` of each sample, one after another."""
    return [_transformed(transform, seed, on_error, *key, sample) for key, sample in zip(keys, samples, strict=True)]


def _transformed(transform: Transform, seed: int, on_error: OnError, epoch: int, sample_id: int, sample: Any) -> Any:
    rng = np.random.Generator(philox(TAG_TRANSFORM, seed, epoch, sample_id))
    try:
        return transform(sample, rng)
    except Exception as error:  # the user's own: passed on as it is, with the sample that shows it
        if on_error == "skip":
            return Skipped(f"{type(error).__name__}: {error}{_file_of(sample)}")
        error.add_note(
            f"ray_goodput: raised by transform= for sample_id {sample_id} in epoch {epoch}{_file_of(sample)}"
        )
        raise


def _file_of(sample: Any) -> str:
    """Which file the sample was, where its format says so."""
    name = next((sample[key] for key in ("path", "__key__") if key in sample), None)
    return "" if name is None else f" ({name})"


def _results(jobs: Sequence[Future[list[Any]]]) -> list[Any]:
    try:
        return [result for job in jobs for result in job.result()]
    except BrokenProcessPool as error:
        raise _died(error) from error


def _died(error: BrokenProcessPool) -> DataError:
    return DataError(
        f"A worker process of transform= died or could not start ({error}): it was killed, ran out of memory, or "
        'cannot import the module that transform= is in. Use fewer workers, or worker_kind="thread".'
    )


def _pickled(transform: Transform) -> bytes:
    """By reference if it is at the top of a module, else by value, if somebody installed what can do that."""
    try:
        return pickle.dumps(transform)
    except Exception as error:  # pickle raises whatever it likes
        try:
            import cloudpickle  # pyright: ignore[reportMissingImports] (no dependency of ours)

            return cloudpickle.dumps(transform)
        except Exception:  # not there, or no better: the first error says why
            raise ConfigError(
                f"transform={transform!r} cannot be sent to worker processes ({error}): define it at the top of a "
                'module that can be imported, or use worker_kind="thread".'
            ) from error


def _start_worker(transform: bytes) -> None:
    """In a spawned process: take the transform, and go when the parent does, however it dies."""
    global _in_worker
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), name="ray-goodput-parent", daemon=True).start()
    _in_worker = pickle.loads(transform)


def _exit_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _transform_in_worker(seed: int, on_error: OnError, keys: Sequence[SampleKey], samples: Sequence[Any]) -> list[Any]:
    assert _in_worker is not None
    return transform_all(_in_worker, seed, on_error, keys, samples)
