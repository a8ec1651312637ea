"""The manifest's job: a Ray Data job over the listing that reads what the format must read of every object.

Worth it from thousands of objects on, since tasks of all nodes share the requests; fewer are read by threads of the
driver. The tasks need no CPU resource: another run may hold them all.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ray_goodput.config import StoreSpec
from ray_goodput.data.formats import ShardFormat
from ray_goodput.data.governors import governor_for
from ray_goodput.data.inspection import Inspected, SchemaTable, inspect_here
from ray_goodput.data.listing import Listing
from ray_goodput.errors import GoodputError
from ray_goodput.storage import open_store

logger = logging.getLogger(__name__)

WORTH_IT = 4000
_OBJECTS_PER_TASK = 256
_THREADS_PER_TASK = 8
_TASKS_AT_ONCE = 16


def inspect_in_cluster(spec: StoreSpec, listing: Listing, fmt: ShardFormat) -> Inspected | None:
    """Rows and columns of every object, read by Ray Data tasks; None if there are too few to start any for.

    Ray is initialised if it is not.

    Raises:
        ShardReadError and what else `fmt.inspect` raises, for one of the objects that cannot be read.
    """
    if len(listing) < WORTH_IT:
        return None
    try:
        return collect(_facts(spec, listing, fmt), len(listing))
    except GoodputError:
        raise
    except Exception as error:  # whatever Ray Data raises: the driver's threads can do it too
        logger.warning("%s: the Ray Data job that reads the files' rows failed, threads do it: %s", spec.uri, error)
        return None


def _facts(spec: StoreSpec, listing: Listing, fmt: ShardFormat) -> Iterator[pa.Table]:
    """What `inspect_block` returns for each block of the listing, in any order, from Ray Data tasks."""
    import ray
    import ray.data

    if not ray.is_initialized():
        ray.init()
    logger.info("%s: %d objects are looked at by a Ray Data job", spec.uri, len(listing))
    look: Any = partial(inspect_block, spec=spec, fmt=fmt)
    facts = ray.data.from_arrow(blocks(listing)).map_batches(
        look,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(size=_TASKS_AT_ONCE),
        num_cpus=0,
    )
    batches: Any = facts.iter_batches(batch_size=None, batch_format="pyarrow")
    return batches


def collect(facts: Iterable[pa.Table], num_objects: int) -> Inspected:
    """The facts of all blocks together. Raises the error of one that has one."""
    rows, kinds = np.empty(num_objects, np.int64), np.empty(num_objects, np.int32)
    table = SchemaTable()
    done = 0
    for fact in (row for part in facts for row in part.to_pylist()):
        if fact["error"] is not None:
            raise _error(fact["error"])
        schemas = [table.number(pa.ipc.read_schema(pa.py_buffer(schema))) for schema in fact["schemas"]]
        start, num = fact["start"], len(fact["rows"])
        rows[start : start + num] = fact["rows"]
        kinds[start : start + num] = np.array(schemas, np.int32)[fact["kinds"]]
        done += num
    assert done == num_objects
    return Inspected(rows, kinds, tuple(table.schemas))


def blocks(listing: Listing) -> list[pa.Table]:
    """The listing in parts, one for a task."""
    return [_block(listing, start) for start in range(0, len(listing), _OBJECTS_PER_TASK)]


def inspect_block(block: pa.Table, *, spec: StoreSpec, fmt: ShardFormat) -> pa.Table:
    """In a task: one row with the facts of all objects of the block, or the error of one of them, pickled."""
    block = block.combine_chunks()
    keys, etags = block["key"].chunk(0), block["etag"].chunk(0)
    listing = Listing(keys.cast(pa.large_string()), block["size"].to_numpy(), etags.cast(pa.large_string()))
    row: dict[str, Any] = {"start": block["start"][0].as_py(), "rows": [], "kinds": [], "schemas": [], "error": None}
    try:
        found = inspect_here(open_store(spec, governor_for(spec)), listing, fmt, _THREADS_PER_TASK)
        row["rows"], row["kinds"] = found.rows.tolist(), found.kinds.tolist()
        row["schemas"] = [schema.serialize().to_pybytes() for schema in found.schemas]
    except GoodputError as error:  # as a value: Ray would wrap it, and run the task again
        row["error"] = pickle.dumps(error)
    return pa.Table.from_pylist([row], _FACTS)


_FACTS = pa.schema(
    [
        ("start", pa.int64()),
        ("rows", pa.list_(pa.int64())),
        ("kinds", pa.list_(pa.int32())),
        ("schemas", pa.list_(pa.binary())),
        ("error", pa.binary()),
    ]
)


def _block(listing: Listing, start: int) -> pa.Table:
    part = listing[start : start + _OBJECTS_PER_TASK]
    starts = np.full(len(part), start, dtype=np.int64)
    return pa.table({"key": part.keys, "size": part.sizes, "etag": part.etags, "start": starts})


def _error(pickled: bytes) -> GoodputError:
    error = pickle.loads(pickled)
    assert isinstance(error, GoodputError)
    return error
