"""Whether a student may be relied on: how many of the scorer's positives it would have found."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

PRECISION_WINDOW = 200  # clips taken for positive that the share of true ones is taken over
PRIOR_WINDOW = 1000  # clips that the share of positives is taken over


class Trust:
    """Compares guesses with answers to clips that were not chosen by these guesses.

    Recall decides, not accuracy: where one clip in ten is positive, a student that never says yes is right nine times
    in ten and worthless.

    Args:
        min_recall: share of the positives that must have been found.
        min_positives: positives that it is taken over, at least; twice as many at most, the latest.
    """

    def __init__(self, min_recall: float, min_positives: int) -> None:
        self._min_recall = min_recall
        self._min_positives = min_positives
        self._found: deque[bool] = deque(maxlen=2 * min_positives)  # of positives: were they taken for such
        self._true: deque[bool] = deque(maxlen=PRECISION_WINDOW)  # of clips taken for positive: were they
        self._positive: deque[bool] = deque(maxlen=PRIOR_WINDOW)

    def note(self, found: bool, positive: bool) -> None:
        """Notes an answer.

        Args:
            found: whether the student would have let the clip pass for positive, or asked.
            positive: whether the scorer says that it is.
        """
        self._positive.append(positive)
        if positive:
            self._found.append(found)
        if found:
            self._true.append(positive)

    @property
    def trusted(self) -> bool:
        """Whether enough of enough positives would have been found."""
        return len(self._found) >= self._min_positives and self.recall >= self._min_recall

    @property
    def recall(self) -> float:
        """Share of the latest positives that would have been found; NaN before the first."""
        return _share(self._found)

    @property
    def precision(self) -> float:
        """Share of the latest clips taken for positive, or not sure of, that were; NaN before the first."""
        return _share(self._true)

    @property
    def prior(self) -> float:
        """Share of positives among the latest clips, never 0 or 1 (Laplace's rule)."""
        return (sum(self._positive) + 1) / (len(self._positive) + 2)

    def state_dict(self) -> dict[str, Any]:
        """Returns the latest answers as lists."""
        return {name: list(getattr(self, f"_{name}")) for name in ("found", "true", "positive")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the latest answers."""
        for name, values in state.items():
            getattr(self, f"_{name}").clear()
            getattr(self, f"_{name}").extend(values)


def _share(values: deque[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
