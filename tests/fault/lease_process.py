"""A driver's coordinator reduced to its lease and its commits: `commit N ATTEMPT` a line, one answer a line.

python lease_process.py STORAGE NAME
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.lease import RunLease, this_process
from ray_goodput.clock import SystemClock
from ray_goodput.core.commit import CheckpointId, LandedSlice, StagedSlice
from ray_goodput.errors import GoodputError
from ray_goodput.storage.local import LocalStore

TTL_S = 2.0


def landed(step: int, attempt: int) -> LandedSlice:
    part = StagedSlice(
        checkpoint=CheckpointId(step, attempt),
        world_rank=0,
        world_size=1,
        slot_path="",
        extents=(),
        structure_digest="d",
        cursors={},
        metadata=b"metadata",
    )
    return LandedSlice(slice=part, objects=(), node_id="n", upload_s=0.1)


def main(storage: str, name: str) -> None:
    store = LocalStore(Path(storage))
    me = this_process(name, cluster=f"cluster of {name}", key="key")
    lease = RunLease(run="run", store=store, me=me, clock=SystemClock(), ttl_s=TTL_S)
    log = CommitLog(run="run", store=store, clock=SystemClock(), check_owner=lease.check)
    try:
        lease.take(log.fence_all)
        lease.start()
        log.open()
        print("taken", flush=True)
        for line in sys.stdin:
            _, step, attempt = line.split()
            log.landed(landed(int(step), int(attempt)))
            print("committed", flush=True)
    except GoodputError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
