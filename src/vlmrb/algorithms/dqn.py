"""Deep Q-network (Mnih et al. 2015), the paper's MiniGrid algorithm (section 5, table 3)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vlmrb.algorithms.base import OffPolicyModule, TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.losses.dqn import DQNLoss, LossFunction
from vlmrb.networks.grid import make_q_network
from vlmrb.replay.config import ReplayConfig


class DQN(OffPolicyModule):
    """DQN with hard target updates, optional double Q and n-step returns (``replay.n_steps``).

    Args:
        env: which environment; its actions must be discrete.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer and exploration.
        learning_rate: Adam's step size. Higher → faster and less stable.
        hidden_sizes: widths of the hidden layers.
        colors: let the network see colours; see `vlmrb.networks.grid.GridEncoder`.
        double_q: double DQN: less over-estimation, one more forward pass.
        loss_function: ``smooth_l1`` or ``l2``.
    """

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        learning_rate: float = 3e-4,
        hidden_sizes: Sequence[int] = (128, 128),
        colors: bool = False,
        double_q: bool = False,
        loss_function: LossFunction = "smooth_l1",
    ) -> None:
        super().__init__(env, training, replay, seed)
        self.learning_rate = learning_rate
        self.hidden_sizes = list(hidden_sizes)
        self.colors = colors
        self.double_q = double_q
        self.loss_function: LossFunction = loss_function

    def build(self, observation_spec: Any, action_spec: Any) -> None:
        """Creates the Q network, its target and the loss."""
        if not hasattr(action_spec, "n"):
            raise ValueError(f"model DQN needs discrete actions, and those of env.id={self.env.id!r} are continuous")
        self.num_actions = int(action_spec.n)
        self.q_network = self.make_network(observation_spec)
        self.target_network = copy.deepcopy(self.q_network).requires_grad_(False)
        loss = DQNLoss(
            self.q_network, self.target_network, self.training_config.gamma, self.double_q, self.loss_function
        )
        # Kept out of the module tree: its networks are already there, and would be saved twice.
        object.__setattr__(self, "loss", torch.compile(loss) if self.training_config.compile else loss)

    def make_network(self, observation_spec: Any) -> nn.Module:
        """Creates the Q network, ``observation → float32[B, num_actions]``; override it to use your own."""
        return make_q_network(
            observation_spec.shape, observation_spec.dtype, self.num_actions, self.hidden_sizes, self.colors
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One fused Adam: a single call for all parameters, which is what costs on small networks."""
        return torch.optim.Adam(self.q_network.parameters(), lr=self.learning_rate, fused=True)

    def target_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Returns the Q network and its target."""
        return [(self.q_network, self.target_network)]

    def update(self, batch: TensorDictBase) -> tuple[Mapping[str, Tensor], Tensor]:
        """Takes one gradient step on ``[B]`` rows; returns the loss and |δ|, ``float32[B]``."""
        loss, abs_td_error = self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}, abs_td_error

    @torch.no_grad()
    def act(self, observation: Tensor, epsilon: float, generator: torch.Generator | None) -> Tensor:
        """ε-greedy: ``int64[n]`` actions for ``[n, …]`` observations."""
        greedy = self.q_network(observation.to(self.device)).argmax(-1).cpu()
        if epsilon <= 0.0:
            return greedy
        random = torch.randint(self.num_actions, greedy.shape, generator=generator)
        return torch.where(torch.rand(greedy.shape, generator=generator) < epsilon, random, greedy)
