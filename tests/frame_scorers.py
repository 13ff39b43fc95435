"""A scorer that looks at frames, for tests of drawing; importable, so that a scoring process can hold it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer


class BrightnessScorer(Scorer):
    """Scores a clip by its mean brightness; refuses clips that are black."""

    name = "brightness"
    version = "1"
    frame_size = 32

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        frames = clips.frames(self.frame_size)
        if not frames.any():
            raise ValueError("black frames")
        return (frames.mean(axis=(1, 2, 3, 4)) / 255).astype(np.float32)
