"""Notices a scorer that tells no clips apart, and so leaves replay uniform, whatever its scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NEARLY_ALL = 0.95  # share of positive answers; above it, prioritised draws are as good as uniform
STRETCH = 200  # clips answered that this share is taken over, at least
SOLVED = 0.5  # share of episodes that reach the goal; from here on nearly all clips may well show progress
LONG = 1_000  # clips answered without a positive one that are no longer chance


@dataclass
class OneSidedAnswers:
    """Watches how many of a scorer's answers are positive, and speaks once in a run.

    Attributes:
        answers: clips answered in the present stretch.
        positives: of these, those above the threshold.
        episodes: training episodes that ended meanwhile.
        successes: of these, those that reached the goal.
        negatives: clips answered since the last positive one.
        said: whether it has spoken.
    """

    answers: int = 0
    positives: int = 0
    episodes: int = 0
    successes: float = 0.0
    negatives: int = 0
    said: bool = False

    def look(self, answers: int, positives: int, episodes: int, success: float) -> str | None:
        """Takes in what has happened since the last call.

        Args:
            answers: clips answered.
            positives: of these, those above the threshold.
            episodes: training episodes that ended.
            success: share of these that reached the goal, in [0, 1]; of no account without episodes.

        Returns:
            What is wrong with the answers, in words that follow a scorer's name and go before its threshold; ``None``
            if nothing is, or if it has been said before.
        """
        self.answers += answers
        self.positives += positives
        self.episodes += episodes
        self.successes += success * episodes if episodes else 0.0
        self.negatives = 0 if positives else self.negatives + answers
        found = self._all() or self._none()
        if self.answers >= STRETCH:
            self.answers = self.positives = self.episodes = 0
            self.successes = 0.0
        if found is None or self.said:
            return None
        self.said = True
        return found

    def _all(self) -> str | None:
        if self.answers < STRETCH or self.positives <= NEARLY_ALL * self.answers:
            return None
        if self.successes >= SOLVED * max(1, self.episodes):
            return None
        reached = f" ({self.successes / self.episodes:.0%} of the episodes reached the goal)" if self.episodes else ""
        share = self.positives / self.answers
        return f"finds nearly everything positive: {share:.1%} of the last {self.answers:,} clips{reached}"

    def _none(self) -> str | None:
        if self.negatives < LONG:
            return None
        return f"finds nothing positive: none of the last {self.negatives:,} clips"

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; what it does not name stays as it is."""
        self.__dict__.update(state)
