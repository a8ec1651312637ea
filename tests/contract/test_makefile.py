"""The Makefile does what the README and its own help say it does."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPICS = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "tests/bench").glob("bench_*.py"))

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands_of(target: str) -> list[str]:
    """What `make TARGET` would run once everything is set up, typed by hand, not under the make of the tests."""
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", target]
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS"}
    by_hand = {name: value for name, value in os.environ.items() if name not in outer}
    made = subprocess.run(command, cwd=ROOT, env=by_hand, capture_output=True, text=True, check=True, timeout=30)
    return made.stdout.splitlines()


@pytest.mark.parametrize("topic", TOPICS)
def test_each_benchmark_runs_by_its_target(topic: str) -> None:
    (command,) = commands_of(f"bench-{topic}")
    assert command.split() == [".venv/bin/python", f"tests/bench/bench_{topic}.py"]


def test_all_benchmarks_run_by_one_target() -> None:
    assert [re.findall(r"bench_(\w+)\.py", command) for command in commands_of("bench")[: len(TOPICS)]] == [
        [topic] for topic in TOPICS
    ]


def test_each_target_of_the_help_does_something() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) >= 12
    idle = [target for target in targets if target != "setup" and "Nothing to be done" in "".join(commands_of(target))]
    assert not idle
