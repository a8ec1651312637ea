"""Starts the ranks of one arm, watches their memory, and brings their figures together."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import queue
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ckpt_arms import Site
from ckpt_rank import BEFORE_ANY_SAVE, OVER, SAVING, Measured, Setup, rank_main
from ckpt_state import Case
from ckpt_vault import NodeSpec, bare_main, vault_main
from results_file import spread

from ray_goodput.config import StoreSpec
from ray_goodput.storage import ObjectStore, open_store

_SAMPLE_S = 0.05
_RANKS_TIMEOUT_S = 420
_NODE_PROCESSES: dict[str, Callable[..., None]] = {"ours": vault_main, "bare upload": bare_main}
# The ranks are forked from a process that has imported torch; what is a process of its own in a run (the vault) is
# spawned, so that its memory is its own too.
RANKS = mp.get_context("forkserver")
RANKS.set_forkserver_preload(["torch._dynamo", "ray_goodput.checkpoint.reader", "ray_goodput.actors.vault"])
_SPAWN = mp.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Folders and storage that all arms use. `memory` is in shared memory."""

    disk: Path
    memory: Path
    store: StoreSpec


@dataclass(slots=True)
class Outcome:
    """Figures of one arm in one case, over its ranks: stall and durable are those of the slowest. Seconds, bytes."""

    stall: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    uploading: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)

    def metrics(self) -> dict[str, dict[str, float]]:
        """In the form of `results_file`; percentiles of steps are one figure over all of them."""
        found: dict[str, list[float]] = {
            "stall_s": self.stall,
            "first_save_s": self.first,
            "durable_s": self.durable,
            "extra_memory_mb_a_rank": [m / 2**20 for m in self.memory],
            "memcpy_s": self.memcpy,
        }
        result = {name: spread(values) for name, values in found.items() if values}
        for name, steps in (("quiet", self.quiet), ("uploading", self.uploading)):
            if len(steps) >= 2:
                for percent in (50, 99):
                    s = spread(steps)
                    result[f"step_{name}_p{percent}_s"] = {**s, "median": percentile(steps, percent)}
        if self.slices:
            result["slice_mb"] = spread([s / 2**20 for s in self.slices])
            ratio = max(self.slices) / statistics.mean(self.slices)
            result["slice_max_to_mean"] = spread([ratio])
        return result


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def run_arm(case: Case, arm: str, place: Place, *, state_mb: float, repeats: int) -> Outcome:
    """Start the world of `case`, let it measure `arm`, and end it."""
    scratch = Path(tempfile.mkdtemp(dir=place.disk))
    memory = Path(tempfile.mkdtemp(dir=place.memory))
    store = place.store.child(scratch.name)
    results, phase = RANKS.Queue(), RANKS.Value("i", OVER)
    try:
        with _node_process(arm, NodeSpec(store=store, local=scratch), case.world_size) as node:
            setups = [
                Setup(
                    case=case,
                    arm=arm,
                    state_mb=state_mb,
                    repeats=repeats,
                    rendezvous=str(scratch / "rendezvous"),
                    phase=phase,
                    site=Site(
                        world_rank=rank,
                        world_size=case.world_size,
                        store=store,
                        disk=scratch,
                        memory=memory,
                        inbox=node.inbox,
                        answers=node.answers[rank],
                        removals=node.removals,
                    ),
                )
                for rank in range(case.world_size)
            ]
            peaks: list[float] = []

            def watch(pids: list[int]) -> contextlib.AbstractContextManager[None]:
                return watched_memory(pids, node.pids, phase, peaks)

            measured = run_ranks([(rank_main, setup) for setup in setups], results, scratch, watch)
        return combine(measured, peaks)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


@dataclass(slots=True)
class _Node:
    inbox: Any
    answers: list[Any]
    removals: Any
    pids: list[int]


@contextlib.contextmanager
def _node_process(arm: str, spec: NodeSpec, world_size: int) -> Iterator[_Node]:
    node = _Node(_SPAWN.Queue(), [_SPAWN.Queue() for _ in range(world_size)], _SPAWN.Queue(), [])
    main = _NODE_PROCESSES.get(arm)
    process = _SPAWN.Process(target=main, args=(spec, node.inbox, node.answers), daemon=True) if main else None
    try:
        if process is not None:
            process.start()
            assert process.pid is not None
            node.pids.append(process.pid)
        with ThreadPoolExecutor(1, thread_name_prefix="removals") as pool:
            pool.submit(_remove_on_request, open_store(spec.store), node)
            try:
                yield node
            finally:
                node.removals.put(None)
    finally:
        node.inbox.put(None)
        if process is not None:
            _end(process)


