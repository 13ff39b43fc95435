"""Clips with everything that repeats taken out: each frame once, each clip once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch

KEY_BYTES = 16


@dataclass(frozen=True)
class UniqueFrames:
    """The frames of a batch of clips, each kept once.

    Attributes:
        frames: ``uint8[U, H, W, 3]``, 0–255, no two alike.
        keys: U digests of their pixels, the same in every batch.
        clips: ``int64[K, L]``, the K different clips as rows of ``frames``.
        inverse: ``int64[B]``, for each clip of the batch its row in ``clips``.
    """

    frames: NDArray[np.uint8]
    keys: list[bytes]
    clips: NDArray[np.int64]
    inverse: NDArray[np.int64]

    def movie(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns the frames of some clips, given as rows ``int64[k, L]``: ``uint8[k, L, H, W, 3]``."""
        return self.frames[rows]


def unique_frames(clips: ClipBatch, frame_size: int | None) -> UniqueFrames:
    """Renders each different state of a batch once, and finds frames and clips that look alike.

    Args:
        clips: B clips with a renderer.
        frame_size: upper bound of the frames' sides in pixels; ``None`` is the environment's default.

    Raises:
        ValueError: the clips carry no renderer.
    """
    if clips.renderer is None:
        raise ValueError("this scorer needs frames, but the clips carry no renderer: pass renderer=…")
    count, length = clips.snapshots.shape[:2]
    states = np.ascontiguousarray(clips.snapshots).reshape(count * length, -1)
    rows = states.view(np.dtype((np.void, states.dtype.itemsize * states.shape[1])))[:, 0]
    _, first, state_of = np.unique(rows, return_index=True, return_inverse=True)
    flat = clips.snapshots.reshape(count * length, *clips.snapshots.shape[2:])
    frames = clips.renderer.render(flat[first], frame_size)

    # States can differ in what is not drawn, so frames are compared once more, by their pixels.
    frame_of_key: dict[bytes, int] = {}
    drawn = [frame_of_key.setdefault(_digest(frame), i) for i, frame in enumerate(frames)]
    kept = np.array(list(frame_of_key.values()))
    frame_of_state = np.searchsorted(kept, drawn)
    index = frame_of_state[state_of.reshape(count, length)]
    different, inverse = np.unique(index, axis=0, return_inverse=True)
    return UniqueFrames(frames[kept], list(frame_of_key), different, inverse.reshape(count))


def _digest(frame: NDArray[np.uint8]) -> bytes:
    digest = hashlib.blake2b(repr(frame.shape).encode(), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(frame).data)
    return digest.digest()
