"""How fast data comes from a far store, ours beside its peers and the upper bound, in one run.

Remote store: JuiceFS's S3 gateway behind a proxy with 20 ms latency and 150 MB/s for everybody. Each arm runs in a
fresh process with an empty cache: epoch 1 fetches, epoch 2 is warm, and steps of a simulated accelerator show the
waiting.
Arms that would take minutes for an epoch are stopped after `--limit-s`, and their rate is that of the part.
The others run in each of `--rounds`, since the machine's speed drifts by the minute; a budget's value is the median
over the rounds of its ratio within a round.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from data_arms import ARMS, BATCH, WORKERS, ArmSpec
from data_forms import KINDS, LENGTH
from data_peers import peers_python
from data_store import RemoteStore
from results_file import Budget, parser, report, spread

LATENCY_S = 0.02
BYTES_PER_S = 150e6
STEP_S = {"jpeg": 0.1, "tokens": 0.005}
HERE = Path(__file__).parent
Figures = dict[str, float]


def prepare(store: RemoteStore, python: Path, root: Path, rows: dict[str, int], absent: dict[str, str]) -> None:
    """Every form of both data sets is in the store, in the mounted volume, or (Arrow) on the local disk."""
    peer_of = {"mds": "mosaicml-streaming", "litdata": "litdata"}
    for kind in KINDS:
        for form in ("raw", "tar", "parquet", "mds", "litdata", "arrow"):
            if peer_of.get(form) in absent:
                continue
            folder = root / "forms" / kind / form
            command = [str(python), str(HERE / "data_forms.py"), kind, form, str(folder), str(rows[kind])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
                if form not in peer_of:
                    raise RuntimeError(f"{form} of {kind} cannot be made: {reason}")
                absent[peer_of[form]] = reason
                continue
            if form != "arrow":
                store.upload(folder, f"{kind}/{form}")
                if form != "raw":
                    shutil.rmtree(folder)
    volume = root / "volume"
    volume.mkdir()
    for kind in KINDS:
        (root / "forms" / kind / "raw").rename(volume / kind)
    store.make_volume(volume)
    shutil.rmtree(volume)


def run_arm(
    store: RemoteStore, python: Path, root: Path, name: str, kind: str, rows: int, *, limit_s: float
) -> tuple[Figures, str]:
    """(figures, what went wrong) of one arm on one data set."""
    arm, cache = ARMS[name], root / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    store.warm()
    with store.mounted() if arm.mounted else nullcontext() as mount:
        folder = root / "forms" / kind / "arrow" if mount is None else mount / kind
        _forget(folder, arm)
        arguments = {
            "kind": kind,
            "rows": rows,
            "prefix": f"{kind}/{arm.form_of(kind)}",
            "options": store.options,
            "cache": str(cache),
            "folder": str(folder),
            "limit_s": limit_s,
            "step_s": STEP_S[kind],
        }
        with (root / "arm.log").open("w") as log:
            process = subprocess.Popen(
                [str(python), str(HERE / "data_arm_process.py"), name, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "RAY_AUTH_MODE": "disabled", "TMPDIR": str(root / "tmp")},
            )
            try:
                figures = _listen(store, process, mount, full=rows)
            finally:
                _end(process)
        tail = (root / "arm.log").read_text(errors="replace").strip().splitlines()
        wrong = "" if "waiting_share" in figures else (tail or ["it ended without a word"])[-1]
    shutil.rmtree(cache, ignore_errors=True)
    return figures, wrong


def _listen(store: RemoteStore, process: subprocess.Popen[str], mount: Path | None, *, full: int) -> Figures:
    """Collects what the arm says, and counts at the proxy between its words."""
    assert process.stdin is not None and process.stdout is not None
    figures: Figures = {}
    bytes_before = requests_before = 0
    mount_before = 0.0
    for line in process.stdout:
        if not line.startswith('{"event"'):
            continue
        said = json.loads(line)
        event = said["event"]
        fetched, requests = store.proxy.counts()
        mount_cpu = _mount_cpu_s(mount)
        if event in ("epoch_1", "epoch_2"):
            figures[f"{event}_samples_per_s"] = said["samples"] / said["seconds"]
            figures[f"{event}_cpu_s_per_1000"] = 1000 * (said["cpu_s"] + mount_cpu - mount_before) / said["samples"]
            figures[f"{event}_fetched_bytes"] = fetched - bytes_before
            figures[f"{event}_requests"] = requests - requests_before
            figures[f"{event}_share_read"] = min(1.0, said["samples"] / full)
            if said["first_s"] is not None:
                figures[f"{event}_first_batch_s"] = said["first_s"]
        elif event == "steps":
            figures["waiting_share"] = said["waiting_share"]
        elif event == "opened":
            figures["open_s"] = said["seconds"]
            figures["open_fetched_bytes"] = fetched - bytes_before
        if event == "epoch_1" and mount is not None and said["samples"] < full:
            subprocess.run(f"cat {mount}/*/* {mount}/*/*/* > /dev/null 2>&1", shell=True)  # epoch 2 is a warm one
        bytes_before, requests_before = store.proxy.counts()
        mount_before = _mount_cpu_s(mount)
        if event != "steps":
            try:
                process.stdin.write("\n")
                process.stdin.flush()
            except BrokenPipeError:
                break
    return figures


def _mount_cpu_s(mount: Path | None) -> float:
    """Processor seconds of the FUSE client, which works for the arm that reads through it."""
    if mount is None:
        return 0.0
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if "mount" in process.cmdline()[:2]:
                total += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return total


def _end(process: subprocess.Popen[str]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)
    for child in children:
        try:
            child.kill()
        except psutil.Error:
            continue


def _forget(folder: Path, arm: ArmSpec) -> None:
    """The bound's file is not in the page cache; every other arm's cache is empty, so none of it is there either."""
    if arm.form != "arrow":
        return
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def budgets(arms: dict[str, Figures], rows: dict[str, int], sizes: dict[str, int]) -> list[Budget]:
    """DESIGN section 8, as far as the arms that ran allow; each as a ratio that should not be above its limit."""
    found: list[Budget] = []

    def at_least(name: str, value: float, limit: float) -> None:
        found.append(Budget(name=f"{name} (inverse)", limit=1 / limit, value=1 / value if value else float("inf")))

    for kind in KINDS:
        ours, bound = arms.get(f"{kind} ours"), arms.get(f"{kind} bound")
        peers = [
            f
            for n, f in arms.items()
            if n.startswith(kind) and n.split(" ", 1)[1] not in ("bound",) and "ours" not in n
        ]
        if not ours or not bound or "epoch_2_samples_per_s" not in ours or "epoch_2_samples_per_s" not in bound:
            continue
        rate, best = ours["epoch_2_samples_per_s"], bound["epoch_2_samples_per_s"]
        at_least(f"{kind}: epoch 2 over the bound", rate / best, 0.95 if kind == "jpeg" else 0.6)
        if kind == "jpeg":
            cpu = ours["epoch_2_cpu_s_per_1000"] / bound["epoch_2_cpu_s_per_1000"]
            found.append(Budget(name="jpeg: epoch 2 processor time over the bound's", limit=1.1, value=cpu))
        else:
            of_peers = max((peer.get("epoch_2_samples_per_s", 0.0) for peer in peers), default=0.0)
            if of_peers:
                at_least("tokens: epoch 2 over the best peer", rate / of_peers, 4.0)
            found.append(Budget(name="tokens: share of waiting at 5 ms", limit=0.05, value=ours["waiting_share"]))
        network = BYTES_PER_S / (sizes[kind] / rows[kind])
        at_least(f"{kind}: epoch 1 over network and decoder", ours["epoch_1_samples_per_s"] / min(network, best), 0.85)
        first = ours["epoch_1_first_batch_s"]
        found.append(Budget(name=f"{kind}: first batch after asking the cache, s", limit=0.5, value=first))
        firsts = [peer["open_s"] + peer["epoch_1_first_batch_s"] for peer in peers if "epoch_1_first_batch_s" in peer]
        if firsts:
            ahead = first / min(firsts)
            found.append(Budget(name=f"{kind}: first batch, of the soonest peer's", limit=1.0, value=ahead))
        over = ours["epoch_1_fetched_bytes"] / sizes[kind]
        found.append(Budget(name=f"{kind}: bytes fetched in epoch 1 over the data's", limit=1.05, value=over))
        found.append(Budget(name=f"{kind}: bytes fetched in epoch 2", limit=0, value=ours["epoch_2_fetched_bytes"]))
    return found


def over_rounds(rounds: list[dict[str, Figures]], rows: dict[str, int], sizes: dict[str, int]) -> list[Budget]:
    """Each budget with the median of its value in each round; an arm that ran once counts in all."""
    values: dict[str, list[float]] = {}
    limits: dict[str, float] = {}
    for figures in rounds:
        for budget in budgets({**rounds[0], **figures}, rows, sizes):
            values.setdefault(budget.name, []).append(budget.value)
            limits[budget.name] = budget.limit
    return [Budget(name=name, limit=limits[name], value=statistics.median(found)) for name, found in values.items()]


def main() -> None:
    arguments = parser("data")
    arguments.add_argument("--photos", type=int, default=8000, help="rounded to whole batches")
    arguments.add_argument("--token-rows", type=int, default=61_440, help="rounded to whole batches")
    arguments.add_argument("--limit-s", type=float, default=15.0, help="of an epoch of one arm")
    arguments.add_argument("--rounds", type=int, default=3, help="of the arms that read whole epochs within the limit")
    arguments.add_argument("--arms", default=",".join(ARMS), help="names, with commas")
    arguments.add_argument("--kinds", default=",".join(KINDS))
    arguments.add_argument(
        "--folder", type=Path, help="keep the store and the peers' environment here for the next run"
    )
    given = arguments.parse_args()
    rows = {
        "jpeg": max(1, given.photos // BATCH["jpeg"]) * BATCH["jpeg"],
        "tokens": max(1, given.token_rows // BATCH["tokens"]) * BATCH["tokens"],
    }
    root: Path = given.folder or Path(tempfile.mkdtemp(prefix="bench-data-"))
    (root / "tmp").mkdir(parents=True, exist_ok=True)
    try:
        measure(given, root, rows)
    finally:
        if given.folder is None:
            shutil.rmtree(root, ignore_errors=True)


def measure(given: Any, root: Path, rows: dict[str, int]) -> None:
    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    python, absent = peers_python(root / "peers")
    mark = root / "prepared.json"
    rounds: list[dict[str, Figures]] = []
    with RemoteStore(root, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as store:
        if not mark.exists() or json.loads(mark.read_text()) != rows:
            if mark.exists():
                raise SystemExit(f"{root} holds data of other sizes: remove it, or give another --folder.")
            tell("making the data")
            prepare(store, python, root, rows, absent)
            mark.write_text(json.dumps(rows))
        coming = [(kind, name) for kind in given.kinds.split(",") for name in given.arms.split(",")]
        for number in range(given.rounds):
            figures: dict[str, Figures] = {}
            for kind, name in coming:
                arm = ARMS[name]
                reason = dict(arm.absent).get(kind) or (absent.get(arm.peer) if arm.peer else None)
                if reason is None:
                    figures[f"{kind} {name}"], reason = run_arm(
                        store, python, root, name, kind, rows[kind], limit_s=given.limit_s
                    )
                outcome = f"absent or incomplete: {reason}" if reason else "done"
                tell(f"round {number + 1}, {kind} {name}: {outcome}")
            rounds.append(figures)
            coming = [(kind, name) for kind, name in coming if _whole(figures.get(f"{kind} {name}", {}))]
    arrow = {kind: root / "forms" / kind / "arrow" / "all.arrow" for kind in KINDS}
    sizes = {kind: path.stat().st_size if kind == "jpeg" else rows[kind] * LENGTH * 4 for kind, path in arrow.items()}
    report(
        "data",
        {
            name: _spreads([figures[name] for figures in rounds if name in figures])
            for name, of in rounds[0].items()
            if of
        },
        over_rounds(rounds, rows, sizes),
        as_json=given.json,
    )
    print(f"{WORKERS} workers each; simulated steps of {STEP_S} s", file=sys.stderr)


def _whole(figures: Figures) -> bool:
    """Whether the arm read (all but the last batch of) both epochs within the limit."""
    return all(figures.get(f"{epoch}_share_read", 0.0) > 0.95 for epoch in ("epoch_1", "epoch_2"))


def _spreads(found: list[Figures]) -> dict[str, dict[str, float]]:
    return {metric: spread([f[metric] for f in found if metric in f]) for metric in found[0]}


if __name__ == "__main__":
    main()
