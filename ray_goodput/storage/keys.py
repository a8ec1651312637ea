"""Rules for keys: relative, `/`-separated, never outside the root. Pure."""

from __future__ import annotations

from ray_goodput.errors import StorageError


def check_key(key: str) -> str:
    """`key` itself, if it names an object inside the root on every kind of store.

    Raises:
        StorageError: empty, absolute, an empty, `.` or `..` part, a NUL, or text that UTF-8 cannot encode.
    """
    if not key:
        raise StorageError("The key of an object is empty.")
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise StorageError(
            f"{key!r} is no key: give names joined by single '/', relative to the root, without '.' and '..'."
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise StorageError(f"{key!r} is no key: it cannot be encoded as UTF-8 ({error.reason}).") from None
    return key


def folder_of(prefix: str) -> str:
    """The folder `prefix` as what its keys start with: `""` for the root, else checked and ending in one `/`."""
    prefix = prefix.rstrip("/")
    return check_key(prefix) + "/" if prefix else ""


def join(root: str, key: str) -> str:
    """`root/key`, where the root may be empty."""
    return f"{root}/{key}" if root else key