def _remove_on_request(store: ObjectStore, node: _Node) -> None:
    """The folder is emptied for each step in `removals`, and rank 0 hears of it."""
    while (step := node.removals.get()) is not None:
        store.delete([info.key for info in store.list()])
        node.answers[0].put(step)


def run_ranks(
    mains: Sequence[tuple[Callable[..., None], Any]],
    results: Any,
    logs: Path,
    watch: Callable[[list[int]], contextlib.AbstractContextManager[Any]] | None = None,
) -> list[Any]:
    """Start a process for each (function, setup), and bring what they put into `results` in the order of ranks.

    Raises:
        RuntimeError: one died or hung; with the end of what it wrote.
    """
    processes = [
        RANKS.Process(target=_logged, args=(main, setup, results, logs / f"rank-{rank}.log"))
        for rank, (main, setup) in enumerate(mains)
    ]
    try:
        for process in processes:
            process.start()
        pids = [process.pid for process in processes if process.pid is not None]
        with watch(pids) if watch is not None else contextlib.nullcontext():
            return _collect(processes, results, logs)
    finally:
        for process in processes:
            _end(process)


def _logged(main: Callable[..., None], setup: Any, results: Any, log: Path) -> None:
    """`main` with its output, and that of what it starts, in a file: stock arms tell much."""
    with log.open("w") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
        main(setup, results)


def _end(process: Any) -> None:
    process.join(20)
    if process.exitcode is None:
        process.kill()
        process.join(5)


def _collect(processes: Sequence[Any], results: Any, logs: Path) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + _RANKS_TIMEOUT_S
    while len(found) < len(processes):
        try:
            rank, value = results.get(timeout=1)
            found[rank] = value
        except queue.Empty:
            codes = [process.exitcode for process in processes]
            if any(code not in (None, 0) for code in codes) or time.monotonic() > deadline:
                tails = [path.read_text(errors="replace")[-1500:] for path in sorted(logs.glob("rank-*.log"))]
                raise RuntimeError("\n".join([f"A rank died or hung (exit codes {codes}).", *tails])) from None
    return [found[rank] for rank in range(len(processes))]


def combine(measured: Sequence[Measured], peaks: Sequence[float]) -> Outcome:
    """Over the ranks of a world: the slowest counts; steps are the same on all, since each ends in an all-reduce."""
    slowest = {
        name: [max(values) for values in zip(*(getattr(m, name) for m in measured), strict=True)]
        for name in ("stall", "first", "durable", "memcpy")
    }
    return Outcome(
        **slowest,
        quiet=measured[0].quiet,
        uploading=measured[0].uploading,
        memory=list(peaks),
        slices=[m.slice_bytes for m in measured if m.slice_bytes],
    )


@contextlib.contextmanager
def watched_memory(ranks: Sequence[int], nodes: Sequence[int], phase: Any, extra: list[float]) -> Iterator[None]:
    """`extra`: bytes a rank above what there was before any save, at the peak of each save but the first; filled at
    the end.

    Counted is the anonymous memory of the ranks, of what they started and of the node's process, and all of /dev/shm;
    the page cache, which the kernel takes back when it needs it, is not.
    """
    seen: dict[int, int] = defaultdict(int)
    stop = threading.Event()

    def watch() -> None:
        count = 0
        pids: list[int] = [*ranks, *nodes]
        while not stop.wait(_SAMPLE_S):
            now = phase.value
            if count % 20 == 0:
                pids = [*_with_children(ranks), *nodes]
            count += 1
            if now == OVER:
                continue
            counted = pids if now != BEFORE_ANY_SAVE else list(ranks)
            seen[now] = max(seen[now], sum(map(_anonymous_bytes, counted)) + _shared_bytes())

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
        base = seen.get(BEFORE_ANY_SAVE, 0)
        extra += [(peak - base) / len(ranks) for number, peak in sorted(seen.items()) if number > SAVING]


def _with_children(pids: Sequence[int]) -> list[int]:
    found = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found


def _anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _shared_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize
