"""The uploads of a rank that saves by itself: one thread, one save after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.clock import Clock
from ray_goodput.core.commit import StagedSlice
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import FencedError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    """A slice under way; the slot is free again when `future` is done."""

    staged: StagedSlice
    future: Future[None]
    sent_mono_s: float


class Uploads:
    """Slices on their way through `vault`. Not thread-safe: used by the training thread only.

    release: takes the slot of a slice that is done; arrived: told of a tier and the seconds it took.
    """

    def __init__(
        self,
        vault: CheckpointVault,
        clock: Clock,
        *,
        release: Callable[[str], None],
        arrived: Callable[[SaveTier, float], None],
    ) -> None:
        self._vault = vault
        self._clock = clock
        self._release = release
        self._arrived = arrived
        self._in_flight: list[_InFlight] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")

    def begin(self, staged: StagedSlice) -> None:
        future = self._pool.submit(self._vault.persist, staged)
        self._in_flight.append(_InFlight(staged, future, self._clock.mono_s()))

    def __bool__(self) -> bool:
        """Whether any slice was not collected yet."""
        return bool(self._in_flight)

    def under_way(self) -> list[SaveTier]:
        return [flight.staged.tier for flight in self._in_flight if not flight.future.done()]

    def wait(self, timeout_s: float, *, first_only: bool = False) -> None:
        """All slices, or the oldest one, are done, or `timeout_s` is over."""
        wait([flight.future for flight in self._in_flight[: 1 if first_only else None]], timeout=timeout_s)

    def collect(self, *, keep_failed: bool = False) -> None:
        """Free the slots of slices that are done; with `keep_failed`, not of those that could not be saved.

        Raises:
            FencedError: a later start of this run goes on without this one.
        """
        for flight in [f for f in self._in_flight if f.future.done()]:
            self._in_flight.remove(flight)
            error = flight.future.exception()
            if error is None or not keep_failed:
                self._release(flight.staged.slot_path)
            if error is None:
                self._arrived(flight.staged.tier, self._clock.mono_s() - flight.sent_mono_s)
            elif isinstance(error, FencedError):
                raise error
            else:
                logger.error("The save of step %d failed: %s", flight.staged.checkpoint.step, error)

    def take_back(self) -> str | None:
        """The slot of the newest slice whose turn had not come; this process uploads it no more, the slot keeps it."""
        for flight in reversed(self._in_flight):
            if flight.future.cancel():
                self._in_flight.remove(flight)
                return flight.staged.slot_path
        return None

    def give_up(self, *, away: bool) -> None:
        """A storage that fails is asked once more for each slice, and not again; for none that waits, if it is known to
        be `away`. The slots keep them: `close` comes next."""
        self._vault.give_up()
        self._in_flight = [flight for flight in self._in_flight if not (away and flight.future.cancel())]

    def close(self) -> None:
        """The thread has ended."""
        self._pool.shutdown(wait=True)
