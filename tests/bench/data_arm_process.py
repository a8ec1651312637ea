"""One arm on one data set in a process of its own: two epochs, then steps with a simulated accelerator.

Prints one JSON object a line: `{"event": "ready"}` once imports are done, `"opened"` when it has its list of files or
index (ours: the manifest, which a run makes once), then one at the end of each phase. Epoch 1 is
the process's first, hence with an empty cache; the parent counts the bytes of each phase at the proxy.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from data_arms import ARMS, Epochs, Place
from data_peers import import_peer

_STEPS = 200


def cpu_s() -> float:
    """Processor seconds of this process and its children, living and dead."""
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def run_epoch(event: str, batches: Iterator[int], limit_s: float, *, after_a_part: bool = False) -> bool:
    """Reads until the end of the epoch, or for `limit_s`; whether it was whole.

    after_a_part: of the epoch before; then the loader first ends what it was asked for there, which is not timed.
    """
    if after_a_part:
        next(batches, None)
    began, cpu_before, samples, whole = time.perf_counter(), cpu_s(), 0, True
    first_s: float | None = None
    for size in batches:
        now = time.perf_counter()
        first_s = first_s or now - began
        samples += size
        if now - began > limit_s:
            whole = False
            break
    seconds = time.perf_counter() - began
    first_s = None if after_a_part else first_s
    say(event, samples=samples, seconds=seconds, first_s=first_s, cpu_s=cpu_s() - cpu_before)
    return whole


def run_steps(batches: Iterator[int], step_s: float, limit_s: float) -> None:
    """Steps of an accelerator that needs no processor: which share of the time do they wait for a batch?"""
    next(batches)  # the start of an epoch is not what is asked
    waited = 0.0
    began = time.perf_counter()
    steps = 0
    while steps < _STEPS and time.perf_counter() - began < limit_s:
        asked = time.perf_counter()
        if next(batches, None) is None:
            break
        waited += time.perf_counter() - asked
        time.sleep(step_s)
        steps += 1
    say("steps", steps=steps, waiting_share=waited / (time.perf_counter() - began))


def main(arm: str, arguments: dict[str, Any]) -> None:
    import torch
    from PIL import Image

    torch.set_num_threads(1)
    Image.init()
    for module in ARMS[arm].modules:
        import_peer(module)
    limit_s = arguments.pop("limit_s")
    step_s = arguments.pop("step_s")
    place = Place(**{**arguments, "cache": Path(arguments["cache"]), "folder": Path(arguments["folder"])})
    os.environ.update(
        S3_ENDPOINT_URL=place.options["endpoint_url"],
        AWS_ACCESS_KEY_ID=place.options["key"],
        AWS_SECRET_ACCESS_KEY=place.options["secret"],
        AWS_DEFAULT_REGION="us-east-1",
    )
    say("ready")
    sys.stdin.readline()
    began = time.perf_counter()
    epochs: Epochs = ARMS[arm].open(place)
    say("opened", seconds=time.perf_counter() - began)
    sys.stdin.readline()
    whole = run_epoch("epoch_1", epochs(0), limit_s)
    sys.stdin.readline()
    run_epoch("epoch_2", epochs(1), limit_s, after_a_part=not whole)
    sys.stdin.readline()
    run_steps(epochs(2), step_s, limit_s)
    sys.stdout.flush()
    os._exit(0)  # how long the arm's threads and processes take to end is nobody's question


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
