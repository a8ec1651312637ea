"""Laws of a failure's kind: what may pass counts against the budget, what is certain to come again ends the run."""

from __future__ import annotations

import pytest

from ray_goodput.core.budget import FailureKind
from ray_goodput.errors import (
    ConfigError,
    DatasetMismatchError,
    GoodputError,
    ObjectChangedError,
    RunError,
    SessionError,
    ShardReadError,
    StorageError,
    StructureMismatchError,
)
from ray_goodput.train import worker
from ray_goodput.train.ray_compat import (
    UserExceptionWithTraceback,
    WorkerGroupError,
    classify_failure,
    goodput_error_in,
)


def failed(**failures: Exception) -> WorkerGroupError:
    wrapped: dict[int, Exception] = {
        int(rank[1:]): UserExceptionWithTraceback(error, str(error)) for rank, error in failures.items()
    }
    return WorkerGroupError("failed", wrapped)


@pytest.mark.parametrize("error", [StorageError, ObjectChangedError, ShardReadError, RunError])
def test_what_a_storage_or_an_actor_failed_to_do_is_tried_again(error: type[GoodputError]) -> None:
    kind, message, ranks = classify_failure(failed(r0=RuntimeError("peer closed"), r1=error("away")))
    assert kind is FailureKind.WORKER and ranks == (0, 1) and message


@pytest.mark.parametrize("error", [ConfigError, DatasetMismatchError, SessionError, StructureMismatchError])
def test_wrong_input_is_never_tried_again_whatever_other_ranks_raised(error: type[GoodputError]) -> None:
    several = failed(r0=RunError("no answer"), r1=error("wrong"), r2=OSError("peer closed"))
    assert classify_failure(several) == (FailureKind.USER_ERROR, "wrong", (0, 1, 2))
    assert type(goodput_error_in(several)) is error


def test_a_node_actor_that_does_not_come_is_no_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, namespace: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(worker.ray, "get_actor", unknown)
    monkeypatch.setattr(worker, "_ACTOR_WAIT_S", -1.0)
    with pytest.raises(RunError, match="vault:x"):
        worker._node_actor("vault:x")
