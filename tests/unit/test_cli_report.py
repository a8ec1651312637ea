"""`ray-goodput report`: one run, four looks, the same figures; and one clear sentence for what it cannot read."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from ray_goodput.cli.report_page import render_page
from ray_goodput.cli.report_text import watch
from ray_goodput.config import StoreSpec
from ray_goodput.errors import ConfigError, GoodputError, ObjectNotFoundError, StorageError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.run_files import RunFiles, RunReader
from ray_goodput.goodput.run_view import MAX_SHOWN, RunView, commit_ages, view_run
from ray_goodput.storage import open_store
from scripted_run import HOSTILE, scripted_ledger, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "llm-1")


@pytest.fixture(scope="module")
def seen(run: Path) -> RunView:
    return view(run)


def reader(folder: Path) -> RunReader:
    return RunReader(open_store(StoreSpec(uri=str(folder))))


def view(folder: Path, price: float | None = None) -> RunView:
    return view_run(reader(folder).read(), cost_per_accelerator_hour=price)


def report(*args: object) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_all_looks_show_the_goodput_of_the_ledger(run: Path, tmp_path: Path) -> None:
    overall = scripted_ledger().report().overall
    page = tmp_path / "page.html"
    text = report(run, "--html", page)
    assert json.loads(report(run, "--json"))["overall"] == pytest.approx(overall, rel=1e-12)
    for look in (text, report(run, "--md"), page.read_text()):
        assert f"{overall:.1%}" in look


def test_json_has_the_reports_own_keys_and_more(run: Path) -> None:
    body = json.loads(report(run, "--json", "--cost-per-accelerator-hour", 2))
    own = scripted_ledger().report().to_dict()
    assert {name: body[name] for name in own}.keys() == own.keys()
    assert body["buckets_s"] == pytest.approx(own["buckets_s"])
    costs = [incident.pop("cost") for incident in body["incidents"]]
    assert body["incidents"] == own["incidents"]
    assert costs == [pytest.approx(incident["gpu_s"] / 3600 * 2) for incident in own["incidents"]]
    assert body["uri"].endswith("llm-1")
    assert body["checkpoints"]["saves"] == 29 and body["checkpoints"]["newest_step"] == 1500
    assert body["next"]["levers"][0]["gain"] > 0 and body["next"]["best_goodput"] >= body["next"]["goodput"]


def test_the_cost_is_that_of_all_rank_time(run: Path) -> None:
    seen = view(run, price=3.0)
    assert seen.cost is not None
    paid = seen.report.target_world * seen.report.wall_s / 3600 * 3.0
    assert seen.cost.total == pytest.approx(paid) == pytest.approx(seen.cost.useful + seen.cost.wasted)
    assert sum(seen.cost.by_bucket.values()) == pytest.approx(paid)
    assert f"{seen.cost.wasted:,.2f}" in render_page(seen)


def test_the_age_of_the_newest_commit_is_a_saw_over_the_runs_time(seen: RunView) -> None:
    corners = commit_ages(seen.commits, seen.timeline)
    assert len(corners) == 2 * len(seen.commits) + 2
    assert [at for at, _ in corners] == sorted(at for at, _ in corners)
    assert corners[0] == (0, 0) and corners[-1][0] == pytest.approx(seen.report.wall_s)
    # Attempt 1 saved step 550 and died before it had saved step 600: the longest time without a commit.
    assert seen.checkpoints.longest_age_s == pytest.approx(860, abs=60)


def test_a_driver_that_was_away_counts_no_time() -> None:
    ledger = Ledger(1)
    for start, step in ((1000.0, 5), (90_000.0, 9)):
        ledger.run_started(start)
        ledger.attempt_started(step, 1, start + 1)
        ledger.commit(step, step, start + 50)
        ledger.attempt_ended(step, start + 90, "stopped")
        ledger.run_ended(start + 100)
    lines = b"".join(s.data for s in ledger.to_segments()).splitlines()
    seen = view_run(RunFiles("r", lines, ()))
    assert seen.timeline.wall_s == seen.report.wall_s == 200
    assert seen.checkpoints.longest_age_s == 100
    assert "Time between two drivers is left out" in render_page(seen)


def test_a_text_with_markup_in_it_stays_a_text(run: Path, seen: RunView) -> None:
    html = render_page(seen)
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "[red]was[/red]" in report(run)
    (row,) = [line for line in report(run, "--md").splitlines() if "alert" in line]
    assert "<script" not in row and "\\| killed" in row
    assert HOSTILE in json.loads(report(run, "--json"))["incidents"][0]["reason"]


class Page(HTMLParser):
    """Every tag that is opened is closed; what would be fetched is noted."""

    VOID = frozenset({"meta", "link", "br", "path", "line", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.fetched += [v for k in ("src", "href") if (v := values.get(k)) and v != "data:,"]
        self.rows += tag == "svg" and values.get("class") == "row"
        if tag not in self.VOID or (tag == "path" and values.get("fill")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    assert page.open == []
    return page


def test_the_page_fetches_nothing_and_shows_every_rank(run: Path) -> None:
    html = render_page(view(run, price=2.5))
    page = parsed(html)
    assert page.fetched == [] and not re.search(r"https?://|@import|url\(|<script", html)
    assert page.rows == 12
    assert not re.search(r"\bnan\b|\binf\b", html)


def test_of_many_ranks_the_page_shows_some_and_those_that_were_lost(tmp_path: Path) -> None:
    html = render_page(view(write_run(tmp_path / "r", world=100)))
    page = parsed(html)
    assert page.rows == MAX_SHOWN and "68 more ranks are not drawn" in html
    assert 'title="lost in an incident">3<' in html
    assert len(html) < 500_000


def test_a_run_still_going_on_says_so_and_has_no_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", ended=False)
    seen = view(folder)
    assert not seen.report.finished
    for look in (report(folder), report(folder, "--md"), render_page(seen)):
        assert "still going on" in look


def test_a_ledger_alone_is_enough(run: Path, seen: RunView, tmp_path: Path) -> None:
    """A copy of the folder `ledger`, and a run whose metrics are damaged: the accounts are all there."""
    alone = view(run / "ledger")
    assert alone.report == seen.report and alone.metrics == ()
    assert parsed(render_page(alone)).rows == 12
    damaged = write_run(tmp_path / "r")
    (damaged / "metrics" / "attempt-0002.jsonl").write_text("{")
    rest = view(damaged)
    assert rest.report == seen.report and [m.attempt for m in rest.metrics] == [1, 3]


def test_a_run_that_has_only_begun_has_a_report() -> None:
    ledger = Ledger(4)
    ledger.run_started(1000)
    begun = view_run(RunFiles("r", b"".join(s.data for s in ledger.to_segments()).splitlines(), ()))
    assert begun.report.overall == 0 and begun.advice is None and begun.no_advice
    assert parsed(render_page(begun)).rows == 4
    ledger.attempt_started(1, 4, 1010)
    ledger.rank_hello(1, 0, 1020)
    begun = view_run(RunFiles("r", b"".join(s.data for s in ledger.to_segments()).splitlines(), ()))
    assert "no advice" in render_page(begun)


def test_a_metric_that_is_not_finite_is_marked(seen: RunView, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    path = folder / "metrics" / "attempt-0003.jsonl"
    lines = path.read_text().splitlines()
    half = len(lines) // 2
    lines[half:] = [re.sub(r'"loss":[0-9.e-]+', '"loss":null', line) for line in lines[half:]]
    path.write_text("\n".join(lines) + "\n")
    assert "not a number from here" in render_page(view(folder))
    assert "not a number from here" not in render_page(seen)


def spoiled(folder: Path, how: str) -> Path:
    """A run's folder with something wrong."""
    write_run(folder)
    second = folder / "ledger" / "ledger-00000001.jsonl"
    data = second.read_bytes()
    match how:
        case "missing":
            second.unlink()
        case "cut":
            second.write_bytes(data[: len(data) // 2])
        case "empty":
            second.write_bytes(b"")
        case "newer":
            second.write_bytes(data.replace(b'"version":3', b'"version":4', 1))
        case "garbled":
            second.write_bytes(data.replace(b'"event"', b"event", 1))
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["Segment 1 of the ledger is missing", "copy all of it"]),
        ("cut", ["ledger-00000001.jsonl is cut off", "copy that object again"]),
        ("empty", ["ledger-00000001.jsonl is cut off"]),
        ("newer", ["version 4", "use the release that wrote it"]),
        ("garbled", ["Line", "cannot be read"]),
    ],
)
def test_a_ledger_that_cannot_be_read_is_one_clear_error(tmp_path: Path, how: str, words: list[str]) -> None:
    with pytest.raises(StorageError) as caught:
        view(spoiled(tmp_path / "r", how))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_on_the_command_line_an_unknown_run_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ray_goodput.cli.app", "report", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        len(done.stderr.splitlines()) == 1 and "There is no ledger" in done.stderr and "STORAGE_PATH/RUN" in done.stderr
    )


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--json", "--md"], "Give one of"),
        (["--json", "--watch"], "Give one of"),
        (["--cost-per-accelerator-hour", "-1"], "cannot cost -1"),
        (["--cost-per-accelerator-hour", "nan"], "cannot cost nan"),
        (["--days", "0"], "cannot take 0 days"),
        (["--watch", "--interval", "0"], "--interval 0 is too short"),
        (["--watch", "--interval", "soon"], "'soon' is no duration"),
        (["--html", "/nonexistent/page.html"], "/nonexistent/page.html"),
    ],
)
def test_arguments_that_make_no_sense_are_one_clear_sentence(run: Path, args: list[str], word: str) -> None:
    with pytest.raises(GoodputError) as caught:
        CliRunner().invoke(app, ["report", str(run), *args], catch_exceptions=False)
    assert isinstance(caught.value, ConfigError) and word in str(caught.value)


