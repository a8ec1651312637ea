"""DCP's `.metadata` is a pickle: read here without running what it says, only rebuilding DCP's own records."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ray_goodput.errors import CorruptCheckpointError

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(value := getattr(torch, global_name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint metadata needs")


def read_metadata(data: bytes) -> Metadata:
    """The metadata in the bytes of a `.metadata` file; no code it names is run.

    Raises:
        CorruptCheckpointError: not DCP metadata.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise CorruptCheckpointError(f"The .metadata of the checkpoint cannot be read: {error}.") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CorruptCheckpointError(f"The .metadata of the checkpoint holds a {type(metadata).__name__}.")
    return metadata
