"""Returns of episodes, read off raw blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class ReturnWindow:
    """The mean undiscounted return of the episodes that ended in a window of env steps.

    Attributes:
        env_steps: rows seen since the window began.
        episodes: episodes that ended since.
    """

    def __init__(self) -> None:
        self._running: NDArray[np.float64] = np.zeros(0)  # per environment, since its episode began
        self.begin()

    def begin(self) -> None:
        """Begins a new window; running episodes go on, and count in the window in which they end."""
        self.env_steps, self.episodes, self._sum = 0, 0, 0.0

    def forget(self) -> None:
        """Begins a new window in which all episodes begin anew."""
        self._running = np.zeros(0)
        self.begin()

    def add(self, reward: NDArray, done: NDArray[np.bool_]) -> None:
        """Takes in a block.

        Args:
            reward: ``[n, T]``.
            done: ``bool[n, T]``, which rows end their episodes.
        """
        if len(self._running) != len(reward):
            self._running = np.zeros(len(reward))
        total = self._running[:, None] + np.cumsum(reward, axis=1, dtype=np.float64)
        self._running = total[:, -1].copy()
        self.env_steps += reward.size
        env, step = np.nonzero(done)  # by environment, then by time
        if not len(env):
            return
        last = np.append(env[1:] != env[:-1], True)
        ends = total[env[last], step[last]]  # what the ended episodes of each environment sum up to
        self._running[env[last]] -= ends
        self._sum += float(ends.sum())
        self.episodes += len(env)

    def mean(self) -> float:
        """Returns the mean; there must have been an episode."""
        return self._sum / self.episodes

    def state_dict(self) -> dict[str, Any]:
        """Returns lists and numbers."""
        return {
            "running": self._running.tolist(),
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "sum": self._sum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._running = np.array(state["running"], np.float64)
        self.env_steps, self.episodes, self._sum = state["env_steps"], state["episodes"], state["sum"]
