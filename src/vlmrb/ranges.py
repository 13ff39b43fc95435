"""Ranges that numeric settings must lie in; NaN lies in none of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """A range of numbers.

    Attributes:
        says: what a value must do, after "must".
        holds: whether a value does; not asked about NaN.
    """

    says: str
    holds: Callable[[float], bool]


FINITE = Range("be finite", math.isfinite)
POSITIVE = Range("be positive and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Range("be finite and not negative", lambda value: 0 <= value < math.inf)
AT_LEAST_ONE = Range("be at least 1", lambda value: 1 <= value < math.inf)
SHARE = Range("lie in [0, 1]", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("lie in (0, 1]", lambda value: 0 < value <= 1)


def require(allowed: Range, section: str, **settings: float | None) -> None:
    """Refuses settings outside their range; ``None`` is one that is not set.

    Args:
        allowed: the range of all of them.
        section: where they are set, such as ``model``.
        settings: name → value.

    Raises:
        ValueError: names the first setting that lies outside.
    """
    for name, value in settings.items():
        if value is not None and (math.isnan(value) or not allowed.holds(value)):
            raise ValueError(f"{section}.{name}={value} must {allowed.says}")


def require_widths(hidden_sizes: Sequence[int]) -> None:
    """Refuses hidden layers without units.

    Raises:
        ValueError: names the first such layer.
    """
    require(AT_LEAST_ONE, "model", **{f"hidden_sizes[{layer}]": width for layer, width in enumerate(hidden_sizes)})
