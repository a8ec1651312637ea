"""`ray-goodput plan` as a user meets it: text, JSON, the page, a run's ledger, refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ray_goodput.cli import charts
from ray_goodput.cli.app import app
from ray_goodput.cli.options import seconds
from ray_goodput.cli.plan_page import render_page
from ray_goodput.cli.plan_text import duration, render_plan
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.reliability import Tier
from ray_goodput.errors import ConfigError, GoodputError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.plan_inputs import PlanInputs
from ray_goodput.goodput.planner import make_plan
from ray_goodput.goodput.simulator import simulate

JOB = ["--gpus", "1024", "--days", "30", "--afr", "0.01", "--stall", "9", "--latency", "120", "--restart", "600"]


def run(*args: str) -> str:
    """Standard output of `ray-goodput plan ARGS`; an error of ours is raised as it is."""
    result = CliRunner().invoke(app, ["plan", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_example_of_the_documentation_answers_every_question() -> None:
    text = run(*JOB, "--interval", "30min", "--cost-per-gpu-hour", "2")
    for word in (
        "57.1%",
        "0.846 expected, 0 to 3",
        "2.06 h",
        "Young",
        "tiers",
        "next",
        "linear rule",
        "7,373",
        "14,746",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 160


def test_json_is_one_object_with_the_plan_and_the_simulation() -> None:
    body = json.loads(run(*JOB, "--json", "--simulate", "--seed", "3", "--runs", "50"))
    assert body["interrupted"] == pytest.approx(0.570821, rel=1e-5)
    assert body["simulation"]["seed"] == 3
    assert json.loads(run(*JOB, "--json"))["simulation"] is None


def test_the_seed_decides_the_simulation() -> None:
    args = [*JOB, "--interval", "1h", "--simulate", "--runs", "50", "--json", "--seed"]
    first, again, other = (json.loads(run(*args, seed))["simulation"]["goodput"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_one_command_reproduces_the_published_table() -> None:
    text = run("--published")
    for row in (
        "19%     19.1%",
        "57%     57.1%",
        "36 h    36.1 h",
        "64%     64.2%     68.4%",
        "91%     91.0%     91.3%",
    ):
        assert row in text
    assert len(json.loads(run("--published", "--json"))["published"]) == 5


def test_three_ways_to_say_how_often_it_fails_agree() -> None:
    by_mtbf = json.loads(run("--gpus", "16384", "--mtbf", "2.79h", "--stall", "9", "--json"))
    rate = str(by_mtbf["inputs"]["failures_per_gpu_year"])
    by_rate = json.loads(run("--gpus", "16384", "--failures-per-gpu-year", rate, "--stall", "9", "--json"))
    assert by_rate["chosen"] == by_mtbf["chosen"]
    assert by_mtbf["mtbf_s"] == pytest.approx(10044.0)


def test_tiers_are_read_in_order_with_durations() -> None:
    tiers = ["--tier", "0.7,60,0.5,0,60", "--tier", "0.25,5min,1,20,180", "--tier", "0.05,30min,9,120,600"]
    body = json.loads(run("--gpus", "1", "--mtbf", "10046.512", *tiers, "--json"))
    assert body["tiers"]["goodput"] == pytest.approx(0.960291, rel=1e-5)


def test_shrink_or_wait_is_decided_when_the_wait_is_known() -> None:
    args = ["--gpus", "64", "--afr", "0.1", "--lost", "8", "--resize", "120", "--replacement"]
    assert "pays after 4.57 min; they are back after 5 min: shrink" in run(*args, "5min")
    assert ": wait" in run(*args, "4min")


def test_a_trace_is_replayed_from_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("3600\n7200,0,node\n")
    args = ["--gpus", "8", "--days", "0.25", "--interval", "10min", "--trace", str(trace), "--spares", "0"]
    body = json.loads(run(*args, "--repair", "1h", "--json"))
    assert body["simulation"]["failures"] == 2
    assert body["simulation"]["waiting"] == pytest.approx(1 / 6)
    assert body["mtbf_s"] == pytest.approx(3 * 3600)


def test_a_run_is_planned_from_the_ledger_in_its_folder(tmp_path: Path) -> None:
    ledger = a_small_run()
    folder = tmp_path / "run" / "ledger"
    folder.mkdir(parents=True)
    for segment in ledger.to_segments():
        (folder / segment.name).write_bytes(segment.data)
    args = ["--from-run", str(tmp_path / "run"), "--stall", "1", "--latency", "5"]
    with pytest.raises(GoodputError, match=r"too short to plan from: it has 300 s and 2 saves.*--restart"):
        run(*args)
    args += ["--restart", "30"]
    body = json.loads(run(*args, "--json"))
    assert body["inputs"]["gpus"] == 2
    assert body["inputs"]["evidence"]["failures"] == 1
    assert body["measured"]["goodput"] == ledger.report().overall
    text = run(*args)
    assert "1 failure in" in text
    assert "(measured)" in text
    assert json.loads(run(*args, "--gpus", "64", "--json"))["inputs"]["gpus"] == 64


def a_small_run() -> Ledger:
    from journal_pages import page, steps

    ledger = Ledger(2)
    ledger.run_started(0)
    for attempt, start in ((1, 0.0), (2, 200.0)):
        ledger.attempt_started(attempt, 2, start)
        ledger.resumed(attempt, 5 * (attempt - 1))
        for rank in range(2):
            ledger.rank_hello(attempt, rank, start)
            script = [(Bucket.STARTUP, 20.0, -1, False), *steps(5 * attempt - 4, 5 * attempt, 10.0)]
            ledger.page(page(attempt, rank, script, closed=True))
        ledger.commit(5 * attempt, attempt, start + 75.0)
        ledger.attempt_ended(attempt, start + 100.0, "failed" if attempt == 1 else "finished")
    ledger.run_ended(300.0)
    return ledger


def test_a_folder_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(GoodputError, match="no ledger"):
        run("--from-run", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"format":"ray_goodput.ledger","version":1,"segment":0,"target_world":2}\n{"event":"comm\n', "Line 2"),
        ('{"format":"ray_goodput.ledger","version":1,"segment":0,"target_world":2}\n{"event":"comm', "cut off"),
        ('{"format":"ray_goodput.ledger","version":9,"segment":0,"target_world":2}\n', "version 9"),
        ('{"format":"ray_goodput.ledger","version":1,"segment":3,"target_world":2}\n', "Segment 0"),
    ],
)
def test_a_ledger_that_is_cut_newer_or_has_a_hole_is_refused_in_one_sentence(
    tmp_path: Path, content: str, word: str
) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "ledger-00000000.jsonl").write_text(content)
    with pytest.raises(GoodputError, match=word):
        run("--from-run", str(tmp_path))


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "--gpus"),
        (["--gpus", "8"], "--afr"),
        (["--gpus", "8", "--afr", "0.01", "--mtbf", "3h"], "one of"),
        (["--gpus", "-1", "--afr", "0.01"], "-1"),
        (["--gpus", "8", "--afr", "7.6"], "--failures-per-gpu-year"),
        (["--gpus", "8", "--mtbf", "0"], "above 0"),
        (["--gpus", "8", "--afr", "0.01", "--stall", "-9"], "stall"),
        (["--gpus", "8", "--afr", "0.01", "--stall", "soon"], "'soon'"),
        (["--gpus", "8", "--afr", "0.01", "--interval", "0"], "interval"),
        (["--gpus", "8", "--afr", "0.01", "--days", "0"], "days"),
        (["--gpus", "8", "--afr", "0.01", "--tier", "1,2"], "2 parts"),
        (["--gpus", "8", "--afr", "0.01", "--tier", "0.5,60,1,1,1"], "add up to 1"),
        (["--gpus", "8", "--afr", "0.01", "--trace", "/nonexistent"], "/nonexistent"),
        (["--gpus", "200000", "--afr", "0.01", "--simulate"], "100,000"),
        (["--gpus", "8", "--afr", "0.01", "--simulate", "--runs", "1"], "runs"),
        (["--gpus", "8", "--afr", "0.01", "--html", "/nonexistent/page.html"], "/nonexistent/page.html"),
        (["--from-run", ""], "empty"),
    ],
)
def test_absurd_options_are_refused_in_one_line(args: list[str], word: str) -> None:
    with pytest.raises(GoodputError) as caught:
        run(*args)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_imports_neither_torch_nor_ray_nor_numpy() -> None:
    code = (
        "import sys; sys.argv = ['ray-goodput', 'plan', '--help']\n"
        "from ray_goodput.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'numpy', 'pyarrow', 'jinja2'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert "--from-run" in done.stdout
    assert done.stderr.strip() == "[]"


def test_a_plan_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['ray-goodput', 'plan', '--simulate', '--html', '/dev/null', *{JOB!r}]\n"
        "from ray_goodput.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr.strip() == "[]"


class Links(HTMLParser):
    """Collects whatever a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "img", "object"):
            self.found.append(tag)
        self.found += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v and not v.startswith("data:")]


