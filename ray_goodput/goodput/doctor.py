"""What a run's own ledger says about known traps: what each costs, and how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.plan import WORTH_SAYING
from ray_goodput.goodput.report import DRIVER
from ray_goodput.goodput.run_view import RunView

Level = Literal["ok", "note", "problem"]

QUIET_S = 180.0
"""A run whose ledger says nothing for so long has no driver: the coordinator writes every ten seconds."""

_POINT = 0.01
_REPORT_S = (1.98, 2.12)  # Ray Train takes one report in about two seconds
_HEALTH_TIMEOUT_S = 240.0
_OLD_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check's result. costs and mend are empty when all is well; `where`: the node or the run it is about."""

    check: str
    level: Level
    found: str
    costs: str = ""
    mend: str = ""
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose_run(view: RunView, *, now_s: float) -> list[Finding]:
    """All checks on one run, worst first. now_s: wall clock, to tell a run that goes on from one that died."""
    if not view.report.attempts:
        return [Finding(check="ledger", level="note", found="The run has not begun: no attempt is in its ledger.")]
    checks = (
        _driver,
        _drivers_before,
        _given_up,
        _newest_commit,
        _interval,
        _stall,
        _data,
        _report_each_step,
        _hang,
        _idle,
        _unknown,
    )
    found = [finding for check in checks if (finding := check(view, now_s)) is not None]
    return worst_first(found)


def worst_first(findings: list[Finding]) -> list[Finding]:
    order: Mapping[Level, int] = {"problem": 0, "note": 1, "ok": 2}
    return sorted(findings, key=lambda f: order[f.level])


def _driver(view: RunView, now_s: float) -> Finding:
    quiet = now_s - view.as_of_s
    if view.report.finished or quiet < QUIET_S:
        state = "has ended in good order" if view.report.finished else "goes on"
        return Finding(check="driver", level="ok", found=f"The run {state}.")
    return Finding(
        check="driver",
        level="problem",
        found=f"The ledger says nothing since {_time(quiet)} and not that the run ended: its driver is gone or stuck "
        "(killed without SIGTERM being handled, out of memory, or its node lost).",
        costs=f"{view.report.target_world} ranks stand still, or nobody takes up the run.",
        mend="Start the same script with the same RunConfig(name=...): it goes on from the newest commit. Submit it "
        "with `ray job submit` on a node that stays, with RAY_JOB_STOP_WAIT_TIME_S=60 so that a stop can finish.",
    )


def _drivers_before(view: RunView, now_s: float) -> Finding | None:
    died = [incident for incident in view.report.incidents if incident.kind == DRIVER]
    if not died:
        return None
    what = "A driver of this run" if len(died) == 1 else f"{len(died)} drivers of this run"
    return Finding(
        check="drivers before",
        level="note",
        found=f"{what} died without a word: SIGTERM was not handled in time, or it was killed, or its node was lost.",
        costs=f"{_hours(sum(incident.gpu_s for incident in died))} accelerator-hours, not counting the time until "
        "somebody started the next one.",
        mend="RAY_JOB_STOP_WAIT_TIME_S=60 in the environment of the head node, and 60 s of grace wherever else the job "
        "is stopped (terminationGracePeriodSeconds): the driver then saves the last step. Enough memory on its node.",
    )


def _given_up(view: RunView, now_s: float) -> Finding | None:
    report = view.report
    last = report.incidents[-1] if report.incidents else None
    if last is None or not report.finished or last.attempt != report.attempts[-1].attempt or last.kind != "worker":
        return None
    committed = [c for c in view.commits if c.attempt == last.attempt]
    first_without_progress = len(report.incidents) == 1 or bool(committed)
    if not first_without_progress:
        return None
    return Finding(
        check="failure budget",
        level="problem",
        found=f"The run was given up at a failure that it could have survived ({last.reason or 'no reason noted'}): "
        "it is configured to retry none.",
        costs="A person has to start it again; until then every accelerator of the job stands still.",
        mend="Leave out RunConfig(failure_config=FailureConfig(max_failures=...)) and give "
        "GoodputTrainer(failure=FailureBudget(max_failures_without_progress=3)): only failures without a new commit "
        "in between count.",
    )


def _newest_commit(view: RunView, now_s: float) -> Finding | None:
    facts, report = view.checkpoints, view.report
    if report.finished or now_s - view.as_of_s >= QUIET_S:
        return None
    age = facts.newest_age_s if facts.newest_age_s is not None else report.wall_s
    bound = max(_OLD_S, 3 * (facts.interval_s or 0.0))
    what = f"step {facts.newest_step}" if facts.newest_step is not None else "none yet"
    if age < bound:
        return Finding(check="newest commit", level="ok", found=f"The newest commit ({what}) is {_time(age)} old.")
    return Finding(
        check="newest commit",
        level="problem",
        found=f"The newest commit ({what}) is {_time(age)} old"
        + (f"; commits used to come every {_time(facts.interval_s)}." if facts.interval_s else "."),
        costs=f"A failure now throws away {_hours(report.at_risk_s)} accelerator-hours of steps.",
        mend="Look for upload errors in the logs of the CheckpointVault actors and try the storage "
        "(ray-goodput doctor --run). If nothing is wrong there, save more often: CheckpointConfig(every=...).",
    )


def _interval(view: RunView, now_s: float) -> Finding | None:
    plan = view.advice
    if plan is None or view.measures.interval_s is None:
        why = view.no_advice or f"not known: {view.measures.sources.get('interval_s', 'no saves')}"
        return Finding(check="save interval", level="note", found=f"The best interval cannot be told yet ({why})")
    here, best = plan.chosen, plan.best
    lost = best.exact - here.exact
    text = (
        f"Saves are {_time(here.interval_s)} of work apart; by this run's own figures {_time(best.interval_s)} is best"
    )
    if lost < _POINT / 2:
        return Finding(check="save interval", level="ok", found=f"{text}, which would gain {100 * lost:.1f} points.")
    if plan.interval_gain <= WORTH_SAYING:
        why = "but too little is known of how often it fails to be sure of that."
        return Finding(check="save interval", level="ok", found=f"{text}, {why}")
    return Finding(
        check="save interval",
        level="problem" if lost >= 2 * _POINT else "note",
        found=f"{text}.",
        costs=f"{100 * lost:.1f} points of goodput: {100 * here.exact:.1f} % instead of {100 * best.exact:.1f} %.",
        mend=f'CheckpointConfig(every="auto"), or every="{max(1, round(best.interval_s))}s".',
    )


def _stall(view: RunView, now_s: float) -> Finding | None:
    share = _share(view, Bucket.CKPT_BLOCK)
    stall = view.checkpoints.stall_s
    if stall is None:
        return None
    text = f"A save stops training for {stall:.2f} s, {100 * share:.1f} % of the time in all."
    if share < 2 * _POINT:
        return Finding(check="save stall", level="ok", found=text)
    return Finding(
        check="save stall",
        level="problem" if share >= 5 * _POINT else "note",
        found=text,
        costs=f"{_hours(_seconds(view, Bucket.CKPT_BLOCK))} accelerator-hours so far.",
        mend='Stage to memory: a larger /dev/shm (two slices a rank). With when_full="wait", uploads that are slower '
        'than the interval stop training: use when_full="skip", or save less often.',
    )


def _data(view: RunView, now_s: float) -> Finding:
    share = _share(view, Bucket.DATA_WAIT)
    text = f"Training waits for batches {100 * share:.1f} % of the time."
    if share < 5 * _POINT:
        return Finding(check="data", level="ok", found=text)
    return Finding(
        check="data",
        level="problem" if share >= 15 * _POINT else "note",
        found=text,
        costs=f"{_hours(_seconds(view, Bucket.DATA_WAIT))} accelerator-hours so far.",
        mend="In the first epoch: ShardedDataset(prefetch_shards=...) higher, and a look at the storage's bandwidth. "
        "In later ones: a cache that holds the data set (RAY_GOODPUT_LOCAL_DIR on NVMe), and less decoding in the "
        "training process (larger parquet row groups, images resized beforehand).",
    )


def _report_each_step(view: RunView, now_s: float) -> Finding | None:
    steps = sum(max(0, a.last_step - (a.resumed_step or 0)) for a in view.report.attempts if a.last_step is not None)
    worlds = [a.world for a in view.report.attempts if a.last_step is not None]
    if steps < 20 or not worlds:
        return None
    spent = _seconds(view, Bucket.STEP) + view.report.lost_s
    step_s = spent / steps / (sum(worlds) / len(worlds))
    if not _REPORT_S[0] <= step_s <= _REPORT_S[1]:
        return None
    return Finding(
        check="report each step",
        level="note",
        found=f"A step takes {step_s:.2f} s, just the pace at which Ray Train takes reports: the loop may call "
        "ray.train.report each step, which is a barrier that waits for the controller's next look, every two seconds.",
        costs="Everything of a step that is shorter than two seconds.",
        mend="Give metrics to run.step({...}), which does not wait, and call ray.train.report once in some minutes, "
        "or not at all.",
    )


def _hang(view: RunView, now_s: float) -> Finding | None:
    report = view.report
    worst = max(
        ((a.buckets_s.get("detect", 0.0) + a.buckets_s.get("hang", 0.0)) / a.world for a in report.attempts),
        default=0.0,
    )
    if worst < _HEALTH_TIMEOUT_S:
        return None
    return Finding(
        check="health timeout",
        level="problem",
        found=f"A failure was noticed only after {_time(worst)}: Ray Train gives a worker that hangs ten minutes.",
        costs=f"{_hours(_seconds(view, Bucket.DETECT) + _seconds(view, Bucket.HANG))} accelerator-hours so far.",
        mend="RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=60 in the driver's environment, and a timeout for the process "
        "group that is not longer.",
    )


def _idle(view: RunView, now_s: float) -> Finding | None:
    share = _share(view, Bucket.IDLE_NODES)
    if share < 5 * _POINT:
        return None
    return Finding(
        check="idle nodes",
        level="note",
        found=f"The run had fewer workers than it asked for during {100 * share:.1f} % of its rank-seconds.",
        costs=f"{_hours(_seconds(view, Bucket.IDLE_NODES))} accelerator-hours that never came.",
        mend="Keep a spare node, or let the cluster's autoscaler replace lost ones; ray-goodput plan --spares says "
        "whether one pays.",
    )


def _unknown(view: RunView, now_s: float) -> Finding | None:
    report = view.report
    total = report.target_world * report.wall_s
    share = report.uncertainty_s / total if total > 0 else 0.0
    if share < _POINT:
        return None
    return Finding(
        check="journals",
        level="note",
        found=f"{100 * share:.1f} % of the rank-seconds cannot be placed for sure: journals did not reach the ledger.",
        costs="Only the figures above are less certain.",
        mend="Usually a node that was lost for good took its journals along; if none was, look for warnings of the "
        "recorder in the workers' logs (a full local disk).",
    )


def _share(view: RunView, bucket: Bucket) -> float:
    total = sum(view.report.buckets_s.values())
    return _seconds(view, bucket) / total if total > 0 else 0.0


def _seconds(view: RunView, bucket: Bucket) -> float:
    return view.report.buckets_s.get(bucket.label, 0.0)


def _hours(rank_seconds: float) -> str:
    return f"{rank_seconds / 3600:.2f}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
