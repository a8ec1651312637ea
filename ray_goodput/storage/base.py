"""What all stores share: checked keys, one way to call, retry and translate, no pickling, no use after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn, TypeVar

from ray_goodput.core.request_rate import RequestFate
from ray_goodput.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    UploadError,
)
from ray_goodput.storage.governor import Attempt, RequestGovernor
from ray_goodput.storage.protocol import ObjectInfo
from ray_goodput.storage.retry import CallFailed, Fault, Retrier, classify

T = TypeVar("T")


class BaseStore:
    """Base of the stores in this folder; see `ObjectStore` for the contract.

    governor: reads go through it, one request at a time; None: as many as there are callers.
    """

    def __init__(self, uri: str, retrier: Retrier, governor: RequestGovernor | None = None) -> None:
        self._uri = uri.rstrip("/") if uri.strip("/") else uri
        self._retrier = retrier
        self._governor = governor
        self._pid = os.getpid()

    @property
    def uri(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._uri!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: send its StoreSpec and call open_store where it is used.")

    def _call(self, op: str, key: str, attempt: Callable[[], T]) -> T:
        """`attempt()` with retries; whatever leaves is a `StorageError` that names the object."""
        if os.getpid() != self._pid:
            raise StorageError(
                f"{self!r} was opened in process {self._pid} and used in its fork {os.getpid()}, where client threads "
                "are gone: open the store in the process that uses it, or start workers with spawn."
            )
        where = f"{self._uri.rstrip('/')}/{key}"
        try:
            return self._retrier.call(f"{op} of {where}", attempt, self._classify)
        except CallFailed as failed:
            raise self._translate(op, where, failed) from failed.error

    def _asked(self, attempt: Attempt[T]) -> T:
        """One request for reading, when it is its turn."""
        return attempt(_ignored) if self._governor is None else self._governor.request(attempt, self._fate)

    def _fate(self, error: Exception) -> RequestFate:
        """What an error says about the load of the store."""
        return RequestFate.LOST if classify(error) is Fault.TRANSIENT else RequestFate.ANSWERED

    def _classify(self, error: Exception) -> Fault:
        return classify(error)

    def _reason(self, error: Exception) -> str:
        """One clause about the cause, free of secrets and line breaks."""
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__

    def _advice(self, fault: Fault, error: Exception) -> str:
        """One sentence on what to change, or nothing."""
        return ""

    def _translate(self, op: str, where: str, failed: CallFailed) -> StorageError:
        error, fault = failed.error, failed.fault
        if fault is Fault.MISSING:
            return ObjectNotFoundError(f"{where} does not exist.")
        if isinstance(error, UploadError):
            return UploadError(f"{error} Tried {failed.attempts} times in {failed.elapsed_s:.1f} s.")
        times = f" {failed.attempts} times in {failed.elapsed_s:.1f} s" if failed.attempts > 1 else ""
        text = f"{op} of {where} failed{times}: {self._reason(error)}. {self._advice(fault, error)}".rstrip()
        if fault is Fault.CHANGED:
            return ObjectChangedError(f"{where} changed: {self._reason(error)}.")
        return (StorageAccessError if fault is Fault.ACCESS else StorageError)(text)

    def _changed(self, key: str, expected: str, found: ObjectInfo) -> ObjectChangedError:
        return ObjectChangedError(
            f"{self._uri.rstrip('/')}/{key} is not the object that was pinned: etag {expected} was expected, now it is "
            f"{found.etag} ({found.size_bytes} bytes). Restore the old object, or pin the new one."
        )

    def _short(self, key: str, start: int, length: int, got: int) -> StorageError:
        return StorageError(
            f"{self._uri.rstrip('/')}/{key} ends early: {length} bytes from offset {start} were asked for, {got} came."
        )


def _ignored() -> None:
    """Nobody asks when the answer began."""
