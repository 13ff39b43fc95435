"""Which clips get scored when there are more than the scorer can take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class WaitingClips:
    """What a policy chooses from: N clips of distinct content, in order of arrival.

    Args:
        clip_ids: the clips of each content, in order of completion.
        completed: env steps at which they were completed.
    """

    def __init__(self, clip_ids: Sequence[Sequence[int]], completed: Sequence[Sequence[int]]) -> None:
        self._clip_ids = clip_ids
        self._completed = completed

    def __len__(self) -> int:
        return len(self._clip_ids)

    @property
    def clip_ids(self) -> NDArray[np.int64]:
        """``int64[N]``, the newest clip of each content."""
        return np.array([ids[-1] for ids in self._clip_ids], np.int64)

    @property
    def oldest(self) -> NDArray[np.int64]:
        """``int64[N]``, env step at which a content's first clip was completed."""
        return np.array([steps[0] for steps in self._completed], np.int64)

    @property
    def newest(self) -> NDArray[np.int64]:
        """``int64[N]``, env step at which its latest clip was completed."""
        return np.array([steps[-1] for steps in self._completed], np.int64)


class SelectionPolicy(ABC):
    """Puts waiting clips in order: the first are scored next, the last are dropped when the queue is full.

    Attributes:
        name: short, for logs and tables.
    """

    name: str

    @abstractmethod
    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Ranks clips.

        Args:
            waiting: N clips.

        Returns:
            ``int64[N]``, a permutation of 0 … N − 1, best first.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides future choices, as plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 — optional to override
        """Continues exactly where ``state`` was taken."""


class NewestFirst(SelectionPolicy):
    """Follows the present policy: what was just experienced is scored first."""

    name = "newest"

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips from the latest to the earliest completed."""
        return np.argsort(waiting.newest, kind="stable")[::-1]


class OldestFirst(SelectionPolicy):
    """First come, first served."""

    name = "oldest"

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips from the earliest to the latest completed."""
        return np.argsort(waiting.oldest, kind="stable")


class RandomOrder(SelectionPolicy):
    """Gives every waiting clip the same chance.

    Args:
        seed: of the policy's own generator.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips in random order."""
        return self._rng.permutation(len(waiting))

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the generator."""
        self._rng.bit_generator.state = state["rng"]


def make_policy(policy: str | SelectionPolicy, seed: int) -> SelectionPolicy:
    """Returns the policy of that name, or the one given.

    Raises:
        ValueError: no policy has that name.
    """
    if isinstance(policy, SelectionPolicy):
        return policy
    named = {"newest": NewestFirst(), "oldest": OldestFirst(), "random": RandomOrder(seed)}
    if policy not in named:
        raise ValueError(f"scoring.policy={policy!r} must be one of {', '.join(named)}, or a SelectionPolicy")
    return named[policy]
