"""`rg.StorageWriter` and `rg.StorageReader` under plain `dcp.save`, `dcp.async_save` and `dcp.load`."""

from __future__ import annotations

import argparse
import pickle
import resource
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ray_goodput as rg
from ray_goodput.checkpoint import folders
from ray_goodput.core.commit import COMMIT_NAME
from ray_goodput.errors import CheckpointError, ConfigError, CorruptCheckpointError, ObjectNotFoundError, StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore
from servers import JuiceFSGateway


@pytest.fixture(autouse=True)
def no_warnings_about_a_single_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def local_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path / "node"))
    return tmp_path / "node"


def make_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": seed, "names": ["a", {"b": seed}]}


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for key in state for leaf in flat(state[key])]
    if isinstance(state, list | tuple):
        return [leaf for item in state for leaf in flat(item)]
    return [state]


def same(one: Any, other: Any) -> bool:
    pairs = zip(flat(one), flat(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def save(state: dict[str, Any], uri: Any, **options: Any) -> None:
    dcp_save(state, storage_writer=rg.StorageWriter(uri, **options))


def load(uri: Any, **options: Any) -> dict[str, Any]:
    state = make_state(99)
    dcp_load(state, storage_reader=rg.StorageReader(uri, **options))
    return state


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond that: what a full disk is to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cause(raised: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    (wrapped,) = raised.value.failures.values()
    return wrapped[0]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def tensors_of(folder: Path) -> Path:
    """The one file of tensors of a checkpoint of one rank."""
    (path,) = folder.glob("__0_0-*.distcp")
    return path


def test_what_was_saved_is_loaded_by_our_reader_and_by_the_stock_one(tmp_path: Path, local_dir: Path) -> None:
    state = make_state(3)
    save(state, tmp_path / "step-3")
    assert same(load(tmp_path / "step-3"), state)
    stock = make_state(98)
    dcp_load(stock, checkpoint_id=tmp_path / "step-3")
    assert same(stock, state)
    assert list(local_dir.rglob("*.distcp")) == []


def test_an_asynchronous_save_keeps_the_values_it_was_given(tmp_path: Path) -> None:
    state = make_state(1)
    before = {name: tensor.clone() for name, tensor in state["model"].items()}
    future: Any = async_save(state, storage_writer=rg.StorageWriter(tmp_path / "step-1"))
    for tensor in state["model"].values():
        tensor.zero_()
    future.result()
    assert same(load(tmp_path / "step-1")["model"], before)


def test_a_writer_may_be_sent_to_the_process_that_saves(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(rg.StorageWriter(tmp_path / "c")))
    dcp_save(make_state(4), storage_writer=writer)
    assert same(load(tmp_path / "c"), make_state(4))


def test_the_checkpoint_id_of_dcp_says_where(tmp_path: Path) -> None:
    state = make_state(2)
    dcp_save(state, checkpoint_id=tmp_path / "b", storage_writer=rg.StorageWriter(tmp_path / "a"))
    again = make_state(99)
    dcp_load(again, checkpoint_id=str(tmp_path / "b"), storage_reader=rg.StorageReader(tmp_path / "a"))
    assert same(again, state) and not (tmp_path / "a").exists()


def test_through_a_real_s3_server_each_load_cleans_up_after_itself(
    juicefs_gateway: JuiceFSGateway, local_dir: Path
) -> None:
    root, options = f"{juicefs_gateway.uri}/dcp", juicefs_gateway.storage_options
    state = make_state(5)
    save(state, f"{root}/step-5", storage_options=options)
    assert same(load(f"{root}/step-5", storage_options=options), state)
    assert [path for path in local_dir.rglob("*") if path.is_file()] == []
    assert rg.latest_complete(root, storage_options=options, verify=True) == f"{root}/step-5"


def test_a_reader_may_be_used_again_after_the_folder_changed(tmp_path: Path) -> None:
    save(make_state(1), tmp_path / "last")
    reader = rg.StorageReader(tmp_path / "last")
    for seed in (1, 2):
        save(make_state(seed), tmp_path / "last", overwrite=True)
        state = make_state(99)
        dcp_load(state, storage_reader=reader)
        assert same(state, make_state(seed))


def test_a_flipped_byte_is_found_before_any_tensor_changes(tmp_path: Path) -> None:
    save(make_state(1), tmp_path / "c")
    flip(tensors_of(tmp_path / "c"), -700)
    state, before = make_state(99), make_state(99)
    with pytest.raises(CheckpointException) as raised:
        dcp_load(state, storage_reader=rg.StorageReader(tmp_path / "c"))
    assert isinstance(cause(raised), CorruptCheckpointError)
    assert same(state, before)


def test_a_folder_without_a_commit_is_no_checkpoint(tmp_path: Path) -> None:
    save(make_state(1), tmp_path / "c")
    (tmp_path / "c" / COMMIT_NAME).unlink()
    with pytest.raises(CheckpointException, match="no complete checkpoint"):
        load(tmp_path / "c")
    with pytest.raises(ObjectNotFoundError, match="latest_complete"):
        rg.StorageReader(tmp_path / "c").read_metadata()


def test_a_complete_checkpoint_is_overwritten_only_when_asked_to(tmp_path: Path) -> None:
    save(make_state(1), tmp_path / "c")
    with pytest.raises(CheckpointException) as raised:
        save(make_state(2), tmp_path / "c")
    assert isinstance(cause(raised), CheckpointError) and "overwrite=True" in str(cause(raised))
    assert same(load(tmp_path / "c"), make_state(1))
    save(make_state(2), tmp_path / "c", overwrite=True)
    assert same(load(tmp_path / "c"), make_state(2))


@pytest.mark.parametrize("where", ["upload_file", "metadata", "commit"])
def test_a_save_that_fails_anywhere_leaves_no_checkpoint_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_dir: Path, where: str
) -> None:
    with monkeypatch.context() as patch:
        create = LocalStore.create

        def refuse(self: LocalStore, key: str, *args: Any, **kwargs: Any) -> bool:
            if where == "upload_file" or key == {"metadata": ".metadata", "commit": COMMIT_NAME}[where]:
                raise ConfigError("refused")
            return create(self, key, *args, **kwargs)

        patch.setattr(LocalStore, "upload_file" if where == "upload_file" else "create", refuse)
        with pytest.raises(CheckpointException):
            save(make_state(1), tmp_path / "c" / "step-1")
    assert rg.latest_complete(tmp_path / "c") is None
    assert list(local_dir.rglob("*save-*")) == []
    save(make_state(2), tmp_path / "c" / "step-1")
    assert same(load(tmp_path / "c" / "step-1"), make_state(2))


@pytest.mark.parametrize("first_to_finish", ["the earlier", "the later"])
def test_of_two_saves_into_one_folder_at_once_the_later_is_whole_and_the_earlier_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_to_finish: str
) -> None:
    finish = rg.StorageWriter.finish
    ready: list[Any] = []

    def told() -> None:
        writer, args = ready[0]
        with pytest.raises(CheckpointError, match="Another process saved"):
            finish(writer, **args)

    def finish_in_turn(self: Any, **args: Any) -> None:
        ready.append((self, args))
        if len(ready) == 1:  # all its objects are written: now the later save begins, and ends
            save(make_state(2), tmp_path / "c")
        elif first_to_finish == "the earlier":
            told()
        if len(ready) == 2 and self is ready[1][0]:
            return finish(self, **args)
        if first_to_finish == "the later":
            told()
        return None

    monkeypatch.setattr(rg.StorageWriter, "finish", finish_in_turn)
    save(make_state(1), tmp_path / "c")
    assert rg.latest_complete(tmp_path, verify=True) == f"{tmp_path}/c"
    assert same(load(tmp_path / "c"), make_state(2))
    assert len(list((tmp_path / "c").iterdir())) == 3, "what the earlier one wrote is gone"


def test_a_disk_that_is_full_is_one_sentence_and_leaves_nothing(tmp_path: Path, local_dir: Path) -> None:
    with file_size_limit(20_000), pytest.raises(CheckpointException) as raised:
        save({"big": torch.zeros(100_000)}, tmp_path / "c")
    message = str(cause(raised))
    assert isinstance(cause(raised), StorageError) and "\n" not in message
    assert all(part in message for part in (str(local_dir), "MiB are free", "RAY_GOODPUT_LOCAL_DIR"))
    assert rg.latest_complete(tmp_path) is None and list(local_dir.rglob("*save-*")) == []
    save(make_state(1), tmp_path / "c")
    assert same(load(tmp_path / "c"), make_state(1))


def test_a_storage_that_goes_away_while_it_is_verified_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(make_state(step), tmp_path / f"step-{step}")
    ill: dict[str, str] = {}

    def strike(op: str, key: str, n: int) -> None:
        if op in ill and ill[op] in key:
            raise StorageError("503 Slow down")

    store = FaultyStore(LocalStore(tmp_path), before=strike)
    monkeypatch.setattr(folders, "open_store", lambda spec: store)
    ill |= {"get_range": "", "head": ""}
    with pytest.raises(StorageError, match="503"):
        rg.latest_complete(tmp_path, verify=True)  # not the older one, and not None: that would start from scratch
    del ill["head"]
    ill["get_range"] = "step-2"  # that object alone cannot be read
    assert rg.latest_complete(tmp_path, verify=True) == f"{tmp_path}/step-1"
    assert "step-2 is passed over" in caplog.text and "cannot be read: 503" in caplog.text
    ill["get_range"] = ""
    with pytest.raises(StorageError, match=r"no whole checkpoint, and 4 object\(s\).*503"):
        rg.latest_complete(tmp_path, verify=True)


def test_an_object_that_is_pruned_between_a_failed_read_and_the_look_for_it_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(make_state(step), tmp_path / f"step-{step}")

    def strike(op: str, key: str, n: int) -> None:
        if op == "get_range" and "step-2" in key:
            shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
            raise StorageError("503 Slow down")

    monkeypatch.setattr(folders, "open_store", lambda spec: FaultyStore(LocalStore(tmp_path), before=strike))
    assert rg.latest_complete(tmp_path, verify=True) == f"{tmp_path}/step-1"


def test_checkpoints_that_a_living_run_prunes_meanwhile_are_passed_over_for_its_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_state(1), tmp_path / "step-1")
    moved: list[str] = []

    def go_on(op: str, key: str, n: int) -> None:
        if op == "get_range" and not moved:  # its bytes are being read
            moved.append(key)
            save(make_state(2), tmp_path / "step-2")
            shutil.rmtree(tmp_path / "step-1")

    store = FaultyStore(LocalStore(tmp_path), before=go_on)
    monkeypatch.setattr(folders, "open_store", lambda spec: store)
    assert rg.latest_complete(tmp_path, verify=True) == f"{tmp_path}/step-2"


