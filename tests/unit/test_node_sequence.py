"""Nodes get their ranks back in each attempt: what they hold is theirs again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from ray_goodput.core.node_sequence import NodeSequence, as_before
from ray_goodput.train import callbacks
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


@given(st.lists(NODES.filter(bool), min_size=2, max_size=6))
def test_while_the_number_of_nodes_stays_a_node_that_stays_keeps_its_place(groups: list[list[str]]) -> None:
    """Whatever groups of other numbers there were before, or between."""
    nodes = NodeSequence()
    last: dict[int, list[str]] = {}
    for group in groups:
        sequence = nodes.of(group)
        nodes.note(sequence)
        before = last.get(len(group), [])
        assert all(sequence.index(node) == before.index(node) for node in before if node in group)
        last[len(group)] = sequence


def test_a_new_node_takes_the_place_of_the_lost_one_and_one_that_comes_back_its_own() -> None:
    assert as_before(["a", "b", "c"], ["c", "d", "a"]) == ["a", "d", "c"]
    assert as_before(["a", "b", "c"], ["c", "a"]) == ["a", "c"]
    assert as_before(["a", "c"], ["d", "c", "a"]) == ["a", "c", "d"]
    nodes = NodeSequence()
    for group, expected in (("abcd", "abcd"), ("dca", "acd"), ("ace", "ace"), ("ecba", "abce"), ("bca", "acb")):
        assert nodes.of(list(group)) == list(expected)
        nodes.note(list(expected))


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
    assert nodes_by_rank("a", "b") == ["b", "a"], "the last one counts"
    order_nodes(lambda nodes: [])
    assert nodes_by_rank("a", "b") == ["a", "b"], "and there is no chain of them"


def test_the_hooks_remember_the_nodes_of_all_groups(rays_own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, then two, then three again, which Ray names in other sequences. The coordinator is away."""
    spec: Any = SimpleNamespace(key="run")
    monkeypatch.setattr(callbacks, "start_vault", lambda *_: None)
    monkeypatch.setattr(callbacks, "shard_cache_actor", lambda *_: None)

    def away(self: Any) -> Any:
        raise ValueError("no such actor")

    monkeypatch.setattr(callbacks.GoodputCallback, "_coordinator", away)
    hooks = callbacks.GoodputCallback(spec)
    context: Any = SimpleNamespace(run_id="r")
    hooks.after_controller_start(context)

    def group(*placed: str) -> list[str]:
        ranked = WorkerGroup._assign_worker_ranks(workers(*placed))
        hooks.before_init_train_context(ranked)
        return [worker.metadata.node_id for worker in ranked]

    assert group("c", "a", "b") == ["c", "a", "b"]
    assert group("b", "c") == ["c", "b"]
    assert group("b", "a", "c") == ["c", "a", "b"]
    assert group("d", "b", "c") == ["c", "d", "b"]


@pytest.mark.parametrize("bad", [lambda nodes: nodes[:1], lambda nodes: nodes[0] / 0])
def test_a_sequence_that_fails_or_loses_a_node_leaves_rays_own(rays_own: Any, bad: Any) -> None:
    order_nodes(bad)
    assert nodes_by_rank("b", "a") == ["b", "a"]
