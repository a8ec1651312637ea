"""`ray-goodput checkpoints verify|export|gc` on real checkpoints."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typer.testing import CliRunner, Result

import ray_goodput as rg
from ray_goodput.cli import checkpoint_gc, checkpoint_verify, checkpoints
from ray_goodput.cli.app import app
from ray_goodput.cli.checkpoint_export import export_checkpoint
from ray_goodput.cli.checkpoint_gc import collect_garbage
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId
from ray_goodput.errors import ConfigError, ObjectNotFoundError, StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_and_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path / "node"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_state(seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        bits = torch.randint(0, 2 if dtype == torch.bool else 60, (3, 5), generator=generator)
        model[str(dtype).removeprefix("torch.")] = bits.to(dtype)
    model |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}
    return {"model": model, "optimizer": {"state": {"w": torch.ones(2)}, "lr": 0.1}}


def write(run: Path, step: int, attempt: int = 1, state: dict[str, Any] | None = None) -> Path:
    folder = run / "checkpoints" / CheckpointId(step, attempt).folder
    dcp_save(state or make_state(step), storage_writer=rg.StorageWriter(folder))
    return folder


def unfinished(run: Path, step: int, attempt: int = 1, *, age_s: float = 7200.0) -> Path:
    folder = write(run, step, attempt)
    (folder / COMMIT_NAME).unlink()
    for path in folder.iterdir():
        at = path.stat().st_mtime - age_s
        os.utime(path, (at, at))
    return folder


def tensors_of(folder: Path) -> Path:
    """The one file of tensors of a checkpoint of one rank."""
    (path,) = folder.glob("__0_0-*.distcp")
    return path


def flip(path: Path, place: int = -800) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])


def body(*arguments: Any, code: int = 0) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_whole_checkpoints_verify_with_exit_code_0_and_damaged_ones_with_1(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert [one["state"] for one in body("verify", tmp_path)["checkpoints"]] == ["complete"] * 3
    flip(tensors_of(tmp_path / "checkpoints" / CheckpointId(2, 1).folder))
    found = body("verify", tmp_path, code=1)
    assert [(one["step"], one["state"]) for one in found["checkpoints"]] == [
        (3, "complete"), (2, "corrupt"), (1, "complete"),
    ]  # fmt: skip
    assert found["corrupt"] == 1 and "distcp has checksum" in found["checkpoints"][1]["problems"][0]
    text = call("verify", tmp_path)
    assert text.exit_code == 1 and "bytes were changed" in text.stdout
    assert body("verify", tmp_path, "--step", 3)["corrupt"] == 0


def test_verify_tells_damage_from_saves_that_have_not_ended(tmp_path: Path) -> None:
    write(tmp_path, 1)
    unfinished(tmp_path, 2)
    assert [one["state"] for one in body("verify", tmp_path)["checkpoints"]] == ["incomplete", "complete"]
    flip(write(tmp_path, 3) / COMMIT_NAME, 50)
    gone = tensors_of(write(tmp_path, 4))
    gone.unlink()
    found = body("verify", tmp_path, code=1)
    assert [one["state"] for one in found["checkpoints"]] == ["corrupt", "corrupt", "incomplete", "complete"]
    assert found["checkpoints"][0]["problems"] == [f"{gone.name} is missing."]


@pytest.mark.parametrize(("module", "command"), [(checkpoint_verify, "verify"), (checkpoints, "ls")])
def test_a_checkpoint_that_is_pruned_while_it_is_looked_at_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, command: str
) -> None:
    folder = write(tmp_path, 1)
    pruned: list[str] = []

    def prune(op: str, key: str, n: int) -> None:
        if op == "list" and not pruned:  # the record was read just now
            pruned.append(key)
            shutil.rmtree(folder)

    store = FaultyStore(LocalStore(tmp_path), before=prune)
    monkeypatch.setattr(module, "open_store", lambda spec: store)
    found = body(command, tmp_path)
    assert pruned and [one["state"] for one in found["checkpoints"]] == ["incomplete"]


def test_verify_takes_the_folder_of_one_checkpoint(tmp_path: Path) -> None:
    found = body("verify", write(tmp_path, 7))
    assert [(one["step"], one["folder"], one["state"]) for one in found["checkpoints"]] == [(7, ".", "complete")]


@pytest.mark.parametrize("command", ["verify", "gc"])
def test_a_place_without_checkpoints_is_an_error(tmp_path: Path, command: str) -> None:
    result = call(command, tmp_path)
    assert result.exit_code == 1 and "no checkpoint" in str(result.exception)


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"} and (8 + length) % 8 == 0
    content = data[8 + length :]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(content)
    return {
        name: (e["dtype"], e["shape"], content[e["data_offsets"][0] : e["data_offsets"][1]])
        for name, e in header.items()
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_safetensors_hold_the_models_tensors_bit_for_bit(tmp_path: Path) -> None:
    state = make_state(2)
    write(tmp_path, 1)
    write(tmp_path, 2, state=state)
    told = body("export", tmp_path, tmp_path / "model.safetensors", "--to", "safetensors")
    found = read_safetensors(tmp_path / "model.safetensors")
    assert told["step"] == 2 and told["tensors"] == len(found)
    assert {name: (list(t.shape), raw(t)) for name, t in state["model"].items()} == {
        name: (shape, data) for name, (_, shape, data) in found.items()
    }
    assert found["bfloat16"][0] == "BF16" and found["float8_e4m3fn"][0] == "F8_E4M3"
    assert np.frombuffer(found["float64"][2]).shape == (15,)


def test_torch_exports_load_as_the_nested_state_without_code(tmp_path: Path) -> None:
    write(tmp_path, 5)
    body("export", tmp_path, tmp_path / "out" / "state.pt", "--to", "torch")
    state = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    assert state["optimizer"]["lr"] == 0.1 and torch.equal(state["optimizer"]["state"]["w"], torch.ones(2))
    assert {name: raw(t) for name, t in state["model"].items()} == {
        name: raw(t) for name, t in make_state(5)["model"].items()
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["state.pt"]


def test_dcp_exports_are_folders_that_stock_torch_loads(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 4)
    assert body("export", tmp_path, tmp_path / "plain", "--to", "dcp", "--step", 3)["step"] == 3
    state = make_state(9)
    dcp_load(state, checkpoint_id=tmp_path / "plain")
    assert {name: raw(t) for name, t in state["model"].items()} == {
        name: raw(t) for name, t in make_state(3)["model"].items()
    }
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {".metadata", tensors_of(tmp_path / "plain").name}


def test_a_damaged_checkpoint_is_not_exported_and_nothing_is_left(tmp_path: Path) -> None:
    flip(tensors_of(write(tmp_path, 3)))
    result = call("export", tmp_path, tmp_path / "out" / "x", "--to", "torch")
    assert result.exit_code == 1 and "damaged" in str(result.exception)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "x").write_text("mine")
    result = call("export", tmp_path, tmp_path / "x", "--to", "torch")
    assert result.exit_code == 1 and "exists already" in str(result.exception)
    assert call("export", tmp_path, "s3://bucket/x", "--to", "torch").exit_code == 1
    assert call("export", tmp_path, tmp_path / "y", "--to", "onnx").exit_code == 2
    assert (tmp_path / "x").read_text() == "mine"


def remaining(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir() if any(p.iterdir()))


def test_gc_removes_unfinished_saves_that_nobody_can_finish_any_more(tmp_path: Path) -> None:
    old, young = unfinished(tmp_path, 1), unfinished(tmp_path, 2, age_s=60)
    write(tmp_path, 3)
    newer = unfinished(tmp_path, 4)
    before = remaining(tmp_path)
    dry = body("gc", tmp_path, "--dry-run")
    assert dry["dry_run"] and remaining(tmp_path) == before
    assert [one["folder"] for one in dry["removed"]] == [f"checkpoints/{old.name}"]
    done = body("gc", tmp_path)
    assert done["removed"] == dry["removed"] and done["freed_bytes"] > 0
    assert remaining(tmp_path) == [young.name, CheckpointId(3, 1).folder, newer.name]
    assert "0 folder(s)" in call("gc", tmp_path).stdout


def test_gc_applies_retention_only_when_asked_and_never_to_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step)
    damaged = write(tmp_path, 25)
    tensors_of(damaged).unlink()
    assert body("gc", tmp_path)["removed"] == []
    body("gc", tmp_path, "--keep-last", 1, "--keep-every", 10)
    assert remaining(tmp_path) == [CheckpointId(step, 1).folder for step in (10, 20, 25)]


class Died(BaseException):
    """The process is gone: nothing that catches errors of ours may catch it."""


def test_a_gc_that_dies_at_any_call_harms_nothing_that_stays_and_the_next_one_ends_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tmp_path / "original"
    kept = write(original, 9).name
    for step in (1, 2):
        write(original, step)
    unfinished(original, 3)
    tried = 0
    for at in itertools.count():
        run = tmp_path / str(at)
        shutil.copytree(original, run)

        def die(op: str, key: str, n: int, at: int = at) -> None:
            if n == at:
                raise Died

        died = False
        with monkeypatch.context() as patch:
            store = FaultyStore(LocalStore(run), before=die)
            patch.setattr(checkpoint_gc, "open_store", lambda spec, store=store: store)
            try:
                collect_garbage(StoreSpec(uri=str(run)), dry_run=False, keep_last=1, older_than_s=0.0)
            except Died:
                died = True
        assert rg.latest_complete(run, verify=True) == str(run / "checkpoints" / kept)
        assert body("verify", run)["corrupt"] == 0, "what is half removed is no checkpoint"
        collect_garbage(StoreSpec(uri=str(run)), dry_run=False, keep_last=1, older_than_s=0.0)
        assert [path.name for path in (run / "checkpoints").iterdir()] == [kept]
        if not died:
            break
        tried += 1
    print(f"calls of gc at which it died: {tried}")
    assert tried >= 20


KILLED_EXPORT = """
import os, signal, sys
from ray_goodput.cli.checkpoint_export import export_checkpoint
from ray_goodput.config import StoreSpec

