"""Frames of OGBench states, from the camera in front of the table (above the maze)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.config import RenderQuality
from vlmrb.envs.drawing import DRAWING, Look
from vlmrb.envs.ogbench_layout import OGBenchLayout

_VERSION: Final = 1  # part of the renderer's name: raise it when any pixel changes


class OGBenchRenderer:
    """Draws snapshots of one OGBench environment in the drawing process, see `vlmrb.envs.drawing`.

    Args:
        env_id: the environment.
        layout: of its snapshots.
        frame_size: edge of the frames in pixels where ``render`` is given none.
        quality: ``full`` equals upstream's ``env.render()`` of that size pixel for pixel.
    """

    def __init__(self, env_id: str, layout: OGBenchLayout, frame_size: int, quality: RenderQuality = "fast") -> None:
        self.env_id = env_id
        self.layout = layout
        self.frame_size = frame_size
        self.quality: RenderQuality = quality
        self.name = f"ogbench-{env_id}-{quality}-{frame_size}px-v{_VERSION}"

    def render(self, snapshots: NDArray[np.float64], frame_size: int | None = None) -> NDArray[np.uint8]:
        """Draws frames, equal states once.

        Args:
            snapshots: ``float64[..., S]``.
            frame_size: edge in pixels; ``None`` takes the renderer's own.

        Returns:
            ``uint8[..., H, W, 3]``, 0–255, H = W.

        Raises:
            DrawingError: this machine cannot draw.
            ValueError: the snapshots are of another environment.
        """
        size = self.frame_size if frame_size is None else frame_size
        self.layout.unpack(snapshots)
        states = np.ascontiguousarray(snapshots, np.float64).reshape(-1, self.layout.size)
        keys = states.view(np.dtype((np.void, states.itemsize * states.shape[1])))[:, 0]
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        frames = DRAWING.draw(Look(self.env_id, size, self.quality), states[first])
        return frames[which].reshape(*snapshots.shape[:-1], size, size, 3)

    def observe(self, snapshots: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns what the agent saw: ``float32[..., O]``."""
        return self.layout.observe(snapshots)
