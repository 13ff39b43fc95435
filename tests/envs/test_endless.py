"""Episodes that never end: whole ones are waited for by evaluations and recordings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from vlmrb.calibration.policies import RandomPlayer
from vlmrb.envs import EnvConfig, config
from vlmrb.evaluation import evaluate
from vlmrb.recording import play_episodes


class Endless(gymnasium.Env):
    """Nothing happens, for ever."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self) -> np.ndarray:
        return np.zeros((4, 4, 3), np.uint8)


gymnasium.register("Endless-v0", Endless)


def _evaluated(env: EnvConfig) -> list[int]:
    module: Any = SimpleNamespace(
        evaluation_epsilon=0.0, play=lambda observation, *_: torch.zeros(len(observation), dtype=torch.int64)
    )
    return evaluate(module, env, episodes=2, seed=0).lengths.tolist()


def _recorded(env: EnvConfig) -> list[int]:
    return [len(rows) for rows in play_episodes(env, RandomPlayer, episodes=2, seed=0)]


@pytest.mark.parametrize("played", [_evaluated, _recorded])
def test_an_episode_that_never_ends_asks_for_a_horizon(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "ENDLESS_STEPS", 6)
    env_id = f"{__name__}:Endless-v0"
    with pytest.raises(ValueError, match=r"^env.id '.*Endless-v0': an episode has not ended .* set env.max_steps$"):
        played(EnvConfig(env_id, num_envs=2))
    assert played(EnvConfig(env_id, num_envs=2, max_steps=10)) == [10, 10]


@pytest.mark.parametrize("played", [_evaluated, _recorded])
def test_an_episode_of_just_that_length_ends(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "ENDLESS_STEPS", 10)
    gymnasium.register("Ending-v0", Endless, max_episode_steps=10)
    try:
        assert played(EnvConfig(f"{__name__}:Ending-v0", num_envs=2)) == [10, 10]
    finally:
        del gymnasium.registry["Ending-v0"]
