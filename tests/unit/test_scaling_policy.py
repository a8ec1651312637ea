"""Laws of the scaling policy that need no Ray: which nodes count, when it gives up, when it grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.train

from ray_goodput.config import FailureBudget
from ray_goodput.errors import ConfigError, WorkersUnavailableError
from ray_goodput.train import scaling
from ray_goodput.train.ray_compat import NoopDecision, ResizeDecision
from ray_goodput.train.scaling import GoodputScalingPolicy


class Cluster:
    """What the policy sees of a cluster, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved: dict[str, dict[str, float]] = {}
        self.free: dict[str, dict[str, float]] = {}
        self.held: dict[str, dict[str, float]] = {}
        self.silent: set[str] = set()
        self.draining: dict[str, float | None] = {}
        self.commit_age_s: float | None = None
        self.asked = 0
        self.now_s = 100.0
        monkeypatch.setattr(scaling, "fresh_reserved_resources", lambda policy: self.reserved)
        monkeypatch.setattr(scaling, "available_resources", lambda: self.free)
        monkeypatch.setattr(scaling, "own_placed_resources", lambda: self.held)
        monkeypatch.setattr(scaling, "draining_nodes", lambda: self.draining)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.advance)
        monkeypatch.setattr(scaling, "time", clock)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def policy(self, num_workers: Any, **budget: Any) -> GoodputScalingPolicy:
        config = ray.train.ScalingConfig(
            num_workers=num_workers, resources_per_worker={"CPU": 1}, elastic_resize_monitor_interval_s=60
        )
        policy: Any = GoodputScalingPolicy(config, run_key="run", budget=FailureBudget(**budget))
        policy._maybe_send_resource_request = lambda: None
        policy._silent_nodes = lambda nodes: self.silent & set(nodes)
        policy._commit_age_s = lambda: self.commit_age_s
        policy._tell_to_save = self._save
        return policy

    def _save(self) -> None:
        self.asked += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(monkeypatch)
    cluster.reserved = {name: {"CPU": 1.0} for name in ("a", "b", "c")}
    return cluster


def size(decision: Any) -> int:
    """Of a decision to start; 0 for one to wait."""
    assert isinstance(decision, NoopDecision | ResizeDecision)
    return decision.num_workers if isinstance(decision, ResizeDecision) else 0


def start(policy: GoodputScalingPolicy) -> int:
    return size(policy.make_decision_for_non_running_worker_group())


def look(policy: GoodputScalingPolicy, num_workers: int, started_s: float = 0.0) -> int:
    state: Any = SimpleNamespace(num_workers=num_workers, start_time=started_s)
    return size(policy.make_decision_for_running_worker_group(state, None))


def test_silent_and_draining_nodes_are_left_out_and_the_rest_is_taken_at_once(cluster: Cluster) -> None:
    policy = cluster.policy((1, 3))
    assert start(policy) == 3
    cluster.silent = {"a"}
    assert start(policy) == 2
    cluster.draining = {"b": 30.0, "elsewhere": 1.0}
    assert start(policy) == 1
    cluster.silent = {"a", "c"}
    assert start(policy) == 0


def test_room_that_ray_had_not_reserved_counts_when_a_node_is_left_out(cluster: Cluster) -> None:
    cluster.reserved = {"a": {"CPU": 3.0}}  # all three workers had been packed on one node of many
    cluster.free = {"a": {"CPU": 3.0}, "b": {"CPU": 2.0}, "c": {"CPU": 8.0, "GPU": 1.0}}
    policy = cluster.policy((1, 3))
    cluster.draining = {"a": None}
    assert start(policy) == 3
    cluster.silent = {"c"}
    cluster.reserved["c"] = {"CPU": 1.0}
    assert start(policy) == 2


def test_places_that_ray_keeps_for_a_killed_driver_are_taken_once_they_are_free(cluster: Cluster) -> None:
    cluster.reserved = {"a": {"CPU": 1.0}}
    cluster.free = {"a": {"CPU": 1.0}, "b": {"CPU": 1.0}}
    assert start(cluster.policy(2)) == 2
    assert start(cluster.policy((1, 2))) == 2


def test_places_of_the_group_that_failed_count_before_ray_has_let_them_go(cluster: Cluster) -> None:
    """As after a driver and then a worker were killed: two of three CPUs are kept for the dead driver, two are held by
    the group that failed."""
    cluster.reserved = {"c": {"CPU": 1.0}}
    cluster.free = {"a": {"memory": 1.0}, "b": {"memory": 1.0}, "c": {"CPU": 1.0, "memory": 1.0}}
    cluster.held = {"a": {"CPU": 1.0}, "b": {"CPU": 1.0}, "gone": {"CPU": 4.0}}
    assert start(cluster.policy(2)) == 2
    assert start(cluster.policy((1, 8))) == 3
    cluster.silent = {"a"}
    assert start(cluster.policy((1, 8))) == 2


def test_a_group_grows_onto_a_new_node_while_ray_keeps_a_place_on_a_draining_one(cluster: Cluster) -> None:
    policy = cluster.policy((1, 3))
    cluster.draining = {"a": 0.0}
    assert start(policy) == 2
    started_s = cluster.now_s
    cluster.free = {"a": {"CPU": 1.0}, "new": {"CPU": 1.0}}
    cluster.commit_age_s = 1.0
    cluster.advance(61.0)
    assert look(policy, 2, started_s) == 3


