"""`rg.FileDataset`: the files of a bucket or a mounted folder as a torch dataset, each cached at first access."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ray_goodput.config import StoreSpec, environment
from ray_goodput.core.order import MAX_SEED, TAG_FILES, TAG_TRANSFORM, Int64Array, permutation, philox
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.governors import governor_for
from ray_goodput.data.listing import list_matching
from ray_goodput.data.manifest import Manifest
from ray_goodput.data.patterns import split_glob
from ray_goodput.data.shard_fetcher import ShardFetcher
from ray_goodput.errors import ConfigError, DatasetMismatchError
from ray_goodput.storage.protocol import ObjectStore

_VERSION = 1
_UNSET = -1
_client_ran = False  # when this process was about to fork
_client_lost = False  # the threads of our faster client stayed behind in the process that this one was forked from


def _before_fork() -> None:
    global _client_ran
    _client_ran = _client_runs()


def _after_fork() -> None:
    global _client_lost
    _client_lost = _client_lost or _client_ran


def _client_runs() -> bool:
    """Whether anybody in this process has made a request through obstore: then its threads are there."""
    try:
        tasks = os.listdir("/proc/self/task")
        return any(Path(f"/proc/self/task/{task}/comm").read_text().startswith("tokio") for task in tasks)
    except OSError:  # no such folder, or a thread that just ended: as if it did
        return True


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file. `path` is relative to the dataset's root, `index` its position among all files by path."""

    path: str
    index: int
    data: bytes


ReadFile = Callable[[DataFile, np.random.Generator], Any]


class _Start(NamedTuple):
    """Where the next iteration begins: files [position, ...) of an epoch, dealt to ranks, in batches."""

    epoch: int
    position: int
    batch_size: int
    dp_rank: int
    dp_world: int


