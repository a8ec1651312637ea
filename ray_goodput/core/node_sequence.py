"""In which sequence the nodes of a worker group get their ranks: as in the group before. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def as_before(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The nodes `now`, each once: those of `before` in the places they had, new ones in the places of those that are
    gone, and what is left over at the end. Fewer nodes move up."""
    new = iter([node for node in now if node not in before])
    places = [node if node in now else next(new, None) for node in before]
    return [node for node in places if node is not None] + list(new)
