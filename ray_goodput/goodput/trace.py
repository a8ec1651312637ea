"""A trace of failures, to be replayed by the simulator: one line a failure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ray_goodput.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A failure at `at_s` seconds into a run. failure_class: the first tier that survives it. node: it took a node."""

    at_s: float
    failure_class: int = 0
    node: bool = False


def parse_trace(lines: Iterable[str]) -> tuple[TraceEvent, ...]:
    """Failures from lines of `SECONDS[,CLASS[,node]]`, oldest first; blank lines and what follows a # are left out.

    Raises:
        ConfigError: a line cannot be read, they are out of order, or there is none.
    """
    events: list[TraceEvent] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            event = _event(*(part.strip() for part in text.split(",")))
        except (ValueError, TypeError):  # no number, or too many fields
            raise ConfigError(
                f"Line {number} of the trace, {text!r}, cannot be read: write the seconds since the start of the run, "
                "then if you like the class of the failure and the word node, as in 86400,1,node."
            ) from None
        if events and event.at_s < events[-1].at_s:
            raise ConfigError(
                f"Line {number} of the trace has a failure at {event.at_s:g} s after one at {events[-1].at_s:g} s: "
                "sort the lines by time."
            )
        events.append(event)
    if not events:
        raise ConfigError("The trace has no failure in it: write one line for each, the seconds since the run began.")
    return tuple(events)


def _event(seconds: str, failure_class: str = "0", node: str = "") -> TraceEvent:
    event = TraceEvent(at_s=float(seconds), failure_class=int(failure_class), node=node == "node")
    if not 0 <= event.at_s < math.inf or event.failure_class < 0 or node not in ("", "node"):
        raise ValueError(event)
    return event
