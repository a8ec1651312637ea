"""The dashboard and the alert rules: current, well-formed, about metrics that exist, and firing when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from ray_goodput.cli.grafana import DASHBOARD_FILE, RULES_FILE, dashboard_text, rules_text
from ray_goodput.goodput.alerts import ALERTS, rules
from ray_goodput.goodput.dashboard import dashboard
from ray_goodput.goodput.metrics import METRICS

MONITORING = Path(__file__).parents[2] / "cluster"
KNOWN = {m.series for m in METRICS.values()}
USED = re.compile(r"ray_goodput_[a-z_]+")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expressions() -> Iterator[str]:
    """All PromQL of the dashboard, with Grafana's variables filled in."""
    model = dashboard()
    targets = [target["expr"] for panel in model["panels"] for target in panel["targets"]]
    for expr in [*targets, *(a["expr"] for a in model["annotations"]["list"])]:
        yield expr.replace("$run_id", ".*").replace("$run", "llm")


def test_what_is_checked_in_is_what_the_code_makes() -> None:
    hint = "run: ray-goodput grafana install --dir cluster"
    assert (MONITORING / DASHBOARD_FILE).read_text() == dashboard_text(), hint
    assert (MONITORING / RULES_FILE).read_text() == rules_text(), hint


def test_every_expression_is_about_metrics_that_exist_and_every_metric_is_looked_at() -> None:
    shown = {name for expr in expressions() for name in USED.findall(expr)}
    watched = {name for alert in ALERTS for name in USED.findall(alert.expr)}
    assert shown <= KNOWN and watched <= KNOWN
    told_elsewhere = {
        f"ray_goodput_{n}" for n in ("attempt", "at_risk_rank_seconds", "uncertain_rank_seconds", "wall_seconds")
    }
    assert shown | watched | told_elsewhere == KNOWN


def test_the_rules_have_the_form_that_prometheus_reads() -> None:
    body: dict[str, Any] = yaml.safe_load(rules_text())
    assert body == rules() and list(body) == ["groups"]
    (group,) = body["groups"]
    assert set(group) == {"name", "rules"}
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Za-z]+", rule["alert"]) and re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_panels_do_not_overlap_and_fill_their_rows() -> None:
    panels = dashboard()["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [
        {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        for g in (p["gridPos"] for p in panels)
    ]
    assert all(not (a & b) for a, b in combinations(cells, 2))
    everything = set().union(*cells)
    assert {x for x, _ in everything} == set(range(24)) and len(everything) == 24 * (max(y for _, y in everything) + 1)
    assert json.loads(dashboard_text()) == dashboard()


def test_the_dashboard_has_what_grafana_needs_to_import_and_provision_it() -> None:
    model = dashboard()
    assert model["uid"] and len(model["uid"]) <= 40 and re.fullmatch(r"[A-Za-z0-9_-]+", model["uid"])
    assert model["title"] and isinstance(model["schemaVersion"], int) and model["schemaVersion"] >= 36
    assert "id" not in model, "an id belongs to one Grafana's database"
    source, *variables = model["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus"), "it works with any Prometheus there is"
    chosen = {"type": "prometheus", "uid": f"${source['name']}"}
    assert all(v["type"] == "query" and v["datasource"] == chosen and v["query"]["refId"] for v in variables)
    declared = {v["name"] for v in model["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in model["panels"] for t in p["targets"])))
    assert used <= declared
    for panel in model["panels"]:
        assert panel["type"] in ("stat", "timeseries") and panel["title"]
        assert {"x", "y", "w", "h"} == set(panel["gridPos"]) and panel["gridPos"]["w"] > 0
        assert all(t["datasource"] == chosen and t["expr"] for t in panel["targets"])
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in ("percentunit", "short", "s", "ops", "none"), panel["title"]
        steps = defaults.get("thresholds", {}).get("steps")
        assert steps is None or steps[0]["value"] is None, "Grafana wants a colour below the first bound"
    assert all(a["datasource"] == chosen for a in model["annotations"]["list"])


def test_a_change_of_size_is_no_crash_loop() -> None:
    [alert] = [alert for alert in ALERTS if alert.name == "GoodputCrashLoop"]
    assert "kind!='resized'" in alert.expr


@needs_promtool
def test_promtool_accepts_the_rules_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(MONITORING / RULES_FILE))
    recorded = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(expressions())]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(path))


