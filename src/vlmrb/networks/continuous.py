"""Actors and critics for flat observations and continuous actions, all of them in actions scaled to [-1, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmrb.networks.mlp import mlp

MIN_SCALE = 1e-4  # of the Gaussian policy, so that log-probabilities stay finite


class ActionBounds(nn.Module):
    """Translates between an environment's actions and the [-1, 1] of the networks; it has no parameters.

    Args:
        low: lower bounds, ``float32[A]``, finite.
        high: upper bounds, ``float32[A]``, finite.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.register_buffer("low", low.clone(), persistent=False)
        self.register_buffer("high", high.clone(), persistent=False)
        self.low: Tensor
        self.high: Tensor

    def to_environment(self, action: Tensor) -> Tensor:
        """Maps ``float32[…, A]`` in [-1, 1] to the bounds, never beyond them."""
        scaled = self.low + (action + 1) / 2 * (self.high - self.low)
        return scaled.clamp(self.low, self.high)

    def to_network(self, action: Tensor) -> Tensor:
        """Maps ``float32[…, A]`` within the bounds to [-1, 1]."""
        return 2 * (action - self.low) / (self.high - self.low) - 1


class DeterministicActor(nn.Module):
    """TD3's policy, ``float32[B, D] → float32[B, A]`` in [-1, 1].

    Args:
        observation_size: D.
        action_size: A.
        hidden_sizes: widths of the hidden layers.
    """

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = mlp([observation_size, *hidden_sizes, action_size])

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the action, ``float32[B, A]``."""
        return self.layers(observation.float()).tanh()


class GaussianActor(nn.Module):
    """SAC's policy before the tanh: a Gaussian with a diagonal covariance that depends on the state.

    Args:
        observation_size: D.
        action_size: A.
        hidden_sizes: widths of the hidden layers.
    """

    def __init__(self, observation_size: int, action_size: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = mlp([observation_size, *hidden_sizes, 2 * action_size])

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale, ``float32[B, A]`` each, in states ``float32[B, D]``; scales begin near 0.7."""
        loc, raw = self.layers(observation.float()).chunk(2, dim=-1)
        return loc, F.softplus(raw) + MIN_SCALE


class Critic(nn.Module):
    """Q(s, a), with layer normalisation (the paper's OGBench setting).

    Args:
        observation_size: D.
        action_size: A.
        hidden_sizes: widths of the hidden layers.
        layer_norm: see `vlmrb.networks.mlp.mlp`.
    """

    def __init__(
        self, observation_size: int, action_size: int, hidden_sizes: Sequence[int], layer_norm: bool = True
    ) -> None:
        super().__init__()
        self.layers = mlp([observation_size + action_size, *hidden_sizes, 1], layer_norm=layer_norm)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns Q(s, a), ``float32[B, 1]``, of ``float32[B, D]`` and ``float32[B, A]``."""
        return self.layers(torch.cat([observation.float(), action], dim=-1))
