"""A Gymnasium world in which the goal is passed at the sixth step, and the episode goes on for six more."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Passing(gymnasium.Env):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 8}
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        return np.full(1, self.steps / 12, np.float32), 0.0, self.steps == 12, False, {"passes": self.steps == 6}

    def render(self) -> np.ndarray:
        return np.full((8, 8, 3), 20 * self.steps, np.uint8)


def passes(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
    return info["passes"]


gymnasium.register("Passing-v0", Passing)
