"""How much memory a model takes, and how its lack shows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: 1
_REAL = ("F64", "F32", "F16", "BF16")


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an exception, of whichever library, means that memory ran out."""
    kind = type(error).__name__
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "allocate memory" in str(error)


def weight_bytes(folder: Path, dtype: str) -> int | None:
    """Reads off the headers of a model's safetensors files how much memory its weights take once loaded.

    Args:
        folder: the model's.
        dtype: in which it is loaded, or ``auto`` for the one it was saved in.

    Returns:
        Bytes; ``None`` if there are no such files, or none that can be read.
    """
    total = 0
    try:
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if length > file.stat().st_size:
                    return None
                header: dict[str, Any] = json.loads(stream.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    total += math.prod(tensor["shape"]) * _width(tensor["dtype"], dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # loading the model will say what is wrong
    return total or None


def _width(stored: str, dtype: str) -> int:
    if dtype == "auto" or stored not in _REAL:
        return _BYTES.get(stored, 1)
    return 4 if dtype == "float32" else 2
