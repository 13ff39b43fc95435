"""How a grid world's state lies in a snapshot, and how an observation is read off it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from minigrid.minigrid_env import MiniGridEnv

# MiniGrid's own codes of cell contents. They are its wire format, hence safe to spell out; a test compares them.
UNSEEN: Final = 0
EMPTY: Final = 1
WALL: Final = 2
FLOOR: Final = 3
DOOR: Final = 4
KEY: Final = 5
BALL: Final = 6
BOX: Final = 7
GOAL: Final = 8
LAVA: Final = 9
AGENT: Final = 10
RED, GREEN, BLUE, PURPLE, YELLOW, GREY = range(6)
OPEN, CLOSED, LOCKED = range(3)

POSE_SIZE: Final = 5  # x, y, direction, carried object's type and colour


class MiniGridState(NamedTuple):
    """Snapshots taken apart; all arrays are views.

    Attributes:
        grid: ``uint8[..., W, H, 3]``, (object, colour, state) of each cell *without* the agent, first index x.
        position: ``uint8[..., 2]``, the agent's x and y.
        direction: ``uint8[...]``, 0 right, 1 down, 2 left, 3 up.
        carried: ``uint8[..., 2]``, the carried object's type and colour, zeros when there is none.
    """

    grid: NDArray[np.uint8]
    position: NDArray[np.uint8]
    direction: NDArray[np.uint8]
    carried: NDArray[np.uint8]


class GridLayout(NamedTuple):
    """Layout of a snapshot ``uint8[S]``, ``S = 3·W·H + 5``: the grid cell by cell, then x, y, direction, carried.

    Attributes:
        width: W in cells, border walls included.
        height: H in cells.
    """

    width: int
    height: int

    @property
    def size(self) -> int:
        """S, bytes of a snapshot."""
        return 3 * self.width * self.height + POSE_SIZE

    def unpack(self, snapshots: NDArray[np.uint8]) -> MiniGridState:
        """Takes snapshots apart.

        Args:
            snapshots: ``uint8[..., S]``.

        Raises:
            ValueError: they are not of this layout.
        """
        if snapshots.shape[-1] != self.size or snapshots.dtype != np.uint8:
            raise ValueError(
                f"a {self.width}x{self.height} grid has snapshots uint8[..., {self.size}], "
                f"got {snapshots.dtype}[..., {snapshots.shape[-1]}]"
            )
        pose = snapshots[..., -POSE_SIZE:]
        grid = snapshots[..., :-POSE_SIZE].reshape(*snapshots.shape[:-1], self.width, self.height, 3)
        return MiniGridState(grid, pose[..., 0:2], pose[..., 2], pose[..., 3:5])

    def observe(self, snapshots: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the full symbolic view of each state, ``uint8[..., W, H, 3]``: the grid with the agent in its cell.

        Equals MiniGrid's ``FullyObsWrapper``: what lies under the agent is hidden, and so is what it carries.
        """
        state = self.unpack(snapshots)
        cells = state.grid.reshape(-1, self.width * self.height, 3).copy()
        x, y = state.position.reshape(-1, 2).astype(np.int64).T
        rows = np.arange(len(cells))
        cells[rows, x * self.height + y] = (AGENT, RED, 0)
        cells[rows, x * self.height + y, 2] = state.direction.reshape(-1)
        return cells.reshape(state.grid.shape)

    def take(self, env: MiniGridEnv) -> NDArray[np.uint8]:
        """Takes the snapshot ``uint8[S]`` of a MiniGrid environment, from its state and not from any observation."""
        from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

        snapshot = np.zeros(self.size, np.uint8)
        snapshot[:-POSE_SIZE] = env.grid.encode().reshape(-1)
        held = env.carrying
        carried = (0, 0) if held is None else (OBJECT_TO_IDX[held.type], COLOR_TO_IDX[held.color])
        snapshot[-POSE_SIZE:] = (*env.agent_pos, env.agent_dir, *carried)
        return snapshot
