"""Storage that fails in mid-run, with real processes: the gateway, a proxy in front of it, and a training process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_goodput.config import StoreSpec
from ray_goodput.storage import open_store
from servers import JuiceFSGateway
from store_proxy import Request, StoreProxy, Strike

JOB = Path(__file__).with_name("outage_job.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What a training process saw: step times (seconds, medians and longest), memory, commits."""

    kind: str
    quiet_steps: int
    outage_steps: int
    quiet_median_s: float
    outage_median_s: float
    outage_longest_s: float
    quiet_rss_bytes: int
    outage_rss_bytes: int
    skipped: int
    commit_after_s: float
    last_committed: bool

    def line(self) -> str:
        return (
            f"{self.kind}: step {self.quiet_median_s * 1e3:.1f} ms quiet ({self.quiet_steps} steps), "
            f"{self.outage_median_s * 1e3:.1f} ms in the outage ({self.outage_steps}, longest "
            f"{self.outage_longest_s * 1e3:.0f} ms); memory {self.quiet_rss_bytes >> 20} -> "
            f"{self.outage_rss_bytes >> 20} MiB; {self.skipped} saves skipped; a commit {self.commit_after_s:.1f} s "
            f"after the end; the last step {'was' if self.last_committed else 'was NOT'} committed"
        )


def half_of_calls(request: Request) -> Strike | None:
    return Strike(status=503) if request.number % 2 else None


def begin(kind: str, gateway: JuiceFSGateway, proxy: StoreProxy) -> Callable[[], None]:
    """The outage begins; what is returned ends it."""
    if kind == "stopped":
        gateway.kill()
        return gateway.start
    if kind == "silent":
        gateway.pause()
        return gateway.resume
    if kind == "slow":
        proxy.sent_bytes_per_s = 1024.0
        return lambda: setattr(proxy, "sent_bytes_per_s", None)
    faults: dict[str, Any] = {"refusing": lambda request: Strike(status=503), "503 to half": half_of_calls}
    proxy.faults = faults[kind]
    return lambda: setattr(proxy, "faults", None)


def run_outage(kind: str, root: Path, *, quiet_s: float, outage_s: float, recovery_s: float) -> Outage:
    """Train for `quiet_s`, go on while the storage fails, and after it is back until a new commit is there."""
    log = root / "steps.jsonl"
    with JuiceFSGateway(root / "gateway") as gateway, StoreProxy(gateway.port) as proxy:
        uri = f"{gateway.uri}/run"
        command = [sys.executable, str(JOB), uri, json.dumps(proxy.options(gateway)), str(log), str(root / "node")]
        with (root / "job.log").open("wb") as output:
            job = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
        try:
            commits = _Commits(uri, gateway.storage_options)
            _until(lambda: len(commits.steps()) >= 1, job, root, 60.0)
            quiet_from = time.monotonic()
            time.sleep(quiet_s)  # the length of a phase, not a wait for something
            outage_from = time.monotonic()
            end = begin(kind, gateway, proxy)
            time.sleep(outage_s)
            outage_to = time.monotonic()
            end()
            before = max(commits.steps(), default=0)
            _until(lambda: max(commits.steps(), default=0) > before, job, root, recovery_s)
            commit_after_s = time.monotonic() - outage_to
            Path(f"{log}.stop").touch()
            job.wait(150)
        finally:
            job.kill()
            job.wait()
    *steps, last = [json.loads(line) for line in log.read_text().splitlines()]
    quiet = [s for s in steps if quiet_from < s["at_s"] <= outage_from]
    during = [s for s in steps if outage_from < s["at_s"] <= outage_to]
    return Outage(
        kind=kind,
        quiet_steps=len(quiet),
        outage_steps=len(during),
        quiet_median_s=statistics.median(s["took_s"] for s in quiet),
        outage_median_s=statistics.median(s["took_s"] for s in during),
        outage_longest_s=max(s["took_s"] for s in during),
        quiet_rss_bytes=max(s["rss_bytes"] for s in quiet),
        outage_rss_bytes=max(s["rss_bytes"] for s in during),
        skipped=steps[-1]["skipped"],
        commit_after_s=commit_after_s,
        last_committed=bool(last["committed"]),
    )


class _Commits:
    """The steps that are committed, seen from outside, past the proxy."""

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self._store = open_store(StoreSpec(uri=uri, options=options))

    def steps(self) -> list[int]:
        keys = [info.key for info in self._store.list("checkpoints")]
        return [int(key.split("/")[1].split("-")[1]) for key in keys if key.endswith("COMMIT.json")]


def _until(reached: Callable[[], bool], job: subprocess.Popen[bytes], root: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert job.poll() is None and time.monotonic() < deadline, (root / "job.log").read_text()[-4000:]
        time.sleep(0.2)
