"""Transforms for `test_transforms.py`, in a module that spawned processes can import; and a parent to be killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np


def augment(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "noise": rng.random(3)}


def which_process(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"pid": os.getpid(), "thread": threading.get_ident()}


def fail_at_five(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["id"] == 5:
        raise KeyError("label")
    return {"id": sample["id"]}


def die_at_five(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["id"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"id": sample["id"]}


if __name__ == "__main__":
    from ray_goodput.data.transforms import SampleTransforms
    from transforming import which_process as by_name

    transforms = SampleTransforms(by_name, 0, workers=2, kind="process")
    results = transforms.begin([(0, i) for i in range(8)], [{"id": i} for i in range(8)])()
    print(*{result["pid"] for result in results}, flush=True)
    time.sleep(float(sys.argv[1]))
