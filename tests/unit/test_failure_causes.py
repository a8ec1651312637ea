"""Which of many failures is the one: the rest are what a lost peer looks like from the ranks that are left."""

from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2.api.exceptions import WorkerGroupError

from ray_goodput.core.budget import FailureKind
from ray_goodput.errors import ShardReadError, StructureMismatchError
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