def test_watching_shows_new_segments_until_the_run_ends(tmp_path: Path) -> None:
    from rich.console import Console

    whole, going_on = write_run(tmp_path / "whole"), tmp_path / "r"
    (going_on / "ledger").mkdir(parents=True)
    segments = sorted((whole / "ledger").iterdir())

    def arrive(_: float = 0.0) -> None:
        path = segments.pop(0)
        (going_on / "ledger" / path.name).write_bytes(path.read_bytes())

    arrive()
    source = reader(going_on)
    read_lines: list[int] = []

    def read() -> RunView:
        read_lines.append(len(source.read().lines))
        if len(read_lines) == 3:
            raise StorageError("The storage is away.")
        return view_run(source.read())

    out = io.StringIO()
    last = watch(read, Console(file=out, width=100, force_terminal=True), arrive, 0.1)
    assert last.report.finished and last.report == view(whole).report
    assert len(read_lines) == 6 and read_lines == sorted(set(read_lines))
    assert "The storage is away." in out.getvalue()


def test_watching_a_run_that_is_not_there_fails_at_once(tmp_path: Path) -> None:
    from rich.console import Console

    with pytest.raises(ObjectNotFoundError):
        watch(lambda: view(tmp_path), Console(file=io.StringIO()), lambda _: pytest.fail("waited"), 0.1)


def test_a_reader_fetches_a_segment_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(StoreSpec(uri=str(run)))
    fetched: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: (fetched.append(key), get(key))[1])
    source = RunReader(store)
    assert source.read().lines == source.read().lines
    assert sorted(k for k in fetched if k.startswith("ledger")) == [f"ledger/ledger-{i:08d}.jsonl" for i in range(6)]


def test_help_and_json_import_neither_torch_nor_ray_nor_mlflow(run: Path) -> None:
    script = (
        "import sys\nfrom ray_goodput.cli import app\n"
        f"sys.argv = ['ray-goodput', 'report', {str(run)!r}, '--json', '--html', '/dev/null']\n"
        "try:\n    app.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'ray', 'mlflow'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
