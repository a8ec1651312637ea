"""What a run's own ledger says about the planner's inputs: its stall, latency, restart, interval and failures. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ray_goodput.errors import StorageError
from ray_goodput.goodput.report import RESIZED
from ray_goodput.goodput.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasures:
    """Figures of one run; None where the ledger does not tell, and `sources` then says why.

    gpus: its target world, one accelerator a rank. failures: incidents but changes of size. exposure_gpu_s:
    accelerator-seconds in which they happened. goodput: the run's own overall, to be held against what the formula
    makes of these figures.
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
    """Commits as (step, at), and rank 0's progress as step -> when it was done, all by the coordinator's clock.

    stalls, latencies: as told with commits, from version 3 of the ledger on.
    """

    commits: list[tuple[int, float]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    done: dict[int, float] = field(default_factory=dict)
    resumed: int = 0
    started_at: float | None = None
    timeline: Timeline = field(default_factory=Timeline)


def measure_run(report: Mapping[str, Any], lines: Iterable[str | bytes] = ()) -> RunMeasures:
    """The figures of the run whose ledger gives `report` (`GoodputReport.to_dict()`) and has these `lines`.

    stall, latency: mean and median of what was told with the commits. A ledger that does not tell (before version 3)
    gives `ckpt_block` a save and rank for the stall, and for the latency the time since the step was done on rank 0,
    less the stall; when a step was done is interpolated between its timeline's cells or the ledger's notes of progress,
    whichever are more, so it is known to some seconds only.
    interval: median time between commits of an attempt, less the stall.
    restart: mean down time of the failures that were overcome; without one, the time to start up and load.

    Raises:
        StorageError: a line is not of a ledger.
    """
    attempts = _read(lines)
    commits = sum(len(a.commits) for a in attempts.values())
    sources: dict[str, str] = {}
    stall, sources["stall_s"] = _stall(report, attempts)
    gaps = [b - a for x in attempts.values() for (_, a), (_, b) in zip(x.commits, x.commits[1:], strict=False)]
    interval = max(1e-3, statistics.median(gaps) - (stall or 0.0)) if gaps else None
    sources["interval_s"] = f"median of {_count(len(gaps), 'interval')}" if gaps else "no attempt has two commits"
    latency, sources["latency_s"] = _latency(attempts, stall or 0.0)
    failures = [incident for incident in report["incidents"] if incident["kind"] != RESIZED]
    overcome = [incident["down_s"] for incident in failures if incident["step_resumed"] is not None]
    if overcome:
        restart: float | None = statistics.fmean(overcome)
        sources["restart_s"] = f"mean over {_count(len(overcome), 'failure')}"
    else:
        restart = _startup(report)
        sources["restart_s"] = (
            "no failure yet: the time it took to start" if restart is not None else "it never started"
        )
    return RunMeasures(
        gpus=int(report["target_world"]),
        wall_s=float(report["wall_s"]),
        goodput=float(report["overall"]),
        failures=len(failures),
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
                attempt.stalls += [body["stall_s"]] if "stall_s" in body else []
                attempt.latencies += [body["latency_s"]] if "latency_s" in body else []
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


def _stall(report: Mapping[str, Any], attempts: Mapping[int, _Attempt]) -> tuple[float | None, str]:
    told = [stall for attempt in attempts.values() for stall in attempt.stalls]
    if told:
        return statistics.fmean(told), f"mean over {_count(len(told), 'save')}"
    blocked = saves = 0.0
    for a in report["attempts"]:
        if (mine := attempts.get(a["attempt"])) and mine.commits:
            blocked += a["buckets_s"].get("ckpt_block", 0.0)
            saves += a["world"] * len(mine.commits)
    commits = sum(len(a.commits) for a in attempts.values())
    return (blocked / saves, f"mean over {_count(commits, 'save')}") if saves else (None, "it has no commit yet")


def _latency(attempts: Mapping[int, _Attempt], stall_s: float) -> tuple[float | None, str]:
    told = [latency for attempt in attempts.values() for latency in attempt.latencies]
    if told:
        return statistics.median(told), f"median of {_count(len(told), 'commit')}"
    late = [late - stall_s for attempt in attempts.values() for late in _lateness(attempt)]
    if not late:
        return None, "no commit can be timed"
    return max(0.0, statistics.median(late)), f"median of {_count(len(late), 'commit')}, known to some seconds"


def _startup(report: Mapping[str, Any]) -> float | None:
    started = [a for a in report["attempts"] if a["last_step"] is not None]
    if not started:
        return None
    return statistics.fmean(
        (a["buckets_s"].get("startup", 0.0) + a["buckets_s"].get("ckpt_load", 0.0)) / a["world"] for a in started
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
