"""What a run's own ledger says about the planner's inputs: its stall, latency, restart, interval and failures. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ray_goodput.errors import StorageError
from ray_goodput.goodput.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasures:
    """Figures of one run; None where the ledger does not tell, and `sources` then says why.

    gpus: its target world, one accelerator a rank. exposure_gpu_s: accelerator-seconds in which `failures` happened.
    goodput: the run's own overall, to be held against what the formula makes of these figures.
    """

    gpus: int
    wall_s: float
    goodput: float
    failures: int
    exposure_gpu_s: float
    saves: int
    stall_s: float | None
    latency_s: float | None
    restart_s: float | None
    interval_s: float | None
    sources: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Attempt:
    """Commits as (step, at), and rank 0's progress as step -> when it was done, all by the coordinator's clock."""

    commits: list[tuple[int, float]] = field(default_factory=list)
    done: dict[int, float] = field(default_factory=dict)
    resumed: int = 0
    started_at: float | None = None
    timeline: Timeline = field(default_factory=Timeline)


def measure_run(report: Mapping[str, Any], lines: Iterable[str | bytes] = ()) -> RunMeasures:
    """The figures of the run whose ledger gives `report` (`GoodputReport.to_dict()`) and has these `lines`.

    stall: `ckpt_block` a save and rank. interval: median time between commits of an attempt, less the stall.
    latency: median over commits of the time since the step was done on rank 0, less the stall; when a step was done is
    interpolated between its timeline's cells or the ledger's notes of progress, whichever are more, so it is known to
    some seconds only.
    restart: mean down time of the incidents that were overcome; without one, the time to start up and load.

    Raises:
        StorageError: a line is not of a ledger.
    """
    attempts = _read(lines)
    commits = sum(len(a.commits) for a in attempts.values())
    sources: dict[str, str] = {}
    stall = _stall(report, attempts)
    sources["stall_s"] = f"mean over {_count(commits, 'save')}" if stall is not None else "it has no commit yet"
    gaps = [b - a for x in attempts.values() for (_, a), (_, b) in zip(x.commits, x.commits[1:], strict=False)]
    interval = max(1e-3, statistics.median(gaps) - (stall or 0.0)) if gaps else None
    sources["interval_s"] = f"median of {_count(len(gaps), 'interval')}" if gaps else "no attempt has two commits"
    latencies = [late - (stall or 0.0) for x in attempts.values() for late in _lateness(x)]
    latency = max(0.0, statistics.median(latencies)) if latencies else None
    sources["latency_s"] = (
        f"median of {_count(len(latencies), 'commit')}, known to some seconds"
        if latencies
        else "no commit can be timed"
    )
    overcome = [i["down_s"] for i in report["incidents"] if i["step_resumed"] is not None]
    if overcome:
        restart: float | None = statistics.fmean(overcome)
        sources["restart_s"] = f"mean over {_count(len(overcome), 'incident')}"
    else:
        restart = _startup(report)
        sources["restart_s"] = (
            "no failure yet: the time it took to start" if restart is not None else "it never started"
        )
    return RunMeasures(
        gpus=int(report["target_world"]),
        wall_s=float(report["wall_s"]),
        goodput=float(report["overall"]),
        failures=len(report["incidents"]),
        exposure_gpu_s=float(report["wall_s"]) * int(report["target_world"]),
        saves=commits,
        stall_s=stall,
        latency_s=latency,
        restart_s=restart,
        interval_s=interval,
        sources=sources,
    )


def _read(lines: Iterable[str | bytes]) -> dict[int, _Attempt]:
    attempts: dict[int, _Attempt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            event = body.get("event")
            if event not in ("commit", "resumed", "rank", "timeline"):
                continue
            attempt = attempts.setdefault(body["attempt"], _Attempt())
            if event == "commit":
                attempt.commits.append((body["step"], body["at"]))
            elif event == "resumed":
                attempt.resumed = body["step"]
            elif event == "timeline":
                if body["world_rank"] == 0:
                    attempt.timeline.put(body["cell_s"], body["first"], body["cells"])
            elif body["world_rank"] == 0 and body["started_at"] is not None:
                attempt.started_at = body["started_at"]
                if body["first_done_ns"] is not None:
                    attempt.done.setdefault(-1, body["started_at"] + body["first_done_ns"] / 1e9)
                if body["last_done"] is not None:
                    attempt.done.setdefault(body["last_done"], body["started_at"] + body["end_ns"] / 1e9)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"Line {number} of the ledger cannot be read ({error!r}): nothing can be planned."
            ) from error
    for attempt in attempts.values():
        if -1 in attempt.done:
            attempt.done.setdefault(attempt.resumed + 1, attempt.done[-1])
            del attempt.done[-1]
        if attempt.started_at is not None:
            drawn = _done_by_timeline(attempt.timeline, attempt.started_at, attempt.resumed)
            attempt.done = max(attempt.done, drawn, key=len)
    return attempts


def _done_by_timeline(timeline: Timeline, started_at: float, resumed: int) -> dict[int, float]:
    """When rank 0 had done a step, for the last one done in each cell."""
    cells = np.flatnonzero(timeline.steps)
    reached = resumed + np.cumsum(timeline.steps[cells])
    times = started_at + (cells + 0.5) * timeline.cell_s  # somewhere in the cell
    return {int(step): float(at) for step, at in zip(reached, times, strict=True)}


def _lateness(attempt: _Attempt) -> list[float]:
    """For each commit whose step lies within the notes of progress: seconds from the step to the commit."""
    steps = sorted(attempt.done)
    if not steps:
        return []
    times = np.maximum.accumulate([attempt.done[step] for step in steps])
    return [at - float(np.interp(step, steps, times)) for step, at in attempt.commits if steps[0] <= step <= steps[-1]]


def _stall(report: Mapping[str, Any], attempts: Mapping[int, _Attempt]) -> float | None:
    blocked = saves = 0.0
    for a in report["attempts"]:
        if (mine := attempts.get(a["attempt"])) and mine.commits:
            blocked += a["buckets_s"].get("ckpt_block", 0.0)
            saves += a["world"] * len(mine.commits)
    return blocked / saves if saves else None


def _startup(report: Mapping[str, Any]) -> float | None:
    started = [a for a in report["attempts"] if a["last_step"] is not None]
    if not started:
        return None
    return statistics.fmean(
        (a["buckets_s"].get("startup", 0.0) + a["buckets_s"].get("ckpt_load", 0.0)) / a["world"] for a in started
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
