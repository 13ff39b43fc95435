"""Prioritisation by reducible loss (Sujit et al. 2022) as a term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vlmrb.replay.terms import PriorityTerm


class ReLoTerm(PriorityTerm):
    """``(f(L(θ) − L(θ_target)) + ε)^α``: how much of a row's loss learning has yet to remove.

    Both losses have the same regression target; a row that is noise has a large loss under both networks, and one that
    has been learnt a small one. The algorithm tells the difference by `OffPolicyModule.reducible_loss`.

    Args:
        map: f: ``relu``, or ``exp``: x + 1 where x ≥ 0 and eˣ below, which keeps the order of rows that got worse.
        exponent: α ≥ 0. Higher → rows that are about to be learnt dominate; 0 → no effect.
        eps: ε ≥ 0. Higher → rows without reducible loss are still drawn.
    """

    name = "relo"
    column = "reducible_loss"
    initial = 1.0
    largest_first = True

    def __init__(self, map: Literal["relu", "exp"] = "relu", exponent: float = 0.6, eps: float = 1e-6) -> None:
        if not 0 <= exponent < np.inf or not 0 <= eps < np.inf:
            raise ValueError(f"the relo term needs exponent ≥ 0 and eps ≥ 0, got exponent={exponent}, eps={eps}")
        if map not in ("relu", "exp"):
            raise ValueError(f"the relo term's map must be 'relu' or 'exp', got {map!r}")
        self.map = map
        self.exponent = float(exponent)
        self.eps = float(eps)

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``α·log(f(x) + ε)``, ``float64[K]``, of differences of losses."""
        if self.exponent == 0:
            return np.zeros_like(values)
        return self.exponent * np.log(self._mapped(values) + self.eps)  # log 0 = −inf is meant

    def _mapped(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        positive = np.maximum(values, 0.0)
        return positive if self.map == "relu" else np.where(values >= 0, positive + 1, np.exp(np.minimum(values, 0)))

    def gauges(self, columns: Mapping[str, NDArray]) -> dict[str, float]:
        """Returns the mean of what the rows' reducible losses have been mapped to."""
        return {"reducible_loss": float(self._mapped(columns[self.column]).mean())}

    def __repr__(self) -> str:
        return f"ReLoTerm(map={self.map!r}, exponent={self.exponent}, eps={self.eps})"