def test_objects_that_would_run_code_are_refused_when_saved_unless_trusted(tmp_path: Path) -> None:
    state = {"args": argparse.Namespace(lr=3)}
    with pytest.raises(CheckpointException) as raised:
        save(state, tmp_path / "c")
    assert "args could not be loaded again" in str(cause(raised))
    save(state, tmp_path / "c", weights_only=False)
    again: dict[str, Any] = {"args": argparse.Namespace(lr=0)}
    with pytest.raises(CheckpointException) as raised:
        dcp_load(again, storage_reader=rg.StorageReader(tmp_path / "c"))
    assert isinstance(cause(raised), CorruptCheckpointError)
    dcp_load(again, storage_reader=rg.StorageReader(tmp_path / "c", weights_only=False))
    assert again["args"].lr == 3


def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_collectives=True"):
        dcp_save(make_state(1), storage_writer=rg.StorageWriter(tmp_path / "c"), use_collectives=False)


def test_the_newest_complete_checkpoint_is_found_whatever_the_folders_are_called(tmp_path: Path) -> None:
    assert rg.latest_complete(tmp_path) is None
    for name in ("2026-11-30", "2026-12-01", "2026-12-02"):
        save(make_state(1), tmp_path / name)
    tensors_of(tmp_path / "2026-12-02").unlink()
    (tmp_path / "2026-12-03").mkdir()
    flip(tensors_of(tmp_path / "2026-12-01"), 100)
    assert rg.latest_complete(tmp_path) == f"{tmp_path}/2026-12-01"
    assert rg.latest_complete(str(tmp_path), verify=True) == f"{tmp_path}/2026-11-30"


def test_a_file_url_with_letters_that_urls_escape_leads_back_to_its_folder(tmp_path: Path) -> None:
    save(make_state(1), tmp_path / "100%25 done")
    found = rg.latest_complete(tmp_path.as_uri())
    assert found is not None and same(load(found), make_state(1))


def test_the_folders_of_a_run_are_ordered_by_step_and_attempt(tmp_path: Path) -> None:
    for name in ("step-0000000010-2", "step-0000000010-1", "step-0000000009-3"):
        save(make_state(1), tmp_path / "checkpoints" / name)
    assert rg.latest_complete(tmp_path) == f"{tmp_path}/checkpoints/step-0000000010-2"


def test_a_run_with_a_record_that_cannot_be_read_falls_back(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        save(make_state(1), tmp_path / name)
    flip(tmp_path / "step-2" / COMMIT_NAME, 40)
    assert rg.latest_complete(tmp_path) == f"{tmp_path}/step-1"
