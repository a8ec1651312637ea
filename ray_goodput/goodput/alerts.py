"""Alert rules for Prometheus, made from the metrics' own names so that a renamed metric cannot leave one silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_goodput.goodput.metrics import METRICS, RUN_LABELS

BY_RUN = f"by ({', '.join(RUN_LABELS)})"
_RUN = "{{ $labels.ray_train_run_name }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. held: how long it must be true. what: the first line a person reads; mend: what to do about it."""

    name: str
    expr: str
    held: str
    severity: str
    what: str
    mend: str


def series(name: str) -> str:
    """A metric's name in Prometheus; a KeyError here is a rule about a metric that does not exist."""
    return METRICS[name].series


def share(bucket: str, window: str) -> str:
    """Share of the rank-seconds of the last `window` that went into `bucket`, per run."""
    seconds = series("goodput_rank_seconds")
    return f'sum {BY_RUN} (delta({seconds}{{bucket="{bucket}"}}[{window}])) / sum {BY_RUN} (delta({seconds}[{window}]))'


def _max(name: str) -> str:
    # A coordinator that was restarted is a second series of the same run for a while.
    return f"max {BY_RUN} ({series(name)})"


ALERTS = (
    Alert(
        name="GoodputNoProgress",
        expr=f"max {BY_RUN} (delta({series('goodput_step')}[10m])) <= 0 and {_max('goodput_ranks')} > 0",
        held="5m",
        severity="critical",
        what=f"{_RUN} has workers and has done no step for 15 minutes",
        mend="Look at the workers' stacks (py-spy dump) and at the run's newest log lines.",
    ),
    Alert(
        name="GoodputNoWorkers",
        expr=f"{_max('goodput_ranks')} == 0",
        held="10m",
        severity="critical",
        what=f"{_RUN} has had no workers for 10 minutes",
        mend="Are there nodes for it? `ray status` says what is asked for and what is there.",
    ),
    Alert(
        name="GoodputCheckpointTooOld",
        expr=f"{_max('goodput_checkpoint_age_seconds')} > 3600",
        held="5m",
        severity="critical",
        what=f"{_RUN} would lose {{{{ $value | humanizeDuration }}}} of work at a failure now",
        mend="Look for upload errors in the logs of the CheckpointVault actors; ray-goodput doctor --run tries the "
        "storage.",
    ),
    Alert(
        name="GoodputCrashLoop",
        expr=f"sum {BY_RUN} (increase({series('goodput_incidents_total')}{{kind!='resized'}}[1h])) > 3",
        held="0m",
        severity="warning",
        what=f"{_RUN} was interrupted {{{{ $value | humanize }}}} times within an hour",
        mend="ray-goodput report names the rank and the reason of each incident.",
    ),
    Alert(
        name="GoodputLow",
        expr=f"{share('step', '30m')} < 0.8",
        held="15m",
        severity="warning",
        what=f"{_RUN} spent only {{{{ $value | humanizePercentage }}}} of the last half hour in steps that survive",
        mend="ray-goodput report shows where the rest went, and what to change next.",
    ),
    Alert(
        name="GoodputDataBound",
        expr=f"{share('data_wait', '15m')} > 0.15",
        held="10m",
        severity="warning",
        what=f"{_RUN} waits for data {{{{ $value | humanizePercentage }}}} of the time",
        mend="A cache that holds the data set, on NVMe; more prefetch_shards; less decoding in the training process.",
    ),
    Alert(
        name="GoodputSaveStall",
        expr=f"{share('ckpt_block', '30m')} > 0.05",
        held="10m",
        severity="warning",
        what=f"Saves stop {_RUN} for {{{{ $value | humanizePercentage }}}} of the time",
        mend='A larger /dev/shm, when_full="skip", or CheckpointConfig(every="auto").',
    ),
    Alert(
        name="GoodputSavesSkipped",
        expr=f"sum {BY_RUN} (increase({series('goodput_saves_skipped_total')}[30m])) > 3",
        held="0m",
        severity="warning",
        what=f"{_RUN} skipped {{{{ $value | humanize }}}} saves in half an hour: uploads are slower than the interval",
        mend="Look at the storage's bandwidth and errors, or save less often.",
    ),
    Alert(
        name="GoodputBelowTarget",
        expr=f"{_max('goodput_ranks')} < {_max('goodput_target_ranks')} and {_max('goodput_ranks')} > 0",
        held="30m",
        severity="warning",
        what=f"{_RUN} has run with fewer workers than it asks for, for half an hour",
        mend="A node is missing: `ray status`, and the cluster's autoscaler.",
    ),
)


def rules() -> dict[str, Any]:
    """The content of a Prometheus rule file."""
    return {
        "groups": [
            {
                "name": "ray_goodput",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.held,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.what, "description": alert.mend},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
