"""Objects in a store or on a disk: whole or absent. See README.md."""

from __future__ import annotations

from ray_goodput.storage.open import open_store
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectStore", "open_store"]
