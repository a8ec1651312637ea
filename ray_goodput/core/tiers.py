"""How far a save goes, and on which nodes its copies are put. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class SaveTier(IntEnum):
    """The farthest place a save is brought to; it is in all nearer ones, too. The largest one asked for counts."""

    NONE = 0
    LOCAL = 1
    """Memory and NVMe of the ranks' own nodes: survives the processes."""
    PEER = 2
    """Another node's NVMe: survives a node."""
    STORAGE = 3
    """Object storage: survives everything here."""

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> SaveTier:
        """The tier of a label; ValueError for any other word."""
        try:
            return cls[label.upper()]
        except KeyError:
            raise ValueError(f"no tier is called {label!r}") from None


def peers_of(node_id: str, domains: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes for copies of what `node_id` holds, best first: those in another failure domain, then the others.

    domains: node -> its failure domain ("" where nothing is known), of all nodes that may hold copies.

    Each group begins behind `node_id` in a ring of all nodes, so that the copies of a job spread evenly.
    """
    ring = sorted({*domains, node_id})
    at = ring.index(node_id)
    others = [*ring[at + 1 :], *ring[:at]]
    own = domains.get(node_id, "")
    elsewhere = [node for node in others if domains[node] != own]
    return (*elsewhere, *(node for node in others if domains[node] == own))
