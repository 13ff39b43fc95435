"""A random sample of all clips that is scored in any case, by which the choice of the others can be judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Audit:
    """Draws completed clips by chance, and counts what the scorer says of those drawn.

    A policy that prefers some clips says nothing of those it leaves out. The drawn ones are scored before all others
    whatever it prefers, so the share of positives among them is that among all clips.

    Args:
        share: of the completed clips, in (0, 1].
        threshold: τ in [0, 1], strictly exceeded by a positive score.
        seed: of the draws.
    """

    def __init__(self, share: float, threshold: float, seed: int) -> None:
        self._share = share
        self._threshold = threshold
        self._rng = np.random.default_rng([seed, 1])
        self._drawn = 0
        self._scored = 0
        self._positives = 0

    def draw(self, clips: int) -> NDArray[np.bool_]:
        """Returns which of the next completed clips are audited, ``bool[clips]``."""
        drawn = self._rng.random(clips) < self._share
        self._drawn += int(drawn.sum())
        return drawn

    def scored(self, scores: NDArray[np.float32]) -> None:
        """Notes the scorer's answers, ``float32[B]`` in [0, 1], for clips that were drawn."""
        self._scored += len(scores)
        self._positives += int((scores > self._threshold).sum())

    def stats(self) -> dict[str, float]:
        """Returns clips ``audited`` and of them ``audit_scored``, and ``audit_share_positive`` of the latter."""
        share = self._positives / self._scored if self._scored else math.nan
        return {"audited": self._drawn, "audit_scored": self._scored, "audit_share_positive": share}

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state and the counts."""
        counts = {"drawn": self._drawn, "scored": self._scored, "positives": self._positives}
        return {"rng": self._rng.bit_generator.state, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores generator and counts."""
        self._rng.bit_generator.state = state["rng"]
        self._drawn, self._scored, self._positives = state["drawn"], state["scored"], state["positives"]
