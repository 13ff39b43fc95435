"""Predicates φ(s, a, s') of transitions, by family of environments, and where they are found by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

# φ(s, a, s') of K transitions; s and s' as the family reads observations, a as stored.
Predicate = Callable[[Any, NDArray, Any], ArrayLike]
P = TypeVar("P", bound=Predicate)

_BUILT_IN = {"doorkey": "vlmrb.replay.rules.doorkey"}
_registered: dict[str, PredicateFamily] = {}


class PredicateFamily:
    r"""Predicates for environments whose observations mean the same.

    ::

        cartpole = register(PredicateFamily("cartpole", r"CartPole-v\d+", "Observations are …"))

        @cartpole.predicate
        def leans_right(s, a, s2):
            '''The pole leans to the right before the step.'''
            return s[:, 2] > 0

    A predicate gets s and s' as ``read`` makes them of observations ``[K, …]`` (without it: the arrays themselves), and
    actions ``int64[K]`` or ``float32[K, A]`` in the agent's numbering, which is another than the environment's where
    ``env.actions`` is set. It returns ``[K]``, each in [0, 1]; truth values of bool will do. With n-step returns s' is
    the state n steps later, or the last one of the episode, as the learner gets it, and a the first action of these
    steps. The docstring's first paragraph is what people and language models are told about it.

    Args:
        name: of the family, one word.
        envs: regular expression that the whole of an environment's id must match, without a leading ``module:``.
        about: what observations hold and what the task is, for people and language models.
        read: makes of observations ``[K, …]`` what the predicates share, once per block of rows.

    Attributes:
        predicates: name → function.
    """

    def __init__(self, name: str, envs: str, about: str, read: Callable[[NDArray], Any] | None = None) -> None:
        if not re.fullmatch(r"\w+", name):
            raise ValueError(f"a family's name must be one word, got {name!r}")
        self.name = name
        self.envs = re.compile(envs)
        self.about = inspect.cleandoc(about)
        self.read = read
        self.predicates: dict[str, Predicate] = {}

    def predicate(self, function: P) -> P:
        """Adds a predicate under the function's name; a decorator.

        Raises:
            ValueError: there is one of that name, or the function says nothing about itself.
        """
        name = function.__name__
        if name in self.predicates:
            raise ValueError(f"family {self.name!r} has a predicate {name!r} already")
        if not (function.__doc__ or "").strip():
            raise ValueError(f"predicate {name!r} needs a docstring: it is all that is known about it elsewhere")
        self.predicates[name] = function
        return function

    def meaning(self, name: str) -> str:
        """Returns what a predicate says about itself, in one line."""
        first, _, _ = inspect.cleandoc(self.predicates[name].__doc__ or "").partition("\n\n")
        return " ".join(first.split())

    def claims(self, env_id: str) -> bool:
        """Says whether the predicates are meant for an environment."""
        return self.envs.fullmatch(env_id.rpartition(":")[2]) is not None

    def require(self, name: str) -> None:
        """Refuses a name without a predicate.

        Raises:
            ValueError: lists those that there are.
        """
        if name not in self.predicates:
            close = difflib.get_close_matches(name, self.predicates, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            known = ", ".join(sorted(self.predicates))
            raise ValueError(f"unknown predicate {name!r}{meant or ';'} family {self.name!r} has: {known}")

    def view(self, observation: NDArray) -> Any:
        """Returns what predicates are given of observations ``[K, …]``."""
        return observation if self.read is None else self.read(observation)

    def truth(self, name: str, s: Any, a: NDArray, s2: Any) -> NDArray[np.float64]:
        """Returns how true a predicate is of K transitions.

        Args:
            name: of the predicate.
            s: `view` of the observations before.
            a: ``[K]`` or ``[K, A]``.
            s2: `view` of the observations after.

        Returns:
            ``float64[K]`` in [0, 1].

        Raises:
            ValueError: the predicate failed or gave something else; names it.
        """
        try:
            values = np.asarray(self.predicates[name](s, a, s2), np.float64)
        except Exception as error:  # whatever a user's function raises
            raise ValueError(f"predicate {name!r} failed: {type(error).__name__}: {error}") from error
        if values.shape != (len(a),):
            raise ValueError(f"predicate {name!r} must give one value per row, [{len(a)}], got {list(values.shape)}")
        if len(values) and not (values.min() >= 0 and values.max() <= 1):  # NaN fails every comparison
            raise ValueError(
                f"predicate {name!r} must give values in [0, 1], got {values.min():.4g} to {values.max():.4g}"
            )
        return values


def register(family: PredicateFamily) -> PredicateFamily:
    """Makes a family known under its name, in the place of an earlier one; returns it.

    Raises:
        ValueError: a built-in family has that name.
    """
    if family.name in _BUILT_IN:
        raise ValueError(f"a built-in family is called {family.name!r}: choose another name")
    _registered[family.name] = family
    return family


def find_predicates(name: str) -> PredicateFamily:
    """Returns a family.

    Args:
        name: ``doorkey``, or ``package.module:family``; the module is imported first, so that it can register it.

    Raises:
        ValueError: the module cannot be imported, or no family has that name.
    """
    module, _, family = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except (ModuleNotFoundError, TypeError) as error:  # TypeError: of names that begin with a dot
            raise ValueError(f"family {name!r}: cannot import {module!r} ({error})") from error
    known = families()
    if family not in known:
        raise ValueError(
            f"family {name!r} is unknown; there are: {', '.join(known)}; name one of your own as package.module:family"
        )
    return known[family]


def predicates_for(env_id: str) -> PredicateFamily:
    """Returns the family that is meant for an environment; families registered last are asked first.

    Raises:
        ValueError: there is none.
    """
    for family in reversed(families().values()):
        if family.claims(env_id):
            return family
    raise ValueError(
        f"env.id {env_id!r}: no predicates are known for it; there are families for "
        f"{', '.join(f'{family.name} ({family.envs.pattern})' for family in families().values())}; "
        "name one of your own as --family package.module:family"
    )


def is_built_in(family: PredicateFamily) -> bool:
    """Says whether a family comes with the package."""
    return family.name in _BUILT_IN


def families() -> dict[str, PredicateFamily]:
    """Returns all families known by now, by name."""
    built_in = {name: importlib.import_module(path).FAMILY for name, path in _BUILT_IN.items()}
    return built_in | _registered
