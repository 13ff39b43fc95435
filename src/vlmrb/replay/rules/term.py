"""Rules as a factor of the priority."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.replay.rules.schema import RuleSet, read_rules
from vlmrb.replay.terms import PriorityTerm

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class RuleTerm(PriorityTerm):
    """``exp(η · Σ c_k T_k / Σ c_k)``: how true the rules are of a row, in the style of Xiao et al. (2026).

    Truths are found once, when a row is stored, from what the learner gets of it: with n-step returns s' is the state
    in which the return ends.

    Args:
        rules: or the file that they are read from when a buffer is made with this term.
        eta: η > 0. Higher → rows that follow the rules dominate: one of which all rules are true is drawn e^η times as
            often as one of which none is.
    """

    name = "rules"
    column = "rule_truth"

    def __init__(self, rules: RuleSet | str | Path, eta: float = 5.0) -> None:
        if not 0 < eta < np.inf:
            raise ValueError(f"the rules term's eta must be positive and finite, got {eta}")
        self.eta = float(eta)
        self._rules = rules

    @property
    def rules(self) -> RuleSet:
        """The rules, read from their file when they are first asked for."""
        if not isinstance(self._rules, RuleSet):
            self._rules = read_rules(self._rules)
        return self._rules

    def own_columns(self) -> dict[str, float]:
        """Returns the column of weighted truths.

        Raises:
            ValueError: the rules cannot be read: no buffer is made without.
        """
        self._rules = self.rules
        return super().own_columns()

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``η`` times weighted truths, ``float64[K]``."""
        return self.eta * values

    def values_of(self, rows: TensorDictBase) -> dict[str, NDArray[np.float64]]:
        """Returns the weighted truths of rows ``[K]``."""
        s, a, s2 = (rows.get(key).numpy() for key in ("observation", "action", ("next", "observation")))
        return {self.column: self.rules.weighted_truth(s, a, s2)}

    def gauges(self, columns: Mapping[str, NDArray]) -> dict[str, float]:
        """Returns the mean weighted truth, and the share of rows of which any rule is true."""
        truth = columns[self.column]
        return {"rules_truth": float(truth.mean()), "share_rules_true": float((truth > 0).mean())}

    def __repr__(self) -> str:
        return f"RuleTerm(eta={self.eta}, rules={self.rules.family}/{self.rules.digest})"
