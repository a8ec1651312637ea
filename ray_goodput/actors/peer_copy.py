"""Copies of a slice on other nodes: sent in pieces through calls of their vaults, never a whole slice in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ray_goodput.actors.node_copies import Flushed, Part
from ray_goodput.core.commit import CheckpointId, LandedSlice
from ray_goodput.errors import CorruptCheckpointError, FencedError, GoodputError

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20


class PeerPort(Protocol):
    """The vault of another node, as far as copies go. Every call is bounded in time."""

    def receive(self, checkpoint: CheckpointId, name: str, sender: str, offset: int, data: bytes) -> None: ...

    def received(self, landed: LandedSlice, sender: str) -> None: ...


class PeersPort(Protocol):
    """Who may take copies: what a vault asks of the run's coordinator."""

    def peers(self, node_id: str) -> Sequence[str]: ...


class PeerCopier:
    """Brings slices to `copies` other nodes; one that fails is replaced by the next. Thread-safe."""

    def __init__(self, *, node_id: str, copies: int, peers: PeersPort, connect: Callable[[str], PeerPort]) -> None:
        self._node_id = node_id
        self._copies = copies
        self._peers = peers
        self._connect = connect
        self._told_lonely = False

    def copy(self, flushed: Flushed) -> int:
        """On how many other nodes the slice is now; what keeps it from more is logged, never raised."""
        step, done, tried = flushed.landed.slice.checkpoint.step, 0, 0
        for node in self._candidates():
            if done == self._copies:
                break
            tried += 1
            try:
                self._send(flushed, self._connect(node))
                done += 1
            except FencedError:
                return done
            except (GoodputError, OSError, ValueError) as error:
                logger.warning("Step %d could not be copied to node %s: %s", step, node, error)
        if done < self._copies and (tried or not self._told_lonely):
            self._told_lonely = True
            logger.warning(
                "Step %d has %d of %d copies on other nodes (%d tried): losing this node would cost the steps since "
                "the newest commit.",
                step,
                done,
                self._copies,
                tried,
            )
        return done

    def _candidates(self) -> Sequence[str]:
        try:
            return self._peers.peers(self._node_id)
        except (GoodputError, ValueError) as error:
            logger.warning("The coordinator does not say which nodes may hold copies: %s", error)
            return ()

    def _send(self, flushed: Flushed, peer: PeerPort) -> None:
        for part in flushed.parts:
            self._send_part(flushed.landed.slice.checkpoint, part, peer)
        peer.received(flushed.landed, self._node_id)

    def _send_part(self, checkpoint: CheckpointId, part: Part, peer: PeerPort) -> None:
        with part.path.open("rb") as file:
            file.seek(part.offset)
            sent = 0
            while sent < part.record.size_bytes:
                data = file.read(min(PIECE_BYTES, part.record.size_bytes - sent))
                if not data:
                    raise CorruptCheckpointError(f"{part.path} is shorter than {part.record.size_bytes} bytes.")
                peer.receive(checkpoint, part.record.name, self._node_id, sent, data)
                sent += len(data)
