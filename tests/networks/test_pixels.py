"""What an agent that sees pixels sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tests.test_fit import fit

from vlmrb.envs import EnvConfig, make_env
from vlmrb.networks.pixels import PixelEncoder, is_image


@pytest.mark.parametrize("shape", [(64, 48, 3), (4, 64, 48), (4, 64, 48, 3), (22, 22, 1)])
def test_images_of_any_layout_become_features(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    encoder = PixelEncoder(shape)
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    features = encoder(images)
    assert features.shape == (5, encoder.out_features)
    torch.testing.assert_close(encoder(images[2:3]), features[2:3])
    assert not torch.equal(encoder(images.flip(1)), features)


def test_both_layouts_of_one_image_are_seen_alike() -> None:
    torch.manual_seed(0)
    last, first = PixelEncoder((32, 40, 3)), PixelEncoder((3, 32, 40))
    first.load_state_dict(last.state_dict())
    images = torch.randint(0, 256, (2, 32, 40, 3), dtype=torch.uint8)
    torch.testing.assert_close(last(images), first(images.movedim(-1, 1)))


def test_stacked_frames_are_their_channels_side_by_side() -> None:
    torch.manual_seed(0)
    stacked, flat = PixelEncoder((2, 32, 40, 3)), PixelEncoder((6, 32, 40))
    flat.load_state_dict(stacked.state_dict())
    images = torch.randint(0, 256, (2, 2, 32, 40, 3), dtype=torch.uint8)
    side_by_side = torch.cat([images[:, 0].movedim(-1, 1), images[:, 1].movedim(-1, 1)], dim=1)
    torch.testing.assert_close(stacked(images), flat(side_by_side))


@pytest.mark.parametrize("shape", [(16, 64, 3), (64, 64, 17), (21, 21, 3)])
def test_what_is_too_small_or_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be seen"):
        PixelEncoder(shape)


class Corner(gymnasium.Env):
    """A white square in one of two corners; action 0 or 1 names the corner, for a reward of 1."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    observation_space = gymnasium.spaces.Box(0, 255, (24, 24, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.corner = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.corner = int(self.np_random.integers(2))
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.render(), float(action == self.corner), True, False, {}

    def render(self) -> np.ndarray:
        frame = np.zeros((24, 24, 3), np.uint8)
        side = slice(0, 6) if self.corner == 0 else slice(18, 24)
        frame[side, side] = 255
        return frame


gymnasium.register("Corner-v0", Corner)
CORNER = f"{__name__}:Corner-v0"


def test_images_are_told_from_symbolic_grids() -> None:
    corner, grid = (make_env(EnvConfig(id=name, num_envs=2), seed=0) for name in (CORNER, "MiniGrid-Empty-5x5-v0"))
    assert is_image(corner.observation_spec["observation"][0])
    assert not is_image(grid.observation_spec["observation"][0])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["DQN", "IQN"])
def test_an_agent_that_sees_pixels_learns_and_is_evaluated(tmp_path: Path, model: str) -> None:
    settings = ["--env.id", CORNER, "--model", f"vlmrb.algorithms.{model}", "--training.total_env_steps", "1600"]
    settings += ["--model.init_args.hidden_sizes", "[32]", "--model.init_args.epsilon_fraction", "0.5"]
    settings += ["--replay.vlm", "null", "--replay.lam_max", "0", "--scoring.scorer", "null", "--replay.n_steps", "1"]
    settings += ["--training.replay_ratio", "0.25", "--evaluation.episodes", "40"]
    assert fit(tmp_path / "run", *settings) == 0
    last = (tmp_path / "run" / "evaluations.csv").read_text().splitlines()[-1].split(",")
    assert float(last[3]) > 0.9, last
