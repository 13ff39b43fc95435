"""Where rows lie, and reading them quickly."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyMemmapStorage, TensorStorage

GIB = 1024**3


def row_bytes(rows: TensorDictBase) -> int:
    """Returns the bytes of one of the rows ``[K]``, K ≥ 1."""
    return sum(leaf[0].nbytes for leaf in rows.values(True, True))


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


class RowReader:
    """Gathers rows from a storage: what ``storage.get`` does, at a third of its cost.

    Args:
        storage: initialised storage of a TensorDict.
    """

    def __init__(self, storage: TensorStorage) -> None:
        # Memory-mapped leaves are a Tensor subclass whose dispatch is slow; as plain tensors they share the memory.
        self._leaves: list[tuple[tuple[str, ...], Tensor]] = [
            (key if isinstance(key, tuple) else (key,), leaf.as_subclass(torch.Tensor))
            for key, leaf in storage._storage.items(include_nested=True, leaves_only=True)
        ]

    def __call__(self, slots: Tensor, extra: Mapping[str, Tensor]) -> TensorDict:
        """Returns copies of rows.

        Args:
            slots: ``int64[B]``.
            extra: further keys, ``[B, …]``.

        Returns:
            ``[B]`` rows, unlocked.
        """
        root: dict[str, Any] = dict(extra)
        for path, leaf in self._leaves:
            node = root
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = leaf.index_select(0, slots)
        return TensorDict(root, [len(slots)])

    def first(self, size: int) -> dict[str, Any]:
        """Returns copies of the first ``size`` rows as nested dicts of tensors."""
        root: dict[str, Any] = {}
        for path, leaf in self._leaves:
            node = root
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = leaf[:size].clone()
        return root
