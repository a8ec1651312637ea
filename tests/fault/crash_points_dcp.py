"""A process that saves by plain `dcp.save` through `rg.StorageWriter` dies (SIGKILL) before one of its storage calls:
`rg.latest_complete` finds the save before or the whole new one, and the same save can be done again.

Tried twice: into a new folder, and over a complete checkpoint (`overwrite=True`), which then holds the old one, the new
one, or none.
"""

from __future__ import annotations

import faulthandler
import itertools
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ray_goodput as rg
from fault.crash_points import dying, start_process
from ray_goodput.checkpoint import writer
from ray_goodput.config import StoreSpec


def state_of(value: int) -> dict[str, Any]:
    return {"weight": torch.full((33, 7), float(value)), "steps": value, "names": ["a", "b"]}


def save(spec: StoreSpec, folder: str, value: int, local: Path, *, overwrite: bool = False) -> None:
    uri, options = f"{spec.uri}/{folder}", {"storage_options": spec.options, "local_dir": local}
    dcp_save(state_of(value), storage_writer=rg.StorageWriter(uri, overwrite=overwrite, **options), no_dist=True)


def newest(spec: StoreSpec, local: Path) -> tuple[str, int]:
    """Folder and value of the newest complete checkpoint, all bytes verified and loaded."""
    uri = rg.latest_complete(spec.uri, storage_options=spec.options, verify=True)
    assert uri is not None, "no complete checkpoint is left"
    state = state_of(0)
    reader = rg.StorageReader(uri, storage_options=spec.options, local_dir=local)
    dcp_load(state, storage_reader=reader, no_dist=True)
    value = state["steps"]
    assert torch.equal(state["weight"], state_of(value)["weight"]), "the state is mixed from two saves"
    return uri.rpartition("/")[2], value


def save_life(spec: StoreSpec, folder: str, value: int, local: Path, overwrite: bool, call: int, pipe: Any) -> None:
    faulthandler.dump_traceback_later(40)
    warnings.simplefilter("ignore")  # that it is a single process
    torch.set_num_threads(1)
    store = dying(replace(spec, uri=f"{spec.uri}/{folder}"), call)
    setattr(writer, "open_store", lambda _: store)  # noqa: B010 (a type checker would see a wrong type)
    save(spec, folder, value, local, overwrite=overwrite)
    pipe.send("end")


def strike_save(spec: StoreSpec, local: Path, call: int, *, overwrite: bool) -> bool:
    """False if the save has no such call. Raises AssertionError if anything is wrong."""
    where = f"dcp.save{' over a checkpoint' if overwrite else ''}, call {call}"
    old, new = "step-0000000001", "step-0000000002"
    save(spec, old, 1, local)
    if overwrite:
        save(spec, new, 2, local)
    process, pipe = start_process(save_life, spec, new, 3, local, overwrite, call)
    try:
        died = pipe.recv() != "end"
    except EOFError:
        died = True
    process.join(20)
    assert process.exitcode == (-signal.SIGKILL if died else 0), f"{where}: {process.exitcode}"
    found = newest(spec, local)
    allowed = {(old, 1), (new, 3)} | ({(new, 2)} if overwrite else set())
    assert found in allowed, f"{where}: {found} is resumed from"
    if found != (new, 3):
        save(spec, new, 3, local, overwrite=overwrite)
    assert newest(spec, local) == (new, 3), f"{where}: the same save, done again, is not what is resumed from"
    return died


def dcp_points(specs: Callable[[str], StoreSpec], root: Path) -> Iterator[int]:
    """Every call of both saves, one after the other."""
    for overwrite in (False, True):
        for call in itertools.count():
            if not strike_save(specs(f"dcp-{overwrite}-{call}"), root / "dcp", call, overwrite=overwrite):
                break
            yield call
