"""What DQN and IQN share: discrete actions, ε-greedy exploration, a target network that is copied now and then."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.ranges import AT_LEAST_ONE, POSITIVE, SHARE, require, require_widths
from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.schedule import LinearSchedule


class ValueBased(OffPolicyModule):
    """Base of the algorithms that learn Q(s, a) of discrete actions and act greedily on it.

    A subclass implements `make_network`, `make_loss`, `compute_loss` and `q_values`.

    Args:
        env: which environment; its actions must be discrete.
        training: budgets and schedules.
        replay: the replay scheme; n-step returns are ``replay.n_steps``.
        seed: seeds environments, buffer and exploration.
        learning_rate: Adam's step size. Higher → faster and less stable.
        hidden_sizes: widths of the hidden layers.
        colors: let the network see colours; see `vlmrb.networks.grid.GridEncoder`.
        double_q: the online network chooses the next action (van Hasselt et al. 2016): less over-estimation, one more
            forward pass.
        target_update_interval: gradient steps between two copies into the target network. Higher → steadier targets,
            slower propagation.
        epsilon_start: exploration rate at the start.
        epsilon_end: exploration rate after the decay.
        epsilon_fraction: part of ``training.total_env_steps`` over which ε falls linearly.

    Attributes:
        q_network: the online network; its target is ``target_network``. There once the networks are built.
    """

    evaluation_epsilon = 0.05  # greedy play gets stuck in loops on grid worlds and reads too low

    q_network: nn.Module
    target_network: nn.Module
    loss: nn.Module

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        *,
        learning_rate: float = 3e-4,
        hidden_sizes: Sequence[int] = (128, 128),
        colors: bool = False,
        double_q: bool = False,
        target_update_interval: int = 200,
        epsilon_start: float = 1.0,
        epsilon_end: float = 0.1,
        epsilon_fraction: float = 0.5,
    ) -> None:
        super().__init__(env, training, replay, seed)
        epsilons = {"epsilon_start": epsilon_start, "epsilon_end": epsilon_end, "epsilon_fraction": epsilon_fraction}
        require(POSITIVE, "model", learning_rate=learning_rate)
        require(AT_LEAST_ONE, "model", target_update_interval=target_update_interval)
        require(SHARE, "model", **epsilons)
        require_widths(hidden_sizes)
        self.learning_rate = learning_rate
        self.hidden_sizes = list(hidden_sizes)
        self.colors = colors
        self.double_q = double_q
        self.target_update_interval = target_update_interval
        self.epsilon_start = epsilon_start
        self.epsilon_end = epsilon_end
        self.epsilon_fraction = epsilon_fraction
        duration = int(epsilon_fraction * self.training_config.total_env_steps)
        self.epsilon_schedule = LinearSchedule(epsilon_start, epsilon_end, begin=0, duration=duration)

    # What a subclass supplies

    @abstractmethod
    def make_network(self, observation_spec: Any) -> nn.Module:
        """Creates the network; override it to use your own."""

    @abstractmethod
    def make_loss(self) -> nn.Module:
        """Creates the loss on ``q_network`` and ``target_network``."""

    @abstractmethod
    def compute_loss(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Returns the loss of ``[B]`` rows, a scalar, and the unweighted |δ|, ``float32[B]``."""

    @abstractmethod
    def q_values(self, observation: Tensor) -> Tensor:
        """Returns Q(s, ·), ``float32[n, num_actions]``, of ``[n, …]`` observations on the module's device."""

    # What they share

    def build(self, observation_spec: Any, action_spec: Any) -> None:
        """Creates the network, its target and the loss."""
        if not hasattr(action_spec, "n"):
            name = type(self).__name__
            raise ValueError(
                f"model {name} needs discrete actions, and those of env.id={self.env.id!r} are continuous: use --model "
                "vlmrb.algorithms.SAC or vlmrb.algorithms.TD3"
            )
        self.num_actions = int(action_spec.n)
        self.q_network = self.make_network(observation_spec)
        self.target_network = copy.deepcopy(self.q_network).requires_grad_(False)
        loss = self.make_loss()
        # Kept out of the module tree: its networks are already there, and would be saved twice.
        object.__setattr__(self, "loss", torch.compile(loss) if self.training_config.compile else loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One fused Adam: a single call for all parameters, which is what costs on small networks."""
        return torch.optim.Adam(self.q_network.parameters(), lr=self.learning_rate, fused=True)

    def update(self, batch: TensorDictBase) -> tuple[Mapping[str, Tensor], Tensor]:
        """Takes one gradient step on ``[B]`` rows; returns the loss and |δ|, ``float32[B]``."""
        loss, abs_td_error = self.compute_loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.grad_steps % self.target_update_interval == 0:
            self.target_network.load_state_dict(self.q_network.state_dict())
        return {"loss": loss.detach()}, abs_td_error

    @property
    def epsilon(self) -> float:
        """The exploration rate now."""
        return self.epsilon_schedule(self.env_steps)

    def gauges(self) -> dict[str, float]:
        """Returns ``epsilon``, the exploration rate."""
        return {"epsilon": self.epsilon}

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """Greedy: ``int64[n]`` actions for ``[n, …]`` observations."""
        return self.q_values(observation.to(self.device)).argmax(-1).cpu()

    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """ε-greedy at the present ε: ``int64[n]`` actions for ``[n, …]`` observations."""
        return self.play(observation, self.epsilon, generator)

    @torch.no_grad()
    def state_value(self, observation: Tensor) -> Tensor:
        """Returns max_a Q(s, a), ``float32[n]``."""
        return self.q_values(observation.to(self.device)).amax(-1).cpu()
