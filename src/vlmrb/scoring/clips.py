"""What a scorer is shown: a batch of clips, rendered only if it asks for frames."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
        answers: ``float32[B]``, what the scorer has said, NaN where it has not; for a student to learn from.
    """

    clip_ids: NDArray[np.int64]
    snapshots: NDArray
    lengths: NDArray[np.int64]
    renderer: Renderer | None = None
    answers: NDArray[np.float32] | None = None
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

    def answering(self, answers: NDArray[np.float32]) -> ClipBatch:
        """Returns the clips with answers, ``float32[B]``, NaN where there is none."""
        return replace(self, answers=answers)

    def select(self, rows: NDArray[np.int64]) -> ClipBatch:
        """Returns the clips at the given rows, ``int64[K]`` indices into the batch."""
        answers = None if self.answers is None else self.answers[rows]
        return ClipBatch(self.clip_ids[rows], self.snapshots[rows], self.lengths[rows], self.renderer, answers)

    def thinned(self, frames: int) -> ClipBatch:
        """Returns the clips with at most ``frames`` frames each, evenly spaced over a clip's real length.

        The last frame is always kept, the first one from two frames on. A clip with no more frames than that keeps them
        all; lengths are those left.

        Args:
            frames: K, at least 1.

        Returns:
            Snapshots ``[B, min(K, L), S]``, a shorter clip repeating its last frame; these very clips if K ≥ L.

        Raises:
            ValueError: ``frames`` is below 1.
        """
        if frames < 1:
            raise ValueError(f"a clip cannot be thinned to {frames} frames: it takes at least 1")
        if frames >= self.snapshots.shape[1]:
            return self
        lengths = np.minimum(self.lengths, frames)
        gaps, last = np.maximum(lengths - 1, 1)[:, None], (self.lengths - 1)[:, None]
        kept = (2 * np.arange(frames) * last + gaps) // (2 * gaps)  # [B, K], rounded half up
        kept = np.minimum(kept, last) if frames > 1 else last
        snapshots = self.snapshots[np.arange(len(self))[:, None], kept]
        return ClipBatch(self.clip_ids, snapshots, lengths, self.renderer, self.answers)
