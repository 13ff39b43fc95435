"""Priority terms: small objects that read one column each; their product is a row's priority.

``p_i = exp(Σ_k log-term_k(i))`` in float64 with exact zeros. A new replay scheme is one subclass of `PriorityTerm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tensordict import TensorDictBase

# Positive priorities are kept within e^±345 (1e±150): no sum over rows overflows and no product with a uniform draw
# becomes denormal, which the sum tree's prefix search relies on.
LOG_LIMIT = 345.0


class PriorityTerm:
    """One factor of the priority, as a function of one column.

    Attributes:
        name: unique among a buffer's terms.
        column: the column it reads; a column that the buffer does not have yet is created as float64.
        initial: value of a newly created column for rows just written; unused for the buffer's own columns.
        largest_first: whether a row just written gets the largest value that a live row's column has been given since,
            so that it is drawn soon (Schaul et al. 2016), instead of ``initial``.
    """

    name: str
    column: str
    initial: float = 0.0
    largest_first: bool = False

    def own_columns(self) -> dict[str, float]:
        """Returns the columns that the term needs, with their initial values; the buffer's own ones keep theirs."""
        return {self.column: self.initial}

    def columns_largest_first(self) -> tuple[str, ...]:
        """Returns the columns of which a row just written gets the largest value, as `largest_first` says of one."""
        return (self.column,) if self.largest_first else ()

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the logarithm of the factor.

        Args:
            values: ``float64[K]``, the column at K rows.

        Returns:
            ``float64[K]``; −inf is an exact zero. NaN and +inf are refused by the buffer.
        """
        raise TypeError(f"{type(self).__name__} does not say how a value of {self.column!r} becomes a priority")

    def observe(self, block: TensorDictBase) -> None:
        """Sees every block of raw one-step rows ``[n, T]``, before it is stored."""

    def end_streams(self) -> None:
        """All running episodes end here without a last row; what comes next may be other environments."""

    def values_of(self, rows: TensorDictBase) -> dict[str, NDArray[np.float64]]:
        """Returns what the term's columns hold for rows ``[K]`` just stored, ``float64[K]`` each.

        A column that is missing here gets its initial value. With n-step returns the rows hold them already.
        """
        return {}

    def needs_refresh(self, env_steps: int) -> bool:
        """Tells, at every write, whether all priorities must be composed anew (O(N), so rarely)."""
        return False

    def refresh(self, env_steps: int, columns: Mapping[str, NDArray]) -> None:
        """Called once before all priorities are composed anew; may change the term's own columns.

        Args:
            env_steps: env steps collected so far.
            columns: name → ``[N]``, views of all columns at the N rows written.
        """

    def restart_clock(self) -> None:
        """Called when env steps are counted from 0 again, the rows there are being as old as that."""

    def gauges(self, columns: Mapping[str, NDArray]) -> dict[str, float]:
        """Returns what shows the term at work, for the metrics.

        Args:
            columns: name → ``[N]``, views of all columns at the N ≥ 1 rows written.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what changes during a run beside the columns, as tensors and plain values (weights_only-safe)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""

    def __repr__(self) -> str:
        """Names the term and its settings: a saved buffer is resumed by one whose terms read the same."""
        return f"{type(self).__name__}({self.name!r})"


class TDTerm(PriorityTerm):
    """``(|δ| + ε)^α`` (Schaul et al. 2016, proportional variant; PER is α = 0.6, ε = 1e-6).

    Args:
        exponent: α ≥ 0. Higher → large errors dominate; 0 → no effect.
        eps: ε ≥ 0. Higher → rows with tiny errors are still drawn; 0 → a row whose error is 0 is reached by the uniform
            part only.
    """

    name = "td"
    column = "td_error"
    largest_first = True

    def __init__(self, exponent: float = 1.0, eps: float = 0.0) -> None:
        if not 0 <= exponent < np.inf or not 0 <= eps < np.inf:
            raise ValueError(f"the td term needs exponent ≥ 0 and eps ≥ 0, got exponent={exponent}, eps={eps}")
        self.exponent = float(exponent)
        self.eps = float(eps)

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``α·log(|δ| + ε)``, ``float64[K]``."""
        values = values + self.eps
        if self.exponent == 0:
            return np.zeros_like(values)
        return self.exponent * _log(values)

    def __repr__(self) -> str:
        return f"TDTerm(exponent={self.exponent}, eps={self.eps})"


class VLMTerm(PriorityTerm):
    """``1[r > τ]``, or ``r^α`` without a threshold (method: score → priority).

    Args:
        threshold: τ in [0, 1], strictly exceeded by a positive score; ``None`` takes the raw score. Higher → fewer,
            surer positives.
        unscored: the provisional priority p̄ ≥ 0 of rows without a score yet. 0 → they are reached by the uniform part
            only; higher → new rows compete with positives until their score arrives.
        exponent: α > 0 on the raw score. Higher → only scores near 1 count.
    """

    name = "vlm"
    column = "score"

    def __init__(self, threshold: float | None = 0.5, unscored: float = 0.0, exponent: float = 1.0) -> None:
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"the vlm term's threshold must lie in [0, 1], got {threshold}")
        if not 0 <= unscored < np.inf or not 0 < exponent < np.inf:
            raise ValueError(
                f"the vlm term needs unscored ≥ 0 and exponent > 0, got unscored={unscored}, exponent={exponent}"
            )
        if threshold is not None and exponent != 1:
            raise ValueError("the vlm term's exponent acts on raw scores only: set threshold to null or exponent to 1")
        # Scores are float32: compared with the float32 neighbour of τ, a score of exactly τ is not above it.
        self.threshold = None if threshold is None else float(np.float32(threshold))
        self.unscored = float(unscored)
        self.exponent = float(exponent)

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the log priority of scores, ``float64[K]``; NaN stands for a row not scored yet."""
        priority = values**self.exponent if self.threshold is None else (values > self.threshold).astype(np.float64)
        return _log(np.where(np.isnan(values), self.unscored, priority))

    def __repr__(self) -> str:
        return f"VLMTerm(threshold={self.threshold}, unscored={self.unscored}, exponent={self.exponent})"


