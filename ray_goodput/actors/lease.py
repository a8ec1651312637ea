"""The lease of a run in its storage: taken before anything is written, renewed now and then, asked at each commit.

No Ray here. `core.lease` holds the format and the rule; actors/README.md says what it protects from, and from what not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ray_goodput.clock import Clock
from ray_goodput.core.lease import LEASE_NAME, Holder, LeaseRecord, Take, decide_take
from ray_goodput.errors import FencedError, ObjectNotFoundError, RunInUseError, StorageError
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

TTL_S = 60.0
_LOOKS_PER_TTL = 12  # of one who waits
_RENEWALS_PER_TTL = 4
_PROCESSES = Path("/proc")


def this_process(id: str, *, cluster: str, key: str) -> Holder:
    """This process as a holder."""
    pid = os.getpid()
    return Holder(
        id=id,
        cluster=cluster,
        key=key,
        host=socket.gethostname(),
        machine=_machine(),
        pid=pid,
        pid_started=_started_ticks(pid) or 0,
    )


def is_gone(holder: Holder) -> bool:
    """Whether the process is certain not to exist; False if it ran where this process cannot look."""
    if not holder.machine or holder.machine != _machine():
        return False
    ticks = _started_ticks(holder.pid)
    return ticks != holder.pid_started if ticks is not None else not _hidden(holder.pid)


def _hidden(pid: int) -> bool:
    """Whether there is a process that /proc does not show: with `hidepid`, those of other users."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except OSError:
        return False
    return not (_PROCESSES / str(pid)).exists()


def _started_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since boot, which no change of the clock touches; None if there is
    none, or nothing but its zombie."""
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    """This boot and process namespace; "" where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class RunLease:
    """Thread-safe. `take`, then `start`; `check` before and after what only the holder may write; `release` at the end.

    first_life: of the coordinator under its driver; in a later one the lease is its own already.
    """

    def __init__(
        self,
        *,
        run: str,
        store: ObjectStore,
        me: Holder,
        clock: Clock,
        ttl_s: float = TTL_S,
        first_life: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        gone: Callable[[Holder], bool] = is_gone,
    ) -> None:
        self._run = run
        self._store = store
        self._me = me
        self._clock = clock
        self._ttl_s = ttl_s
        self._first_life = first_life
        self._on_lost: Callable[[str], None] = lambda reason: None
        self._sleep = sleep
        self._gone = gone
        self._lock = threading.Lock()
        self._mine = LeaseRecord(run=run, holder=me, ttl_s=ttl_s)
        self._lost = ""
        self._failing = False
        self._looked_mono_s = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_loop, name="goodput-lease", daemon=True)

    def take(self, on_lost: Callable[[str], None] | None = None) -> None:
        """The lease is ours; waits for another one's to run out, if it is not known to be over.

        on_lost: called once, with the sentence why, when it shows that another driver has taken the run; on whichever
            thread finds it.

        Raises:
            RunInUseError: a living driver holds it.
            StorageError: the storage cannot be read or written.
        """
        self._on_lost = on_lost or self._on_lost
        if not self._first_life:  # restarted under its driver: the lease is ours, or another driver has taken the run
            with contextlib.suppress(FencedError):
                self.renew()
            return
        first = seen = self._read()
        since_mono_s, told = self._clock.mono_s(), False
        while True:
            unchanged_s = self._clock.mono_s() - since_mono_s
            decision = decide_take(
                seen,
                self._me,
                unchanged_s=unchanged_s,
                changed=seen is not None and first is not None and seen.beat != first.beat,
                holder_is_gone=seen is not None and self._gone(seen.holder),
            )
            if decision.action is Take.REFUSE:
                raise RunInUseError(
                    f"The run {self._run!r} in {self._store.uri} is already being trained: {decision.reason}. Wait for "
                    "it, stop it, or choose another RunConfig(name=...)."
                )
            if decision.action is Take.TAKE:
                self._write(self._mine)
                return
            if not told:
                logger.warning("The run %r is not free: %s.", self._run, decision.reason)
                told = True
            self._sleep(self._ttl_s / _LOOKS_PER_TTL)
            try:
                now = self._read()
            except StorageError as error:
                # Its holder could not renew it either: the time begins again.
                logger.warning("The lease of run %r cannot be read now: %s", self._run, error)
                since_mono_s = self._clock.mono_s()
                continue
            if now is None or seen is None or now.holder.id != seen.holder.id:
                first, since_mono_s = now, self._clock.mono_s()  # another one has taken it: judge that one
            seen = now

    def start(self) -> None:
        """From now on the lease is renewed in the background. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def check(self) -> None:
        """Raises FencedError: another driver has taken the run. StorageError: it cannot be told now."""
        if not self._lost:
            found = self._read()
            if found is not None and found.holder.id != self._me.id:
                self._lost = (
                    f"The run {self._run!r} has been taken over by the driver on {found.holder.host}, process "
                    f"{found.holder.pid}, while this one did not renew its lease: it commits nothing any more."
                )
                logger.error("%s", self._lost)
                self._on_lost(self._lost)
            self._looked_mono_s = self._clock.mono_s()
        if self._lost:
            raise FencedError(self._lost)

    def holds(self) -> bool:
        """Whether the run is ours as far as is known; looks anew if the last look is old, as after a stop."""
        try:
            if self._lost or self._clock.mono_s() - self._looked_mono_s > self._ttl_s / 2:
                self.check()
        except FencedError:
            return False
        except StorageError as error:
            logger.debug("Whether the run is still ours cannot be told now: %s", error)
        return True

    def renew(self) -> None:
        """Write the next beat, if it is still ours and not released."""
        with self._lock:
            if self._stop.is_set():
                return
            self.check()
            self._mine = replace(self._mine, beat=self._mine.beat + 1)
            self._write(self._mine)

    def release(self) -> None:
        """The run has ended: anybody may take it. Never raises: it runs out by itself otherwise."""
        self._stop.set()
        with self._lock, contextlib.suppress(StorageError, FencedError):
            self.check()
            self._write(replace(self._mine, released=True))

    def _read(self) -> LeaseRecord | None:
        try:
            return LeaseRecord.from_json(self._store.get(LEASE_NAME))
        except ObjectNotFoundError:
            return None

    def _write(self, record: LeaseRecord) -> None:
        self._store.put(LEASE_NAME, record.to_json())

    def _renew_loop(self) -> None:
        while not self._stop.wait(self._ttl_s / _RENEWALS_PER_TTL):
            try:
                self.renew()
                self._failing = False
            except FencedError:
                return  # said where it was found
            except StorageError as error:
                if not self._failing:
                    logger.warning("The lease of run %r cannot be renewed now, tried again: %s", self._run, error)
                self._failing = True
