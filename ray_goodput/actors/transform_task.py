"""The Ray Data task that fetches a data shard and runs `transform_shard` on it, anywhere in the cluster.

It stands before the node's prefetch actors, which write its result into their cache: only what is transformed goes
through the object store, as one Arrow IPC stream a shard. The tasks need no CPU resource, as the pool does not: they
run while train workers hold them all.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ray_goodput.actors.shard_cache import cache_root
from ray_goodput.actors.shard_feed import Admission
from ray_goodput.data.cache import NodeCache
from ray_goodput.errors import GoodputError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ray_goodput.data.mixture_feed import AnyFetcher

SCHEMA = pa.schema(
    [
        ("feed", pa.int64()),
        ("number", pa.int64()),
        ("data_shard", pa.int64()),
        ("wanted", pa.bool_()),
        ("table", pa.large_binary()),
        ("error", pa.string()),
    ]
)

_opening = threading.Lock()
_opened: tuple[Any, AnyFetcher] | None = None  # the last one: tasks of a feed share processes


def load_admitted(batch: Any, *, cache_actor: ActorHandle, dataset: str, root: str, node_id: str) -> pa.Table:
    """For numbers of a feed: their data shards, once they may be fetched; with the table, if it is transformed.

    Waits while a number is too far ahead of the consumer. A number without a table is left to the prefetch actor.
    """
    import ray

    rows: list[dict[str, Any]] = []
    for feed, number in zip(batch["feed"].tolist(), batch["number"].tolist(), strict=True):
        admission, data_shard = Admission.WAIT, -1
        while admission is Admission.WAIT:
            admission, data_shard = ray.get(cache_actor.admit.remote(dataset, number, feed))
        row = {"feed": feed, "number": number, "data_shard": data_shard, "wanted": admission is Admission.FETCH}
        rows.append({**row, "table": None, "error": ""})
        if admission is not Admission.FETCH:
            continue
        fetcher = _fetcher(cache_actor, dataset, feed, root, node_id)
        if not fetcher.transforms(data_shard):
            continue
        try:
            rows[-1]["table"] = to_stream(fetcher.load(data_shard))
        except (GoodputError, OSError) as problem:
            rows[-1]["error"] = f"{type(problem).__name__}: {problem}"
    return pa.Table.from_pylist(rows, SCHEMA)


def to_stream(table: pa.Table) -> bytes:
    """The table as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_stream(data: bytes) -> pa.Table:
    """Inverse of `to_stream`."""
    return pa.ipc.open_stream(data).read_all()


def _fetcher(cache_actor: ActorHandle, dataset: str, feed: int, root: str, node_id: str) -> AnyFetcher:
    import ray

    global _opened
    key = (cache_actor._actor_id, dataset, feed)
    with _opening:
        if _opened is None or _opened[0] != key:
            spec: Any = ray.get(cache_actor.fetch_spec.remote(dataset))
            here = ray.get_runtime_context().get_node_id() == node_id
            cache = NodeCache(Path(root) if here else cache_root(), limit_bytes=spec.cache_limit_bytes).open()
            _opened = key, spec.fetcher(cache)
        return _opened[1]
