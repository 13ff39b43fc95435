"""A player of DoorKey that knows the state: key, door and goal in as few steps as the rules allow.

It makes scripted clips (demonstrations, and positives for corpora and tests); no agent learns from it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.grid import CLOSED, DOOR, EMPTY, GOAL, KEY, OPEN, POSE_SIZE, GridLayout
from vlmrb.envs.grid_simulator import DONE, FORWARD, LEFT, PICKUP, RIGHT, TOGGLE

_FAR: Final = np.int16(30_000)  # steps; more than any level takes, and room to add to

# Pose p of a grid of N cells a side is (x·N + y)·4 + direction, with MiniGrid's directions: right, down, left, up.
_STEP: Final = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])


class DoorKeyExpert:
    """Plays a batch of DoorKey levels of one size, none of which it needs to have seen before.

    The plan is exact for a level that is played as intended (key, door, goal) and for any state a meddler leaves
    behind, except that it never drops the key to save steps. Plans are kept from call to call as long as a level's
    cells stay the same, so hand instance i's state in at row i each time.

    Args:
        size: N, edge of the square grid in cells, border walls included.

    Raises:
        ValueError: the grid is too small to hold a level.
    """

    def __init__(self, size: int) -> None:
        if size < 5:
            raise ValueError(f"DoorKey needs a grid of 5 or more cells a side, got {size}")
        self.layout = GridLayout(size, size)
        cells = np.indices((size, size)).reshape(2, -1).T  # [N², 2]
        ahead = (cells[:, None] + _STEP).clip(0, size - 1)  # [N², 4, 2]; border cells are walls, never stood on
        self._front = (ahead[..., 0] * size + ahead[..., 1]).reshape(-1)  # [4·N²] the cell in front of a pose
        pose = np.arange(4 * size * size)
        turned = pose // 4 * 4
        self._left, self._right = turned + (pose - 1) % 4, turned + (pose + 1) % 4
        self._forward = self._front * 4 + pose % 4
        self._make_room(0)

    def act(self, snapshots: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Chooses actions.

        Args:
            snapshots: ``uint8[n, S]`` of DoorKey states of this size.

        Returns:
            ``int64[n]``, actions of MiniGrid; 6 (done) where the agent stands on the goal, or can never get there.

        Raises:
            ValueError: the snapshots are of another size.
        """
        pose = self._plan(snapshots)
        row = np.arange(len(pose))
        choices = np.stack(
            [
                self._costs[row, self._forward[pose]],  # first, so that ties are resolved by going on
                self._costs[row, self._left[pose]],
                self._costs[row, self._right[pose]],
                self._deed_costs[row, pose] - np.int16(1),
            ]
        )
        choices[0, ~self._walkable[row, self._front[pose]]] = _FAR
        action = np.array([FORWARD, LEFT, RIGHT, -1])[choices.argmin(axis=0)]
        action = np.where(action < 0, self._deed[row, pose], action)
        here = self._costs[row, pose]
        return np.where((here == 0) | (here >= _FAR), DONE, action)

    def steps_to_goal(self, snapshots: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Returns how many steps it will take from these states, ``int64[n]``; −1 where the goal is out of reach."""
        pose = self._plan(snapshots)
        steps = self._costs[np.arange(len(pose)), pose].astype(np.int64)
        return np.where(steps >= _FAR, -1, steps)

    def _make_room(self, count: int) -> None:
        poses = len(self._front)
        self._known = np.full((count, self.layout.size - POSE_SIZE + 1), 255, np.uint8)  # no level looks like this
        self._costs = np.zeros((count, poses), np.int16)  # steps to the goal
        self._deed_costs = np.zeros((count, poses), np.int16)  # the same, if the first step is to handle what is ahead
        self._deed = np.zeros((count, poses), np.int64)
        self._walkable = np.zeros((count, poses // 4), bool)

    def _plan(self, snapshots: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Brings the plans up to date; returns the agents' poses, ``int64[n]``."""
        state = self.layout.unpack(snapshots)
        holds = state.carried[:, 0] == KEY
        known = np.concatenate((snapshots[:, :-POSE_SIZE], holds[:, None].astype(np.uint8)), axis=1)
        if len(known) != len(self._known):
            self._make_room(len(known))
        stale = np.flatnonzero((known != self._known).any(axis=1))
        if len(stale):
            self._known[stale] = known[stale]
            self._renew(stale, state.grid[stale], holds[stale])
        x, y = state.position.astype(np.int64).T
        return (x * self.layout.height + y) * 4 + state.direction

    def _renew(self, rows: NDArray[np.int64], grid: NDArray[np.uint8], holds: NDArray[np.bool_]) -> None:
        """Plans the given rows anew, backwards from the goal: each stage's end costs what the next one takes."""
        cells = grid.reshape(len(grid), -1, 3)
        kind, status = cells[..., 0], cells[..., 2]
        door, key, goal = kind == DOOR, kind == KEY, kind == GOAL
        floor = (kind == EMPTY) | goal
        shut = (door & (status != OPEN)).any(axis=1)
        ajar = (door & (status == CLOSED)).any(axis=1)
        lies = key.any(axis=1)
        arrived = np.where(np.repeat(goal, 4, axis=1), np.int16(0), _FAR)

        def facing(what: NDArray[np.bool_], then: NDArray[np.int16], when: NDArray[np.bool_]) -> NDArray[np.int16]:
            return np.where(what[:, self._front] & when[:, None], then + np.int16(1), _FAR)

        always = np.ones(len(rows), bool)
        with_key_open = self._spread(arrived, floor | door | key)
        with_key_shut = self._spread(facing(door, with_key_open, always), floor | key)
        take_then_open = facing(key, with_key_open, lies)
        key_lies_open = self._spread(np.minimum(arrived, take_then_open), floor | door)
        open_it = facing(door, np.where(lies[:, None], key_lies_open, with_key_open), shut & (ajar | holds))
        take_it = facing(key, np.where(shut[:, None], with_key_shut, with_key_open), lies)
        walkable = floor | (door & ~shut[:, None])
        self._walkable[rows] = walkable
        self._deed_costs[rows] = np.minimum(open_it, take_it)
        self._deed[rows] = np.where(take_it < open_it, PICKUP, TOGGLE)
        self._costs[rows] = self._spread(np.minimum(arrived, self._deed_costs[rows]), walkable)

    def _spread(self, end: NDArray[np.int16], walkable: NDArray[np.bool_]) -> NDArray[np.int16]:
        """Returns the least steps from every pose, ``int16[k, 4·N²]``, to any end, with what each end still costs."""
        blocked = ~walkable[:, self._front]  # [k, 4·N²]
        costs = end
        while True:
            ahead = costs.take(self._forward, axis=1)
            ahead[blocked] = _FAR
            around = np.minimum(costs.take(self._left, axis=1), costs.take(self._right, axis=1))
            better = np.minimum(costs, np.minimum(np.minimum(ahead, around) + np.int16(1), _FAR))
            if np.array_equal(better, costs):
                return costs
            costs = better


def expert_actions(snapshots: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Chooses actions for any batch of states; :class:`DoorKeyExpert` is quicker where the same levels come again.

    Args:
        snapshots: ``uint8[n, S]`` of DoorKey states of one size.

    Returns:
        ``int64[n]``, actions of MiniGrid.

    Raises:
        ValueError: no square grid has snapshots of this size.
    """
    size = math.isqrt(max(snapshots.shape[-1] - POSE_SIZE, 0) // 3)
    return DoorKeyExpert(size).act(snapshots)
