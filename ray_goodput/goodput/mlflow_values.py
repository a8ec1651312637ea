"""What MLflow is told, as plain values: names it accepts, goodput as metrics, a configuration as params. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_goodput.core.buckets import Bucket
from ray_goodput.core.data_flow import DataCounts, figures
from ray_goodput.goodput.report import GoodputReport

RUN_KEY_TAG = "ray_goodput.run_key"
STEP_TAG = "ray_goodput.step"
ATTEMPT_TAG = "ray_goodput.attempt"
CHANGED_TAG = "ray_goodput.changed."

MAX_NAME = 250  # MLflow's own bound
_MAX_VALUE = 500
_MAX_PARAMS = 300
_RESERVED = frozenset({"goodput", "system", "train"})
_FORBIDDEN = re.compile(r"[^\w.\- :]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Metrics of one moment. goodput: they describe the run as a whole, so their step may never go back."""

    at_ms: int
    step: int
    values: Mapping[str, float]
    attempt: int = 0
    goodput: bool = False


def metric_name(name: str) -> str:
    """`name` as MLflow accepts it: letters, digits, `_`, `-`, `.`, `:`, space and `/`, no path that means another one.

    A name without a group gets `train/`; so does one in a group of ours.
    """
    clean = _clean(name)
    if "/" not in clean or clean.split("/")[0] in _RESERVED - {"train"}:
        clean = f"train/{clean}"
    return clean[:MAX_NAME].rstrip("/")


def training_points(attempt: int, step: int, at_s: float, values: Mapping[str, float]) -> Points:
    """The numbers given to `run.step`, with the attempt they come from as a metric of its own."""
    named = {metric_name(name): float(value) for name, value in values.items()}
    return Points(at_ms=int(at_s * 1000), step=step, values={**named, "train/attempt": float(attempt)}, attempt=attempt)


def goodput_points(report: GoodputReport, at_s: float, data: DataCounts | None = None) -> Points:
    """The report as metrics, and `data/...`. Step: the newest one ever done, so that a rollback does not take it back.

    `fetch_seconds`: seconds that a rank has waited for batches, averaged over the target world.
    """
    reached = [a.last_step for a in report.attempts if a.last_step is not None]
    values = {
        "goodput/overall": report.overall,
        "goodput/availability": report.availability,
        "goodput/runtime": report.runtime,
        "goodput/wall_seconds": report.wall_s,
        "goodput/committed_seconds": report.committed_s,
        "goodput/at_risk_seconds": report.at_risk_s,
        "goodput/uncertain_seconds": report.uncertainty_s,
        "goodput/attempts": float(len(report.attempts)),
        "goodput/incidents": float(len(report.incidents)),
        "goodput/failures": float(report.failures),
        "goodput/steps_lost": float(sum(i.steps_lost for i in report.incidents)),
        "goodput/ranks": float(report.attempts[-1].world if report.attempts else 0),
        "fetch_seconds": report.buckets_s.get(Bucket.DATA_WAIT.label, 0.0) / max(1, report.target_world),
    }
    if report.durable_step is not None:
        values["goodput/durable_step"] = float(report.durable_step)
    if data is not None:
        values |= {f"data/{name}": value for name, value in figures(data).items()}
    values |= {f"goodput/bucket_seconds/{bucket}": seconds for bucket, seconds in report.buckets_s.items()}
    return Points(
        at_ms=int(at_s * 1000),
        step=max([*reached, report.durable_step or 0]),
        values=values,
        attempt=report.attempts[-1].attempt if report.attempts else 0,
        goodput=True,
    )


def flat_params(values: Mapping[str, Any]) -> dict[str, str]:
    """A nested configuration as params: `{"a": {"b": 1}}` is `{"a.b": "1"}`. At most 300, each cut to 500 characters.

    What is neither text nor number nor a list of such shows as the name of its type.
    """
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if len(flat) >= _MAX_PARAMS:
            return
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        elif _is_plain(value):
            flat[_clean(prefix)[:MAX_NAME].rstrip("/")] = str(value)[:_MAX_VALUE]
        else:
            flat[_clean(prefix)[:MAX_NAME].rstrip("/")] = type(value).__name__

    walk("", values)
    return flat


def _clean(name: str) -> str:
    parts = [_FORBIDDEN.sub("_", part).strip() for part in str(name).split("/")]
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "unnamed"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, str | int | float | bool) or (isinstance(value, Mapping) and not value)
