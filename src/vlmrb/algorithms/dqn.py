"""Deep Q-network (Mnih et al. 2015), the paper's MiniGrid algorithm (section 5, table 3)."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from vlmrb.algorithms.config import TrainingConfig
from vlmrb.algorithms.value_based import ValueBased
from vlmrb.envs import EnvConfig
from vlmrb.losses.dqn import DQNLoss, LossFunction
from vlmrb.networks.pixels import is_image
from vlmrb.networks.q import make_q_network
from vlmrb.replay.config import ReplayConfig


class DQN(ValueBased):
    """DQN with hard target updates, optional double Q and n-step returns.

    Args:
        env: which environment; its actions must be discrete.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer and exploration.
        loss_function: ``smooth_l1`` or ``l2``.
        common: the settings of `ValueBased`.
    """

    loss: DQNLoss

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        loss_function: LossFunction = "smooth_l1",
        **common: Any,
    ) -> None:
        super().__init__(env, training, replay, seed, **common)
        self.loss_function: LossFunction = loss_function

    def make_network(self, observation_spec: Any) -> nn.Module:
        """Creates the Q network, ``observation → float32[B, num_actions]``; override it to use your own."""
        shape, dtype, pixels = observation_spec.shape, observation_spec.dtype, is_image(observation_spec)
        return make_q_network(shape, dtype, self.num_actions, self.hidden_sizes, self.colors, pixels)

    def make_loss(self) -> nn.Module:
        """Creates the loss."""
        gamma = self.training_config.gamma
        return DQNLoss(self.q_network, self.target_network, gamma, self.double_q, self.loss_function)

    def compute_loss(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the loss of ``[B]`` rows and |δ|, ``float32[B]``."""
        return self.loss(batch)

    def reducible_loss(self, batch: TensorDictBase) -> Tensor:
        """Returns the loss of ``[B]`` rows minus that of the target network, ``float32[B]``."""
        return self.loss.reducible(batch)

    def features(self, observation: Tensor) -> Tensor:
        """Returns the last hidden layer, ``float32[n, F]``, of ``[n, …]`` observations.

        Raises:
            TypeError: `make_network` was overridden to give no ``Sequential``, whose last layer could be left out.
        """
        if not isinstance(self.q_network, nn.Sequential):
            raise TypeError(f"{type(self).__name__}'s network has no last layer to leave out: override features")
        return self.q_network[:-1](observation)

    def q_values(self, observation: Tensor) -> Tensor:
        """Returns Q(s, ·), ``float32[n, num_actions]``."""
        return self.q_network(observation)
