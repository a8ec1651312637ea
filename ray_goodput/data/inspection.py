"""What the format reads of every object of a listing: rows and columns, with each set of columns kept once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_goodput.config import StoreSpec
from ray_goodput.data.formats import GuessingFormat, ShardFormat
from ray_goodput.data.listing import Listing
from ray_goodput.errors import ShardReadError
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inspected:
    """rows: of each object. kinds: which of `schemas` it has."""

    rows: NDArray[np.int64]
    kinds: NDArray[np.int32]
    schemas: tuple[pa.Schema, ...]


InspectAll = Callable[[StoreSpec, Listing, ShardFormat], Inspected | None]
"""Another way to inspect a listing of that store; None: not this one."""


class SchemaTable:
    """Numbers for schemas: the same columns in the same order have the same number."""

    def __init__(self) -> None:
        self.schemas: list[pa.Schema] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, schema: pa.Schema) -> int:
        schema = schema.remove_metadata()
        if self.schemas and schema.equals(self.schemas[-1]):  # the usual case, without writing it down
            return len(self.schemas) - 1
        written = schema.serialize().to_pybytes()
        known = self._numbers.get(written)
        if known is None:
            known = self._numbers[written] = len(self.schemas)
            self.schemas.append(schema)
        return known


def inspect_here(store: ObjectStore, listing: Listing, fmt: ShardFormat, max_workers: int) -> Inspected:
    """By threads of this process. Raises what the first bad object raises."""
    rows, kinds = np.empty(len(listing), np.int64), np.empty(len(listing), np.int32)
    table = SchemaTable()
    pool = ThreadPoolExecutor(max_workers, thread_name_prefix="ray-goodput-manifest")
    try:
        # By turns, so that the first bad object ends it without a hundred thousand requests already queued.
        for start in range(0, len(listing), 16 * max_workers):
            turn = listing[start : start + 16 * max_workers]
            for i, facts in enumerate(pool.map(lambda info: fmt.inspect(store, info), turn), start):
                rows[i], kinds[i] = facts.rows, table.number(facts.schema)
    finally:
        pool.shutdown(cancel_futures=True)
    return Inspected(rows, kinds, tuple(table.schemas))


def common_schema(store: ObjectStore, listing: Listing, inspected: Inspected, fmt: ShardFormat) -> pa.Schema:
    """The columns all objects with rows have; order, nullability and metadata may differ. Guessed types are merged.

    Raises:
        ShardReadError: two objects differ, naming both; and the columns.
    """
    with_rows = np.flatnonzero(inspected.rows)
    kinds, firsts = np.unique(inspected.kinds[with_rows], return_index=True)
    in_order = sorted(zip(with_rows[firsts].tolist(), kinds.tolist(), strict=True))
    first, kind = in_order[0]
    schema = inspected.schemas[kind]
    expected = {field.name: field.type for field in schema}
    for index, kind in in_order[1:]:
        other = inspected.schemas[kind]
        columns = {field.name: field.type for field in other}
        if columns == expected:
            continue
        if isinstance(fmt, GuessingFormat):
            try:
                schema = fmt.merge(schema, other)
                expected = {field.name: field.type for field in schema}
                continue
            except (pa.ArrowException, ValueError):
                logger.debug("%s cannot be read with the columns of the files before it", listing[index].key)
        names = sorted(n for n in {*columns, *expected} if columns.get(n) != expected.get(n))
        differ = ", ".join(f"{n} ({_type(expected, n)} / {_type(columns, n)})" for n in names)
        root = store.uri.rstrip("/")
        raise ShardReadError(
            f"{root}/{listing[first].key} and {root}/{listing[index].key} have different columns: {differ}. Write them "
            "alike, or give a pattern that matches only one kind."
        )
    return schema


def _type(columns: dict[str, pa.DataType], name: str) -> str:
    return str(columns[name]) if name in columns else "absent"
