"""Which data-parallel rank reads what, and on which nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_goodput.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """One process's place in the data.

    of_node: the data-parallel ranks of all processes of this node, each once.
    nodes: of each data-parallel rank, the numbers of the nodes with a process of it.
    is_first: no process of a lower world rank has the same data-parallel rank: this one speaks for all that read the
        same batches.
    """

    dp_rank: int
    dp_world: int
    of_node: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    is_first: bool = True


def agreed(told: Sequence[tuple[int, int]], node_of_rank: Sequence[int], world_rank: int) -> DataRanks:
    """The place of `world_rank`, from the (dp_rank, dp_world) that every rank gave and the number of its node, both
    ordered by world rank.

    Raises:
        ConfigError: they do not make one data-parallel group, on every rank alike.
    """
    dp_world = told[0][1]
    for rank, (dp_rank, size) in enumerate(told):
        if size != dp_world:
            raise ConfigError(
                f"batches(dp_world=): rank 0 gave {dp_world} and rank {rank} gave {size}: every rank has to give the "
                "size of the same data-parallel group."
            )
        if not 0 <= dp_rank < dp_world:
            raise ConfigError(f"batches(dp_rank={dp_rank}, dp_world={dp_world}): rank {rank} is not in that group.")
    missing = sorted(set(range(dp_world)) - {dp_rank for dp_rank, _ in told})
    if missing:
        raise ConfigError(
            f"batches(dp_world={dp_world}): no rank gave dp_rank={missing[0]}, so its samples would be skipped: the "
            f"{len(told)} ranks have to give all of 0 to {dp_world - 1}."
        )
    mine = told[world_rank][0]
    nodes: list[set[int]] = [set() for _ in range(dp_world)]
    for (dp_rank, _), node in zip(told, node_of_rank, strict=True):
        nodes[dp_rank].add(node)
    return DataRanks(
        dp_rank=mine,
        dp_world=dp_world,
        of_node=tuple(rank for rank, on in enumerate(nodes) if node_of_rank[world_rank] in on),
        nodes=tuple(tuple(sorted(on)) for on in nodes),
        is_first=all(dp_rank != mine for dp_rank, _ in told[:world_rank]),
    )
