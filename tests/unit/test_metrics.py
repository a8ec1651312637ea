"""What Prometheus is told: names as the field writes them, bounded labels, the report's own values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from journal_pages import page, steps
from ray_goodput.actors import metrics_export
from ray_goodput.actors.metrics_export import MetricsExporter
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.budget import FailureKind
from ray_goodput.core.data_flow import PARTS, DataCounts
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.metrics import METRICS, RunFigures, samples


def figures(*, incidents: int = 1, commits: int = 3) -> RunFigures:
    ledger = Ledger(2)
    ledger.run_started(0)
    for attempt in range(1, incidents + 2):
        at = 100.0 * attempt
        ledger.attempt_started(attempt, 2, at)
        for rank in (0, 1):
            ledger.rank_hello(attempt, rank, at)
            ledger.page(page(attempt, rank, steps(1, 9, 10), closed=True), at + 90)
        ledger.resumed(attempt, 0)
        if attempt <= incidents:
            ledger.attempt_ended(attempt, at + 90, "worker", ranks=[1])
    return RunFigures(
        report=ledger.report(at=1000),
        attempt=incidents + 1,
        ranks=2,
        step=9,
        committed_step=5,
        commits=commits,
        saves_skipped=0,
        commit_age_s=12.0,
        data=DataCounts(
            batches=9, waited_s=2.0, elapsed_s=10.0, network_s=3.0, decode_s=1.0, refused=4, lost=1, requests=50
        ),
    )


def test_names_have_base_units_and_no_name_is_used_twice() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"goodput_[a-z_]+", metric.name) and metric.name.endswith("_total") == (
            metric.kind == "counter"
        )
        assert metric.text.endswith(".")
        assert not re.search(r"_(ms|minutes|hours|percent|s)$", metric.name)
    assert len({m.series for m in METRICS.values()}) == len(METRICS)


def test_every_metric_has_a_value_and_labels_are_bounded() -> None:
    found = list(samples(figures(incidents=30)))
    assert {s.metric.name for s in found} == set(METRICS)
    assert {s.label for s in found} <= {
        "",
        "driver",
        "resized",
        *(b.label for b in Bucket),
        *(k.value for k in FailureKind),
        *PARTS,
        *("wait", "store", "disk", "all", "retried", "refused"),
    }
    assert len({(s.metric.name, s.label) for s in found}) == len(found)


def test_the_values_are_the_reports_own() -> None:
    f = figures()
    found = {(s.metric.name, s.label): s.value for s in samples(f)}
    assert found["goodput_overall_ratio", ""] == f.report.overall
    assert found["goodput_incidents_total", "worker"] == 1 and found["goodput_steps_lost_total", ""] == 9
    assert found["goodput_incidents_total", "preemption"] == 0, "a series begins at 0, or its first growth is not seen"
    buckets = {label: value for (name, label), value in found.items() if name == "goodput_rank_seconds"}
    assert buckets == f.report.buckets_s
    assert sum(buckets.values()) == pytest.approx(f.report.target_world * f.report.wall_s + f.report.imbalance_s)


def test_the_data_planes_figures_are_told_once_a_rank_has_read_through_it() -> None:
    f = figures()
    found = {(s.metric.name, s.label): s.value for s in samples(f)}
    assert found["goodput_data_stall_ratio", ""] == 0.2
    assert found["goodput_data_seconds", "network"] == 3.0
    assert found["goodput_data_requests", "retried"] == 5 and found["goodput_data_requests", "refused"] == 4
    assert [part for part in PARTS if found["goodput_data_bottleneck", part]] == ["network"]
    without = {s.metric.name for s in samples(replace(f, data=None))}
    assert without and not any(name.startswith("goodput_data") for name in without)


class Recorded:
    """In place of Ray's gauge: what was set."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.tag_keys = tag_keys
        self.values: dict[tuple[str, ...], list[float]] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys), "Ray wants all declared tags"
        self.values.setdefault(tuple(tags.values()), []).append(value)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_export, "Gauge", Recorded)


def test_every_sample_is_told_with_the_runs_labels(recorded: None) -> None:
    now = [figures()]
    exporter = MetricsExporter("llm", lambda: now[0], lambda: "abc")
    exporter.export()
    now[0] = figures(commits=5)
    exporter.export()
    told: Any = exporter._gauges
    assert told["goodput_commits_total"].values == {("llm", "abc"): [3.0, 5.0]}
    assert told["goodput_incidents_total"].values["llm", "abc", "worker"] == [1.0, 1.0]
    assert all(m.values for m in told.values())


def test_nothing_is_told_before_ray_train_has_named_the_run(recorded: None) -> None:
    exporter = MetricsExporter("llm", figures)
    exporter.export()
    told: Any = exporter._gauges
    assert all(m.values == {} for m in told.values())
