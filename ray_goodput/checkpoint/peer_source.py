"""Copies of a checkpoint on other nodes of the run, fetched in pieces: each object once a node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ray_goodput.checkpoint.sources import CheckpointSource, FetchedSource, Tier, farthest, verify_file
from ray_goodput.core.commit import CommitRecord, ObjectRecord
from ray_goodput.errors import CorruptCheckpointError, GoodputError, NoCopyLeftError, ObjectNotFoundError, StorageError

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20  # what travels in one call


class PeerReads(Protocol):
    """Copies on other nodes of the run. Every call is bounded in time, and raises a GoodputError when it fails."""

    def holders(self) -> Mapping[str, Sequence[str]]:
        """Object name -> nodes that hold a copy of it."""
        ...

    def read(self, node_id: str, name: str, offset: int, size_bytes: int) -> bytes: ...


class PeerSource(FetchedSource):
    """Objects from the nodes that hold copies, each fetched once a node, in pieces; else from `fallback`."""

    tier: Tier

    def __init__(
        self, record: CommitRecord, peers: PeerReads, cache_dir: str | Path, fallback: CheckpointSource
    ) -> None:
        super().__init__(record, "local", cache_dir)
        self._peers = peers
        self._fallback = fallback
        self._lock = threading.Lock()
        self._holders: Mapping[str, Sequence[str]] | None = None

    def path(self, name: str) -> Path:
        try:
            path = super().path(name)
            self._note("peer")
        except (CorruptCheckpointError, ObjectNotFoundError) as error:
            logger.debug("%s is not to be had from another node, storage is asked: %s", name, error)
            path = self._from_fallback(name)
            self._note(self._fallback.tier)
        return path

    def _from_fallback(self, name: str) -> Path:
        try:
            return self._fallback.path(name)
        except (CorruptCheckpointError, ObjectNotFoundError):
            raise
        except StorageError as error:
            raise NoCopyLeftError(
                f"No node has a whole copy of {name} of {self.record.checkpoint.folder}, "
                f"and the storage cannot be read now: {error}"
            ) from error

    def _note(self, tier: Tier) -> None:
        with self._lock:
            self.tier = farthest([self.tier, tier])

    def _download(self, entry: ObjectRecord, tmp: Path) -> None:
        problem: GoodputError | None = None
        for node_id in self._nodes(entry.name):
            try:
                self._copy(node_id, entry, tmp)
                verify_file(tmp, entry)
                return
            except GoodputError as error:  # the next holder may have it whole
                logger.warning("The copy of %s on node %s is not used: %s", entry.name, node_id, error)
                problem = error
        raise ObjectNotFoundError(f"no node has a whole copy of {entry.name} ({problem or 'none holds one'})")

    def _copy(self, node_id: str, entry: ObjectRecord, tmp: Path) -> None:
        with tmp.open("wb") as file:
            while file.tell() < entry.size_bytes:
                size = min(_PIECE_BYTES, entry.size_bytes - file.tell())
                data = self._peers.read(node_id, entry.name, file.tell(), size)
                if not data:
                    raise CorruptCheckpointError(f"it ends after {file.tell()} of {entry.size_bytes} bytes")
                file.write(data)

    def _nodes(self, name: str) -> Sequence[str]:
        with self._lock:
            if self._holders is None:
                try:
                    self._holders = self._peers.holders()
                except GoodputError as error:
                    logger.warning("It is not known which nodes hold copies: %s", error)
                    self._holders = {}
            return self._holders.get(name, ())