def die(size):
    os.kill(os.getpid(), signal.SIGKILL)

export_checkpoint(StoreSpec(uri=sys.argv[1]), sys.argv[2], to=sys.argv[3], on_bytes=die)
"""


def test_an_export_that_is_killed_leaves_no_target_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    write(tmp_path / "run", 1)
    target = tmp_path / "out" / "state.pt"
    command = [sys.executable, "-c", KILLED_EXPORT, str(tmp_path / "run"), str(target), "torch"]
    assert subprocess.run(command, timeout=50).returncode == -signal.SIGKILL
    assert list(target.parent.glob(".export-*")) and not target.exists()
    body("export", tmp_path / "run", target, "--to", "torch")
    assert [path.name for path in target.parent.iterdir()] == ["state.pt"]
    assert torch.equal(torch.load(target, weights_only=True)["model"]["int8"], make_state(1)["model"]["int8"])


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_without_room_is_one_sentence_and_leaves_nothing(tmp_path: Path, to: str) -> None:
    write(tmp_path / "run", 1, state={"model": {"big": torch.zeros(50_000)}})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as a full disk
    try:
        result = call("export", tmp_path / "run", tmp_path / "out" / "x", "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(result.exception, StorageError), result.exception
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_an_export_replaces_nothing_that_came_meanwhile(tmp_path: Path, to: str) -> None:
    write(tmp_path / "run", 1)
    target = tmp_path / "x"

    def come(size: int) -> None:
        target.write_text("precious")

    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(StoreSpec(uri=str(tmp_path / "run")), str(target), to=to, on_bytes=come)
    assert target.read_text() == "precious" and not list(tmp_path.glob(".*export-*"))
    below = call("export", tmp_path / "run", target / "y", "--to", to)
    assert isinstance(below.exception, StorageError) and "cannot be made a folder" in str(below.exception)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert call("export", tmp_path / "run", tmp_path / "link", "--to", to).exit_code == 1


def test_an_export_of_one_folder_does_not_take_another_step_than_it_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 1)
    result = call("export", folder, tmp_path / "x", "--to", "torch", "--step", "2")
    assert isinstance(result.exception, ObjectNotFoundError) and "of step 2" in str(result.exception)
    assert body("export", folder, tmp_path / "x", "--to", "torch", "--step", "1")["step"] == 1
