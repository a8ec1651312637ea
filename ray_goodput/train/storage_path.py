"""From Ray's `RunConfig(storage_path=)` and `storage_options` to our store and to the file system Ray itself writes
with."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train

from ray_goodput.config import StoreSpec
from ray_goodput.errors import ConfigError, GoodputError, StorageAccessError
from ray_goodput.storage import open_store


def resolve_storage(
    run_config: ray.train.RunConfig, options: Mapping[str, Any] | None
) -> tuple[ray.train.RunConfig, StoreSpec]:
    """The run configuration with the file system filled in, and the store of the run's own folder.

    For `s3://`, Ray gets s3fs with the same options instead of pyarrow's S3 client, whose default checksums make
    uploads to MinIO-derived servers vanish without an error.

    Raises:
        ConfigError: a file system was passed, which our own clients could not use.
    """
    if run_config.storage_filesystem is not None:
        raise ConfigError(
            "GoodputTrainer reads and writes through its own clients, so RunConfig(storage_filesystem=...) cannot be "
            'used: give a URL as storage_path (such as "s3://bucket/runs") and GoodputTrainer(storage_options={...}).'
        )
    uri = str(run_config.storage_path)
    options = dict(options or {})
    if uri.startswith("s3://"):
        return (
            dataclasses.replace(
                run_config, storage_path=uri.removeprefix("s3://").rstrip("/"), storage_filesystem=_s3fs(options)
            ),
            StoreSpec(uri=uri, options=options).child(str(run_config.name)),
        )
    if "://" not in uri:
        uri = str(Path(uri).expanduser().resolve())
        run_config = dataclasses.replace(run_config, storage_path=uri)
    return run_config, StoreSpec(uri=uri, options=options).child(str(run_config.name))


def probe_storage(spec: StoreSpec) -> None:
    """Write, read and delete one small object, so that a storage that cannot work is found before anything starts.

    Raises:
        StorageAccessError: saying where and what to change.
    """
    key = f".probe-{uuid.uuid4().hex}"
    content = b"ray_goodput"
    try:
        store = open_store(spec)
        store.put(key, content)
        back = store.get(key)
    except GoodputError as error:
        raise StorageAccessError(f"The storage of this run, {spec.uri}, cannot be used: {error}") from error
    with contextlib.suppress(GoodputError):
        store.delete([key])
    if back != content:
        raise StorageAccessError(
            f"The storage of this run, {spec.uri}, returned {len(back)} bytes that differ from the {len(content)} "
            "written: it cannot be trusted with checkpoints."
        )


def _s3fs(options: Mapping[str, Any]) -> Any:
    from pyarrow.fs import FSSpecHandler, PyFileSystem
    from s3fs import S3FileSystem

    options = dict(options)
    client = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    options["config_kwargs"] = {**client, **options.get("config_kwargs", {})}
    return PyFileSystem(FSSpecHandler(S3FileSystem(**options)))
