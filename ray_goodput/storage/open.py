"""From a `StoreSpec` to an open store: the scheme decides, and only then is a client library imported."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ray_goodput.config import StoreSpec
from ray_goodput.errors import ConfigError
from ray_goodput.gates import drills_folder
from ray_goodput.storage.governor import RequestGovernor
from ray_goodput.storage.protocol import ObjectStore

_CLOUD_SCHEMES = ("s3", "s3a")


def open_store(spec: StoreSpec, governor: RequestGovernor | None = None) -> ObjectStore:
    """A store for the root `spec.uri`; reads that cross the network go through `governor`, if one is given.

    `s3://` goes to `CloudStore` (obstore); a local path or `file://` to `LocalStore`; any other URL that
    fsspec knows (`gs://`, `az://`, `memory://`, ...) to `FsspecStore`. A file system object that is already open can
    be given as `options={"filesystem": fs}`: it is used for whatever URL. Nothing is sent yet: a wrong key shows
    at the first call.

    Raises:
        ConfigError: the URI is empty or malformed, or an option is unknown; the message names it.
    """
    store = _open(spec, governor)
    if drills_folder() is None:
        return store
    from ray_goodput.storage.faults import behind_gates

    return behind_gates(store)


def _open(spec: StoreSpec, governor: RequestGovernor | None) -> ObjectStore:
    if not spec.uri:
        raise ConfigError("The storage URI is empty: give s3://bucket/prefix, another fsspec URL, or a local path.")
    options = dict(spec.options)
    if options.get("filesystem") is not None:
        from ray_goodput.storage.fsspec_store import FsspecStore

        return FsspecStore(spec.uri, filesystem=options.pop("filesystem"), governor=governor)
    scheme, separator, _ = spec.uri.partition("://")
    if not separator or scheme == "file":
        from ray_goodput.storage.local import LocalStore

        if options:
            raise ConfigError(f"A local path takes no storage options, got {sorted(options)} for {spec.uri}.")
        return LocalStore(local_path(spec.uri))
    if scheme.lower() in _CLOUD_SCHEMES:
        from ray_goodput.storage.cloud import CloudStore

        return CloudStore(spec.uri, options, governor=governor)
    from ray_goodput.storage.fsspec_store import FsspecStore

    return FsspecStore(spec.uri, options=options, governor=governor)


def local_path(uri: str) -> Path:
    """The path behind a plain path or a `file://` URL (percent-decoded; a foreign host is a `ConfigError`)."""
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    parts = urlsplit(uri, allow_fragments=False)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{uri} names the host {parts.netloc!r}: write file:///{parts.netloc}{parts.path} instead.")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return Path(unquote(path)).absolute()
