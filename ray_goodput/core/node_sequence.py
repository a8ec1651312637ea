"""Which nodes of a worker group get which ranks: those they had. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def as_before(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The nodes `now`: those of `before` in the places they had, the others in the free ones, and at the end. Of fewer
    nodes, those behind a free place move up."""
    others = iter([node for node in now if node not in before])
    places = [node if node in now else next(others, None) for node in before]
    return [node for node in places if node is not None] + list(others)


class NodeSequence:
    """The nodes of a run's worker groups, by rank. Not thread-safe.

    A group follows the last one of as many nodes, else the last one: so a node that stays keeps its place as long as
    their number does, and one that comes back after a smaller group has it again.
    """

    def __init__(self) -> None:
        self._last: list[str] = []
        self._of_number: dict[int, list[str]] = {}

    def of(self, nodes: Sequence[str]) -> list[str]:
        """These nodes (each once) in the sequence in which they get their ranks."""
        return as_before(self._of_number.get(len(nodes), self._last), nodes)

    def note(self, nodes: Sequence[str]) -> None:
        """A group has begun on these nodes, by rank."""
        self._last = self._of_number[len(nodes)] = list(nodes)
