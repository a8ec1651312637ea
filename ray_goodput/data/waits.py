"""Where a consumer's waiting for data is booked: whoever keeps this process's ledger says so here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

_observer: Callable[[], AbstractContextManager[None]] | None = None


def observe_waits(observer: Callable[[], AbstractContextManager[None]] | None) -> None:
    """From now on each wait for a batch of an `rg.DataLoader` happens inside `observer()`; None: nobody observes."""
    global _observer
    _observer = observer


def waiting() -> AbstractContextManager[None]:
    """The context of one wait."""
    return nullcontext() if _observer is None else _observer()
