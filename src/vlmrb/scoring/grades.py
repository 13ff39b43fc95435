"""How milestones inside a clip become a score; shared by the recognisers, which so differ only in what they see."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

KEY, DOOR, GOAL = range(3)  # columns of an event array


@dataclass(frozen=True)
class Grades:
    """The score of a clip by the best milestone that happens *inside* it.

    An event is a change between two consecutive frames: a key is picked up, a door opens, the agent steps onto a
    goal. Every such change counts, whether or not it happened before: a clip carries no memory, so a key taken up
    again after it was dropped, or a door opened again, is graded like the first time, as a viewer of the clip alone
    would. Dropping a key or closing a door is no event.

    Attributes:
        nothing: score of a clip without any event, in [0, 0.5). Matters only to raw-score priorities (higher → such
            clips are replayed more often).
        key: score of a clip in which a key is picked up. As ``door`` and ``goal`` in (0.5, 1].
        door: score of a clip in which a door opens.
        goal: score of a clip in which the agent reaches a goal.
        success_only: only reaching the goal counts; all else is then ignored. Where successes are rare this starves
            replay of positive clips.
        step: score of a clip with a milestone of another environment than MiniGrid (OGBench: a cube lifted or placed,
            a button, drawer or window as the task wants it). As ``goal`` in (0.5, 1].
    """

    nothing: float = 0.1
    key: float = 0.7
    door: float = 0.85
    goal: float = 1.0
    success_only: bool = False
    step: float = 0.7

    def __post_init__(self) -> None:
        """Refuses grades that would put a milestone on the wrong side of the paper's threshold of 0.5.

        Raises:
            ValueError: a grade lies outside its range.
        """
        if not 0.0 <= self.nothing < 0.5:
            raise ValueError(f"grades.nothing must lie in [0, 0.5), got {self.nothing}")
        for name in ("key", "door", "goal", "step"):
            if not 0.5 < getattr(self, name) <= 1.0:
                raise ValueError(f"grades.{name} must lie in (0.5, 1], got {getattr(self, name)}")

    @property
    def version(self) -> str:
        """The settings as text, part of a scorer's version: a cached score must not outlive a change of grades."""
        return "/".join(f"{value:g}" for value in astuple(self))

    def score(self, events: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Grades clips.

        Args:
            events: ``bool[B, 3]``, whether a key was picked up, a door opened, a goal reached.

        Returns:
            ``float32[B]`` in [0, 1]: the highest grade among a clip's events, ``nothing`` if there is none.
        """
        counted = np.array([not self.success_only, not self.success_only, True])
        worth = np.array([self.key, self.door, self.goal], dtype=np.float32)
        return np.where(events & counted, worth, np.float32(self.nothing)).max(axis=1)

    def score_steps(self, events: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Grades clips of environments other than MiniGrid.

        Args:
            events: ``bool[B, M]``, which milestones happen; the last one is the goal.

        Returns:
            ``float32[B]`` in [0, 1]: ``goal``, else ``step`` for any other, else ``nothing``.
        """
        steps = events[:, :-1].any(axis=1) & (not self.success_only)
        best = np.where(events[:, -1], self.goal, np.where(steps, self.step, self.nothing))
        return best.astype(np.float32)
