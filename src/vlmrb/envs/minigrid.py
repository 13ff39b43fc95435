"""Every other registered MiniGrid id, stepped by Gymnasium; same observations, snapshots and frames as DoorKey's.

The observation is the whole symbolic grid (method.md section 5: full observability); the mission string is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import gymnasium
import minigrid  # noqa: F401  (importing it registers its ids)
import numpy as np
from minigrid.minigrid_env import MiniGridEnv
from numpy.typing import NDArray

from vlmrb.envs.grid import GridLayout
from vlmrb.envs.gymnasium import GymnasiumSimulator
from vlmrb.envs.instance import Instance, action_space
from vlmrb.envs.simulator import Spaces

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer


class MiniGridInstance(Instance):
    """One MiniGrid environment; its snapshot is its state, so no frame is drawn while stepping."""

    @property
    def grid_world(self) -> MiniGridEnv:
        """The environment without wrappers."""
        return cast(MiniGridEnv, self.env.unwrapped)

    def _make(self) -> gymnasium.Env:
        return gymnasium.make(self.config.id, disable_env_checker=True)

    def _spaces(self) -> Spaces:
        self.layout = GridLayout(self.grid_world.width, self.grid_world.height)
        return Spaces((*self.layout, 3), np.uint8, self.layout.size, action_space(self.env, self.config.id))

    def reset(self, seed: int) -> None:
        """Begins a new episode."""
        super().reset(seed)
        if self.config.max_steps is not None:
            self.grid_world.max_steps = self.config.max_steps  # after the reset: some levels set it there

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns the symbolic grid ``uint8[W, H, 3]`` with the agent in it, and the snapshot ``uint8[S]``."""
        snapshot = self.layout.take(self.grid_world)
        return self.layout.observe(snapshot), snapshot


def claims(env_id: str) -> bool:
    """Says whether the id is one that MiniGrid registers."""
    return env_id.startswith(("MiniGrid-", "BabyAI-")) and env_id in gymnasium.registry


def check(config: EnvConfig) -> None:
    """Every setting goes with these ids."""


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes a batch of MiniGrid instances."""
    from vlmrb.envs.batch import SimulatorEnv

    return SimulatorEnv(GymnasiumSimulator(MiniGridInstance, config, num_envs, seed), config.actions)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of this id's snapshots; opens one instance to learn the grid's size."""
    from vlmrb.envs.tiles import GridRenderer

    instance = MiniGridInstance(config)
    try:
        return GridRenderer(*instance.layout, config.tile_size, config.visuals)
    finally:
        instance.close()
