"""Who may train a run: one driver at a time, also when two clusters share a storage. A persisted format, and the rule.

The holder writes its lease again and again, with a growing `beat`. Whoever wants the run judges by how long the record
has not changed *while it looked*, on its own monotonic clock: no two machines' clocks are ever compared.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, ClassVar

from ray_goodput.errors import StorageError

LEASE_NAME = "lease.json"
_FORMAT = "ray_goodput.lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that may hold a lease, as well as another one can tell whether it still lives.

    cluster: "" if it is not known. key: by which its actors are named on its cluster. machine: boot and process
    namespace, within which (pid, pid_started) is one process for ever; pid_started in the kernel's ticks since boot.
    """

    id: str
    cluster: str
    key: str
    host: str
    machine: str
    pid: int
    pid_started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The object `lease.json` in the run's folder. `released`: the run ended in order, and anybody may take it."""

    VERSION: ClassVar[int] = 1

    run: str
    holder: Holder
    ttl_s: float
    beat: int = 0
    released: bool = False

    def to_json(self) -> bytes:
        body = {"format": _FORMAT, "version": self.VERSION, **asdict(self)}
        return json.dumps(body, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LeaseRecord:
        """Raises StorageError: this is no lease, or one of a later version."""
        try:
            body: dict[str, Any] = json.loads(data)
            if body["format"] != _FORMAT or body["version"] != cls.VERSION:
                raise StorageError(
                    f"{LEASE_NAME} is {body['format']!r} of version {body['version']}, this release reads "
                    f"{_FORMAT!r} of version {cls.VERSION}: use the release that wrote it."
                )
            return cls(
                run=str(body["run"]),
                holder=Holder(**body["holder"]),
                ttl_s=float(body["ttl_s"]),
                beat=int(body["beat"]),
                released=bool(body["released"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{LEASE_NAME} cannot be read ({error!r}): remove it once no driver runs.") from error


class Take(Enum):
    """What to do about a lease that one wants."""

    TAKE = "take"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class TakeDecision:
    action: Take
    reason: str


def decide_take(
    record: LeaseRecord | None, me: Holder, *, unchanged_s: float, changed: bool, holder_is_gone: bool
) -> TakeDecision:
    """Whether `me` may take the run.

    unchanged_s: for how long it was seen unchanged. changed: whether it changed since the first look. holder_is_gone:
    its process was looked for on this machine, and does not exist.
    """
    if record is None:
        return TakeDecision(Take.TAKE, "nobody has held the run")
    who = f"the driver on {record.holder.host}, process {record.holder.pid}"
    if record.released:
        return TakeDecision(Take.TAKE, f"{who}, has ended")
    if record.holder.id == me.id:
        return TakeDecision(Take.TAKE, "it is ours already")
    if me.cluster and (record.holder.cluster, record.holder.key) == (me.cluster, me.key):
        # Its actors would have our names, and ours could not have been started.
        return TakeDecision(Take.TAKE, f"{who}, is gone from this cluster")
    if holder_is_gone:
        return TakeDecision(Take.TAKE, f"{who}, is gone from this machine")
    if changed:
        return TakeDecision(Take.REFUSE, f"{who}, holds it: its lease was renewed while we looked")
    if unchanged_s >= record.ttl_s:
        return TakeDecision(Take.TAKE, f"{who}, has not renewed its lease for {unchanged_s:.0f} s")
    return TakeDecision(
        Take.WAIT, f"{who}, may still hold it: whether its lease runs out shows in {record.ttl_s:.0f} s"
    )
