"""Rank-based prioritised experience replay (Schaul et al. 2016, section 3.3) as a term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.replay.terms import PriorityTerm

if TYPE_CHECKING:
    from torch import Tensor


class RankTerm(PriorityTerm):
    """``(1/rank)^α`` with the rank of a row's |δ| among all rows, 1 being the largest; equal errors share a rank.

    Ranks are exact when they are taken anew, every ``refresh_every`` env steps. Between, a row whose |δ| changes gets
    the rank that it would have had among the errors of that moment, at O(log N). The original keeps a heap that is
    sorted now and then, to the same end.

    Args:
        exponent: α ≥ 0. Higher → the largest errors dominate; 0 → no effect.
        refresh_every: env steps between two times that all ranks are taken anew.
    """

    name = "rank"
    column = "td_error"
    largest_first = True

    def __init__(self, exponent: float = 0.7, refresh_every: float = 1_000) -> None:
        if not 0 <= exponent < np.inf or not 0 < refresh_every < np.inf:
            raise ValueError(
                f"the rank term needs exponent ≥ 0 and refresh_every > 0, got {exponent} and {refresh_every}"
            )
        self.exponent = float(exponent)
        self.refresh_every = float(refresh_every)
        self._errors: NDArray[np.float64] = np.zeros(0)  # of all rows at the last refresh, ascending
        self._refreshed_at: int | None = None

    def ranks(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns ``int64[K]``, 1 + the number of errors at the last refresh that are larger than each of ``[K]``."""
        return 1 + len(self._errors) - np.searchsorted(self._errors, values, side="right")

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``−α·log(rank)``, ``float64[K]``."""
        return -self.exponent * np.log(self.ranks(values))

    def needs_refresh(self, env_steps: int) -> bool:
        """True every `refresh_every` env steps."""
        return self._refreshed_at is None or env_steps - self._refreshed_at >= self.refresh_every

    def refresh(self, env_steps: int, columns: Mapping[str, NDArray]) -> None:
        """Sorts the errors of all rows."""
        self._errors = np.sort(columns["td_error"])
        self._refreshed_at = int(env_steps)

    def restart_clock(self) -> None:
        """Lets ranks be taken anew at the next write."""
        self._refreshed_at = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors by which ranks are told, and when they were those of the buffer."""
        import torch

        return {"errors": torch.from_numpy(self._errors.copy()), "refreshed_at": self._refreshed_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        errors: Tensor = state["errors"]
        self._errors, self._refreshed_at = errors.numpy().copy(), state["refreshed_at"]

    def __repr__(self) -> str:
        return f"RankTerm(exponent={self.exponent}, refresh_every={self.refresh_every})"
