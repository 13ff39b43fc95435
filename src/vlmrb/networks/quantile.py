"""The implicit quantile network: the return as a function of the quantile level τ (Dabney et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlmrb.networks.mlp import mlp
from vlmrb.networks.q import make_encoder


class QuantileNetwork(nn.Module):
    """Quantile values Z_τ(s, a) = f(ψ(s) ⊙ φ(τ))_a, with φ_j(τ) = ReLU(Σ_i cos(π i τ) w_ij + b_j), i from 0 (eq. 4).

    ``features`` and ``quantiles`` are apart, so that a state which is asked for several sets of levels is encoded once.

    Args:
        trunk: ψ, ``observation → float32[B, width]``.
        width: of the features.
        head: f, ``float32[…, width] → float32[…, num_actions]``.
        num_cosines: n, terms of the embedding. Higher → finer dependence on τ.
    """

    def __init__(self, trunk: nn.Module, width: int, head: nn.Module, num_cosines: int = 64) -> None:
        super().__init__()
        self.trunk = trunk
        self.embedding = nn.Sequential(nn.Linear(num_cosines, width), nn.ReLU())
        self.head = head
        self.register_buffer("frequencies", math.pi * torch.arange(num_cosines), persistent=False)
        self.frequencies: Tensor

    def features(self, observation: Tensor) -> Tensor:
        """Returns ψ(s), ``float32[B, width]``."""
        return self.trunk(observation)

    def quantiles(self, features: Tensor, tau: Tensor) -> Tensor:
        """Returns Z_τ(s, a).

        Args:
            features: ψ(s), ``float32[B, width]``.
            tau: quantile levels in [0, 1], ``float32[B, N]``, or ``[1, N]`` for the same ones in all states.

        Returns:
            ``float32[B, N, num_actions]``.
        """
        embedded = self.embedding((tau.unsqueeze(-1) * self.frequencies).cos())  # [B or 1, N, width]
        return self.head(features.unsqueeze(1) * embedded)

    def forward(self, observation: Tensor, tau: Tensor) -> Tensor:
        """Returns Z_τ(s, a), ``float32[B, N, num_actions]``."""
        return self.quantiles(self.features(observation), tau)

    def mean_over(self, features: Tensor, num_quantiles: int) -> Tensor:
        """Returns Q(s, ·) as the mean over evenly spaced levels, ``float32[B, num_actions]``.

        The levels are the midpoints (k + ½) / K: the paper draws them (eq. 3), which estimates the same integral with
        more noise, and would leave the greedy policy to chance.

        Args:
            features: ψ(s), ``float32[B, width]``.
            num_quantiles: K.
        """
        midpoints = (torch.arange(num_quantiles, device=features.device) + 0.5) / num_quantiles
        return self.quantiles(features, midpoints.unsqueeze(0)).mean(1)


def make_quantile_network(
    observation_shape: Sequence[int],
    observation_dtype: torch.dtype,
    num_actions: int,
    hidden_sizes: Sequence[int],
    colors: bool = False,
    num_cosines: int = 64,
    pixels: bool = False,
) -> QuantileNetwork:
    """Builds a `QuantileNetwork`: ψ is the encoder and the first hidden layer, f the others.

    Args:
        observation_shape: one observation's shape; the encoder is chosen by `vlmrb.networks.q.make_encoder`.
        observation_dtype: one observation's dtype.
        num_actions: number of discrete actions.
        hidden_sizes: widths of the hidden layers, at least one.
        colors: see `vlmrb.networks.grid.GridEncoder`.
        num_cosines: terms of the cosine embedding.
        pixels: see `vlmrb.networks.q.make_encoder`.

    Raises:
        ValueError: there is no hidden layer, whose width the embedding takes.
    """
    if not hidden_sizes:
        raise ValueError("model.hidden_sizes=[] leaves IQN without features: name at least one hidden layer")
    encoder, inputs = make_encoder(observation_shape, observation_dtype, colors, pixels)
    width = hidden_sizes[0]
    trunk = nn.Sequential(encoder, nn.Linear(inputs, width), nn.ReLU())
    return QuantileNetwork(trunk, width, mlp([*hidden_sizes, num_actions], last_layer_scale=0.1), num_cosines)
