"""MiniGrid's rules for a whole batch of levels as arrays: some hundred times the speed of one instance at a time.

The rules are MiniGrid's, cell for cell, for levels of walls, lava, goals, yellow doors and one yellow key; a family
adds how its levels are made. tests/envs plays both side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.grid import (
    AGENT,
    CLOSED,
    DOOR,
    EMPTY,
    GOAL,
    GREY,
    KEY,
    LAVA,
    LOCKED,
    OPEN,
    POSE_SIZE,
    RED,
    WALL,
    YELLOW,
    GridLayout,
)
from vlmrb.envs.simulator import Spaces, Step

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)
NUM_ACTIONS: Final = 7

_SCHEMA: Final = 1

# What an action does to the cell in front of the agent, and what that cell and the agent's hand hold afterwards.
_NOTHING, _MOVE, _ARRIVE, _BURN, _PICKUP, _DROP, _OPEN, _CLOSE = range(8)
_CELL_AFTER = np.zeros((8, 3), np.uint8)
_CELL_AFTER[_PICKUP] = (EMPTY, 0, 0)
_CELL_AFTER[_DROP] = (KEY, YELLOW, 0)
_CELL_AFTER[_OPEN] = (DOOR, YELLOW, OPEN)
_CELL_AFTER[_CLOSE] = (DOOR, YELLOW, CLOSED)
_HAND_CHANGE = np.array([0, 0, 0, 0, 1, -1, 0, 0], np.int64)
_STRIDE = np.array([0, 1, 1, 1, 0, 0, 0, 0], np.int64)
_TURN = np.array([-1, 1, 0, 0, 0, 0, 0], np.int64)
_TYPES: Final = 11
_HELD = np.array([(0, 0), (KEY, YELLOW)], np.uint8)


def _outcomes() -> NDArray[np.int8]:
    """Tabulates the rules: ``int8[action · type of the cell in front · its state · key in hand]``, flat."""
    table = np.full((NUM_ACTIONS, _TYPES, 3, 2), _NOTHING, np.int8)
    table[FORWARD, EMPTY] = _MOVE
    table[FORWARD, DOOR, OPEN] = _MOVE
    table[FORWARD, GOAL] = _ARRIVE
    table[FORWARD, LAVA] = _BURN
    table[PICKUP, KEY, :, 0] = _PICKUP
    table[DROP, EMPTY, :, 1] = _DROP
    table[TOGGLE, DOOR, LOCKED, 1] = _OPEN  # the only key has the only door's colour
    table[TOGGLE, DOOR, CLOSED] = _OPEN
    table[TOGGLE, DOOR, OPEN] = _CLOSE
    return table.reshape(-1)


_OUTCOMES = _outcomes()


class Levels(NamedTuple):
    """Levels at their start; no key is in hand.

    Attributes:
        grid: ``uint8[k, N, N, 3]``, (object, colour, state) of each cell without the agent, first index x.
        position: ``int64[k, 2]``, the agent's x and y.
        direction: ``int64[k]``, 0 right, 1 down, 2 left, 3 up.
    """

    grid: NDArray[np.uint8]
    position: NDArray[np.int64]
    direction: NDArray[np.int64]


def walled_grid(count: int, size: int) -> NDArray[np.uint8]:
    """Returns empty rooms with walls around them, ``uint8[count, size, size, 3]``."""
    grid = np.zeros((count, size, size, 3), np.uint8)
    grid[:] = (EMPTY, 0, 0)
    grid[:, [0, -1]] = (WALL, GREY, 0)
    grid[:, :, [0, -1]] = (WALL, GREY, 0)
    return grid


class GridSimulator(ABC):
    """``n`` levels of one size.

    Args:
        size: N, edge of the square grid in cells, border walls included, at most 255.
        num_envs: n.
        max_steps: horizon in env steps.
        seed: of the level generator.
    """

    exact_resume = True

    def __init__(self, size: int, num_envs: int, max_steps: int, seed: int = 0) -> None:
        self.size = size
        self.num_envs = num_envs
        self.max_steps = max_steps
        self.layout = GridLayout(size, size)
        self.spaces = Spaces((size, size, 3), np.uint8, self.layout.size, NUM_ACTIONS)
        # The states are kept in the layout of their snapshots, so that taking them is one copy.
        self._state = np.zeros((num_envs, self.layout.size), np.uint8)
        self._position = np.zeros(num_envs, np.int64)  # x·N + y
        self._direction = np.zeros(num_envs, np.int64)
        self._holds = np.zeros(num_envs, np.int64)  # 0 or 1 key
        self._steps = np.zeros(num_envs, np.int64)
        # Views and tables that spare arithmetic in every step.
        self._flat = self._state.reshape(-1)
        self._grid = self._state[:, :-POSE_SIZE].reshape(num_envs, size, size, 3)
        self._pose = self._state[:, -POSE_SIZE:]
        self._row = np.arange(num_envs) * self.layout.size
        self._seen_row = np.arange(num_envs) * size * size
        self._ahead = np.array([size, 1, -size, -1], np.int64)
        x, y, direction = (axis.reshape(-1) for axis in np.indices((size, size, 4)))
        self._poses = np.stack((x, y, direction), axis=1).astype(np.uint8)  # [(x·N + y)·4 + direction]
        self._agents = np.array([(AGENT, RED, direction) for direction in range(4)], np.uint8)
        self.seed(seed)
        self.restart(np.arange(num_envs))

    def seed(self, seed: int) -> None:
        """Seeds the generator of levels to come."""
        self.rng = np.random.default_rng(seed)

    def step(self, action: NDArray[np.int64]) -> Step:
        """Moves every instance on.

        Args:
            action: ``int64[n]``, 0 left, 1 right, 2 forward, 3 pick up, 4 drop, 5 toggle, 6 done (does nothing).

        Raises:
            ValueError: an action is out of range.
        """
        if action.min() < 0 or action.max() >= NUM_ACTIONS:
            raise ValueError(f"MiniGrid's actions are 0 to {NUM_ACTIONS - 1}, got {action.tolist()}")
        self._steps += 1
        stride = self._ahead.take(self._direction)
        front = (self._position + stride) * 3 + self._row  # where the cell in front lies in the flat states
        code = ((action * _TYPES + self._flat.take(front)) * 3 + self._flat.take(front + 2)) * 2 + self._holds
        outcome = _OUTCOMES.take(code)
        self._direction += _TURN.take(action)
        self._direction &= 3
        stride *= _STRIDE.take(outcome)
        self._position += stride
        self._pose[:, :3] = self._poses.take(self._position * 4 + self._direction, axis=0)
        changed = np.flatnonzero(outcome > _BURN)
        if len(changed):
            what = outcome[changed]
            self._flat[front[changed, None] + np.arange(3)] = _CELL_AFTER[what]
            self._holds[changed] += _HAND_CHANGE[what]
            self._pose[changed, 3:] = _HELD[self._holds[changed]]

        success = outcome == _ARRIVE
        reward = np.zeros(self.num_envs, np.float32)
        if success.any():
            reward[success] = 1 - 0.9 * (self._steps[success] / self.max_steps)
        observation, snapshot = self.look()
        terminated = success | (outcome == _BURN)
        return Step(observation, snapshot, reward, success, terminated, self._steps >= self.max_steps)

    def look(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Returns fresh arrays of the current observations ``uint8[n, N, N, 3]`` and snapshots ``uint8[n, S]``."""
        observation = self._grid.copy()
        observation.reshape(-1, 3)[self._seen_row + self._position] = self._agents.take(self._direction, axis=0)
        return observation, self._state.copy()

    @abstractmethod
    def make_levels(self, count: int) -> Levels:
        """Draws ``count`` new levels from ``self.rng``, distributed as MiniGrid's generator distributes them."""

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Begins new levels in the given instances, ``int64[k]``."""
        levels = self.make_levels(len(rows))
        self._grid[rows] = levels.grid
        self._position[rows] = levels.position[:, 0] * self.size + levels.position[:, 1]
        self._direction[rows] = levels.direction
        self._holds[rows] = 0
        self._steps[rows] = 0
        self._pose[rows, :3] = self._poses[self._position[rows] * 4 + levels.direction]
        self._pose[rows, 3:] = 0

    def set_states(self, rows: NDArray[np.int64], snapshots: NDArray[np.uint8], steps: NDArray[np.int64]) -> None:
        """Puts instances into given states.

        Args:
            rows: ``int64[k]``.
            snapshots: ``uint8[k, S]`` of states of this size.
            steps: ``int64[k]``, env steps of the running episodes.

        Raises:
            ValueError: the snapshots are of another size.
        """
        state = self.layout.unpack(snapshots)
        self._state[rows] = snapshots
        x, y = state.position.astype(np.int64).T
        self._position[rows] = x * self.size + y
        self._direction[rows] = state.direction
        self._holds[rows] = state.carried[:, 0] == KEY
        self._steps[rows] = steps

    def state_dict(self) -> dict[str, Any]:
        """Returns states, step counts and the generator: all that the future depends on besides actions."""
        return {
            "schema": _SCHEMA,
            "snapshots": self._state.copy(),
            "steps": self._steps.copy(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned, exactly.

        Raises:
            ValueError: other schema, number of instances or size.
        """
        if state.get("schema") != _SCHEMA:
            raise ValueError(f"this grid-world state has schema {state.get('schema')}, this version reads {_SCHEMA}")
        if state["snapshots"].shape != self._state.shape:
            raise ValueError(
                f"this grid-world state is of shape {state['snapshots'].shape}, but the settings ask for "
                f"{self._state.shape}: keep env.id and env.num_envs when resuming"
            )
        self.set_states(np.arange(self.num_envs), state["snapshots"], state["steps"])
        self.rng.bit_generator.state = state["rng"]

    def close(self) -> None:  # noqa: B027 (nothing is held)
        """Lets go of nothing: all is arrays."""
