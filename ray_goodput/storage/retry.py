"""When to try again: a budget of attempts and seconds, exponential backoff with full jitter, one table of errors.

Full jitter (wait = uniform(0, min(cap, first * 2^n))) after M. Brooker, "Exponential Backoff And Jitter", AWS
Architecture Blog, 2015: of the usual variants it makes many clients of one store collide least.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from ray_goodput.clock import Clock, SystemClock
from ray_goodput.errors import ConfigError, GoodputError, UploadError

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Fault(Enum):
    """What kind of failure an error is, which decides whether trying again can help."""

    TRANSIENT = "transient"
    ACCESS = "access"
    MISSING = "missing"
    CHANGED = "changed"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Budget of one storage call: whichever of `attempts` and `total_s` is used up first ends it.

    The n-th wait is drawn from 0 to min(`max_wait_s`, `first_wait_s` * 2^n) seconds.
    """

    attempts: int = 20
    total_s: float = 30.0
    first_wait_s: float = 0.1
    max_wait_s: float = 4.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"RetryPolicy(attempts={self.attempts}): at least 1 attempt is needed.")
        if min(self.total_s, self.first_wait_s, self.max_wait_s) < 0:
            raise ConfigError(
                f"RetryPolicy(total_s={self.total_s}, first_wait_s={self.first_wait_s}, "
                f"max_wait_s={self.max_wait_s}): seconds cannot be negative."
            )

    def wait_s(self, retry: int, rng: random.Random) -> float:
        """Seconds to wait before retry number `retry` (0, 1, ...)."""
        # The exponent is capped: 2**1024 does not fit a float.
        return rng.uniform(0.0, min(self.max_wait_s, self.first_wait_s * 2.0 ** min(retry, 60)))


class CallFailed(Exception):
    """A call did not succeed within its budget; internal, turned into a `StorageError` by the store."""

    def __init__(self, error: Exception, fault: Fault, attempts: int, elapsed_s: float) -> None:
        super().__init__(error, fault, attempts, elapsed_s)
        self.error = error
        self.fault = fault
        self.attempts = attempts
        self.elapsed_s = elapsed_s


class Retrier:
    """Runs calls under a policy. Thread-safe: holds no state of a call."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.policy = policy
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._rng = rng or random.Random()

    def call(self, what: str, attempt: Callable[[], T], classify: Callable[[Exception], Fault]) -> T:
        """The result of `attempt()`, tried again while `classify` calls its error transient and the budget lasts.

        A `GoodputError` other than `UploadError` is a finished verdict and passes through.

        Raises:
            CallFailed: the last error, its kind, the number of attempts and the seconds spent.
        """
        started_s = self._clock.mono_s()
        for tries in range(1, self.policy.attempts + 1):
            try:
                result = attempt()
            except Exception as error:  # any client library may raise anything; `classify` sorts it
                if isinstance(error, GoodputError) and not isinstance(error, UploadError):
                    raise
                fault = classify(error)
                elapsed_s = self._clock.mono_s() - started_s
                wait_s = self.policy.wait_s(tries - 1, self._rng)
                out_of_budget = tries == self.policy.attempts or elapsed_s + wait_s > self.policy.total_s
                if fault is not Fault.TRANSIENT or out_of_budget:
                    raise CallFailed(error, fault, tries, elapsed_s) from error
                if tries == 1:
                    _log.warning("%s failed, trying again for up to %.0f s", what, self.policy.total_s)
                self._sleep(wait_s)
            else:
                if tries > 1:
                    elapsed_s = self._clock.mono_s() - started_s
                    _log.info("%s succeeded at attempt %d after %.1f s", what, tries, elapsed_s)
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")


_ACCESS_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP}
_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}


def classify(error: BaseException) -> Fault:
    """The kind of an error of the operating system or of a Python network client."""
    if isinstance(error, UploadError):
        return Fault.TRANSIENT
    if isinstance(error, FileNotFoundError):
        return Fault.MISSING
    if isinstance(error, PermissionError | NotADirectoryError):
        return Fault.ACCESS
    if isinstance(error, ConnectionError | TimeoutError):
        return Fault.TRANSIENT
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in _ACCESS_ERRNO:
            return Fault.ACCESS
        return Fault.TRANSIENT if error.errno in _TRANSIENT_ERRNO else Fault.FATAL
    # aiohttp, botocore and friends: their trees have no common base, but telling names.
    name = type(error).__name__
    if any(word in name for word in ("Timeout", "Connect", "ServerDisconnected", "Throttl", "Incomplete")):
        return Fault.TRANSIENT
    if any(word in name for word in ("Credential", "Unauthorized", "Forbidden", "AccessDenied")):
        return Fault.ACCESS
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return classify_status(status) if isinstance(status, int) else Fault.FATAL


def classify_status(status: int) -> Fault:
    """The kind of an HTTP status."""
    if status in (408, 429) or status >= 500:
        return Fault.TRANSIENT
    if status in (301, 307, 401, 403):
        return Fault.ACCESS
    if status == 404:
        return Fault.MISSING
    return Fault.CHANGED if status == 412 else Fault.FATAL
