#!/usr/bin/env python3
"""Tell Ray that this machine is about to go, then wait until its raylet has left or the time is up.

    python drain_node.py --deadline-s 100 --reason-message "the pod is being deleted"

Run it inside the container of one Ray node: a KubeRay `preStop` hook, or `spot_watch.py`. Needs nothing but the
standard library and the `ray` command. From the drain on, Ray places nothing new here and Ray Train hears of the
preemption with its deadline, so the run can save and go on elsewhere.

Ray itself kills nothing at the deadline, and a raylet leaves before it only once no actor lives on it (measured with
2.60). The time until then belongs to the checkpoint vault, which may still be uploading; hence the wait.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REASON = "DRAIN_NODE_REASON_PREEMPTION"
# One `ray drain-node` takes 2 to 4 s. A head that is gone, too, must not cost the whole grace period.
ASK_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Raylet:
    """The raylet of this machine, as its command line describes it."""

    pid: int
    node_id: str
    gcs_address: str


def _command_lines(proc: Path) -> Iterator[tuple[int, list[str]]]:
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it ended while we looked
                continue


def find_raylet(proc: Path = Path("/proc")) -> Raylet | None:
    """The raylet that runs here, or None. Its own arguments name node and GCS, so no driver has to be started."""
    for pid, argv in _command_lines(proc):
        if Path(argv[0]).name != "raylet":
            continue
        options = dict(word[2:].split("=", 1) for word in argv[1:] if word.startswith("--") and "=" in word)
        if options.get("node_id") and options.get("gcs-address"):
            return Raylet(pid=pid, node_id=options["node_id"], gcs_address=options["gcs-address"])
    return None


def drain_command(raylet: Raylet, deadline_s: int, reason_message: str) -> list[str]:
    """The `ray drain-node` call: the node goes in `deadline_s` seconds."""
    return [
        "ray",
        "drain-node",
        f"--address={raylet.gcs_address}",
        f"--node-id={raylet.node_id}",
        f"--reason={REASON}",
        f"--reason-message={reason_message}",
        f"--deadline-remaining-seconds={deadline_s}",
    ]


def is_running(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether `pid` lives; a zombie does not."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def drain(deadline_s: int, reason_message: str, *, poll_s: float = 0.5) -> str:
    """Drain this node and wait for its raylet, `deadline_s` seconds at most. Returns what happened, as a sentence."""
    ends_mono_s = time.monotonic() + deadline_s
    raylet = find_raylet()
    if raylet is None:
        return "No raylet runs here: there is nothing to drain."
    command = drain_command(raylet, deadline_s, reason_message)
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=min(ASK_TIMEOUT_S, deadline_s))
    except subprocess.TimeoutExpired:
        return f"The head at {raylet.gcs_address} did not answer the drain: this node goes without notice."
    if asked.returncode != 0:
        lines = (asked.stderr or asked.stdout).strip().splitlines()
        return f"Ray refused the drain of node {raylet.node_id}: {lines[-1] if lines else asked.returncode}"
    while time.monotonic() < ends_mono_s:
        if not is_running(raylet.pid):
            return f"Node {raylet.node_id} was drained and has left."
        time.sleep(poll_s)
    return f"Node {raylet.node_id} was drained; its time of {deadline_s} s is up."


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 whatever happened: a hook that fails would only shorten the node's last minutes."""
    parser = argparse.ArgumentParser(description="Drain the Ray node of this machine before it goes.")
    parser.add_argument("--deadline-s", type=int, required=True, help="seconds until the node is taken away")
    parser.add_argument("--reason-message", required=True, help="why, for Ray's logs")
    args = parser.parse_args(argv)
    print(drain(args.deadline_s, args.reason_message), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
