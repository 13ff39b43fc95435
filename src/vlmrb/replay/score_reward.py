"""The clip's score as a reward instead of a priority: the alternative that is usually asked about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from vlmrb.replay.clips import ClipStore


class ScoreRewardTransform(Transform):
    """Adds ``weight · r``, or ``weight · 1[r > τ]``, to the rewards of rows on their way out of the buffer.

    r is the score of the row's own clip. What is stored stays as it is, so a score takes effect when it arrives; rows
    without one get nothing.

    With n-step returns the bonus is that of the row's root alone: those of the n − 1 rows after it, whose rewards are
    part of the return, are left out. A value then counts the bonuses of every n-th row of its future, on average 1/n of
    them all.

    Args:
        weight: positive. Higher → the scorer's opinion outweighs the environment's reward.
        mode: ``terminal``: the last row of a clip gets the bonus; ``shaped``: every row of a clip of K rows gets 1/K of
            it.
        threshold: τ in [0, 1), strictly exceeded by a positive score; ``None`` takes the raw score.
    """

    def __init__(
        self,
        weight: float = 1.0,
        mode: Literal["terminal", "shaped"] = "terminal",
        threshold: float | None = None,
    ) -> None:
        super().__init__()
        if not 0 < weight < np.inf or mode not in ("terminal", "shaped"):
            raise ValueError(
                f"scores as rewards need weight > 0 and mode 'terminal' or 'shaped', got weight={weight}, mode={mode!r}"
            )
        if threshold is not None and not 0 <= threshold < 1:
            raise ValueError(f"scores as rewards need a threshold in [0, 1), which some scores exceed, got {threshold}")
        self.weight = float(weight)
        self.mode = mode
        # Scores are float32: compared with the float32 neighbour of τ, a score of exactly τ is not above it.
        self.threshold = None if threshold is None else float(np.float32(threshold))
        self._sum, self._rows = 0.0, 0  # of what was added since `gauges` was asked for

    def attach(self, clips: ClipStore, columns: Mapping[str, NDArray]) -> None:
        """Connects it with a buffer.

        Args:
            clips: the buffer's clips.
            columns: name → ``[capacity]``, the buffer's columns.
        """
        self._clips, self._columns = clips, columns

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adds to the rewards of sampled rows ``[B]``, copies of what is stored; ``index`` says where they lie.

        Rows that were read by ``buffer[…]`` come without, and stay as they are stored.
        """
        if "index" in tensordict:
            reward, bonus = tensordict["next", "reward"], self.bonus(tensordict["index"].numpy())
            reward.view(len(reward)).numpy()[:] += bonus
            self._sum += float(bonus.sum())
            self._rows += len(bonus)
        return tensordict

    def bonus(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns what is added to the rewards of the rows in ``slots``, ``int64[K]`` → ``float64[K]``."""
        bonus = np.zeros(len(slots))
        score = self._columns["score"][slots]
        scored = np.flatnonzero(~np.isnan(score))
        slots, score = slots[scored], score[scored]
        value = score.astype(np.float64) if self.threshold is None else (score > self.threshold).astype(np.float64)
        rows = self._clips.rows_at(slots)
        share = self._columns["position"][slots] == rows - 1 if self.mode == "terminal" else 1 / rows
        bonus[scored] = self.weight * value * share
        return bonus

    def gauges(self) -> dict[str, float]:
        """Returns what has been added to a row's reward on average since the last call; nothing if there were none."""
        mean = {"score_bonus": self._sum / self._rows} if self._rows else {}
        self._sum, self._rows = 0.0, 0
        return mean

    def get_extra_state(self) -> dict[str, Any]:
        """Returns what `gauges` has yet to report, as numbers."""
        return {"sum": self._sum, "rows": self._rows}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores `get_extra_state`."""
        self._sum, self._rows = state["sum"], state["rows"]

    def __repr__(self) -> str:
        return f"ScoreRewardTransform(weight={self.weight}, mode={self.mode!r}, threshold={self.threshold})"
