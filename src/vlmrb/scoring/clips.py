"""What a scorer is shown: a batch of clips, rendered only if it asks for frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class Renderer(Protocol):
    """Turns snapshots into frames (the paper's ψ); picklable, so that a scorer process can hold one.

    Attributes:
        name: environment, looks and version; part of the score cache's key.
    """

    name: str

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        """Renders snapshots.

        Args:
            snapshots: ``[..., S]``, of the environment's own dtype.
            frame_size: upper bound of height and width in pixels; ``None`` is the environment's default.

        Returns:
            ``uint8[..., H, W, 3]``, 0–255.
        """
        ...

    def observe(self, snapshots: NDArray) -> NDArray:
        """Returns what the agent saw in these states.

        Args:
            snapshots: ``[..., S]``.

        Returns:
            ``[..., *observation_shape]``, of the observation's dtype.
        """
        ...


@dataclass(frozen=True)
class ClipBatch:
    """Clips handed to a scorer.

    Attributes:
        clip_ids: ``int64[B]``.
        snapshots: ``[B, L, S]``; a clip shorter than L repeats its last frame.
        lengths: ``int64[B]``, the number of real frames, 2 to L.
        renderer: how to draw the snapshots; ``None`` if no scorer will ask for frames.
    """

    clip_ids: NDArray[np.int64]
    snapshots: NDArray
    lengths: NDArray[np.int64]
    renderer: Renderer | None = None
    _frames: dict[int | None, NDArray[np.uint8]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.clip_ids)

    def __getstate__(self) -> dict[str, object]:
        """Leaves rendered frames behind when a batch travels to another process."""
        return {**self.__dict__, "_frames": {}}

    def frames(self, frame_size: int | None = None) -> NDArray[np.uint8]:
        """Renders the clips, once per frame size.

        Args:
            frame_size: upper bound of height and width in pixels; ``None`` is the environment's default.

        Returns:
            ``uint8[B, L, H, W, 3]``, 0–255.

        Raises:
            ValueError: the batch carries no renderer.
        """
        if self.renderer is None:
            raise ValueError("this scorer needs frames, but the clips carry no renderer: pass renderer=…")
        if frame_size not in self._frames:
            self._frames[frame_size] = self.renderer.render(self.snapshots, frame_size)
        return self._frames[frame_size]

    def observations(self) -> NDArray:
        """Returns the agent's observations, ``[B, L, *observation_shape]``.

        Raises:
            ValueError: the batch carries no renderer.
        """
        if self.renderer is None:
            raise ValueError("this scorer needs observations, but the clips carry no renderer: pass renderer=…")
        return self.renderer.observe(self.snapshots)

    def select(self, rows: NDArray[np.int64]) -> ClipBatch:
        """Returns the clips at the given rows, ``int64[K]`` indices into the batch."""
        return ClipBatch(self.clip_ids[rows], self.snapshots[rows], self.lengths[rows], self.renderer)
