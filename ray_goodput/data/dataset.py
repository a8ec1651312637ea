"""What a user says about the training data: a plain value, checked when made, that travels to every process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ray_goodput.config import StoreSpec
from ray_goodput.core.order import MAX_SEED, SampleOrder
from ray_goodput.data.feed import FetchSpec
from ray_goodput.data.formats import GroupingFormat, ShardFormat, format_by_extension, get_format, identity_of
from ray_goodput.data.inspection import InspectAll
from ray_goodput.data.local_loader import BatchSettings, StreamedDataset
from ray_goodput.data.manifest import Manifest, build_manifest
from ray_goodput.data.patterns import compile_glob, split_glob
from ray_goodput.data.shard_transforms import TransformRows, TransformShard, source_version, transformed
from ray_goodput.data.shuffle_report import ShuffleReport, measure
from ray_goodput.errors import ConfigError

if TYPE_CHECKING:
    from ray_goodput.data.mixture_manifest import AnyManifest

MAX_DEFAULT_LANES = 64


@dataclass(frozen=True, slots=True)
class ShardedDataset(StreamedDataset):
    """Files in a bucket or folder, streamed in an order that is a pure function of (files, seed, lanes, window).

    uri_glob: `s3://bucket/train/*.parquet`, any fsspec URL or a local path; `**` crosses folders; a folder means all
        its files of the format, also in sub-folders. A relative path is made absolute here and now.
    global_batch_size: samples of a step over all ranks. May change between runs and attempts.
    seed, lanes, window: fix the order; a checkpoint can only be resumed with the same ones. lanes: independent
        streams that a batch is drawn from (default: the largest divisor of the batch that is at most 64); window: data
        shards of a lane that are shuffled together. A node reads from lanes x window shards at once: that many must fit
        its cache.
    columns: which columns to keep; default: all.
    transform: `f(sample: dict, rng: numpy.random.Generator) -> dict`, per sample. `rng` depends on seed, epoch and
        sample only, so that augmentation survives a restart. Must be picklable under Ray.
    collate: `f(samples: list[dict]) -> Mapping`, instead of the default that stacks.
    workers, worker_kind: how many threads, or spawned processes ("process"), of each rank run `transform`; 0: the one
        thread that builds batches. Results do not depend on it.
    on_error: a sample for which `transform` raises ends the run ("fail"), or is left out of its batch and counted in
        `batch.num_skipped` ("skip"); all others keep their weight.
    transform_shard: `f(table: pyarrow.Table) -> pyarrow.Table`, once a data shard; its result is what is cached. Under
        Ray it runs in Ray Data tasks anywhere in the cluster. Runs before `columns` are chosen.
    transform_version: names what `transform_shard` does, in the cache and in the run: change it when the result
        changes. Default: a hash of the function's source text, which does not see what the function calls.
    transform_rows: "same": as many rows as in the file, or it is an error; "count": may be more or fewer, and every
        file is transformed once when the manifest is made.
    drop_last: leave out the last N mod G samples of each epoch, instead of a batch that holds two epochs' samples.
    storage_options: as for s3fs and fsspec.
    format: "auto" for the format of the file name's extension (parquet for a folder), a format's name ("parquet",
        "webdataset", "jsonl", "csv", "tokens", "files", or a registered one), or a format object:
        `rg.TokenFormat(...)`, `rg.RawFilesFormat(...)`.
    on_change: an object that is not the one the run began with is an error ("fail"), or taken as it is ("accept").
    cache_limit_bytes: limit of the node's cache; default: what the disk has.
    prefetch_shards: how many data shards to fetch ahead of need on a node.
    hedge_after_s: a request that has not begun to be answered by then is sent a second time, and the first whole answer
        counts. Shortens rare long waits for more requests; default: never.
    """

    uri_glob: str
    _: KW_ONLY
    global_batch_size: int
    seed: int = 0
    lanes: int | None = None
    window: int = 8
    columns: Sequence[str] | None = None
    transform: Callable[..., Mapping[str, Any]] | None = None
    collate: Callable[[list[Any]], Mapping[str, Any]] | None = None
    workers: int = 0
    worker_kind: Literal["thread", "process"] = "thread"
    on_error: Literal["fail", "skip"] = "fail"
    transform_shard: TransformShard | None = None
    transform_version: str | None = None
    transform_rows: TransformRows = "same"
    drop_last: bool = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    format: str | ShardFormat = "auto"
    on_change: Literal["fail", "accept"] = "fail"
    cache_limit_bytes: int | None = None
    prefetch_shards: int = 8
    hedge_after_s: float | None = None

    def __post_init__(self) -> None:
        if not self.uri_glob:
            raise ConfigError("ShardedDataset(''): give the files' URI, for example s3://bucket/train/*.parquet.")
        if "://" not in self.uri_glob:
            absolute = os.path.abspath(os.path.expanduser(self.uri_glob))
            object.__setattr__(self, "uri_glob", absolute)
        for name in ("global_batch_size", "window", "prefetch_shards"):
            _at_least_one(name, getattr(self, name))
        for name in ("lanes", "cache_limit_bytes"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"ShardedDataset(seed={self.seed!r}): give an integer from 0 to 2**64 - 1.")
        if self.lanes is not None and self.lanes > self.global_batch_size:
            raise ConfigError(
                f"ShardedDataset: a global batch of {self.global_batch_size} cannot be smaller than the {self.lanes} "
                "lanes it is drawn from: use fewer lanes or a larger batch."
            )
        if isinstance(self.columns, str) or (self.columns is not None and not self.columns):
            raise ConfigError(
                f"ShardedDataset(columns={self.columns!r}): give a list of column names, or None for all."
            )
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))
        for name in ("transform", "collate"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigError(f"ShardedDataset({name}={getattr(self, name)!r}): give a function, or None.")
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 0:
            raise ConfigError(f"ShardedDataset(workers={self.workers!r}): give an integer of at least 0.")
        if self.worker_kind not in ("thread", "process"):
            raise ConfigError(f'ShardedDataset(worker_kind={self.worker_kind!r}): give "thread" or "process".')
        if self.on_error not in ("fail", "skip"):
            raise ConfigError(f'ShardedDataset(on_error={self.on_error!r}): give "fail" or "skip".')
        if self.hedge_after_s is not None and not self.hedge_after_s > 0:
            raise ConfigError(f"ShardedDataset(hedge_after_s={self.hedge_after_s!r}): give seconds above 0, or None.")
        if self.on_change not in ("fail", "accept"):
            raise ConfigError(f'ShardedDataset(on_change={self.on_change!r}): give "fail" or "accept".')
        if not isinstance(self.format, str) and not hasattr(self.format, "read_table"):
            raise ConfigError(f"ShardedDataset(format={self.format!r}): give a format's name, or a ShardFormat.")
        self._check_transform_shard()
        self.shard_format()
        try:
            compile_glob(self.pattern)
        except re.error as error:
            raise ConfigError(f"ShardedDataset({self.uri_glob!r}): the pattern cannot be read: {error}.") from None

    @property
    def num_lanes(self) -> int:
        """Lanes of the order: as given, else the largest divisor of the global batch that is at most 64."""
        if self.lanes is not None:
            return self.lanes
        upper = min(MAX_DEFAULT_LANES, self.global_batch_size)
        return next(n for n in range(upper, 0, -1) if self.global_batch_size % n == 0)

    @property
    def store_spec(self) -> StoreSpec:
        """The root of the files and how to reach it."""
        return StoreSpec(uri=self._split()[0], options=self.storage_options or {})

    @property
    def pattern(self) -> str:
        """Which keys under the root are data shards."""
        return self._split()[1]

    @property
    def title(self) -> str:
        """What people call it: the URI as it was given."""
        return self.uri_glob

    @property
    def format_id(self) -> str:
        """What the manifest calls the format: its name, with the parameters that change what is read."""
        return identity_of(self.shard_format())

    @property
    def manifest_uri(self) -> str:
        """What the manifest calls itself: root and pattern."""
        root, pattern = self._split()
        return f"{root.rstrip('/')}/{pattern}"

    def format_impl(self) -> ShardFormat:
        """The format of the files. Raises ConfigError for an unknown one."""
        if not isinstance(self.format, str):
            return self.format
        if self.format != "auto":
            return get_format(self.format)
        return format_by_extension(self.uri_glob) or get_format("parquet")

    def shard_format(self) -> ShardFormat:
        """The format of the data shards: that of the files, with `transform_shard` after it."""
        fmt = self.format_impl()
        if self.transform_shard is None:
            return fmt
        return transformed(fmt, self.transform_shard, str(self.transform_version), self.transform_rows)

    def check_world(self, dp_world: int) -> None:
        """Raises ConfigError if `dp_world` data-parallel ranks cannot share a batch."""
        if dp_world < 1 or self.global_batch_size < dp_world:
            raise ConfigError(
                f"A global batch of {self.global_batch_size} samples cannot be shared by {dp_world} data-parallel "
                f"ranks: each needs at least one. Set global_batch_size to {max(1, dp_world)} or more, use fewer "
                "workers, or give dp_rank= and dp_world= if several of them read the same samples."
            )

    def manifest(self, *, max_workers: int = 16, inspect: InspectAll | None = None) -> Manifest:
        """List the files and count their rows.

        inspect: reads many files' rows elsewhere: `actors.manifest_job.inspect_in_cluster`, as `GoodputTrainer` does.

        Raises: EmptyDatasetError, ShardReadError, StorageError, ConfigError.
        """
        from ray_goodput.data.governors import governor_for
        from ray_goodput.storage import open_store

        store = open_store(self.store_spec, governor_for(self.store_spec, hedge_after_s=self.hedge_after_s))
        manifest = build_manifest(
            store,
            self.pattern,
            self.shard_format(),
            max_workers=max_workers,
            uri=self.manifest_uri,
            inspect=None if inspect is None else partial(inspect, self.store_spec),
        )
        self.check_columns(manifest)
        return manifest

    def shuffle_report(self, manifest: AnyManifest | None = None, *, num_shards: int = 8) -> ShuffleReport:
        """How far batches stray from the whole, being drawn from lanes x window data shards at a time. Fetches
        `num_shards` of them to see how sorted they are; warns in the log if the window is too small for that.

        Raises:
            ShardReadError, ObjectChangedError, StorageError: they cannot be read.
        """
        return measure(self, self.manifest() if manifest is None else manifest, num_shards=num_shards)

    def order(self, manifest: AnyManifest) -> SampleOrder:
        """The order of the samples of `manifest`."""
        return SampleOrder(manifest.rows, seed=self.seed, lanes=self.num_lanes, window=self.window)

    def batch_settings(self) -> BatchSettings:
        """How batches are made of the rows."""
        return BatchSettings(
            global_batch_size=self.global_batch_size,
            drop_last=self.drop_last,
            columns=self.columns,
            transform=self.transform,
            collate=self.collate,
            workers=self.workers,
            worker_kind=self.worker_kind,
            on_error=self.on_error,
        )

    def fetch_spec(self, manifest: AnyManifest) -> FetchSpec:
        """What any process needs to fetch the data shards."""
        return FetchSpec.of(self, manifest)

    def check_columns(self, manifest: AnyManifest) -> None:
        """Raises ConfigError if `columns` asks for one that the data do not have, as far as can be known."""
        if self.transform_shard is not None:
            return
        if self.columns is None or not isinstance(manifest, Manifest) or manifest.schema is None:
            return
        missing = [name for name in self.columns if name not in manifest.schema.names]
        if missing:
            raise ConfigError(
                f"ShardedDataset(columns=...): {manifest.uri} has no column {', '.join(map(repr, missing))}; it has "
                f"{', '.join(map(repr, manifest.schema.names))}."
            )

    def _check_transform_shard(self) -> None:
        for name in ("transform_version", "transform_rows"):
            if self.transform_shard is None and getattr(self, name) not in (None, "same"):
                raise ConfigError(f"ShardedDataset({name}=...) says nothing without transform_shard=.")
        if self.transform_shard is None:
            return
        if not callable(self.transform_shard):
            raise ConfigError(f"ShardedDataset(transform_shard={self.transform_shard!r}): give a function, or None.")
        if self.transform_rows not in ("same", "count"):
            raise ConfigError(f'ShardedDataset(transform_rows={self.transform_rows!r}): give "same" or "count".')
        version = self.transform_version
        if version is None:
            version = source_version(self.transform_shard)
        if not version or not isinstance(version, str):
            raise ConfigError(f'ShardedDataset(transform_version={version!r}): give a name, such as "1".')
        object.__setattr__(self, "transform_version", version)

    def _split(self) -> tuple[str, str]:
        root, pattern = split_glob(self.uri_glob)
        if pattern:
            return root, pattern
        parent, _, name = root.rstrip("/").rpartition("/")
        fmt = self.format_impl()
        known = format_by_extension(name) is not None or name.lower().endswith(fmt.extensions)
        if known and not parent.endswith(":/"):
            return parent or "/", name
        endings = fmt.extensions
        if isinstance(fmt, GroupingFormat):  # cameras write .JPG, ImageNet .JPEG
            endings = (*endings, *(ending.upper() for ending in endings))
        return root.rstrip("/") or "/", f"**/*{endings[0]}" if len(endings) == 1 else f"**/*{{{','.join(endings)}}}"


def _at_least_one(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"ShardedDataset({name}={value!r}): give an integer of at least 1.")
