"""What SAC and TD3 share: continuous actions, an actor beside twin critics, targets that follow softly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import Tensor, nn
from torchrl.objectives import LossModule, SoftUpdate, ValueEstimators

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.networks.continuous import ActionBounds, Critic
from vlmrb.ranges import POSITIVE, POSITIVE_SHARE, require, require_widths
from vlmrb.replay.config import ReplayConfig


class ActorCritic(OffPolicyModule):
    """Base of the algorithms on one of TorchRL's actor-critic losses.

    TorchRL's ``LossModule`` stacks the twin critics' parameters into new ones, so it, and not the networks, must be in
    the module tree: as ``loss`` it holds every parameter once, target parameters included. The actor that plays is kept
    outside the tree and has the loss's own parameters. Lightning never copies a module, so they stay the same ones, on
    whatever device.

    Networks see actions scaled to [-1, 1]; actions are translated when the agent acts, and back when it learns.

    Args:
        env: which environment; its observations must be flat vectors and its actions continuous and bounded.
        training: budgets and schedules.
        replay: the replay scheme; n-step returns are ``replay.n_steps``.
        seed: seeds environments, buffer and exploration.
        hidden_sizes: widths of the hidden layers of actor and critics.
        critic_learning_rate: Adam's step size for the critics. Higher → faster and less stable.
        actor_learning_rate: Adam's step size for the actor.
        target_update_rate: share of the way that targets go towards their networks at an update, in (0, 1]. Higher →
            faster propagation, less steady targets.
        layer_norm: layer normalisation in the critics. Steadier critics, more time.
    """

    loss: LossModule
    actor: nn.Module

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        *,
        hidden_sizes: Sequence[int] = (512, 512, 512),
        critic_learning_rate: float = 3e-4,
        actor_learning_rate: float = 3e-4,
        target_update_rate: float = 0.005,
        layer_norm: bool = True,
    ) -> None:
        super().__init__(env, training, replay, seed)
        learning_rates = {"critic_learning_rate": critic_learning_rate, "actor_learning_rate": actor_learning_rate}
        require(POSITIVE, "model", **learning_rates)
        require(POSITIVE_SHARE, "model", target_update_rate=target_update_rate)
        require_widths(hidden_sizes)
        self.hidden_sizes = list(hidden_sizes)
        self.critic_learning_rate = critic_learning_rate
        self.actor_learning_rate = actor_learning_rate
        self.target_update_rate = target_update_rate
        self.layer_norm = layer_norm

    # What a subclass supplies

    @abstractmethod
    def make_actor(self, observation_size: int, action_size: int) -> nn.Module:
        """Creates the actor, on ``observation float32[B, D]``."""

    @abstractmethod
    def make_loss(self, actor: nn.Module, critics: list[TensorDictModule]) -> LossModule:
        """Creates TorchRL's loss, with ``reduction="none"`` and importance weights left to `critic_step`."""

    @abstractmethod
    def regression_target(self, rows: TensorDictBase) -> Tensor:
        """Returns what the critics are regressed on, ``float32[B]``, for rows as `rows_for_loss` makes them."""

    @abstractmethod
    def best_action(self, observation: Tensor) -> Tensor:
        """Returns the actor's action without noise, ``float32[n, A]`` in [-1, 1], on the module's device."""

    @abstractmethod
    def noisy_action(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the action of training, ``float32[n, A]`` in [-1, 1], on the module's device.

        Args:
            observation: ``float32[n, D]`` on the module's device.
            generator: where noise is drawn from; a CPU generator.
        """

    # What they share

    def build(self, observation_spec: Any, action_spec: Any) -> None:
        """Creates actor, twin critics and the loss.

        Raises:
            ValueError: the environment's actions are discrete or unbounded, its observations are no flat vectors, or
                the loss is to be compiled.
        """
        name, env_id = type(self).__name__, self.env.id
        if self.training_config.compile:
            raise ValueError(f"training.compile=true is for DQN and IQN: model {name} runs TorchRL's loss as it is")
        if hasattr(action_spec, "n"):
            raise ValueError(
                f"model {name} needs continuous actions, and those of env.id={env_id!r} are discrete: use --model "
                "vlmrb.algorithms.DQN or vlmrb.algorithms.IQN"
            )
        low, high = action_spec.space.low, action_spec.space.high
        if not (low.isfinite() & high.isfinite() & (low < high)).all():
            raise ValueError(f"model {name} needs actions with finite bounds, which env.id={env_id!r} does not give")
        if len(observation_spec.shape) != 1:
            raise ValueError(
                f"model {name} reads flat vectors, and env.id={env_id!r} observes arrays of shape "
                f"{tuple(observation_spec.shape)}"
            )
        sizes = observation_spec.shape[0], action_spec.shape[0]
        self.bounds = ActionBounds(low, high)
        actor = self.make_actor(*sizes)
        object.__setattr__(self, "actor", actor)  # its parameters are the loss's
        critics = [
            TensorDictModule(
                Critic(*sizes, self.hidden_sizes, self.layer_norm), ["observation", "action"], ["state_action_value"]
            )
            for _ in range(2)
        ]
        self.loss = self.make_loss(actor, critics)
        self.set_constants()
        self._targets = SoftUpdate(self.loss, tau=self.target_update_rate)

    def set_constants(self) -> None:
        """Hands the loss those settings that it keeps as buffers, which a checkpoint's would otherwise replace."""
        self.loss.make_value_estimator(ValueEstimators.TD0, gamma=self.training_config.gamma)

    def on_train_start(self) -> None:
        """Gives the present settings the last word, after a checkpoint has been loaded; then as in the base."""
        self.set_constants()
        super().on_train_start()

    def make_adam(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns one fused Adam for parameter groups."""
        return torch.optim.Adam(groups, fused=True)

    def rows_for_loss(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a shallow copy of a batch with actions scaled to [-1, 1]."""
        return batch.copy().set("action", self.bounds.to_network(batch["action"]))

    def critic_step(self, optimizer: Any, losses: Tensor, batch: TensorDictBase) -> Tensor:
        """Steps the critics; returns their loss, detached.

        Args:
            optimizer: the critics'.
            losses: each item's, ``float32[B]``; a ``priority_weight`` in the batch scales them.
            batch: the ``[B]`` rows.
        """
        weight = batch.get("priority_weight", None)
        loss = losses.mean() if weight is None else (losses * weight.to(losses.dtype)).mean()
        self.step(optimizer, loss)
        return loss.detach()

    def step(self, optimizer: Any, loss: Tensor) -> None:
        """Takes one optimizer step."""
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    @torch.no_grad()
    def reducible_loss(self, batch: TensorDictBase) -> Tensor:
        """Returns the critics' loss on ``[B]`` rows minus that of the target critics, ``float32[B]``."""
        rows = self.rows_for_loss(batch)
        target, observation, action = self.regression_target(rows), rows["observation"], rows["action"]

        def loss(critics: TensorDictParams) -> Tensor:
            values = torch.stack([self.q_value(critic, observation, action) for critic in critics])
            return (values - target).square().sum(0)

        return loss(self.loss.qvalue_network_params) - loss(self.loss.target_qvalue_network_params)

    def features(self, observation: Tensor) -> Tensor:
        """Returns the actor's last hidden layer, ``float32[n, F]``, of ``float32[n, D]`` observations.

        Raises:
            TypeError: `make_actor` was overridden to give a network without ``layers``.
        """
        layers = getattr(self.actor, "layers", None)
        if not isinstance(layers, nn.Sequential):
            raise TypeError(f"{type(self).__name__}'s actor has no last layer to leave out: override features")
        return layers[:-1](observation.float())

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """Returns the actor's actions without noise, ``float32[n, A]`` on the CPU."""
        return self.bounds.to_environment(self.best_action(observation.to(self.device))).cpu()

    @torch.no_grad()
    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Returns uniformly random actions until ``training.learning_starts``, then the actor's with noise."""
        if self.env_steps < self.training_config.learning_starts:
            return self.random_actions(len(observation), generator)
        return self.bounds.to_environment(self.noisy_action(observation.to(self.device), generator)).cpu()

    @torch.no_grad()
    def state_value(self, observation: Tensor) -> Tensor:
        """Returns the smaller of the twin critics' Q(s, π(s)), ``float32[n]`` on the CPU."""
        observation = observation.to(self.device)
        action = self.best_action(observation)
        return torch.minimum(
            *(self.q_value(critic, observation, action) for critic in self.loss.qvalue_network_params)
        ).cpu()

    def q_value(self, critic: TensorDictParams, observation: Tensor, action: Tensor) -> Tensor:
        """Returns one critic's Q(s, a), ``float32[B]``.

        Args:
            critic: its parameters, an element of the loss's ``qvalue_network_params``.
            observation: ``float32[B, D]``.
            action: ``float32[B, A]`` in [-1, 1].
        """
        with critic.to_module(self.loss.qvalue_network):
            return self.loss.qvalue_network.module(observation, action).squeeze(-1)
