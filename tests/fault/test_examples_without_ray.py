"""The examples that need no Ray, run as a user would: killed in the middle and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(example: str, tmp_path: Path, *arguments: str, processes: Literal[1, 2] = 1) -> subprocess.Popen[str]:
    environment = os.environ | {"RAY_GOODPUT_LOCAL_DIR": str(tmp_path / "local"), "OMP_NUM_THREADS": "1"}
    launcher = TORCHRUN if processes == 2 else [sys.executable]
    return subprocess.Popen(
        [*launcher, str(EXAMPLES / example), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    try:
        out, error = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, error
    return out.splitlines()


def committed(run: Path) -> list[int]:
    return [int(path.parent.name.split("-")[1]) for path in run.glob("checkpoints/*/COMMIT.json")]


@pytest.mark.timeout(240)
def test_a_killed_run_over_files_ends_as_if_it_had_not_been_and_goes_on_at_another_world_size(tmp_path: Path) -> None:
    common = ("--files", "400", "--every", "10")
    (_, undisturbed) = lines_of(
        start("train_torchrun.py", tmp_path, *common, "--epochs", "15", "--storage", f"{tmp_path}/a")
    )

    storage = f"{tmp_path}/b"
    endless = start("train_torchrun.py", tmp_path, *common, "--epochs", "100000", "--storage", storage)
    while not committed(Path(storage, "run")):
        assert endless.poll() is None
        time.sleep(0.005)
    os.killpg(endless.pid, signal.SIGKILL)
    endless.communicate()
    assert max(committed(Path(storage, "run"))) < 300  # else there was nothing left to go on with
    again = start("train_torchrun.py", tmp_path, *common, "--epochs", "15", "--storage", storage)
    resumed, result = lines_of(again)
    assert resumed.startswith("Going on after step")
    assert json.loads(result) == json.loads(undisturbed)

    two = start("train_torchrun.py", tmp_path, *common, "--epochs", "17", "--storage", storage, processes=2)
    resumed, result = lines_of(two)
    assert resumed == "Going on after step 300."
    assert json.loads(result)["step"] == 300 + 2 * 400 // (2 * 20)


@pytest.mark.timeout(120)
def test_plain_dcp_with_our_storage_classes_goes_on_from_the_newest_complete_folder(tmp_path: Path) -> None:
    storage = f"{tmp_path}/dcp"
    (first,) = lines_of(start("dcp_drop_in.py", tmp_path, "--storage", storage))
    assert first == f"Went on after step 0, trained to 50, newest: {storage}/step-0000000040"
    (Path(storage) / "step-0000000040" / "COMMIT.json").unlink()  # as if it had been killed while it saved
    (second,) = lines_of(start("dcp_drop_in.py", tmp_path, "--storage", storage, processes=2))
    assert second == f"Went on after step 20, trained to 70, newest: {storage}/step-0000000060"
