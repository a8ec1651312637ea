"""Nodes get their ranks back in each attempt: what they hold is theirs again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from ray_goodput.core.node_sequence import as_before
from ray_goodput.train.ray_compat import order_nodes, worker_infos

NODES = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(NODES, NODES)
def test_nodes_keep_their_places_among_each_other_and_none_is_lost(before: list[str], now: list[str]) -> None:
    sequence = as_before(before, now)
    assert sorted(sequence) == sorted(now)
    kept = [node for node in before if node in now]
    assert [node for node in sequence if node in before] == kept
    if len(now) >= len(before):
        assert all(sequence.index(node) == before.index(node) for node in kept)


def test_a_new_node_takes_the_place_of_the_lost_one() -> None:
    assert as_before(["a", "b", "c"], ["c", "d", "a"]) == ["a", "d", "c"]
    assert as_before(["a", "b", "c"], ["c", "a"]) == ["a", "c"]
    assert as_before(["a", "c"], ["d", "c", "a"]) == ["a", "c", "d"]
    assert as_before([], ["b", "a"]) == ["b", "a"]


@pytest.fixture
def rays_own() -> Any:
    """Ray's class is as it was afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        own = WorkerGroup._sort_workers_by_gpu_id_grouped_by_node
        patch.setattr(WorkerGroup, "_sort_workers_by_gpu_id_grouped_by_node", staticmethod(own))
        yield


def workers(*nodes: str) -> list[Any]:
    return [
        SimpleNamespace(
            metadata=SimpleNamespace(node_id=node, node_ip=f"ip of {node}", pid=pid, accelerator_ids={}),
            resources={},
            distributed_context=None,
        )
        for pid, node in enumerate(nodes)
    ]


def nodes_by_rank(*placed: str) -> list[str]:
    return [info.node_id for info in worker_infos(WorkerGroup._assign_worker_ranks(workers(*placed)))]


def test_ray_gives_the_nodes_their_ranks_in_the_sequence_that_we_want(rays_own: Any) -> None:
    assert nodes_by_rank("b", "a", "b", "a") == ["b", "b", "a", "a"]
    order_nodes(lambda nodes: as_before(["a", "b"], nodes))
    ranked = WorkerGroup._assign_worker_ranks(workers("b", "a", "b", "a"))
    assert [w.metadata.node_id for w in ranked] == ["a", "a", "b", "b"]
    contexts: list[Any] = [w.distributed_context for w in ranked]
    assert [c.world_rank for c in contexts] == [0, 1, 2, 3]
    assert [c.local_rank for c in contexts] == [0, 1, 0, 1]
    assert [c.node_rank for c in contexts] == [0, 0, 1, 1]
    order_nodes(lambda nodes: as_before(["b", "a"], nodes))
    assert nodes_by_rank("a", "b") == ["b", "a"], "the last one counts, and there is no chain of them"


@pytest.mark.parametrize("bad", [lambda nodes: nodes[:1], lambda nodes: nodes[0] / 0])
def test_a_sequence_that_fails_or_loses_a_node_leaves_rays_own(rays_own: Any, bad: Any) -> None:
    order_nodes(bad)
    assert nodes_by_rank("b", "a") == ["b", "a"]
