"""Faults on purpose: what a run survives, before a cluster shows it. See README.md beside this file."""

from ray_goodput.gates import InjectedFaultError
from ray_goodput.testing.faults import Fault, Kind, Phase, Target, random_faults
from ray_goodput.testing.find import LiveRun, find_run
from ray_goodput.testing.injector import FaultInjector, Strike

__all__ = [
    "Fault",
    "FaultInjector",
    "InjectedFaultError",
    "Kind",
    "LiveRun",
    "Phase",
    "Strike",
    "Target",
    "find_run",
    "random_faults",
]
