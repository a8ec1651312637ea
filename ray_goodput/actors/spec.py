"""What every actor and worker of a run must know; picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_goodput.actors.lease import TTL_S
from ray_goodput.actors.names import run_key
from ray_goodput.config import CheckpointConfig, StoreSpec, WatchdogConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run. `store` is the run's own folder: `<storage_path>/<run>`.

    started_at_s, driver_pid: wall clock when the driver took the run up, and its process; 0 before.
    driver: a name of the driver's own, by which it holds the run's lease; "" before it wants it.
    """

    run: str
    store: StoreSpec
    checkpoint: CheckpointConfig
    target_world: int
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    started_at_s: float = 0.0
    driver_pid: int = 0
    driver: str = ""
    lease_ttl_s: float = TTL_S

    @property
    def key(self) -> str:
        return run_key(self.run, self.store)
