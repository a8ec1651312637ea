"""Tries a run's storage: whether what clients write is there afterwards, and whether its clock agrees."""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from ray_goodput.config import StoreSpec
from ray_goodput.errors import GoodputError, ObjectNotFoundError
from ray_goodput.goodput.doctor import Finding
from ray_goodput.storage import ObjectStore, open_store

_SKEW_S = 60.0
_CONTENT = b"ray_goodput doctor"


def try_storage(spec: StoreSpec) -> list[Finding]:
    """Findings about writing to the folder `spec`; each probe is a small object that is removed again."""
    store = open_store(spec)
    found = [_try_ours(store)]
    if found[0].level == "ok" and spec.uri.startswith("s3://"):
        found.append(_try_pyarrow(spec, store))
    return found


def _try_ours(store: ObjectStore) -> Finding:
    key = f".doctor-{uuid.uuid4().hex}"
    try:
        began = time.monotonic()
        store.put(key, _CONTENT)
        took_s = time.monotonic() - began
        info = store.head(key)
        back = store.get(key)
    except GoodputError as error:
        return Finding(
            check="storage",
            level="problem",
            found=f"A probe cannot be written and read back: {error}",
            costs="No checkpoint becomes durable.",
            mend="Check the URL, credentials (--storage-options) and permissions: write, read, list, delete.",
            where=store.uri,
        )
    finally:
        with contextlib.suppress(GoodputError):
            store.delete([key])
    if back != _CONTENT:
        return Finding(
            check="storage",
            level="problem",
            found=f"{len(_CONTENT)} bytes were written, {len(back)} others came back.",
            costs="No checkpoint there can be trusted.",
            mend="Use another storage.",
            where=store.uri,
        )
    skew = time.time() - info.modified_at_s if info.modified_at_s else 0.0
    if abs(skew) > _SKEW_S:
        return Finding(
            check="clock",
            level="problem" if abs(skew) > 600 else "note",
            found=f"This machine's clock is {skew:+.0f} s off the storage's.",
            costs="S3 refuses every request from 15 min on: uploads stop, and with them commits.",
            mend="Run chrony or another time service on every node.",
            where=store.uri,
        )
    text = f"A probe was written, looked up and read back; writing it took {1000 * took_s:.0f} ms."
    return Finding(check="storage", level="ok", found=text, where=store.uri)


def _try_pyarrow(spec: StoreSpec, store: ObjectStore) -> Finding:
    """Ray itself writes with pyarrow where it is given nothing else; some servers lose what that sends by default."""
    key = f".doctor-{uuid.uuid4().hex}"
    split = urlsplit(spec.uri)
    try:
        with _pyarrow_s3(spec).open_output_stream(f"{split.netloc}{split.path.rstrip('/')}/{key}") as stream:
            stream.write(_CONTENT)
        told = "was told to be done"
    except (OSError, GoodputError) as error:
        told = f"failed ({' '.join(str(error).split())[:200]})"
    try:
        size = store.head(key).size_bytes
    except ObjectNotFoundError:
        size = -1
    finally:
        with contextlib.suppress(GoodputError):
            store.delete([key])
    if size == len(_CONTENT):
        text = "An upload by pyarrow's S3 client arrived."
        return Finding(check="upload checksums", level="ok", found=text, where=store.uri)
    return Finding(
        check="upload checksums",
        level="problem",
        found=f"An upload by pyarrow's S3 client {told}, and the object is not there.",
        costs="What Ray itself, or your own code with pyarrow, writes there is lost, on some servers without an error. "
        "GoodputTrainer's own files are safe: it uses other clients.",
        mend="AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment of the driver and all nodes.",
        where=store.uri,
    )


def _pyarrow_s3(spec: StoreSpec) -> Any:
    from pyarrow.fs import S3FileSystem

    from ray_goodput.storage.cloud_options import S3Options

    options = S3Options.parse(spec.options)
    given: dict[str, Any] = {"region": options.region or "us-east-1"}
    if options.key:
        given |= {"access_key": options.key, "secret_key": options.secret, "session_token": options.token}
    if options.endpoint_url:
        endpoint = urlsplit(options.endpoint_url)
        given |= {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme}
    return S3FileSystem(**given)
