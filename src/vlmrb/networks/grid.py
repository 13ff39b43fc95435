"""Networks for MiniGrid's symbolic grid that are fast on a CPU.

A convolution over a 6×6 grid is mostly overhead on a CPU. Here every cell is looked up in a fixed table of eight
features, the border walls (always the same) are dropped, and the rest is one small multilayer perceptron.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from minigrid.core.constants import OBJECT_TO_IDX, STATE_TO_IDX
from torch import Tensor, nn

NUM_FEATURES = 8
NUM_COLORS = 6
_STATES = 4  # door states 0–2, or the agent's direction 0–3


def _feature_table(colors: bool) -> Tensor:
    """Returns the fixed features of every (object, state) pair, or of every (object, colour, state) triple.

    Columns: wall, key, door, goal, agent, first and second state bit, anything else (lava negative).

    Returns:
        ``float32[objects·4, 8]``, or ``float32[objects·6·4, 14]`` with six columns of colour appended.
    """
    num_objects = max(OBJECT_TO_IDX.values()) + 1
    table = torch.zeros(num_objects, _STATES, NUM_FEATURES)
    for column, name in enumerate(("wall", "key", "door", "goal", "agent")):
        table[OBJECT_TO_IDX[name], :, column] = 1.0
    table[OBJECT_TO_IDX["door"], STATE_TO_IDX["open"], 5] = 1.0
    table[OBJECT_TO_IDX["door"], STATE_TO_IDX["locked"], 6] = 1.0
    for direction in range(_STATES):
        table[OBJECT_TO_IDX["agent"], direction, 5] = math.cos(direction * math.pi / 2)
        table[OBJECT_TO_IDX["agent"], direction, 6] = math.sin(direction * math.pi / 2)
    table[OBJECT_TO_IDX["ball"], :, 7] = 1.0
    table[OBJECT_TO_IDX["box"], :, 7] = 0.5
    table[OBJECT_TO_IDX["lava"], :, 7] = -1.0
    if not colors:
        return table.flatten(0, 1)
    table = table.unsqueeze(1).expand(-1, NUM_COLORS, -1, -1)
    coloured = torch.zeros(num_objects, 1, 1, 1)
    for name in ("key", "door", "ball", "box"):
        coloured[OBJECT_TO_IDX[name]] = 1.0
    onehot = torch.eye(NUM_COLORS)[None, :, None, :].expand(num_objects, -1, _STATES, -1) * coloured
    return torch.cat([table, onehot], -1).flatten(0, 2)


class GridEncoder(nn.Module):
    """Looks every interior cell up in a fixed feature table and flattens the result; it has no parameters.

    Args:
        observation_shape: ``(W, H, 3)`` of the symbolic grid.
        colors: append six colour features a cell. Needed where colour matters (several keys or doors); DoorKey has one
            of each, and the narrower input trains faster there.
    """

    def __init__(self, observation_shape: Sequence[int], colors: bool = False) -> None:
        super().__init__()
        width, height, _ = observation_shape
        self.colors = colors
        table = _feature_table(colors)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor
        self.out_features = (width - 2) * (height - 2) * table.shape[1]

    def forward(self, observation: Tensor) -> Tensor:
        """Maps ``uint8[B, W, H, 3]`` (object, colour, state) to ``float32[B, out_features]``."""
        cells = observation[..., 1:-1, 1:-1, :].int()
        index = cells[..., 0]
        if self.colors:
            index = index * NUM_COLORS + cells[..., 1]
        index = index * _STATES + cells[..., 2]
        return F.embedding(index.flatten(-2), self.table).flatten(-2)
