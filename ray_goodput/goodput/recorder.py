"""What a rank is doing now, written down at every change.

The training thread pays one clock read and one record for each change; a heartbeat thread stamps the journal's last
sign of life, and a sender thread hands finished records on in pages. None of them ever raises into training: a recorder
that cannot write says so once and goes quiet, and the ledger books the missing time as unknown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ray_goodput.clock import Clock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import STEP_DONE, JournalPage, JournalWriter

logger = logging.getLogger(__name__)

SendPage = Callable[[JournalPage], int | None]
"""Delivers a page; may answer with the number of the record wanted next (the receiver lost some, or has them already).
It may raise or take long: the page is offered again at a later beat, and pages may arrive twice."""


class Recorder:
    """Keeps one rank's journal: `start`, then `switch`, `span` and `step_done`, then `close`.

    `switch` sets the base bucket; a `span` overrides it until it ends, the innermost one counting. All methods may be
    called from any thread, but there is one timeline a rank: call them for what the training thread does.

    on_give_up: called in place of `send`, as often, once the journal cannot be written any more and what it holds is
        delivered: the receiver must not take its silence for the rank's, and may have orders. As `send`, it may raise.
    """

    def __init__(
        self,
        writer: JournalWriter,
        clock: Clock,
        *,
        send: SendPage | None = None,
        on_give_up: Callable[[], Any] | None = None,
        heartbeat_s: float = 1.0,
        page_records: int = 4096,
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._mono_s = clock.mono_s
        self._send = send
        self._on_give_up = on_give_up
        self._heartbeat_s = heartbeat_s
        self._page_records = page_records
        self._lock = threading.Lock()
        self._live = False
        self._gave_up = False
        self._base = Bucket.STARTUP
        self._bucket = Bucket.STARTUP  # of the open record
        self._spans: list[_Span] = []
        self._step = -1  # the last one done; -1 while unknown
        self._sent = 0  # records delivered; owned by whoever holds `_sending`
        self._sending = threading.Lock()
        self._send_failed = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, bucket: Bucket = Bucket.STARTUP, *, threads: bool = True) -> None:
        """Begin the journal in `bucket`, and the heartbeat. With `threads=False` the caller beats (`beat`)."""
        try:
            with self._lock:
                self._base = self._bucket = bucket
                self._writer.open(self._now_ns(), int(self._clock.at_s() * 1e9), bucket)
                self._live = True
        except Exception as error:  # a full or read-only disk must not keep training from starting
            self._give_up(error)
        if threads:
            if self._live:
                self._threads.append(threading.Thread(target=self._beat_loop, name="goodput-heartbeat", daemon=True))
            if self._send is not None:  # its own thread: a receiver that hangs must not stop the heartbeat
                self._threads.append(threading.Thread(target=self._send_loop, name="goodput-sender", daemon=True))
            for thread in self._threads:
                thread.start()

    @property
    def bucket(self) -> Bucket:
        """What the rank is doing now."""
        return self._bucket

    @property
    def step(self) -> int:
        """The last step done, or resumed from; -1 while unknown."""
        return self._step

    def elapsed_s(self) -> float:
        """Seconds since `start`, on the clock the journal is written with; what `Ledger.rank_hello` asks for."""
        return self._clock.mono_s() - self._writer.header.mono_anchor_ns / 1e9 if self._live else 0.0

    def switch(self, bucket: Bucket) -> None:
        """From now on the rank's time belongs to `bucket`, wherever no span says otherwise."""
        with self._lock:
            self._base = bucket
            if not self._spans:
                self._change(bucket)

    def span(self, bucket: Bucket) -> _Span:
        """Context manager: the time inside belongs to `bucket`, except for spans within."""
        return _Span(self, bucket)

    def step_done(self, step: int, own_s: float = 0.0) -> None:
        """Step `step` is done (the first one of a run is 1); what follows belongs to the next.

        own_s: how long the rank computed by itself in it, without waits for others; 0 if that is not known.
        """
        with self._lock:
            if self._live:
                try:
                    self._writer.roll(
                        self._now_ns(),
                        flags=STEP_DONE,
                        step=step,
                        next_bucket=self._bucket,
                        next_step=step + 1,
                        own_us=int(own_s * 1e6),
                    )
                except Exception as error:  # never into training
                    self._give_up(error)
            self._step = step

    def resumed(self, step: int) -> None:
        """The run goes on after `step` (0 for a fresh run): the open record belongs to the step after it."""
        with self._lock:
            self._step = step
            if self._live:
                self._writer.set_step(step + 1)

    def beat(self) -> None:
        """Stamp a sign of life."""
        if self._live:
            self._writer.heartbeat(self._now_ns())

    def deliver(self) -> bool:
        """Send all records not delivered yet, and the current sign of life; False when the receiver failed."""
        with self._sending:
            if self._send is None:
                return True
            try:
                if self._gave_up and self._sent >= self._writer.next_record:
                    if self._on_give_up is not None:
                        self._on_give_up()
                    self._send_failed = False
                    return True
                rewinds = 0
                while rewinds <= 2:  # a receiver that keeps asking for old records must wait for the next beat
                    page = self._writer.read(self._sent, self._page_records)
                    wanted = self._send(page)
                    before, self._sent = self._sent, page.next_record if wanted is None else wanted
                    if self._sent >= self._writer.next_record:
                        break
                    rewinds += self._sent <= before
                self._send_failed = False
                return True
            except Exception as error:  # the receiver may be dead or restarting: keep the records, offer them again
                if not self._send_failed:
                    logger.warning("The goodput journal cannot be delivered (%r); it will be offered again.", error)
                self._send_failed = True
                return False

    def close(self, timeout_s: float = 2.0) -> None:
        """End the journal and deliver the rest, waiting at most about `timeout_s` for the receiver. Idempotent."""
        with self._lock:
            if self._live:
                self._live = False
                try:
                    self._writer.close(self._now_ns(), step=self._next_step())
                except Exception as error:  # never into training
                    self._give_up(error)
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        if not self._threads:
            self.deliver()
        if not any(thread.is_alive() for thread in self._threads):
            self._writer.release()  # else the sender still reads from it; the process's end closes the file

    def _enter(self, span: _Span) -> None:
        with self._lock:
            self._spans.append(span)
            self._change(span.bucket)

    def _exit(self, span: _Span) -> None:
        with self._lock:
            # A generator that is closed late can end an outer span first: take out this one, wherever it is.
            if self._spans and self._spans[-1] is span:
                self._spans.pop()
            elif span in self._spans:
                self._spans.remove(span)
            self._change(self._spans[-1].bucket if self._spans else self._base)

    def _change(self, bucket: Bucket) -> None:
        if bucket is self._bucket or not self._live:
            return
        self._bucket = bucket
        step = self._next_step()
        try:
            self._writer.roll(self._now_ns(), flags=0, step=step, next_bucket=bucket, next_step=step)
        except Exception as error:  # never into training
            self._give_up(error)

    def _next_step(self) -> int:
        return self._step + 1 if self._step >= 0 else -1

    def _now_ns(self) -> int:
        return int(self._mono_s() * 1e9)

    def _give_up(self, error: Exception) -> None:
        self._live, self._gave_up = False, True
        logger.warning(
            "The goodput journal %s cannot be written (%r). Training goes on; this rank's time will be unknown.",
            self._writer.path,
            error,
        )

    def _beat_loop(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            self.beat()

    def _send_loop(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            self.deliver()
        self.deliver()


class _Span:
    """A context manager of a recorder; a class, since a generator would cost several times as much."""

    __slots__ = ("_recorder", "bucket")

    def __init__(self, recorder: Recorder, bucket: Bucket) -> None:
        self._recorder = recorder
        self.bucket = bucket

    def __enter__(self) -> None:
        self._recorder._enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder._exit(self)
