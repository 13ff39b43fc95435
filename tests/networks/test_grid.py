from __future__ import annotations

import pytest
import torch
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

from vlmrb.networks.grid import GridEncoder
from vlmrb.networks.mlp import mlp
from vlmrb.networks.q import make_q_network


def grid(*cell: int) -> torch.Tensor:
    """A 5×5 grid, walls around, empty inside but for one cell in the middle."""
    cells = torch.zeros(1, 5, 5, 3, dtype=torch.uint8)
    cells[..., 0] = OBJECT_TO_IDX["wall"]
    cells[:, 1:-1, 1:-1, 0] = OBJECT_TO_IDX["empty"]
    cells[0, 2, 2] = torch.tensor(cell, dtype=torch.uint8)
    return cells


def test_what_matters_in_doorkey_looks_different_to_the_network() -> None:
    encode = GridEncoder((5, 5, 3))
    cells = [
        *((OBJECT_TO_IDX[name], 0, 0) for name in ("empty", "wall", "key", "goal", "ball", "box", "lava")),
        *((OBJECT_TO_IDX["door"], 4, state) for state in range(3)),
        *((OBJECT_TO_IDX["agent"], 0, direction) for direction in range(4)),
    ]
    codes = {tuple(encode(grid(*cell))[0].round(decimals=4).tolist()) for cell in cells}
    assert len(codes) == len(cells)


def test_border_walls_are_dropped() -> None:
    encode = GridEncoder((5, 5, 3))
    assert encode(grid(1, 0, 0)).shape == (1, 3 * 3 * 8)
    altered = grid(1, 0, 0)
    altered[0, 0, :, 0] = OBJECT_TO_IDX["goal"]
    assert torch.equal(encode(altered), encode(grid(1, 0, 0)))


@pytest.mark.parametrize(("colors", "differ"), [(False, False), (True, True)])
def test_colours_are_seen_only_when_asked_for(colors: bool, differ: bool) -> None:
    encode = GridEncoder((5, 5, 3), colors=colors)
    red, blue = (grid(OBJECT_TO_IDX["key"], COLOR_TO_IDX[name], 0) for name in ("red", "blue"))
    assert torch.equal(encode(red), encode(blue)) is not differ


def test_vector_observations_get_a_plain_perceptron() -> None:
    network = make_q_network((4,), torch.float32, 2, [8])
    assert network(torch.zeros(3, 4)).shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_numbers_of_any_dtype_are_seen_as_what_they_are(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    network = make_q_network(shape, dtype, 2, [8])
    numbers = torch.tensor([[0, 1, 128, 255], [7, 7, 7, 7]])
    torch.testing.assert_close(network(numbers.to(dtype).reshape(2, *shape)), network[1:](numbers.float()))


def test_last_layer_starts_small() -> None:
    torch.manual_seed(0)
    plain = mlp([4, 8, 2])
    torch.manual_seed(0)
    scaled = mlp([4, 8, 2], last_layer_scale=0.1)
    torch.testing.assert_close(scaled[-1].weight, 0.1 * plain[-1].weight)
