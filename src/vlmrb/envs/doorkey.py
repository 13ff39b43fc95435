"""MiniGrid's DoorKey of any size, stepped as arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.grid import DOOR, GOAL, GREEN, GREY, KEY, LOCKED, WALL, YELLOW
from vlmrb.envs.grid_simulator import GridSimulator, Levels, walled_grid

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer

_NAME = re.compile(r"MiniGrid-DoorKey-(\d+)x(\d+)-v0")


class DoorKeySimulator(GridSimulator):
    """``n`` DoorKey levels of one size.

    Args:
        size: N, edge of the square grid in cells, border walls included, at least 5.
        num_envs: n.
        max_steps: horizon in env steps; ``None`` is upstream's 10·N².
        seed: of the level generator.

    Raises:
        ValueError: the size is below 5 (no room for a dividing wall) or above 255.
    """

    def __init__(self, size: int, num_envs: int, max_steps: int | None = None, seed: int = 0) -> None:
        if not 5 <= size <= 255:
            raise ValueError(f"DoorKey needs a grid of 5 to 255 cells a side, got {size}")
        super().__init__(size, num_envs, 10 * size**2 if max_steps is None else max_steps, seed)

    def make_levels(self, count: int) -> Levels:
        """Draws new levels.

        MiniGrid draws the agent's and then the key's cell by rejection; drawing each uniformly from what is free on the
        left of the dividing wall, and the key from one cell less, is the same distribution.
        """
        n = self.size
        inner = n - 2
        wall = self.rng.integers(2, n - 2, count)  # x of the dividing wall
        free = (wall - 1) * inner
        high = np.stack((free, free - 1, np.full(count, 4), np.full(count, n - 3)))
        agent, key, direction, door = self.rng.integers(0, high)  # [4, k]
        key += key >= agent  # skips the agent's cell

        grid = walled_grid(count, n)
        grid[:, -2, -2] = (GOAL, GREEN, 0)
        index = np.arange(count)
        grid[index, wall] = (WALL, GREY, 0)
        grid[index, wall, door + 1] = (DOOR, YELLOW, LOCKED)
        grid[index, key // inner + 1, key % inner + 1] = (KEY, YELLOW, 0)
        return Levels(grid, np.stack((agent // inner + 1, agent % inner + 1), axis=1), direction)


def _size(env_id: str) -> int:
    match = _NAME.fullmatch(env_id.rpartition(":")[2])
    if match is None or match[1] != match[2]:
        raise ValueError(f"env.id {env_id!r} is no DoorKey of the form MiniGrid-DoorKey-NxN-v0")
    return int(match[1])


def claims(env_id: str) -> bool:
    """Says whether the id is a DoorKey, of any size, registered upstream or not."""
    return _NAME.fullmatch(env_id) is not None


def check(config: EnvConfig) -> None:
    """Refuses sizes without room for a dividing wall, and worker processes.

    Raises:
        ValueError: naming the setting.
    """
    if not 5 <= _size(config.id) <= 255:
        raise ValueError(f"env.id {config.id!r}: DoorKey needs 5 to 255 cells a side")
    if config.workers:
        raise ValueError(f"env.workers = {config.workers}: DoorKey is stepped as one batch of arrays, leave it at 0")


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes a batch of DoorKey levels."""
    from vlmrb.envs.batch import SimulatorEnv

    return SimulatorEnv(DoorKeySimulator(_size(config.id), num_envs, config.max_steps, seed), config.actions)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of DoorKey snapshots."""
    from vlmrb.envs.tiles import GridRenderer

    size = _size(config.id)
    return GridRenderer(size, size, config.tile_size, config.visuals)


def make_expert(config: EnvConfig) -> Callable[[NDArray[np.uint8]], NDArray[np.int64]]:
    """Makes the player of scripted clips: snapshots ``uint8[n, S]`` → actions ``int64[n]``."""
    from vlmrb.envs.doorkey_expert import DoorKeyExpert

    return DoorKeyExpert(_size(config.id)).act
