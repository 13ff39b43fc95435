"""Writes blocks of rows round robin and counts how often each slot has been written."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import RoundRobinWriter, Storage


class BlockWriter(RoundRobinWriter):
    """TorchRL's round-robin writer with generations, writing slices instead of index lists (twice as fast)."""

    _cursor: int

    def __init__(self) -> None:
        super().__init__(track_generations=True)

    def register_storage(self, storage: Storage) -> None:
        """Binds the storage and allocates the generations of all its slots, −1 for never written."""
        super().register_storage(storage)
        self._ensure_generation(storage.max_size, storage.max_size, torch.device("cpu"))

    @property
    def slot_generations(self) -> NDArray[np.int64]:
        """``int64[capacity]``, a view; −1 where nothing was ever written."""
        return self._generation.numpy()

    def extend(self, data: TensorDictBase) -> Tensor:
        """Writes rows ``[K]``, K ≤ capacity, and returns their slots, ``int64[K]``."""
        count, capacity, start = len(data), self._storage.max_size, int(self._cursor)
        self._cursor = (start + count) % capacity
        self._write_count += count
        before_wrap = min(count, capacity - start)
        if before_wrap == count:
            self._storage.set(slice(start, start + count), data)
            index = torch.arange(start, start + count)
        else:
            self._storage.set(slice(start, capacity), data[:before_wrap])
            self._storage.set(slice(0, count - before_wrap), data[before_wrap:])
            index = torch.arange(start, start + count) % capacity
        self.slot_generations[index.numpy()] += 1
        return index
