"""A run's own id, in its storage: copies on the nodes that a deleted run of the same name left are told apart by it."""

from __future__ import annotations

import json
import logging
import uuid

from ray_goodput.errors import ObjectNotFoundError
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

IDENTITY_NAME = "run.json"
_FORMAT, _VERSION = "ray_goodput.run", 1


def run_identity(store: ObjectStore) -> str:
    """The id in `run.json`, made at the first call. Only the run's coordinator calls it, or rank 0 where there is none:
    nobody races.

    Raises:
        StorageError: the storage cannot be read or written.
    """
    try:
        body = json.loads(store.get(IDENTITY_NAME))
        if body["format"] == _FORMAT and isinstance(body["id"], str):
            return body["id"]
        problem = f"format {body['format']!r}"
    except ObjectNotFoundError:
        problem = ""
    except (ValueError, KeyError, TypeError) as error:
        problem = repr(error)
    if problem:
        logger.warning("%s cannot be read (%s): what nodes still hold of the run is not used.", IDENTITY_NAME, problem)
    run_id = uuid.uuid4().hex
    store.put(IDENTITY_NAME, json.dumps({"format": _FORMAT, "version": _VERSION, "id": run_id}).encode())
    return run_id
