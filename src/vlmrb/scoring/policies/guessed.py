"""Policies that go by a cheap guess of what the scorer would say (`WaitingClips.guess`).

Clips without a guess come after those with one, the newest first; while nobody guesses, both are `NewestFirst`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.policy import SelectionPolicy, WaitingClips


class UncertainFirst(SelectionPolicy):
    """Scores first what the guess is least sure of: its probability is closest to 0.5."""

    name = "uncertainty"
    reads_guesses = True

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips from the least to the most sure guess."""
        return _ascending(np.abs(waiting.guess - 0.5), waiting)


class ExpectedFirst(SelectionPolicy):
    """Scores first what is most probably positive, so that few positives are missed."""

    name = "expected"
    reads_guesses = True

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips from the most to the least probably positive."""
        return _ascending(-waiting.guess, waiting)


def _ascending(values: NDArray[np.float64], waiting: WaitingClips) -> NDArray[np.int64]:
    """Returns clips by ascending values, NaN last; among equals the newest goes first."""
    return np.lexsort((-np.arange(len(waiting)), -waiting.newest, values))
