"""A worker that saves by itself dies (SIGKILL) before one of its storage calls: a whole `rg.Checkpointer`, which
uploads, commits and prunes without anybody else."""

from __future__ import annotations

import faulthandler
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fault.crash_points import NEVER, SERVER, dying, resume_point, train
from fault.save_process import build, digest
from ray_goodput.config import CheckpointConfig, StoreSpec


def worker_life(spec: StoreSpec, node: Path, call: int, out: Path) -> None:
    """Restore, train a step, save it and close, with `rg.Checkpointer`; `out` says what was restored and, at last, that
    the save is committed."""
    from ray_goodput.train import checkpointer

    faulthandler.dump_traceback_later(40)
    torch.set_num_threads(1)
    store = dying(spec, call)
    setattr(checkpointer, "open_store", lambda _: store)  # noqa: B010 (a type checker would see a wrong type)
    model, optimizer = build()
    config = CheckpointConfig(every=NEVER, keep_last=1, staging_dir=str(node / "slots"))
    with checkpointer.Checkpointer(spec.uri, config=config, local_dir=node) as saves:
        at = saves.restore(model=model, optimizer=optimizer)
        restored = digest(model)
        train(model, optimizer, at + 1)
        saves.save(at + 1)
    out.write_text(json.dumps({"at": at, "weights": restored, "end": digest(model), "calls": len(store.calls)}))


def run_worker(spec: StoreSpec, node: Path, call: int, out: Path) -> dict[str, Any] | None:
    """What it said, None if it died."""
    process = SERVER.Process(target=worker_life, args=(spec, node, call, out), daemon=True)
    process.start()
    process.join(60)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode in (0, -signal.SIGKILL), f"{out.name}: {process.exitcode}"
    return json.loads(out.read_text()) if process.exitcode == 0 else None


def strike_worker(spec: StoreSpec, root: Path, call: int, weights: dict[int, str]) -> int | None:
    """A worker with one commit behind it dies before a call of its second life; a third life goes on. The step that was
    resumed from, None if there was no such call."""
    where = f"worker, call {call}"
    node = root / "node"
    first = run_worker(spec, node, NEVER, root / "first.json")
    assert first is not None
    weights |= {first["at"]: first["weights"], first["at"] + 1: first["end"]}
    second = run_worker(spec, node, call, root / "second.json")
    if second is not None:
        return None
    step, found = resume_point(spec)
    assert step in (1, 2), f"{where}: step {step} would be resumed from"
    third = run_worker(spec, node, NEVER, root / "third.json")
    assert third is not None, where
    assert third["at"] >= step, f"{where}: step {step} was committed, {third['at']} is resumed from"
    assert resume_point(spec) == (third["at"] + 1, third["end"]), f"{where}: the next save is not what is resumed from"
    for at, digest_found in ((step, found), (third["at"], third["weights"])):
        assert weights.setdefault(at, digest_found) == digest_found, f"{where}: not the weights of step {at}"
    return third["at"]


def all_worker_points(specs: Callable[[str], StoreSpec], root: Path) -> Iterator[int]:
    weights: dict[int, str] = {}
    call = 0
    while True:
        name = f"worker-{call}"
        (root / name).mkdir(parents=True)
        if strike_worker(specs(name), root / name, call, weights) is None:
            return
        yield call
        call += 1
