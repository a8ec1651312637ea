"""The pages of `report` and `plan` in a real browser: nothing is fetched, nothing complains, nothing sticks out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_goodput.cli.app import app
from scripted_run import write_run

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine (apt-get install chromium)"),
    pytest.mark.timeout(180),
]
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
]
NOTHING = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:\">"
)
MEASURE = """<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll") && !e.closest("svg") &&
    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80));
  const small = [...document.querySelectorAll("main *")].filter(e => e.textContent.trim() &&
    parseFloat(getComputedStyle(e).fontSize) < 10).map(e => e.outerHTML.slice(0, 80));
  parent.postMessage(JSON.stringify({
    width: innerWidth, scroll: document.documentElement.scrollWidth, wide, small,
    rows: document.querySelectorAll("svg.row").length, charts: document.querySelectorAll("svg.chart").length}), "*");
});
</script>"""


def browse(page: Path, width: int, *, out: Path | None = None) -> tuple[str, list[str]]:
    """The page's DOM after it has loaded, and what it wrote to the console; with `out` a picture goes there."""
    assert BROWSER
    size, profile = f"--window-size={width},2400", page.parent / f"profile-{width}"
    what = ["--dump-dom"] if out is None else [f"--screenshot={out}"]
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", size, *what, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def measured(page: Path, width: int) -> dict[str, object]:
    """What a script finds that is put into a copy of the page, and what the browser complains of when the page may
    fetch nothing at all."""
    html = re.sub("<meta http-equiv[^>]*>", "", page.read_text()).replace("<head>", f"<head>{NOTHING}")
    copy, frame = page.with_name("measured.html"), page.with_name("frame.html")
    copy.write_text(html.replace("</head>", f"{MEASURE}</head>"))
    # In a frame, since a browser's window is never narrower than 500 pixels.
    frame.write_text(
        "<!doctype html><title></title><script>addEventListener('message', e => { document.title = e.data })</script>"
        f'<iframe src="{copy.name}" style="border: 0; width: {width}px; height: 2000px"></iframe>'
    )
    dom, console = browse(frame, width + 100)
    title = re.search("<title>(.*?)</title>", dom)
    assert title
    return json.loads(unescape(title[1])) | {"console": console}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    run, html = write_run(folder / "run"), folder / "report.html"
    done = CliRunner().invoke(app, ["report", str(run), "--html", str(html), "--cost-per-accelerator-hour", "2.5"])
    assert done.exit_code == 0, done.output
    return html


def test_the_browser_tells_when_a_page_complains_or_fetches(page: Path) -> None:
    """The control: what the other tests look for can be seen."""
    bad = page.with_name("bad.html")
    body = '<img src="bad.html"><p class="wide" style="width: 3000px; font-size: 4px">x</p>'
    bad.write_text(page.read_text().replace("<main>", f"<main>{body}"))
    assert any("Content Security Policy" in line for line in browse(bad, 1280)[1])
    seen = measured(bad, 1280)
    assert seen["console"] and seen["wide"] and seen["small"]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_fetches_nothing_complains_of_nothing_and_fits(page: Path, width: int, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    assert browse(page, width, out=picture)[1] == []
    assert picture.stat().st_size > 20_000
    found = measured(page, width)
    assert (found.pop("rows"), found.pop("charts")) == (12, 4)
    assert found == {"width": width, "scroll": width, "wide": [], "small": [], "console": []}


@pytest.mark.parametrize("width", [1280, 390])
def test_the_plan_fetches_nothing_complains_of_nothing_and_fits(width: int, tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    job = ["--gpus", "1024", "--afr", "0.01", "--stall", "9", "--latency", "120", "--restart", "600"]
    assert CliRunner().invoke(app, ["plan", *job, "--html", str(html)]).exit_code == 0
    found = measured(html, width)
    assert (found["scroll"], found["wide"], found["console"]) == (width, [], [])
