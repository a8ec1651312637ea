"""The Grafana dashboard of a run, as code. It needs a Prometheus data source that scrapes the Ray cluster."""

from __future__ import annotations

from typing import Any

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.alerts import BY_RUN, series
from ray_goodput.goodput.metrics import RUN_LABELS

UID = "ray-goodput"
_WIDTH = 24
_SELECT = '{ray_train_run_name=~"$run", ray_train_run_id=~"$run_id"}'
_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_COLOURS = {
    Bucket.STEP: "green",
    Bucket.LOST: "dark-red",
    Bucket.DATA_WAIT: "orange",
    Bucket.CKPT_BLOCK: "purple",
    Bucket.RESTART: "red",
    Bucket.DETECT: "light-red",
    Bucket.HANG: "semi-dark-red",
    Bucket.STARTUP: "blue",
    Bucket.CKPT_LOAD: "light-purple",
    Bucket.IDLE_NODES: "text",
}


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON model. Same input (none), same output, so that a checked-in copy can be compared."""
    rows = (
        (
            4,
            (
                _stat("Goodput", _now("goodput_overall_ratio"), "percentunit", steps=(0.8, 0.95)),
                _stat(
                    "Availability (no rank missing)",
                    _now("goodput_availability_ratio"),
                    "percentunit",
                    steps=(0.9, 0.99),
                ),
                _stat("Ranks", _now("goodput_ranks"), "short"),
                _stat("Step", _now("goodput_step"), "short"),
                _stat("Age of the newest commit", _now("goodput_checkpoint_age_seconds"), "s", worst=(1800, 3600)),
                _stat("Interruptions", _total("goodput_incidents_total"), "short", worst=(1, 5)),
            ),
        ),
        (
            9,
            (
                _buckets("Where the last 10 minutes went", "10m"),
                _graph(
                    "Goodput since the run began",
                    "percentunit",
                    ("overall", _now("goodput_overall_ratio")),
                    ("availability", _now("goodput_availability_ratio")),
                    ("runtime", _now("goodput_runtime_ratio")),
                ),
            ),
        ),
        (
            8,
            (
                _graph("Steps", "short", ("step", _now("goodput_step")), ("durable", _now("goodput_durable_step"))),
                _graph("Steps a second", "short", ("steps/s", f"clamp_min({_change('goodput_step', '2m')} / 120, 0)")),
                _graph("Age of the newest commit", "s", ("age", _now("goodput_checkpoint_age_seconds"))),
                _graph("Slowest rank, times the usual one", "short", ("x", _now("goodput_slowest_rank_ratio"))),
            ),
        ),
        (
            8,
            (
                _graph(
                    "Ranks", "short", ("running", _now("goodput_ranks")), ("asked for", _now("goodput_target_ranks"))
                ),
                _graph(
                    "Interruptions and lost steps in an hour",
                    "short",
                    ("{{kind}}", f"sum by (kind) (increase({series('goodput_incidents_total')}{_SELECT}[1h]))"),
                    ("lost steps", f"sum(increase({series('goodput_steps_lost_total')}{_SELECT}[1h]))"),
                ),
                _graph(
                    "Saves in an hour",
                    "short",
                    ("durable", f"sum(increase({series('goodput_commits_total')}{_SELECT}[1h]))"),
                    ("skipped", f"sum(increase({series('goodput_saves_skipped_total')}{_SELECT}[1h]))"),
                ),
            ),
        ),
        (
            8,
            (
                _graph(
                    "Data: waiting, cached, ready",
                    "percentunit",
                    ("waiting for data", _now("goodput_data_stall_ratio")),
                    ("shards cached when needed", _now("goodput_data_hit_ratio")),
                    ("batches ready", _now("goodput_data_queue_ratio")),
                ),
                _graph("Data: what holds training up", "short", ("{{part}}", _by("part", "goodput_data_bottleneck"))),
                _graph("Data: seconds on the way to batches", "s", ("{{part}}", _by("part", "goodput_data_seconds"))),
                _graph(
                    "Data: bytes and requests",
                    "short",
                    ("bytes from {{source}}", _by("source", "goodput_data_bytes")),
                    ("requests: {{kind}}", _by("kind", "goodput_data_requests")),
                ),
            ),
        ),
    )
    panels: list[dict[str, Any]] = []
    y = 0
    for height, row in rows:
        width = _WIDTH // len(row)
        for i, panel in enumerate(row):
            place = {"h": height, "w": width, "x": i * width, "y": y}
            panels.append({"id": len(panels) + 1, "gridPos": place, "datasource": _SOURCE, **panel})
        y += height
    return {
        "uid": UID,
        "title": "Ray goodput",
        "tags": ["ray", "ray_goodput"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": [_annotation()]},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    known = series("goodput_overall_ratio")
    asked = (
        ("run", "Run", f"label_values({known}, ray_train_run_name)"),
        ("run_id", "Driver", f'label_values({known}{{ray_train_run_name=~"$run"}}, ray_train_run_id)'),
    )
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [source] + [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 2,
            "includeAll": name == "run_id",
            "allValue": ".*",
            "multi": name == "run_id",
        }
        for name, label, query in asked
    ]


def _annotation() -> dict[str, Any]:
    return {
        "name": "Interruptions",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f"sum by (kind) (increase({series('goodput_incidents_total')}{_SELECT}[1m])) > 0",
        "titleFormat": "{{kind}}",
        "step": "60s",
    }


def _now(name: str) -> str:
    return f"max {BY_RUN} ({series(name)}{_SELECT})"


def _total(name: str) -> str:
    return f"sum {BY_RUN} ({series(name)}{_SELECT}) or vector(0)"


def _by(label: str, name: str) -> str:
    """The newest values of a gauge with a label of its own."""
    return f"max by ({', '.join((*RUN_LABELS, label))}) ({series(name)}{_SELECT})"


def _change(name: str, window: str) -> str:
    return f"max {BY_RUN} (delta({series(name)}{_SELECT}[{window}]))"


def _target(expr: str, legend: str, number: int) -> dict[str, Any]:
    return {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend, "datasource": _SOURCE}


def _thresholds(good_above: tuple[float, float] | None, bad_above: tuple[float, float] | None) -> dict[str, Any]:
    if good_above is not None:
        colours, bounds = ("red", "orange", "green"), good_above
    elif bad_above is not None:
        colours, bounds = ("green", "orange", "red"), bad_above
    else:
        return {"mode": "absolute", "steps": [{"color": "blue", "value": None}]}
    values = (None, *bounds)
    return {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in zip(colours, values, strict=True)]}


def _stat(
    title: str,
    expr: str,
    unit: str,
    *,
    steps: tuple[float, float] | None = None,
    worst: tuple[float, float] | None = None,
) -> dict[str, Any]:
    return {
        "type": "stat",
        "title": title,
        "targets": [_target(expr, "", 0)],
        "fieldConfig": {"defaults": {"unit": unit, "thresholds": _thresholds(steps, worst)}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"},
    }


def _graph(title: str, unit: str, *lines: tuple[str, str]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "targets": [_target(expr, legend, i) for i, (legend, expr) in enumerate(lines)],
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 2}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _buckets(title: str, window: str) -> dict[str, Any]:
    seconds = series("goodput_rank_seconds")
    grown = f"clamp_min(sum by (bucket) (delta({seconds}{_SELECT}[{window}])), 0)"
    panel = _graph(title, "percentunit", ("{{bucket}}", f"{grown} / scalar(sum(delta({seconds}{_SELECT}[{window}])))"))
    custom = {"fillOpacity": 70, "lineWidth": 0, "stacking": {"mode": "normal", "group": "A"}}
    panel["fieldConfig"] = {
        "defaults": {"unit": "percentunit", "min": 0, "max": 1, "custom": custom},
        "overrides": [
            {
                "matcher": {"id": "byName", "options": bucket.label},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
            }
            for bucket, colour in _COLOURS.items()
        ],
    }
    return panel
