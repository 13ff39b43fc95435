"""Writes blocks of rows round robin and counts how often each slot has been written."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import RoundRobinWriter, Storage

from vlmrb.replay.storage import RowTable


class BlockWriter(RoundRobinWriter):
    """TorchRL's round-robin writer with generations, for blocks of rows.

    Attributes:
        table: the rows; ``None`` until the storage has its first one.
    """

    _cursor: int

    def __init__(self) -> None:
        super().__init__(track_generations=True)
        self.table: RowTable | None = None

    def register_storage(self, storage: Storage) -> None:
        """Binds the storage and allocates the generations of all its slots, −1 for never written."""
        super().register_storage(storage)
        self._ensure_generation(storage.max_size, storage.max_size, torch.device("cpu"))

    @property
    def size(self) -> int:
        """Number of rows written and not yet overwritten: ``len(storage)`` without the compiler's wrapper, at 8 µs."""
        return self._storage._len

    @property
    def slot_generations(self) -> NDArray[np.int64]:
        """``int64[capacity]``, a view; −1 where nothing was ever written."""
        return self._generation.numpy()

    def extend(self, data: TensorDict) -> Tensor:
        """Writes rows.

        Args:
            data: of any batch shape, flattened in order; at most as many as there are slots. The first ones ever
                written say which keys are stored.

        Returns:
            Their slots, ``int64[K]``.
        """
        count, capacity, start = data.numel(), self._storage.max_size, int(self._cursor)
        if self.table is None:
            self._storage.set(slice(start, start + count), data.reshape(-1))
            self.table = RowTable(self._storage)
        else:
            self.table.write(start, data)
            self._storage._len = min(len(self._storage) + count, capacity)
        self._cursor = (start + count) % capacity
        self._write_count += count
        index = torch.arange(start, start + count)
        if start + count > capacity:
            index %= capacity
        self.slot_generations[index.numpy()] += 1
        return index
