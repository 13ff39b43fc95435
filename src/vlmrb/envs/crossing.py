"""MiniGrid's LavaCrossing and SimpleCrossing, stepped as arrays."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vlmrb.envs.grid import EMPTY, GOAL, GREEN, GREY, LAVA, RED, WALL
from vlmrb.envs.grid_simulator import GridSimulator, Levels, walled_grid

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer

_NAME = re.compile(r"MiniGrid-(Lava|Simple)CrossingS(\d+)N(\d+)-v0")


class Variant(NamedTuple):
    """What a crossing's id says.

    Attributes:
        lava: rivers are of lava, which ends the episode; else of wall.
        size: edge of the square grid in cells, border walls included; odd, at least 5.
        num_crossings: rivers, 1 to size − 3.
    """

    lava: bool
    size: int
    num_crossings: int


class CrossingSimulator(GridSimulator):
    """``n`` levels in which each of some rivers can be crossed at one place only.

    Args:
        variant: rivers and size.
        num_envs: n.
        max_steps: horizon in env steps; ``None`` is upstream's 4·N².
        seed: of the level generator.
    """

    def __init__(self, variant: Variant, num_envs: int, max_steps: int | None = None, seed: int = 0) -> None:
        self.variant = variant
        super().__init__(variant.size, num_envs, 4 * variant.size**2 if max_steps is None else max_steps, seed)

    def make_levels(self, count: int) -> Levels:
        """Draws new levels.

        As MiniGrid does: rivers are drawn without replacement from the even columns and rows; then a path from the room
        at the top left to that at the bottom right crosses them in random order, each at a random cell of its rooms.
        """
        lava, n, rivers = self.variant
        rows = np.arange(count)
        lines = (n - 3) // 2  # where a river may run, in either direction
        drawn = self.rng.permuted(np.tile(np.arange(2 * lines), (count, 1)), axis=1)[:, :rivers]
        river = np.zeros((count, 2, lines), np.bool_)  # of columns, of rows
        river.reshape(count, -1)[rows[:, None], drawn] = True
        wet = np.zeros((count, 2, n - 2), np.bool_)
        wet[:, :, 1:-1:2] = river
        grid = walled_grid(count, n)
        grid[:, 1:-1, 1:-1][wet[:, 0, :, None] | wet[:, 1, None, :]] = (LAVA, RED, 0) if lava else (WALL, GREY, 0)

        # limit[k, axis, room] is where room number `room` begins, counted along an axis; the last one is the far wall.
        limit = np.full((count, 2, rivers + 2), n - 1)
        limit[:, :, 0] = 0
        level, axis, line = np.nonzero(river)
        limit[level, axis, river.cumsum(axis=2)[river]] = 2 * line + 2
        columns = river[:, 0].sum(axis=1)
        crosses_row = self.rng.permuted(np.arange(rivers) >= columns[:, None], axis=1).astype(np.int64)
        room = np.zeros((count, 2), np.int64)
        for step in range(rivers):
            across = crosses_row[:, step]  # the axis along which the path now goes on
            beside = 1 - across
            cell = np.empty((count, 2), np.int64)
            cell[rows, across] = limit[rows, across, room[rows, across] + 1]
            low, high = (limit[rows, beside, room[rows, beside] + side] for side in range(2))
            cell[rows, beside] = self.rng.integers(low + 1, high)
            grid[rows, cell[:, 0], cell[:, 1]] = (EMPTY, 0, 0)
            room[rows, across] += 1
        grid[:, -2, -2] = (GOAL, GREEN, 0)
        return Levels(grid, np.ones((count, 2), np.int64), np.zeros(count, np.int64))


def _variant(env_id: str) -> Variant:
    match = _NAME.fullmatch(env_id.rpartition(":")[2])
    if match is None:
        raise ValueError(f"env.id {env_id!r} is no crossing of the form MiniGrid-LavaCrossingS9N1-v0")
    return Variant(match[1] == "Lava", int(match[2]), int(match[3]))


def claims(env_id: str) -> bool:
    """Says whether the id is a LavaCrossing or SimpleCrossing, of any size, registered upstream or not."""
    return _NAME.fullmatch(env_id) is not None


def check(config: EnvConfig) -> None:
    """Refuses sizes and numbers of rivers for which there are no levels, and worker processes.

    Raises:
        ValueError: naming the setting.
    """
    _, size, rivers = _variant(config.id)
    if not 5 <= size <= 255 or size % 2 == 0:
        raise ValueError(f"env.id {config.id!r}: a crossing needs an odd number of cells a side, from 5 to 255")
    if not 1 <= rivers <= size - 3:
        raise ValueError(f"env.id {config.id!r}: {size} cells a side hold 1 to {size - 3} rivers")
    if config.workers:
        raise ValueError(f"env.workers = {config.workers}: crossings are stepped as one batch of arrays, leave it at 0")


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes a batch of crossings."""
    from vlmrb.envs.batch import SimulatorEnv

    simulator = CrossingSimulator(_variant(config.id), num_envs, config.max_steps, seed)
    return SimulatorEnv(simulator, config.actions)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of a crossing's snapshots."""
    from vlmrb.envs.tiles import GridRenderer

    size = _variant(config.id).size
    return GridRenderer(size, size, config.tile_size, config.visuals)
