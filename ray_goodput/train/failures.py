"""From what Ray Train's controller says about a failed attempt to the event that our rule judges."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from ray_goodput.core.budget import FailureEvent, FailureKind
from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.hang import HangVerdict
from ray_goodput.train.ray_compat import TrainingFailedError, classify_failure, user_error_in

_STEP = "ray_goodput_step"


def note_step(error: Exception, step: int) -> None:
    """`error`, raised by the train loop, says from now on which step was done last; also once Ray has carried it on."""
    with contextlib.suppress(AttributeError, TypeError):  # a class with slots of its own: then nobody knows the step
        setattr(error, _STEP, step)


def because_of(hang: HangVerdict, event: FailureEvent, node_of_rank: Mapping[int, str]) -> FailureEvent:
    """The failure of an attempt that hung, if it is that processes died: that is only what came of it."""
    if event.kind not in (FailureKind.WORKER, FailureKind.STARTUP):
        return event
    nodes = tuple(dict.fromkeys(node_of_rank[rank] for rank in hang.culprits if rank in node_of_rank))
    return replace(
        event, kind=FailureKind.HANG, message=hang.reason, ranks=hang.culprits, nodes=nodes, step=None, error=""
    )


def failure_event(
    error: TrainingFailedError, *, committed: CheckpointId | None, node_of_rank: Mapping[int, str]
) -> FailureEvent:
    """What happened, where, and whether it could be an error that comes again for the same reason.

    Not an `OSError`, which is what connections and files raise: a storage or a server that is away looks alike each
    time, too, and comes back.
    """
    kind, message, ranks = classify_failure(error)
    users = user_error_in(error, ranks)
    return FailureEvent(
        kind=kind,
        committed=committed,
        message=message,
        ranks=ranks,
        nodes=tuple(dict.fromkeys(node_of_rank[rank] for rank in ranks if rank in node_of_rank)),
        step=getattr(users, _STEP, None),
        error="" if users is None or isinstance(users, OSError) else f"{type(users).__name__}: {users}",
    )
