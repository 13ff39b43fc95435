"""Where rows lie, and reading them quickly."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyMemmapStorage, TensorStorage

GIB = 1024**3


def row_bytes(rows: TensorDictBase) -> int:
    """Returns the bytes of one of the rows ``[K]``, K ≥ 1."""
    return sum(leaf[0].nbytes for leaf in rows.values(True, True))


def nest(leaves: Mapping[NestedKey, Tensor], *shape: int) -> TensorDict:
    """Returns a TensorDict ``shape`` of leaves that are known to fit.

    Not the public constructor: its checks of every entry cost as much as gathering them. TorchRL does the same.
    """
    batch_size = torch.Size(shape)
    root: dict[str, Any] = {}
    for key, leaf in leaves.items():
        node = root
        *path, name = (key,) if isinstance(key, str) else key
        for part in path:
            if part not in node:
                node[part] = TensorDict._new_unsafe({}, batch_size=batch_size)
            node = node[part]._tensordict
        node[name] = leaf
    return TensorDict._new_unsafe(root, batch_size=batch_size)


def mapped_storage(capacity: int, scratch_dir: str | Path | None) -> LazyMemmapStorage:
    """Returns a storage whose rows lie in files of a fresh folder, which goes when the storage or the process does.

    TorchRL's own clean-up is off: it installs signal handlers that would delete the rows before a checkpoint could be
    saved on SIGTERM, and without a folder it maps shared memory, which is no disk.

    Args:
        capacity: number of rows.
        scratch_dir: where the folder is made; ``None`` is the system's temporary one.

    Raises:
        OSError: the folder cannot be made.
    """
    folder = tempfile.mkdtemp(prefix="vlmrb-rows-", dir=scratch_dir)
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, auto_cleanup=False)
    weakref.finalize(storage, shutil.rmtree, folder, ignore_errors=True)
    return storage


@dataclass(frozen=True)
class Placement:
    """Whether rows lie in memory or in files.

    Attributes:
        storage: ``memory``, ``memmap``, or ``auto``: memory-mapped if the rows would exceed ``memory_limit``.
        scratch_dir: see `mapped_storage`.
        memory_limit: bytes.
    """

    storage: Literal["auto", "memory", "memmap"]
    scratch_dir: str | Path | None
    memory_limit: int

    def __post_init__(self) -> None:
        """Refuses another word for ``storage``."""
        if self.storage not in ("auto", "memory", "memmap"):
            raise ValueError(f"storage={self.storage!r} must be 'auto', 'memory' or 'memmap'")

    def mapped(self, capacity: int, rows: TensorDictBase) -> LazyMemmapStorage | None:
        """Returns a memory-mapped storage for ``capacity`` rows like these, or ``None`` if they belong into memory."""
        if not self.maps(capacity * row_bytes(rows.reshape(-1))):
            return None
        return mapped_storage(capacity, self.scratch_dir)

    def maps(self, rows_bytes: int) -> bool:
        """Returns whether rows of so many bytes in all lie in files."""
        return self.storage == "memmap" or (self.storage == "auto" and rows_bytes > self.memory_limit)


def _leaf(rows: TensorDict, key: NestedKey) -> Tensor:
    """Returns a leaf of what `nest` made, at a fifth of ``get``'s time."""
    *path, name = (key,) if isinstance(key, str) else key
    for part in path:
        rows = rows._tensordict[part]
    return rows._tensordict[name]


class RowTable:
    """Reads and writes the rows of a storage leaf by leaf, at a third of what TensorDict's general indexing costs.

    Args:
        storage: an initialised storage of a TensorDict.
    """

    def __init__(self, storage: TensorStorage) -> None:
        # Memory-mapped leaves are a Tensor subclass whose dispatch is slow; as plain tensors they share the memory.
        self._leaves: list[tuple[NestedKey, Tensor]] = [
            (key, leaf.as_subclass(torch.Tensor))
            for key, leaf in storage._storage.items(include_nested=True, leaves_only=True)
        ]
        self._capacity = len(storage._storage)

    def write(self, start: int, rows: TensorDict) -> None:
        """Writes rows into consecutive slots, going on at slot 0 after the last one.

        Args:
            start: the first slot.
            rows: of any batch shape, flattened in order; at most as many as there are slots. Other keys are left out.
        """
        count = rows.numel()
        before_wrap = self._capacity - start
        for key, leaf in self._leaves:
            values = _leaf(rows, key).reshape(count, *leaf.shape[1:])
            if count <= before_wrap:
                leaf[start : start + count] = values
            else:
                leaf[start:] = values[:before_wrap]
                leaf[: count - before_wrap] = values[before_wrap:]

    def read(self, slots: Tensor, extra: Mapping[str, Tensor]) -> TensorDict:
        """Returns copies of rows.

        Args:
            slots: ``int64[B]``.
            extra: further keys, ``[B, …]``.

        Returns:
            ``[B]`` rows, unlocked.
        """
        rows = {key: leaf.index_select(0, slots) for key, leaf in self._leaves}
        return nest({**extra, **rows}, slots.numel())

    def values(self, key: NestedKey, slots: Tensor) -> Tensor:
        """Returns copies of one key's values in slots ``int64[B]``: ``[B, …]``."""
        return dict(self._leaves)[key].index_select(0, slots)

    def first(self, size: int) -> TensorDict:
        """Returns copies of the first ``size`` rows."""
        return nest({key: leaf[:size].clone() for key, leaf in self._leaves}, size)
