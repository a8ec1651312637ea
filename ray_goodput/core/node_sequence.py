"""Which nodes of a worker group get which ranks: those they had before. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def merged(known: Sequence[str], now: Sequence[str]) -> list[str]:
    """All nodes known, and the nodes `now`, each in the place it has had. A new one takes the place of the first that
    is gone, or the next one; others that are gone keep theirs, as they may come back."""
    new = iter([node for node in now if node not in known])
    return [node if node in now else next(new, node) for node in known] + list(new)