class FileDataset(IterableDataset[Any]):
    """Every file once an epoch over all ranks and loader workers, in an order that depends on (files, seed, epoch).

    uri: a folder (of a bucket: `s3://bucket/train`, any fsspec URL, or a mounted volume), with all files below it, or a
        pattern, such as `/mnt/data/**/*.jpg`. Hidden files are left out. Listed once, here.
    read: `f(file: DataFile, rng: numpy.random.Generator) -> sample`, in the loader's workers. `rng` depends on seed,
        epoch and file only. Default: a dict of `path` and `bytes`.
    shuffle, seed: the order; without `shuffle` it is that of the paths.
    dp_rank, dp_world: default: of torch.distributed, else of the environment (RANK, WORLD_SIZE), else the only one.
    drop_uneven: leave out the last N mod world files of an epoch, so that all ranks get as many.
    cache_dir: node-local folder, shared by all processes; default: below `RAY_GOODPUT_LOCAL_DIR`.
    cache_limit_bytes: for the whole cache; the files opened longest ago go first.
    prefetch_files: how many files each process fetches ahead of need.
    on_change: a file that is not the one that was listed is an error ("fail"), or taken as it is ("accept").

    With `rg.DataLoader`, `loader.state_dict()` is exact in mid-epoch, for any number of workers and ranks before and
    after, as long as all ranks have done as many batches. With torch's own loader call `set_epoch` before each epoch.
    A file crosses the network once a node, however many processes ask.
    """

    def __init__(
        self,
        uri: str,
        *,
        read: ReadFile | None = None,
        shuffle: bool = True,
        seed: int = 0,
        dp_rank: int | None = None,
        dp_world: int | None = None,
        drop_uneven: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | Path | None = None,
        cache_limit_bytes: int | None = None,
        prefetch_files: int = 8,
        on_change: Literal["fail", "accept"] = "fail",
    ) -> None:
        """Lists the files.

        Raises:
            EmptyDatasetError: nothing there, or nothing matches.
            ConfigError, StorageError.
        """
        super().__init__()
        if not uri:
            raise ConfigError("FileDataset(''): give the files' folder or pattern, for example s3://bucket/train.")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"FileDataset(seed={seed!r}): give an integer from 0 to 2**64 - 1.")
        if (dp_rank is None) != (dp_world is None):
            raise ConfigError(f"FileDataset(dp_rank={dp_rank}, dp_world={dp_world}): give both or neither.")
        if dp_rank is not None and dp_world is not None and not 0 <= dp_rank < dp_world:
            raise ConfigError(f"FileDataset: dp_rank={dp_rank} is not in a world of {dp_world}.")
        if prefetch_files < 0:
            raise ConfigError(f"FileDataset(prefetch_files={prefetch_files}): give 0 or more.")
        if on_change not in ("fail", "accept"):
            raise ConfigError(f'FileDataset(on_change={on_change!r}): give "fail" or "accept".')
        if "://" not in uri:
            uri = os.path.abspath(os.path.expanduser(uri))
        root, pattern = split_glob(uri)
        self._store = StoreSpec(uri=root.rstrip("/") or "/", options=storage_options or {})
        self._read = read
        self._shuffle = shuffle
        self._seed = seed
        self._place = None if dp_rank is None or dp_world is None else (dp_rank, dp_world)
        self._drop_uneven = drop_uneven
        self._cache_dir = Path(cache_dir) if cache_dir is not None else environment().local_dir / "cache"
        self._cache_limit_bytes = cache_limit_bytes
        self._prefetch_files = prefetch_files
        self._pin = on_change == "fail"
        self._opened: tuple[int, ShardFetcher] | None = None
        self._led = False  # by a loader, which keeps the state
        self._done: tuple[int, int] | None = None  # epoch and position of an iteration without one
        # Listed by s3fs, so that workers forked from here can use the faster client: where it has run, they cannot.
        self.manifest = _list_files(_open_store(self._store, fast=False), pattern or "**/*", uri)
        # Shared with the loader's workers, which may live for many epochs. Each reads it when it begins to iterate.
        self._shared = torch.full((5,), _UNSET, dtype=torch.int64).share_memory_()
        self._shared[:3] = torch.tensor([0, 0, 1])

    @property
    def identity(self) -> str:
        """The files and their order, in which positions are counted."""
        return f"files={self.manifest.digest} seed={self._seed} shuffle={self._shuffle}"

    def __len__(self) -> int:
        """Files of this rank in a whole epoch."""
        rank, world = self._rank_and_world()
        return len(self._of_rank(np.arange(self.manifest.num_shards), rank, world))

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is `epoch`, from its start unless it was taken up within it."""
        self._done = None
        if epoch != int(self._shared[0]):
            self._shared[:2] = torch.tensor([epoch, 0])

    def begin(self, *, epoch: int, position: int, batch_size: int) -> None:
        """The next iteration, in every worker, starts there; see `ResumableIterable`. `rg.DataLoader` calls it."""
        self._led = True
        self._shared.copy_(torch.tensor([epoch, position, batch_size, *self._rank_and_world()]))

    def position_after(self, batches: int) -> int:
        """Files of all ranks that are done once each rank has done `batches` batches since `begin`."""
        start = self._start()
        return min(start.position + batches * start.batch_size * start.dp_world, self.manifest.num_shards)

    def state_dict(self) -> dict[str, Any]:
        """Where an iteration in this very process stands (no loader workers); else ask `rg.DataLoader`."""
        start = self._start()
        epoch, position = (start.epoch, start.position) if self._done is None else self._done
        return {"version": _VERSION, "epoch": epoch, "position": position, "identity": self.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where `state` was taken. Raises DatasetMismatchError if it is of other files."""
        if state.get("version") != _VERSION or state.get("identity") != self.identity:
            raise DatasetMismatchError(
                f"The FileDataset's state is of {state.get('identity')}, and this one has {self.identity}: files were "
                "added, removed or changed, or it has another seed. Restore them, or start the epoch anew."
            )
        self._done = None
        self._shared[:2] = torch.tensor([state["epoch"], state["position"]])

    def __iter__(self) -> Iterator[Any]:
        """This process's files: of its rank, and of its loader worker if it is one.

        Raises:
            ShardReadError, ObjectChangedError: a file cannot be had, naming it.
        """
        start = self._start()
        order = np.arange(self.manifest.num_shards, dtype=np.int64)
        if self._shuffle:
            order = permutation(self.manifest.num_shards, TAG_FILES, self._seed, start.epoch).astype(np.int64)
        mine = self._of_rank(order[start.position :], start.dp_rank, start.dp_world)
        worker = get_worker_info()
        if worker is not None:
            batches = np.arange(len(mine)) // start.batch_size
            mine = mine[batches % worker.num_workers == worker.id]
        alone = worker is None and not self._led
        for done, index in enumerate(self._ahead(mine), 1):
            sample = self._sample(index, start.epoch)
            if alone:
                self._done = start.epoch, min(start.position + done * start.dp_world, self.manifest.num_shards)
            yield sample
        if alone:
            self.set_epoch(start.epoch + 1)

    def _sample(self, index: int, epoch: int) -> Any:
        data = self._fetcher().table(index)["bytes"][0].as_py()
        file = DataFile(path=self.manifest.shard(index).key, index=index, data=data)
        if self._read is None:
            return {"path": file.path, "bytes": file.data}
        rng = np.random.Generator(philox(TAG_TRANSFORM, self._seed, epoch, index))
        try:
            return self._read(file, rng)
        except Exception as error:  # the user's own: passed on as it is, with the file that shows it
            error.add_note(f"ray_goodput: raised by read= for {self._store.uri}/{file.path}")
            raise

    def _ahead(self, indices: Int64Array) -> Iterator[int]:
        """`indices`, with those that come next on their way into the cache."""
        if not self._prefetch_files or len(indices) < 2:
            yield from indices.tolist()
            return
        fetcher = self._fetcher()
        coming: deque[tuple[int, Future[Any]]] = deque()
        pool = ThreadPoolExecutor(min(8, self._prefetch_files), thread_name_prefix="ray-goodput-files")
        try:
            for index in indices.tolist():
                coming.append((index, pool.submit(fetcher.ensure, index)))
                if len(coming) > self._prefetch_files:
                    yield _waited_for(*coming.popleft())
            while coming:
                yield _waited_for(*coming.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _of_rank(self, order: Int64Array, rank: int, world: int) -> Int64Array:
        whole = len(order) - len(order) % world if self._drop_uneven else len(order)
        return order[:whole][rank::world]

    def _start(self) -> _Start:
        epoch, position, batch_size, rank, world = self._shared.tolist()
        if rank == _UNSET:
            rank, world = self._rank_and_world()
        return _Start(epoch, position, batch_size, rank, world)

    def _rank_and_world(self) -> tuple[int, int]:
        if self._place is not None:
            return self._place
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def _fetcher(self) -> ShardFetcher:
        """Of this process: neither stores nor caches survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            cache = NodeCache(self._cache_dir, limit_bytes=self._cache_limit_bytes).open()
            fetcher = ShardFetcher(self.manifest, _open_store(self._store), _WholeFile(), cache, pin=self._pin)
            self._opened = (os.getpid(), fetcher)
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


@dataclass(frozen=True, slots=True)
class _WholeFile:
    """A file as a table of one row, so that it lives in the cache like any data shard."""

    name: str = "file"

    def read_table(self, path: Path) -> pa.Table:
        return pa.table({"bytes": pa.array([path.read_bytes()], pa.large_binary())})


def _waited_for(index: int, fetch: Future[Any]) -> int:
    fetch.exception()  # not raised: reading tries again, and raises if that fails too
    return index


def _list_files(store: ObjectStore, pattern: str, uri: str) -> Manifest:
    infos, _ = list_matching(store, pattern, uri)
    return Manifest(
        uri,
        _WholeFile().name,
        keys=infos.keys,
        rows=np.ones(len(infos), dtype=np.int64),
        sizes=infos.sizes,
        etags=infos.etags,
    )


def _open_store(spec: StoreSpec, *, fast: bool = True) -> ObjectStore:
    """The fastest client that works here: obstore would hang in a process forked from one that has used it."""
    is_s3 = spec.uri.lower().startswith(("s3://", "s3a://")) and "filesystem" not in spec.options
    if is_s3 and (_client_lost or not fast):
        from ray_goodput.storage.fsspec_store import FsspecStore

        return FsspecStore(spec.uri, options=dict(spec.options), governor=governor_for(spec))
    from ray_goodput.storage import open_store

    return open_store(spec, governor_for(spec))
