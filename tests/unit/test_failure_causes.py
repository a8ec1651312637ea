"""Which of many failures is the one: the rest are what a lost peer looks like from the ranks that are left."""

import pickle
from dataclasses import replace

import cloudpickle
import pytest
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import WorkerGroupError

from ray_goodput.core.budget import BudgetState, FailureEvent, FailureKind, decide_retry
from ray_goodput.core.hang import HangVerdict
from ray_goodput.errors import DrainedError, RunError, ShardReadError, StructureMismatchError
from ray_goodput.train.failures import because_of, failure_event, note_step
from ray_goodput.train.ray_compat import classify_failure

PEER_GONE = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:33189: Connection reset by peer. GLHF!")


def raised(error: Exception) -> UserExceptionWithTraceback:
    return UserExceptionWithTraceback(error, traceback_str=f"Traceback ...\n{error!r}")


def classify(failures: dict[int, Exception]) -> tuple[FailureKind, str, tuple[int, ...]]:
    return classify_failure(WorkerGroupError("failed", failures))


def test_a_process_that_died_is_named_and_not_the_peers_that_noticed() -> None:
    kind, _, ranks = classify({0: raised(PEER_GONE), 1: ActorDiedError(), 2: raised(PEER_GONE)})
    assert (kind, ranks) == (FailureKind.WORKER, (1,))


def test_an_error_of_the_users_is_named_with_its_type_and_not_the_peers_that_noticed() -> None:
    kind, message, ranks = classify({0: raised(PEER_GONE), 1: raised(KeyError("z"))})
    assert (kind, message, ranks) == (FailureKind.WORKER, "KeyError: 'z'", (1,))


def test_with_nothing_but_lost_peers_all_are_named() -> None:
    kind, message, ranks = classify({0: raised(PEER_GONE), 1: raised(PEER_GONE)})
    assert kind is FailureKind.WORKER and ranks == (0, 1) and "Connection reset" in message


def test_bad_input_is_not_retried_and_what_may_pass_is() -> None:
    assert classify({0: raised(StructureMismatchError("other model"))})[0] is FailureKind.USER_ERROR
    assert classify({0: raised(ShardReadError("away"))})[0] is FailureKind.WORKER


def test_a_dead_process_is_found_inside_what_the_health_check_says() -> None:
    died = WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())
    kind, _, ranks = classify({0: RuntimeError("some other back end's words for a lost peer"), 1: died})
    assert (kind, ranks) == (FailureKind.WORKER, (1,))


def test_a_drain_is_one_also_while_only_its_peers_have_told_of_the_rank_that_leaves() -> None:
    left = WorkerGroupError("failed", {0: raised(DrainedError("rank 2 leaves", ranks=(2,)))})
    event = failure_event(left, committed=None, node_of_rank={2: "c"})
    assert (event.kind, event.ranks, event.nodes, event.error) == (FailureKind.DRAIN, (2,), ("c",), "")


def test_an_attempt_that_left_after_notice_is_a_drain_whatever_its_peers_raised_behind_it() -> None:
    left = DrainedError("node n goes", (1,))
    assert classify({0: PEER_GONE, 1: raised(left), 2: RunError("no answer")}) == (
        FailureKind.DRAIN,
        "node n goes",
        (1,),
    )
    assert classify({0: left, 1: StructureMismatchError("other model")})[0] is FailureKind.USER_ERROR
    again = pickle.loads(pickle.dumps(left))
    assert (str(again), again.ranks) == ("node n goes", (1,))


def event(failures: dict[int, Exception]):
    return failure_event(WorkerGroupError("failed", failures), committed=None, node_of_rank={0: "a", 1: "b", 2: "b"})


def test_an_error_of_the_train_loop_carries_its_step_through_ray_and_names_the_node() -> None:
    error = KeyError("z")
    note_step(error, 7)
    carried = cloudpickle.loads(cloudpickle.dumps({0: raised(PEER_GONE), 1: raised(error), 2: raised(PEER_GONE)}))
    found = event(carried)
    assert (found.step, found.error, found.nodes, found.ranks) == (7, "KeyError: 'z'", ("b",), (1,))


@pytest.mark.parametrize("error", [ActorDiedError(), ConnectionError("no route"), ShardReadError("away"), PEER_GONE])
def test_what_comes_and_goes_is_no_error_that_repeats(error: Exception) -> None:
    assert event({0: error}).error == ""


def test_of_an_attempt_that_hung_the_hang_is_the_cause_and_counts_like_any_failure() -> None:
    died = FailureEvent(kind=FailureKind.WORKER, committed=None, message="The actor died", ranks=(0, 1), error="x")
    hang = HangVerdict(culprits=(1,), reason="Hung: rank 1 (process 7 on 10.0.0.2) is stopped (SIGSTOP)")
    event = because_of(hang, died, {0: "10.0.0.1", 1: "10.0.0.2"})
    assert (event.kind, event.ranks, event.nodes, event.error) == (FailureKind.HANG, (1,), ("10.0.0.2",), "")
    drained = replace(died, kind=FailureKind.DRAIN)
    assert because_of(hang, drained, {}) == drained
    decision = decide_retry(BudgetState(), event, max_failures_without_progress=0)
    assert not decision.retry and "Crash loop: 1 failures" in decision.reason and hang.reason in decision.reason
