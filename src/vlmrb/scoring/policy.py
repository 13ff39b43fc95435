"""Which clips get scored when there are more than the scorer can take; `vlmrb.scoring.policies` has further ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch


class WaitingClips:
    """What a policy chooses from: N clips of distinct content, in order of arrival.

    Args:
        clip_ids: the clips of each content, in order of completion.
        completed: env steps at which they were completed.
        described: what `SelectionPolicy.describe` said of each content.
        guess: see below; all unknown if ``None``.

    Attributes:
        described: N descriptions, ``None`` for those of a policy that describes nothing.
        guess: ``float64[N]`` in [0, 1], the probability, as far as somebody cheaper than the scorer can tell, that the
            scorer finds the clip positive; NaN where nobody has told.
    """

    def __init__(
        self,
        clip_ids: Sequence[Sequence[int]],
        completed: Sequence[Sequence[int]],
        described: Sequence[Any] | None = None,
        guess: NDArray[np.float64] | None = None,
    ) -> None:
        self._clip_ids = clip_ids
        self._completed = completed
        self.described: Sequence[Any] = [None] * len(clip_ids) if described is None else described
        self.guess = np.full(len(clip_ids), np.nan) if guess is None else guess

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

    def describing(self, described: Sequence[Any]) -> WaitingClips:
        """Returns the same clips with other descriptions."""
        return WaitingClips(self._clip_ids, self._completed, described, self.guess)


class SelectionPolicy(ABC):
    """Puts waiting clips in order: the first are scored next, the last are dropped when the queue is full.

    Attributes:
        name: short, for logs and tables.
        reads_guesses: whether the order depends on `WaitingClips.guess`.
    """

    name: str
    reads_guesses: bool = False

    @abstractmethod
    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Ranks clips.

        Args:
            waiting: N clips.

        Returns:
            ``int64[N]``, a permutation of 0 … N − 1, best first.
        """

    def describe(self, clips: ClipBatch) -> Sequence[Any] | None:
        """Says what `rank` wants to know of clips' content, so that it need not look at them again.

        Args:
            clips: B clips just completed, whole; or the same ones again in a resumed run.

        Returns:
            B descriptions, small ones, as they are kept while their clips wait; ``None`` if nothing is wanted.
        """
        return None

    def note(self, described: Sequence[Any]) -> None:  # noqa: B027 — optional to override
        """Takes in B clips just completed, once each, those that need not wait included, before they are ranked.

        Args:
            described: what `describe` said of them, if it said anything.
        """

    def follow(self, seed: int) -> None:  # noqa: B027 — optional to override
        """Hears the run's seed before anything else; see `FollowsSeed`."""

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
        seed: of the policy's own generator; ``None`` follows the run's, and is 0 without one.
    """

    name = "random"

    def __init__(self, seed: int | None = None) -> None:
        self._own_seed = seed
        self._rng = np.random.default_rng(seed or 0)

    def follow(self, seed: int) -> None:
        """Draws by the run's seed, unless it has its own."""
        if self._own_seed is None:
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
