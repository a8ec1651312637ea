"""Laws of folders that do not outlive who uses them."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_goodput.storage.scratch import Scratch, sweep

KILLED = """
import os, signal, sys
from pathlib import Path
from ray_goodput.storage.scratch import Scratch
scratch = Scratch.fresh(Path(sys.argv[1]), "save-")
(scratch.path / "half").write_bytes(b"x" * 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_one_and_what_others_use_stays(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=50)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("save-*")
    (tmp_path / "save-by-the-user").mkdir()
    with Scratch.fresh(tmp_path, "load-"):
        assert left.exists(), "it is of another family"
    with Scratch.fresh(tmp_path, "save-") as used, Scratch.fresh(tmp_path, "save-") as other:
        assert not left.exists() and used.path.is_dir() and other.path.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["save-by-the-user"]


def test_the_last_of_those_that_share_a_folder_removes_it(tmp_path: Path) -> None:
    first, second = Scratch(tmp_path / "load-1"), Scratch(tmp_path / "load-1")
    first.close()
    sweep(tmp_path, "load-")
    assert second.path.is_dir()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_locked_the_folder_goes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Scratch.fresh(tmp_path, "save-") as scratch:
        assert [path.name for path in tmp_path.iterdir()] == [scratch.path.name]
    assert list(tmp_path.iterdir()) == []
