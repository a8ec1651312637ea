"""Faults on purpose: what a run survives, before a cluster shows it. See README.md beside this file.

A name's module, and Ray behind most of them, is imported when the name is first used: whoever starts a Ray cluster
with a token of its own has to do so before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_goodput.gates import InjectedFaultError as InjectedFaultError
    from ray_goodput.testing.faults import Fault as Fault
    from ray_goodput.testing.faults import Kind as Kind
    from ray_goodput.testing.faults import Phase as Phase
    from ray_goodput.testing.faults import Target as Target
    from ray_goodput.testing.faults import random_faults as random_faults
    from ray_goodput.testing.find import LiveRun as LiveRun
    from ray_goodput.testing.find import find_run as find_run
    from ray_goodput.testing.injector import FaultInjector as FaultInjector
    from ray_goodput.testing.injector import Strike as Strike

_HOME = {
    "Fault": "ray_goodput.testing.faults",
    "FaultInjector": "ray_goodput.testing.injector",
    "InjectedFaultError": "ray_goodput.gates",
    "Kind": "ray_goodput.testing.faults",
    "LiveRun": "ray_goodput.testing.find",
    "Phase": "ray_goodput.testing.faults",
    "Strike": "ray_goodput.testing.injector",
    "Target": "ray_goodput.testing.faults",
    "find_run": "ray_goodput.testing.find",
    "random_faults": "ray_goodput.testing.faults",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll] (names are resolved on first use)


def __getattr__(name: str) -> Any:
    """The public object `name`, imported on first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_goodput.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
