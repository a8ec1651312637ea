"""Runs the small job as a driver process on a Ray cluster that the tests started, and reads what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from books import assert_law
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.run_files import LEDGER_FOLDER, RunReader
from ray_goodput.storage import open_store
from ray_goodput.storage.protocol import ObjectStore
from ray_goodput.train.sample_log import SampleAudit, audit
from servers import JuiceFSGateway
from store_proxy import StoreProxy

SCRIPT = Path(__file__).with_name("small_job.py")
JOB_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A driver that ended: what it wrote and printed, and the folder of its workers' files."""

    code: int
    outcome: dict[str, Any]
    log: str
    store: ObjectStore
    pids: Path

    def audit(self) -> SampleAudit:
        return audit(self.store)


def on_s3(data: Path, prefix: str, gateway: JuiceFSGateway, proxy: StoreProxy) -> dict[str, Any]:
    """Options of a `Job` that has a copy of the files of `data`, and its storage, in the gateway, behind the proxy."""
    root = f"s3://{gateway.bucket}/{prefix}"
    store = open_store(StoreSpec(uri=f"{root}/data", options=gateway.storage_options))
    for file in sorted(data.glob("*.parquet")):
        store.put(file.name, file.read_bytes())
    return {"data": f"{root}/data", "storage": f"{root}/runs", "storage_options": proxy.options(gateway)}


class Job:
    """One driver process of the small job, or of another `script` that takes these options. However it ends, its books
    must balance (law G1)."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *arguments: str,
        address: str,
        data: str,
        storage: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        script: Path = SCRIPT,
        submit_to: str | None = None,
    ) -> None:
        """submit_to: address of a cluster's dashboard, where `ray job submit` runs the driver, as job `name`."""
        self.name = name
        self.spec = StoreSpec(uri=storage or str(folder / "storage"), options=storage_options or {}).child(name)
        self._out = folder / f"{name}-{time.monotonic_ns()}.json"
        self._log_path = self._out.with_suffix(".log")
        options = ["--storage-options", json.dumps(storage_options)] if storage_options else []
        command = [sys.executable, str(script), "--storage", storage or str(folder / "storage"), "--data", data]
        self._pids = Path(tempfile.mkdtemp(prefix="pids-", dir=folder))
        command += ["--name", name, "--out", str(self._out), *options]
        command += ["--pids", str(self._pids)] if script == SCRIPT else []
        self._brake = self._pids / "brake"
        self._brake.touch()
        for argument in arguments:
            command += [argument, str(self._brake)] if argument == "--brake" else [argument]
        if submit_to is not None:
            command = [*ray_job("submit", submit_to), "--submission-id", name, "--", *command]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "RAY_ADDRESS": address}
            )

    def wait(self, timeout_s: float = JOB_TIMEOUT_S) -> Finished:
        """The driver has ended; it is killed when it needs longer."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {timeout_s:.0f} s:\n{self.log[-6000:]}") from None
        outcome = json.loads(self._out.read_text()) if self._out.exists() else {}
        finished = Finished(code, outcome, self.log, open_store(self.spec), self._pids)
        assert_books_balance(finished)
        return finished

    def succeed(self, timeout_s: float = JOB_TIMEOUT_S) -> Finished:
        finished = self.wait(timeout_s)
        assert finished.code == 0, finished.log[-6000:]
        return finished

    def wait_for_commit(self, timeout_s: float = 120.0, *, attempt: int = 1) -> None:
        """At least one checkpoint of `attempt` or a later one is committed, seen from outside."""
        self._until(lambda: any(c.attempt >= attempt for c in self.commits()), "no commit", timeout_s)

    def commits(self) -> list[CheckpointId]:
        """What is committed, seen from outside."""
        keys = [info.key.split("/") for info in open_store(self.spec).list("checkpoints")]
        return [c for _, folder, name in keys if name == "COMMIT.json" and (c := CheckpointId.parse(folder))]

    def pid(self, attempt: int, world_rank: int, timeout_s: float = 120.0) -> int:
        """The process of a rank, once its state is restored."""
        path = self._pids / f"{attempt}-{world_rank}"
        self._until(lambda: path.exists() and path.read_text(), f"no rank {world_rank} in attempt {attempt}", timeout_s)
        return int(path.read_text())

    def _until(self, reached: Callable[[], Any], otherwise: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached():
            assert self.process.poll() is None, self.log[-6000:]
            if time.monotonic() > deadline:
                self.kill()  # else it holds the CPUs that the next test needs
                raise AssertionError(f"{otherwise} within {timeout_s:.0f} s:\n{self.log[-6000:]}")
            time.sleep(0.1)

    def release_brake(self) -> None:
        """From now on the steps of a job with `--brake` take no time."""
        self._brake.unlink()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")


def stop_job(address: str, name: str) -> None:
    """`ray job stop`, which returns when the driver has ended."""
    subprocess.run([*ray_job("stop", address), name], check=True, capture_output=True, timeout=120)


def ray_job(verb: str, address: str) -> list[str]:
    """The command `ray job VERB` for the dashboard at `address`, without what follows."""
    return [sys.executable, "-m", "ray.scripts.scripts", "job", verb, "--address", address]


def assert_nothing_lost(finished: Finished, steps: Mapping[int, tuple[int, ...]]) -> None:
    """Every sample of each epoch exactly once, and each step on the same samples as in `steps`."""
    found = finished.audit()
    assert (found.repeated, found.skipped) == (0, 0)
    assert found.steps == steps


def assert_books_balance(finished: Finished) -> None:
    """Law G1, of what the driver was given and of the ledger that anybody can read afterwards."""
    if goodput := finished.outcome.get("goodput"):
        assert_law(goodput)
    if any(finished.store.list(LEDGER_FOLDER)):
        assert_law(ledger_report(finished.store).to_dict())


def ledger_report(store: ObjectStore) -> GoodputReport:
    """The report of the ledger in a run's storage, as of its last event."""
    return Ledger.from_lines(RunReader(store).read().lines).report()