class AgeTerm(PriorityTerm):
    """Freshness ``exp(−Δ/τ)`` with Δ the age of a row (Ma et al. 2026).

    With one τ the factor common to all rows cancels, so ``t_i/τ`` is stored once and never refreshed, except for moving
    the origin before the exponential overflows; draws do not change by that.

    Args:
        tau: τ in env steps; 0.1 to 0.5 of the buffer's turnover is usual. Higher → older rows keep their weight.
    """

    name = "age"
    column = "env_step"
    _SPAN = 200.0  # the origin moves when the newest row's exponent exceeds this

    def __init__(self, tau: float) -> None:
        if not 0 < tau < np.inf:
            raise ValueError(f"the age term's tau must be a positive number of env steps, got {tau}")
        self.tau = float(tau)
        self.origin = 0

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``(t_i − origin)/τ`` of birth times in env steps, ``float64[K]``."""
        return (values - self.origin) / self.tau

    def needs_refresh(self, env_steps: int) -> bool:
        """True when the newest row's exponent has grown too large."""
        return (env_steps - self.origin) / self.tau > self._SPAN

    def refresh(self, env_steps: int, columns: Mapping[str, NDArray]) -> None:
        """Moves the origin to now."""
        self.origin = int(env_steps)

    def restart_clock(self) -> None:
        """Moves the origin back to 0."""
        self.origin = 0

    def gauges(self, columns: Mapping[str, NDArray]) -> dict[str, float]:
        """Returns the mean factor, compared with the newest row's."""
        born = columns[self.column]
        return {"freshness": float(np.exp((born - born.max()) / self.tau).mean())}

    def state_dict(self) -> dict[str, Any]:
        """Returns the origin in env steps."""
        return {"origin": self.origin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the origin."""
        self.origin = int(state["origin"])

    def __repr__(self) -> str:
        return f"AgeTerm(tau={self.tau})"


def compose(
    terms: Sequence[PriorityTerm], columns: Mapping[str, NDArray], index: NDArray[np.int64], source: str = "compose"
) -> NDArray[np.float64]:
    """Multiplies the terms at some rows.

    Args:
        terms: the factors; none gives 1 everywhere.
        columns: column name → ``[capacity]``.
        index: ``int64[K]``.
        source: who changed the columns, for error messages.

    Returns:
        ``float64[K]``: exactly 0, or within e^±345.

    Raises:
        ValueError: a term returned NaN or +inf; names the term and ``source``.
    """
    total = np.zeros(len(index))
    with np.errstate(all="ignore"):  # what comes of it is checked, and log 0 = −inf is meant
        for term in terms:
            log_priority = term.log_priority(columns[term.column][index].astype(np.float64, copy=False))
            if not (log_priority < np.inf).all():
                raise ValueError(f"{source}: priority term {term.name!r} gave a priority that is not finite")
            total += log_priority
    priority = np.exp(np.minimum(np.maximum(total, -LOG_LIMIT), LOG_LIMIT))
    priority[total == -np.inf] = 0.0
    return priority


class LiveMaximum:
    """The largest of the values currently known, at O(log n) per change.

    Args:
        capacity: number of slots.
    """

    def __init__(self, capacity: int) -> None:
        # Here, so that settings, which are checked by making terms of them, can be judged without torch.
        from torchrl.data.replay_buffers.samplers.prioritized import MinSegmentTreeFp64

        self._tree = MinSegmentTreeFp64(capacity)
        self._capacity = capacity
        self._empty = self._tree.identity_element

    def set(self, index: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Sets the values of slots, both ``[K]``; equal slots must come with equal values."""
        self._tree[index] = -values

    def forget(self, index: NDArray[np.int64]) -> None:
        """Forgets the values of slots, ``int64[K]``."""
        self._tree[index] = self._empty

    def value(self, default: float) -> float:
        """Returns the largest known value, or ``default`` when none is known."""
        smallest = self._tree.query(0, self._capacity)
        return default if smallest == self._empty else -smallest

    def known(self, size: int) -> NDArray[np.bool_]:
        """Returns which of the first ``size`` slots have a known value, ``bool[size]``."""
        return self._tree[np.arange(size)] != self._empty


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm with log 0 = −inf and no floating-point warning."""
    return np.log(values, out=np.full_like(values, -np.inf), where=values > 0)
