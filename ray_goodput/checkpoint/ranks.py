"""What saves and restores ask of the processes that do them together."""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """One process's view of its world; `train.world.World` is one. All methods are collective, on one thread."""

    @property
    def world_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, ordered by rank, on every rank."""
        ...

    def all_true(self, flag: bool) -> bool:
        """Whether `flag` holds on every rank."""
        ...
