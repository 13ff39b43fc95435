from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from vlmrb.networks.quantile import QuantileNetwork, make_quantile_network


def test_quantiles_are_the_hand_computed_product_of_features_and_cosine_embedding() -> None:
    network = QuantileNetwork(nn.Identity(), 2, nn.Linear(2, 1, bias=False), num_cosines=2)
    with torch.no_grad():
        network.embedding[0].weight.copy_(torch.tensor([[1.0, 1.0], [0.0, -1.0]]))  # type: ignore[union-attr, operator]
        network.embedding[0].bias.copy_(torch.tensor([0.0, 0.5]))  # type: ignore[union-attr, operator]
        network.head.weight.copy_(torch.tensor([[1.0, 10.0]]))  # type: ignore[union-attr, operator]
    # φ(τ) = ReLU(1 + cos πτ, 0.5 − cos πτ): at τ = 0 (2, 0), at ½ (1, 0.5), at 1 (0, 1.5); features (3, 2).
    found = network(torch.tensor([[3.0, 2.0]]), torch.tensor([[0.0, 0.5, 1.0]]))
    assert found.flatten().tolist() == pytest.approx([6.0, 3.0 + 10.0, 30.0], abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 5, 3), torch.uint8), ((4,), torch.float32), ((2, 3), torch.float32), ((128,), torch.uint8)],
)
def test_grids_and_vectors_give_quantiles_of_every_action(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    network = make_quantile_network(shape, dtype, 7, [16, 8])
    observation = torch.ones(3, *shape, dtype=dtype)
    assert network(observation, torch.rand(3, 5)).shape == (3, 5, 7)
    assert network(observation, torch.rand(1, 5)).shape == (3, 5, 7)


def test_the_mean_is_over_evenly_spaced_levels() -> None:
    network = make_quantile_network((4,), torch.float32, 3, [16])
    observation, levels = torch.randn(2, 4), torch.tensor([[0.125, 0.375, 0.625, 0.875]])
    expected = network(observation, levels).mean(1)
    torch.testing.assert_close(network.mean_over(network.features(observation), 4), expected)
    assert network.frequencies[1].item() == pytest.approx(math.pi)


def test_a_network_without_hidden_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.hidden_sizes=\[\]"):
        make_quantile_network((4,), torch.float32, 3, [])
