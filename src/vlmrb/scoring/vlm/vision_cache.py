"""Vision features by frame, computed once and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Feature = tuple["torch.Tensor", ...]  # one frame's, or one pair's: the embeddings [T, D], then those of deeper layers


class VisionCache:
    """Least recently used features go first.

    Args:
        max_bytes: most bytes kept, on the device where the features are; 0 keeps none.

    Attributes:
        asked: features handed out so far.
        encoded: features that had to be computed for that.
        bytes: kept now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.asked = 0
        self.encoded = 0
        self.bytes = 0
        self._kept: OrderedDict[bytes, Feature] = OrderedDict()

    def __len__(self) -> int:
        """Number of features kept."""
        return len(self._kept)

    def get(self, keys: Sequence[bytes], encode: Callable[[list[int]], list[Feature]]) -> list[Feature]:
        """Returns features, computing those that are not kept.

        Args:
            keys: U different keys.
            encode: computes the features at the given positions of ``keys``.

        Returns:
            U features.
        """
        found = {key: self._kept[key] for key in keys if key in self._kept}
        missing = [position for position, key in enumerate(keys) if key not in found]
        if missing:
            found.update(zip((keys[position] for position in missing), encode(missing), strict=True))
        self.asked += len(keys)
        self.encoded += len(missing)
        for key in keys:
            self._keep(key, found[key])
        return [found[key] for key in keys]

    def clear(self) -> None:
        """Lets all features go and counts afresh."""
        self._kept.clear()
        self.bytes = self.asked = self.encoded = 0

    def _keep(self, key: bytes, feature: Feature) -> None:
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        size = sum(part.numel() * part.element_size() for part in feature)
        if size > self.max_bytes:
            return
        self._kept[key] = feature
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, old = self._kept.popitem(last=False)
            self.bytes -= sum(part.numel() * part.element_size() for part in old)
