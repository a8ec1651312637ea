"""Copies on nodes, as a restoring rank asks for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.vaults import connect_vault
from ray_goodput.core.commit import CheckpointId
from ray_goodput.errors import GoodputError, StorageError
from ray_goodput.train.worker import WorkerContext

logger = logging.getLogger(__name__)

_HOLD_TIMEOUT_S = 60.0


class RemotePeers:
    """The vaults of other nodes as a `PeerReads`. Thread-safe."""

    def __init__(self, key: str, coordinator: Any, checkpoint: CheckpointId) -> None:
        self._key = key
        self._coordinator = coordinator
        self._checkpoint = checkpoint
        self._vaults: dict[str, Any] = {}

    def holders(self) -> Mapping[str, Sequence[str]]:
        return self._coordinator.holders(self._checkpoint)

    def read(self, node_id: str, name: str, offset: int, size_bytes: int) -> bytes:
        vault = self._vaults.setdefault(node_id, connect_vault(self._key, node_id))
        try:
            return vault.read(self._checkpoint, name, offset, size_bytes)
        except ValueError as error:
            raise StorageError(f"Node {node_id} has no vault any more ({error}).") from error


def hold_leftovers(worker: WorkerContext) -> None:
    """What earlier attempts staged on the nodes of this one is safe there, and the coordinator knows. Collective.

    A vault that does not answer costs what it holds, never the attempt.
    """
    if worker.is_first_of_node:
        try:
            ray.get(worker.vault.hold.remote(worker.attempt), timeout=_HOLD_TIMEOUT_S)
        except (GoodputError, RayError, TimeoutError) as error:
            logger.warning("What this node holds of earlier attempts is not known: %s", error)
    worker.world.all_true(True)
