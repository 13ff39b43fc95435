"""Implicit quantile networks (Dabney et al. 2018), the paper's other MiniGrid algorithm (section 5)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from vlmrb.algorithms.config import TrainingConfig
from vlmrb.algorithms.value_based import ValueBased
from vlmrb.envs import EnvConfig
from vlmrb.losses.iqn import IQNLoss
from vlmrb.networks.pixels import is_image
from vlmrb.networks.quantile import QuantileNetwork, make_quantile_network
from vlmrb.ranges import AT_LEAST_ONE, POSITIVE, require
from vlmrb.replay.config import ReplayConfig


class IQN(ValueBased):
    """IQN with hard target updates, optional double Q and n-step returns; acts on the mean of its quantiles.

    Args:
        env: which environment; its actions must be discrete.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer, exploration and the quantile levels.
        num_quantiles: N, levels drawn for the online network. Higher → less noise in the gradient, more time.
        num_target_quantiles: N', levels drawn for the target. Higher → less noise in the target, more time.
        num_policy_quantiles: K, evenly spaced levels by which actions are chosen.
        num_cosines: terms of the embedding of a level.
        kappa: κ > 0 of the Huber loss, where it turns from quadratic to linear.
        common: the settings of `ValueBased`.
    """

    q_network: QuantileNetwork
    target_network: QuantileNetwork
    loss: IQNLoss

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        num_quantiles: int = 8,
        num_target_quantiles: int = 8,
        num_policy_quantiles: int = 32,
        num_cosines: int = 64,
        kappa: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(env, training, replay, seed, **common)
        quantiles = {
            "num_quantiles": num_quantiles,
            "num_target_quantiles": num_target_quantiles,
            "num_policy_quantiles": num_policy_quantiles,
        }
        require(AT_LEAST_ONE, "model", **quantiles, num_cosines=num_cosines)
        require(POSITIVE, "model", kappa=kappa)
        self.num_quantiles = num_quantiles
        self.num_target_quantiles = num_target_quantiles
        self.num_policy_quantiles = num_policy_quantiles
        self.num_cosines = num_cosines
        self.kappa = kappa

    @cached_property
    def quantile_generator(self) -> torch.Generator:
        """Where the levels of training are drawn from; on the module's device, first asked for when that is settled."""
        return torch.Generator(self.device).manual_seed(self.seed + 3)

    def generators(self) -> dict[str, torch.Generator]:
        """Returns the base's generators and that of the quantile levels."""
        return super().generators() | {"quantiles": self.quantile_generator}

    def make_network(self, observation_spec: Any) -> QuantileNetwork:
        """Creates the quantile network; override it to use your own."""
        shape, dtype, pixels = observation_spec.shape, observation_spec.dtype, is_image(observation_spec)
        return make_quantile_network(
            shape, dtype, self.num_actions, self.hidden_sizes, self.colors, self.num_cosines, pixels
        )

    def make_loss(self) -> IQNLoss:
        """Creates the loss."""
        return IQNLoss(
            self.q_network,
            self.target_network,
            self.training_config.gamma,
            self.num_policy_quantiles,
            self.double_q,
            self.kappa,
        )

    def compute_loss(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Draws quantile levels and returns the loss of ``[B]`` rows and |δ|, ``float32[B]``."""
        return self.loss(batch, *self.draw_levels(len(batch)))

    def reducible_loss(self, batch: TensorDictBase) -> Tensor:
        """Draws quantile levels; returns the loss of ``[B]`` rows minus that of the target network, ``float32[B]``."""
        return self.loss.reducible(batch, *self.draw_levels(len(batch)))

    def features(self, observation: Tensor) -> Tensor:
        """Returns ψ(s), ``float32[n, width]``, of ``[n, …]`` observations."""
        return self.q_network.features(observation)

    def draw_levels(self, count: int) -> tuple[Tensor, Tensor]:
        """Draws quantile levels from [0, 1] for so many rows: ``float32[count, N]`` and ``float32[count, N']``."""
        sizes = (self.num_quantiles, self.num_target_quantiles)
        levels = torch.rand(count, sum(sizes), generator=self.quantile_generator, device=self.device)
        online, target = levels.split(sizes, dim=1)
        return online, target

    def q_values(self, observation: Tensor) -> Tensor:
        """Returns Q(s, ·), the mean over K evenly spaced quantiles, ``float32[n, num_actions]``."""
        return self.q_network.mean_over(self.q_network.features(observation), self.num_policy_quantiles)
