"""Holds the requests of one process to one store to the rate that `core.request_rate` allows, and counts them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from typing import TypeVar

from ray_goodput.core.request_rate import (
    RequestFate,
    RequestLimits,
    RequestRate,
    RequestRecord,
    after_request,
    starting_rate,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

Attempt = Callable[[Callable[[], None]], T]
"""One request; calls its argument when the answer begins."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests of a process so far. refused: 429 and 503; lost: timeouts and broken connections; hedged: asked a second
    time. waited_s: thread-seconds spent waiting for a turn."""

    requests: int = 0
    refused: int = 0
    lost: int = 0
    hedged: int = 0
    waited_s: float = 0.0

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> RequestCounts:
        """Of requests that another process has made."""
        fates = [seen.fate for seen in records]
        refused, lost = fates.count(RequestFate.REFUSED), fates.count(RequestFate.LOST)
        return cls(requests=len(fates), refused=refused, lost=lost)

    def __add__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class RequestGovernor:
    """Requests run inside `request`, which waits for a turn. Thread-safe; one a store and process.

    hedge_after_s: a request whose answer has not begun by then is sent a second time, and the first whole answer
        counts; None: never. A second request is only sent if the rate has room for it.
    share: at most that many at a time, whatever the rate allows: set where the node's rate is kept elsewhere.
    """

    def __init__(self, limits: RequestLimits | None = None, *, hedge_after_s: float | None = None) -> None:
        self.limits = limits or RequestLimits()
        self.hedge_after_s = hedge_after_s
        self._changed = threading.Condition()
        self._rate = starting_rate(self.limits)
        self._share: int | None = None
        self._running = 0
        self._counts = RequestCounts()
        self._unreported: list[RequestRecord] | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def rate(self) -> RequestRate:
        return self._rate

    @property
    def counts(self) -> RequestCounts:
        return self._counts

    @property
    def concurrency(self) -> int:
        """Requests that may be under way now."""
        return self._rate.concurrency if self._share is None else max(1, min(self._rate.concurrency, self._share))

    def request(self, attempt: Attempt[T], fate_of: Callable[[Exception], RequestFate]) -> T:
        """What `attempt` returns, once it is its turn; whatever it raises is the caller's to try again.

        fate_of: what an error says about the store's load.
        """
        if self.hedge_after_s is None:
            self._enter()
            return self._run(attempt, fate_of, lambda: None)
        return self._hedged(attempt, fate_of, self.hedge_after_s)

    def set_share(self, share: int | None) -> None:
        """See the class. From then on `take_records` has what happened here."""
        with self._changed:
            self._share = share
            if self._unreported is None:
                self._unreported = []
            self._changed.notify_all()

    def take_records(self) -> list[RequestRecord]:
        """Requests that are over since the last call, for whoever keeps the node's rate; only once a share is set."""
        with self._changed:
            records, self._unreported = self._unreported or [], None if self._unreported is None else []
            return records

    def note(self, seen: RequestRecord) -> None:
        """A request is over, here or in another process of the node: the rate follows."""
        with self._changed:
            decision = after_request(self._rate, seen, self.limits)
            self._rate = decision.rate
            self._changed.notify_all()
        if decision.reason:
            logger.info("%s", decision.reason)

    def _enter(self) -> None:
        began = time.monotonic()
        with self._changed:
            while self._running >= self.concurrency:
                self._changed.wait()
            self._running += 1
            self._counts += RequestCounts(requests=1, waited_s=time.monotonic() - began)

    def _try_enter(self) -> bool:
        with self._changed:
            if self._running >= self.concurrency:
                return False
            self._running += 1
            self._counts += RequestCounts(requests=1, hedged=1)
            return True

    def _run(
        self, attempt: Attempt[T], fate_of: Callable[[Exception], RequestFate], on_answer: Callable[[], None]
    ) -> T:
        """`attempt()` inside a turn already taken, which ends with it."""
        began = time.monotonic()
        first: list[float] = []

        def answered() -> None:
            first.append(time.monotonic() - began)
            on_answer()

        fate = RequestFate.ANSWERED
        try:
            return attempt(answered)
        except Exception as error:
            fate = fate_of(error)
            raise
        finally:
            seen = RequestRecord(
                fate=fate,
                began_mono_s=began,
                ended_mono_s=time.monotonic(),
                first_byte_s=first[0] if first else None,
            )
            with self._changed:
                self._running -= 1
                if fate is not RequestFate.ANSWERED:
                    self._counts += RequestCounts(**{fate.value: 1})
                if self._unreported is not None:
                    self._unreported.append(seen)
            self.note(seen)

    def _hedged(self, attempt: Attempt[T], fate_of: Callable[[Exception], RequestFate], after_s: float) -> T:
        self._enter()
        with self._changed:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(2 * self.limits.largest, thread_name_prefix="ray-goodput-request")
            pool = self._pool
        answering = threading.Event()
        first: Future[T] = pool.submit(self._run, attempt, fate_of, answering.set)
        first.add_done_callback(lambda _: answering.set())
        if answering.wait(after_s) or not self._try_enter():
            return first.result()
        running = {first, pool.submit(self._run, attempt, fate_of, lambda: None)}
        while True:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            good = next((future for future in done if future.exception() is None), None)
            if good is not None or not running:
                return (good or done.pop()).result()
