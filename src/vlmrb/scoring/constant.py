"""A scorer that says the same of every clip: the control in which a positive label means nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer


class ConstantScorer(Scorer):
    """Gives each clip the same score.

    Above the threshold every scored row is positive and VLM-only replay becomes uniform over what has been scored;
    at or below it no row is, and replay is uniform.

    Args:
        value: the score, in [0, 1].

    Raises:
        ValueError: ``value`` lies outside [0, 1].
    """

    name = "constant"
    needs = "snapshots"

    def __init__(self, value: float = 1.0) -> None:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"a constant score must lie in [0, 1], got {value}")
        self.value = value
        self.version = f"1:{value!r}"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Returns ``float32[B]``, the constant."""
        return np.full(len(clips), self.value, dtype=np.float32)
