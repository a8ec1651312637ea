from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ray_goodput.cli.app import parse_options
from ray_goodput.cli.demo import DemoConfig
from ray_goodput.errors import ConfigError


def ray_goodput(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray_goodput.cli.app", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["checkpoints", "ls", "/nonexistent/run"], "/nonexistent/run"),
        (["checkpoints", "ls", "s3://b/r", "--storage-options", '{"secret": "hunter2"'], "not JSON"),
        (["demo", "--steps", "10"], "10 steps are too few"),
        (["demo", "--kill", "node", "--workers", "1"], "--workers 2"),
    ],
)
def test_an_error_of_ours_is_one_line_on_standard_error_and_exit_code_1(args: list[str], word: str) -> None:
    done = ray_goodput(*args)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert word in done.stderr
    assert "hunter2" not in done.stderr


def test_wrong_usage_is_exit_code_2() -> None:
    done = ray_goodput("demo", "--kill", "everything")
    assert (done.returncode, done.stdout) == (2, "")


def test_inside_only_ours_even_a_childs_output_goes_to_standard_error() -> None:
    script = """
import subprocess, sys
from ray_goodput.cli.stdout import only_ours
with only_ours() as out:
    print("library")
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    print("ours", file=out)
print("after")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.split() == ["ours", "after"]
    assert sorted(done.stderr.split()) == ["child", "library"]


def test_with_a_log_file_both_streams_of_the_others_go_there(tmp_path: Path) -> None:
    script = """
import subprocess, sys
from pathlib import Path
from ray_goodput.cli.stdout import only_ours
with only_ours(Path(sys.argv[1])) as out:
    subprocess.run([sys.executable, "-c", "import sys; print('child'); print('moan', file=sys.stderr)"], check=True)
    print("ours", file=out)
print("after", file=sys.stderr)
"""
    log = tmp_path / "new" / "log"
    done = subprocess.run([sys.executable, "-c", script, log], capture_output=True, text=True, check=True, timeout=50)
    assert (done.stdout.split(), done.stderr.split()) == (["ours"], ["after"])
    assert sorted(log.read_text().split()) == ["child", "moan"]


def test_storage_options_are_a_json_object() -> None:
    assert parse_options(None) == {}
    assert parse_options('{"endpoint_url": "http://h"}') == {"endpoint_url": "http://h"}
    with pytest.raises(ConfigError, match="JSON object"):
        parse_options("[1]")


def test_a_run_without_a_kill_may_be_as_short_as_one_step() -> None:
    assert DemoConfig(kill="none", steps=1).every == 1