LABELS = 'ray_train_run_name="llm",ray_train_run_id="1"'


def steady(name: str, first: float, growth: float, minutes: int, **labels: str) -> dict[str, str]:
    inner = ",".join([LABELS, *(f'{k}="{v}"' for k, v in labels.items())])
    return {"series": f"{name}{{{inner}}}", "values": f"{first:g}+{growth:g}x{minutes}"}


HEALTHY = [
    steady("ray_goodput_ranks", 8, 0, 90),
    steady("ray_goodput_target_ranks", 8, 0, 90),
    steady("ray_goodput_step", 0, 60, 90),
    steady("ray_goodput_checkpoint_age_seconds", 60, 0, 90),
    steady("ray_goodput_incidents_total", 0, 0, 90, kind="worker"),
    steady("ray_goodput_saves_skipped_total", 0, 0, 90),
    steady("ray_goodput_rank_seconds", 0, 450, 90, bucket="step"),
    steady("ray_goodput_rank_seconds", 0, 20, 90, bucket="data_wait"),
    steady("ray_goodput_rank_seconds", 0, 10, 90, bucket="ckpt_block"),
]
TROUBLE = {
    "GoodputNoProgress": [steady("ray_goodput_step", 500, 0, 90)],
    "GoodputNoWorkers": [steady("ray_goodput_ranks", 0, 0, 90)],
    "GoodputCheckpointTooOld": [steady("ray_goodput_checkpoint_age_seconds", 0, 60, 90)],
    "GoodputCrashLoop": [steady("ray_goodput_incidents_total", 0, 1, 90, kind="worker")],
    "GoodputLow": [steady("ray_goodput_rank_seconds", 0, 900, 90, bucket="restart")],
    "GoodputDataBound": [steady("ray_goodput_rank_seconds", 0, 90, 90, bucket="data_wait")],
    "GoodputSaveStall": [steady("ray_goodput_rank_seconds", 0, 30, 90, bucket="ckpt_block")],
    "GoodputSavesSkipped": [steady("ray_goodput_saves_skipped_total", 0, 1, 90)],
    "GoodputBelowTarget": [steady("ray_goodput_target_ranks", 16, 0, 90)],
}


@needs_promtool
def test_each_alert_fires_in_its_trouble_and_none_on_a_healthy_run(tmp_path: Path) -> None:
    assert set(TROUBLE) == {alert.name for alert in ALERTS}
    shutil.copy(MONITORING / RULES_FILE, tmp_path)
    cases: list[dict[str, Any]] = []
    for trouble, changed in {"": [], **TROUBLE}.items():
        replaced = {s["series"] for s in changed}
        series = [s for s in HEALTHY if s["series"] not in replaced] + changed
        # Fires or not, whatever labels and texts it has: ALERTS is a series that Prometheus makes.
        asked = [
            {
                "expr": f'count(ALERTS{{alertname="{a.name}", alertstate="firing"}}) or vector(0)',
                "eval_time": "85m",
                "exp_samples": [{"labels": "{}", "value": 1 if a.name == trouble else 0}],
            }
            for a in ALERTS
        ]
        cases.append({"interval": "1m", "input_series": series, "promql_expr_test": asked})
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": cases}))
    assert "SUCCESS" in promtool("test", "rules", str(path))


def test_the_command_writes_both_files_where_it_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["grafana", "install", "--dir", str(tmp_path / "new"), "--json"])
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert Path(body["dashboard"]).read_text() == dashboard_text() and Path(body["rules"]).read_text() == rules_text()
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(app, ["grafana", "install", "--dir", str(tmp_path / "file")])
    assert refused.exit_code == 1 and "cannot be written" in str(refused.exception)