def test_free_room_on_a_node_that_goes_or_is_silent_is_none_though_ray_reserved_nothing_there(cluster: Cluster) -> None:
    cluster.reserved = {"a": {"CPU": 1.0}}
    cluster.free = {"a": {"CPU": 1.0}, "b": {"CPU": 4.0}, "c": {"CPU": 4.0}}
    cluster.draining, cluster.silent = {"b": 30.0}, {"c"}
    policy = cluster.policy((1, 3))
    assert start(policy) == 1
    cluster.silent = set()
    assert start(policy) == 3


def test_a_fixed_number_is_waited_for_and_then_given_up_in_one_sentence(cluster: Cluster) -> None:
    policy = cluster.policy(4, max_wait_for_workers_s=50.0)
    for _ in range(50):
        assert start(policy) == 0
    cluster.advance(2.0)
    with pytest.raises(WorkersUnavailableError) as raised:
        start(policy)
    message = str(raised.value)
    assert "\n" not in message
    for part in ("4 worker(s) are needed", "room for 3", "{'CPU': 1}", "max_wait_for_workers_s", "num_workers"):
        assert part in message


def test_a_view_that_cannot_be_had_ends_no_run_before_its_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = cluster.policy((1, 4), max_wait_for_workers_s=50.0)
    assert start(policy) == 3 and look(policy, 3) == 0

    def no_gcs(*_: object) -> Any:
        raise ConnectionError("Ray's GCS is being started again")

    cluster.advance(100.0)
    with monkeypatch.context() as away:
        away.setattr(scaling, "fresh_reserved_resources", no_gcs)
        assert look(policy, 3) == 0
        for _ in range(40):
            assert start(policy) == 0
    assert start(policy) == 3
    look(policy, 3)
    monkeypatch.setattr(scaling, "fresh_reserved_resources", no_gcs)
    with pytest.raises(WorkersUnavailableError, match="GCS is being started"):
        for _ in range(60):
            assert start(policy) == 0


def test_the_wait_begins_anew_whenever_the_group_has_run(cluster: Cluster) -> None:
    policy = cluster.policy(3, max_wait_for_workers_s=50.0)
    assert start(policy) == 3
    assert look(policy, 3) == 0
    cluster.advance(1e6)
    cluster.silent = {"a"}
    for _ in range(40):
        assert start(policy) == 0
    cluster.silent = set()
    assert start(policy) == 3


def test_a_group_of_a_fixed_size_is_never_resized(cluster: Cluster) -> None:
    policy = cluster.policy(2)
    start(policy)
    cluster.reserved = {"a": {"CPU": 9.0}}
    cluster.advance(1000.0)
    assert look(policy, 2) == 0
    cluster.reserved = {}
    cluster.advance(1000.0)
    assert look(policy, 2) == 0


def test_growth_asks_for_a_save_once_and_comes_right_after_its_commit(cluster: Cluster) -> None:
    policy = cluster.policy((1, 3))
    cluster.silent = {"a"}
    assert start(policy) == 2
    started_s = cluster.now_s
    cluster.silent = set()
    cluster.advance(59.0)
    assert look(policy, 2, started_s) == 0 and cluster.asked == 0, "not looked at before its interval"
    cluster.advance(2.0)
    cluster.commit_age_s = 300.0
    assert look(policy, 2, started_s) == 0 and cluster.asked == 1
    cluster.advance(2.0)
    assert look(policy, 2, started_s) == 0 and cluster.asked == 1, "asked for again too soon"
    cluster.advance(2.0)
    cluster.commit_age_s = 1.0
    assert look(policy, 2, started_s) == 3, "a pending growth is looked at every time"


def test_a_running_group_is_never_shrunk_and_never_grows_onto_a_node_that_goes(cluster: Cluster) -> None:
    policy = cluster.policy((1, 3))
    start(policy)
    cluster.commit_age_s = 0.0
    cluster.advance(100.0)
    cluster.draining = {"c": 30.0}
    assert look(policy, 2) == 0
    cluster.advance(100.0)
    cluster.silent = {"a", "b"}
    assert look(policy, 2) == 0 and cluster.asked == 0


def test_a_replacement_seen_once_is_waited_for_the_next_time_if_that_pays(cluster: Cluster) -> None:
    policy = cluster.policy((1, 3))
    assert start(policy) == 3 and look(policy, 3) == 0
    cluster.silent = {"a"}
    assert start(policy) == 2, "nothing is known yet: on with what is left"
    cluster.advance(20.0)
    assert look(policy, 2) == 0
    cluster.advance(20.0)
    assert look(policy, 3) == 0, "the node came back"
    cluster.advance(500.0)
    assert start(policy) == 0, "a replacement takes about 41 s: shrinking, 3 x 21 s twice, would cost more"
    cluster.advance(60.0)
    assert start(policy) == 2, "overdue"


def test_a_known_replacement_time_wins_over_what_was_seen(cluster: Cluster) -> None:
    policy = cluster.policy((1, 3), replacement_wait_s=40.0)
    cluster.silent = {"a"}
    policy._ran_before = True
    assert start(policy) == 0


@pytest.mark.parametrize("name", ["max_wait_for_workers_s", "replacement_wait_s"])
def test_a_negative_wait_is_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: -1.0}
    with pytest.raises(ConfigError, match=name):
        FailureBudget(**wrong)
