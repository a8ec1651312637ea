"""Call an actor as if it were the plain object it wraps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ray_goodput.actors.names import NAMESPACE
from ray_goodput.errors import RunError

CONTROL = "control"
"""The group of threads of an actor for calls that its other work must not delay."""

_CONTROL_THREADS = 4


def with_control_threads(process: type, **more_groups: int) -> Any:
    """An actor class with threads of their own for calls in the group `CONTROL`, and in `more_groups`."""
    remote: Any = ray.remote  # its overloads do not know of groups
    return remote(concurrency_groups={CONTROL: _CONTROL_THREADS, **more_groups})(process)


class RemoteProxy:
    """Blocking calls to a named actor, each bounded by `timeout_s`.

    The handle is looked up at the first call and kept: Ray delivers to the actor's next life after a restart. Errors
    of the method come out as themselves, not wrapped, so that callers handle them as with the plain object.

    Raises:
        ValueError: no actor of that name lives.
        RunError: no answer within `timeout_s`, or the actor is gone.
    """

    def __init__(self, name: str, *, timeout_s: float = 120.0) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(self._name, namespace=NAMESPACE)
        return self._handle

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return ray.get(getattr(self.handle, method).remote(*args, **kwargs), timeout=self._timeout_s)
            except RayTaskError as error:
                raise error.cause from error
            except RayError as error:
                raise RunError(f"The actor {self._name} did not answer ({type(error).__name__}).") from error

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._name, self._timeout_s))


def _rebuild(name: str, timeout_s: float) -> RemoteProxy:
    return RemoteProxy(name, timeout_s=timeout_s)