EDGES = {
    "usual": PlanInputs(gpus=1024, days=30, failures_per_gpu_year=0.01, stall_s=9, latency_s=120, restart_s=600),
    "with all": PlanInputs(
        gpus=16384,
        days=54,
        failures_per_gpu_year=0.19,
        failures_per_node_year=0.1,
        stall_s=9,
        latency_s=120,
        restart_s=600,
        interval_s=1800,
        replacement_s=1800,
        cost_per_gpu_hour=2.5,
        tiers=(
            Tier(share=0.7, interval_s=60, stall_s=0.5, latency_s=0, restart_s=60),
            Tier(share=0.3, interval_s=1800, stall_s=9, latency_s=120, restart_s=600),
        ),
    ),
    "almost never fails": PlanInputs(gpus=1, days=0.1, failures_per_gpu_year=1e-9),
    "never gets anywhere": PlanInputs(gpus=10_000_000, days=1, failures_per_gpu_year=1000, stall_s=600, restart_s=3600),
    "one long interval": PlanInputs(gpus=8, days=1, failures_per_gpu_year=1, interval_s=86400, latency_s=86400),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_page_is_self_contained_and_its_drawings_are_well_formed(name: str) -> None:
    plan = make_plan(EDGES[name])
    simulated = simulate(plan.simulation(runs=20)) if plan.inputs.gpus <= 100_000 else None
    html = render_page(plan, simulated)
    links = Links()
    links.feed(html)
    assert links.found == []
    assert not re.search(r"https?://|@import|url\(", html)
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) >= 6
    for drawing in drawings:
        for path in ElementTree.fromstring(drawing).iter("path"):
            assert path.get("d", "").startswith("M"), "a curve is not empty"
    numbers = [float(n) for d in drawings for n in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy)="([^"]*)"', d)]
    assert all(0 <= n <= 360 for n in numbers)
    assert "nan" not in html.replace("nance", "")
    assert len(render_plan(plan, simulated).splitlines()) > 10


