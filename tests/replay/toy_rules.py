"""Predicates of a toy family: observations are numbers in [0, 1] that say how true each of them is."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from vlmrb.replay.rules.predicates import PredicateFamily, register

toy = register(PredicateFamily("toy", r"Toy-v\d+", "Numbers."))


@toy.predicate
def first(s: NDArray, a: NDArray, s2: NDArray) -> Any:
    """The first number of s."""
    return s[:, 0]


@toy.predicate
def second(s: NDArray, a: NDArray, s2: NDArray) -> Any:
    """The second number of s.

    This is not told to language models.
    """
    return s[:, 1]


@toy.predicate
def then(s: NDArray, a: NDArray, s2: NDArray) -> Any:
    """The first number of s',
    in two lines."""
    return s2[:, 0]


@toy.predicate
def acts(s: NDArray, a: NDArray, s2: NDArray) -> Any:
    """Action 1 is taken."""
    return a == 1
