"""MiniGrid's own instances played beside a batch of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np
from scipy.stats import chi2_contingency

from vlmrb.envs.grid_simulator import GridSimulator
from vlmrb.envs.simulator import Step


class Beside:
    """Takes the same steps in both, and compares everything.

    Args:
        theirs: n instances, reset, that show the whole grid.
        ours: the same n levels, whatever they hold at first.
    """

    def __init__(self, theirs: Sequence[gymnasium.Env], ours: GridSimulator) -> None:
        self.theirs = theirs
        self.ours = ours
        self.steps = np.zeros(len(theirs), np.int64)
        self.copy()

    def snapshots(self) -> np.ndarray:
        return np.stack([self.ours.layout.take(env.unwrapped) for env in self.theirs])

    def copy(self) -> None:
        """Puts our levels into the states of theirs."""
        self.ours.set_states(np.arange(len(self.theirs)), self.snapshots(), self.steps)

    def step(self, action: np.ndarray, rng: np.random.Generator) -> Step:
        """Moves both on; where an episode ends, both begin a new one."""
        got = self.ours.step(action)
        self.steps += 1
        for row, env in enumerate(self.theirs):
            observation, reward, terminated, truncated, _ = env.step(int(action[row]))
            np.testing.assert_array_equal(got.snapshot[row], self.ours.layout.take(env.unwrapped))
            np.testing.assert_array_equal(got.observation[row], observation["image"])
            assert got.reward[row] == np.float32(reward)
            assert (got.terminated[row], got.truncated[row]) == (terminated, truncated)
            assert got.success[row] == (reward > 0)
            if terminated or truncated:
                env.reset(seed=int(rng.integers(2**31)))
                self.steps[row] = 0
        self.copy()
        return got


def assert_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Tests for each feature, ``[count]``, whether both come from one distribution."""
    for name in ours:
        features = (ours[name], theirs[name])
        values = np.unique(np.concatenate(features))
        table = np.array([[(feature == value).sum() for value in values] for feature in features])
        table = table[:, table.sum(axis=0) >= 10]
        p = 1.0 if table.shape[1] == 1 else chi2_contingency(table).pvalue
        assert p > 1e-3, f"{name}: p = {p}, {table}"
