"""The random number streams of a rank as JSON: python, numpy's legacy global, torch CPU, each CUDA device.

Format: version 1, `{"format": "ray_goodput.rng", "version": 1, "python": [version, [625 ints], gauss | null],
"numpy": {...}, "torch": base64, "cuda": [base64, ...]}`. No pickle. A rank's streams go to the same rank of a world of
the same size; at any other size they are derived from (seed, step, rank).
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from ray_goodput.errors import CorruptCheckpointError

FORMAT, VERSION = "ray_goodput.rng", 1


def capture_rng() -> bytes:
    """The state of every stream of this process, as JSON of about 20 KB."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)  # a tuple then; the stub says a dictionary, too
    kind, key, position, has_gauss, cached = numpy_state
    body = {
        "format": FORMAT,
        "version": VERSION,
        "python": [version, list(words), gauss],
        "numpy": {
            "kind": kind,
            "key": _encode(np.ascontiguousarray(key, dtype="<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_encode(state.numpy().tobytes()) for state in _cuda_states()],
    }
    return json.dumps(body, separators=(",", ":")).encode()


def restore_rng(data: bytes) -> None:
    """Every stream goes on exactly where `capture_rng` saw it. CUDA devices beyond those saved are left alone.

    Raises:
        CorruptCheckpointError: the data is not a rank's state; no stream has been touched then.
    """
    try:
        body = json.loads(data)
        if body["format"] != FORMAT or body["version"] != VERSION:
            raise ValueError(f"format {body['format']!r}, version {body['version']!r}")
        version, words, gauss = body["python"]
        python_state = (int(version), tuple(int(word) for word in words), gauss)
        random.Random().setstate(python_state)
        n = body["numpy"]
        key = np.frombuffer(_decode(n["key"]), dtype="<u4").astype(np.uint32)
        numpy_state = (n["kind"], key, int(n["position"]), int(n["has_gauss"]), float(n["cached_gaussian"]))
        np.random.RandomState().set_state(numpy_state)
        torch_state = _tensor(body["torch"])
        torch.Generator().set_state(torch_state)
        cuda_states = [_tensor(state) for state in body["cuda"]]
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CorruptCheckpointError(f"The random number state of a rank cannot be read ({error}).") from error
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if torch.cuda.is_available():
        for device, state in enumerate(cuda_states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)


def derive_rng(seed: int, step: int, world_rank: int) -> None:
    """Every stream starts afresh from (seed, step, rank): the same everywhere, different for each rank and step."""
    sequence = np.random.SeedSequence([seed & (2**64 - 1), step, world_rank])
    python_seed, numpy_seed, torch_seed = (int(word) for word in sequence.generate_state(3, dtype=np.uint64))
    random.seed(python_seed)
    np.random.seed(numpy_seed & (2**32 - 1))
    torch.manual_seed(torch_seed & (2**63 - 1))  # CUDA devices too, lazily if CUDA is not up yet


def _cuda_states() -> list[torch.Tensor]:
    # Asking an uninitialised CUDA for its state would create a context on every device of the node.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
