"""`metrics/data.json` of a run: what its newest attempt's ranks have counted on the way to their batches.

Format, version 1: {"version": 1, "attempt": 2, "counts": {name: number of `DataCounts`}}. A count that a reader does
not know is left out, one that is missing is 0. For looking at: nothing is decided by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from ray_goodput.core.data_flow import DataCounts
from ray_goodput.errors import StorageError
from ray_goodput.goodput.metrics_log import FOLDER

KEY = f"{FOLDER}/data.json"
_VERSION = 1


def data_to_bytes(attempt: int, counts: DataCounts) -> bytes:
    """The object's content."""
    return json.dumps({"version": _VERSION, "attempt": attempt, "counts": asdict(counts)}, indent=1).encode()


def data_from_bytes(data: bytes) -> DataCounts:
    """The counts in it.

    Raises:
        StorageError: it is damaged, or of a newer version.
    """
    try:
        body = json.loads(data)
        version, counts = body["version"], body["counts"]
        known: dict[str, Any] = {f.name: counts[f.name] for f in fields(DataCounts) if f.name in counts}
        if not all(isinstance(value, int | float) for value in known.values()):
            raise ValueError("a count is no number")
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{KEY} is damaged: {type(error).__name__}: {error}.") from error
    if version != _VERSION:
        raise StorageError(f"{KEY} has version {version}; this release reads version {_VERSION}: update ray_goodput.")
    return DataCounts(**known)
