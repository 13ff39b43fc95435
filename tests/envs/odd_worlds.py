"""Environments that hang, never end, count, or have no bounds; importing them loads no torch, so workers start soon."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import gymnasium
import numpy as np


class Counting(gymnasium.Env):
    """The observation is the number of env steps since the reset; the episode ends after ``length``, if ever.

    Args:
        render_mode: as Gymnasium has it.
        length: env steps of an episode; ``None``: it never ends.
        draw_s: seconds that a frame takes at least.
        hang_at: env step that never returns.
        size: numbers in an observation.
        start_s: seconds that it takes to be made.

    Attributes:
        draws: frames drawn by all of them in this process.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space: gymnasium.Space = gymnasium.spaces.Discrete(2)
    draws = 0

    def __init__(
        self,
        render_mode: str | None = None,
        length: int | None = None,
        draw_s: float = 0.0,
        hang_at: int | None = None,
        size: int = 1,
        start_s: float = 0.0,
    ) -> None:
        time.sleep(start_s)
        self.render_mode, self.length, self.draw_s, self.hang_at = render_mode, length, draw_s, hang_at
        self.observation_space = gymnasium.spaces.Box(0, np.inf, (size,), np.float32)

    def _observation(self) -> np.ndarray:
        return np.full(self.observation_space.shape, self.steps, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        while self.steps == self.hang_at:
            time.sleep(60.0)
        return self._observation(), 1.0, self.steps == self.length, False, {}

    def render(self) -> np.ndarray:
        Counting.draws += 1
        time.sleep(self.draw_s)
        return np.full((8, 8, 3), self.steps % 256, np.uint8)


class Unbounded(Counting):
    """Takes any number as an action."""

    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, _, *rest = super().step(action)
        return observation, float(np.abs(action).max()), *rest


gymnasium.register("Counting-v0", Counting)
gymnasium.register("Unbounded-v0", Unbounded)
