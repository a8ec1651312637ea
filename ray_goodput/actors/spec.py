"""What every actor and worker of a run must know; picklable."""

from __future__ import annotations

from dataclasses import dataclass

from ray_goodput.actors.names import run_key
from ray_goodput.config import CheckpointConfig, StoreSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run. `store` is the run's own folder: `<storage_path>/<run>`."""

    run: str
    store: StoreSpec
    checkpoint: CheckpointConfig
    target_world: int

    @property
    def key(self) -> str:
        return run_key(self.run, self.store)