def test_the_page_holds_the_plans_figures(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    text = run(*JOB, "--html", str(file))
    html = file.read_text()
    for figure in ("99.73%", "57.1%", "2.06 h"):
        assert figure in html
        assert figure in text


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.93, 1.0), (0.9999, 1.0), (1 - 1e-6, 1.0), (0.17, 1.0)])
def test_percent_ticks_are_few_and_told_apart(low: float, high: float) -> None:
    ticks = charts.percent_ticks(charts.Scale(low, high, charts.BOTTOM, charts.TOP))
    assert 2 <= len(ticks) <= 7
    assert len({text for _, text in ticks}) == len(ticks)


def test_a_curve_that_leaves_the_frame_has_a_gap_there() -> None:
    x, y = charts.Scale(0, 3, 0, 30), charts.Scale(0, 1, 10, 0)
    assert charts.path([(0, 0.5), (1, -1), (2, 0.5), (3, 1)], x, y) == "M0.0 5.0 M20.0 5.0 L30.0 0.0"


@pytest.mark.parametrize(
    ("text", "expected"), [("9", 9.0), ("0.5", 0.5), ("90s", 90.0), ("10min", 600.0), ("1.5h", 5400.0)]
)
def test_times_are_seconds_or_durations(text: str, expected: float) -> None:
    assert seconds("--stall", text) == expected


def test_a_text_that_is_no_time_is_refused_with_its_option() -> None:
    with pytest.raises(ConfigError, match="--stall 'soon'"):
        seconds("--stall", "soon")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (9, "9 s"), (119, "119 s"), (600, "10 min"), (7427, "2.06 h"), (3064263, "35.5 d")]
)
def test_durations_are_short(value: float, text: str) -> None:
    assert duration(value) == text
