"""Which of a clip's rows its score is about: finer credit than the same priority for all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmrb.replay.terms import PriorityTerm


class CreditTerm(PriorityTerm):
    """1 for rows shortly before, or at, what made their clip positive, ``floor`` for the others of such a clip.

    Rows of clips of which nobody has said what made them positive keep 1. It goes with the `VLMTerm`.

    Args:
        window: env steps before the decisive transition that are credited as well, since value has to flow back.
            Higher → more rows of a positive clip are replayed often.
        floor: factor of the clip's other rows, in [0, 1). Higher → nearer to crediting the whole clip.
    """

    name = "credit"
    column = "credit"
    initial = 1.0

    def __init__(self, window: int = 8, floor: float = 0.0) -> None:
        if window < 0 or not 0 <= floor < 1:
            raise ValueError(f"the credit term needs window ≥ 0 and floor in [0, 1), got {window} and {floor}")
        self.window = int(window)
        self.floor = float(floor)

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``log(floor + (1 − floor)·credit)`` of credits in [0, 1], ``float64[K]``."""
        return np.log(self.floor + (1 - self.floor) * values)  # log 0 = −inf is meant

    def credits(self, decisive: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Spreads credit to predecessors.

        Args:
            decisive: ``bool[B, L − 1]``, which transitions made their clip positive.

        Returns:
            ``float64[B, L − 1]``: 1 from ``window`` transitions before each of them on, 0 elsewhere.
        """
        credited = decisive.copy()
        for step in range(1, min(self.window, decisive.shape[1] - 1) + 1):
            credited[:, :-step] |= decisive[:, step:]
        return credited.astype(np.float64)

    def __repr__(self) -> str:
        return f"CreditTerm(window={self.window}, floor={self.floor})"
