"""Reads what a run has left in storage about its time: the ledger's segments and the curves of its metrics.

Works on a run that still goes on (its segments are immutable, a reader comes back for the new ones; while it reads, old
ones may be replaced by a whole one) and on a folder that was copied from storage.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ray_goodput.core.data_flow import DataCounts
from ray_goodput.errors import ObjectNotFoundError, StorageError
from ray_goodput.goodput.data_log import KEY as DATA_KEY
from ray_goodput.goodput.data_log import data_from_bytes
from ray_goodput.goodput.metrics_log import FOLDER as METRICS_FOLDER
from ray_goodput.goodput.metrics_log import MetricsLog
from ray_goodput.goodput.segments import current_lines
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

LEDGER_FOLDER = "ledger"
_SEGMENT = re.compile(r"(?:.*/)?ledger-\d{8}\.jsonl")
_AT_ONCE = 16
_TRIES = 5


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Lines of the segments that count, oldest first, and one curve an attempt. uri: of the run, without
    credentials."""

    uri: str
    lines: Sequence[bytes]
    metrics: tuple[MetricsLog, ...]
    data: DataCounts | None = None


class RunReader:
    """Reads one run, again and again if wished: a segment is fetched once. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._segments: dict[str, list[bytes]] = {}

    def read(self) -> RunFiles:
        """Everything there is now.

        Raises:
            ObjectNotFoundError: there is no ledger.
            StorageError: a segment is cut off, or the storage cannot be read.
        """
        for _ in range(_TRIES):
            keys = self._list()
            if self._fetch([key for key in keys if key not in self._segments]):
                break
        else:
            raise StorageError(
                f"The ledger at {self._store.uri} changed under each of {_TRIES} attempts to read it: try again. If "
                "this is a copy of the run's folder, copy it again, while nobody writes to the copy."
            )
        self._segments = {key: self._segments[key] for key in keys}
        lines = current_lines([line for key in keys for line in self._segments[key]])
        return RunFiles(self._store.uri, lines, tuple(self._metrics()), self._data())

    def _fetch(self, keys: Sequence[str]) -> bool:
        """Get these segments; False if one has gone since they were listed: a newer whole one has replaced it."""
        if not keys:
            return True
        with ThreadPoolExecutor(min(_AT_ONCE, len(keys))) as pool:
            found = list(pool.map(self._get, keys))
        self._segments |= {key: lines for key, lines in zip(keys, found, strict=True) if lines is not None}
        return None not in found

    def _get(self, key: str) -> list[bytes] | None:
        try:
            return _lines(key, self._store.get(key))
        except ObjectNotFoundError:
            return None

    def _list(self) -> list[str]:
        for folder in (LEDGER_FOLDER, ""):  # the run's folder, or a copy of its ledger alone
            keys = [info.key for info in self._store.list(folder) if _SEGMENT.fullmatch(info.key)]
            if folder == "":
                keys = [key for key in keys if "/" not in key]
            if keys:
                return sorted(keys)
        raise ObjectNotFoundError(
            f"There is no ledger at {self._store.uri}: give the folder of a run, STORAGE_PATH/RUN, which has a folder "
            "named ledger from its first attempt on."
        )

    def _data(self) -> DataCounts | None:
        try:
            return data_from_bytes(self._store.get(DATA_KEY))
        except ObjectNotFoundError:
            return None
        except StorageError as error:  # the accounts do not need them
            logger.warning("The data counts are left out: %s", error)
            return None

    def _metrics(self) -> list[MetricsLog]:
        logs: list[MetricsLog] = []
        for info in self._store.list(METRICS_FOLDER):
            if not info.key.endswith(".jsonl"):
                continue
            try:
                logs.append(MetricsLog.from_bytes(self._store.get(info.key)))
            except StorageError as error:  # the accounts do not need them
                logger.warning("%s is left out: %s", info.key, error)
        return sorted(logs, key=lambda log: log.attempt)


def _lines(key: str, data: bytes) -> list[bytes]:
    if not data.endswith(b"\n"):
        raise StorageError(
            f"{key} is cut off: it has {len(data)} bytes and its last line no end. If this is a copy of the run's "
            "folder, copy that object again; the run itself writes segments whole or not at all."
        )
    return data.splitlines()
