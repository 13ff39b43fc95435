"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), the paper's other OGBench algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.objectives import TD3Loss

from vlmrb.algorithms.actor_critic import ActorCritic
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.losses.td_errors import abs_td_error
from vlmrb.networks.continuous import DeterministicActor
from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, require
from vlmrb.replay.config import ReplayConfig


class TD3(ActorCritic):
    """TD3 with target policy smoothing and a delayed actor, on TorchRL's ``TD3Loss``.

    All noise is in units of actions scaled to [-1, 1].

    Args:
        env: which environment; its observations must be flat vectors and its actions continuous and bounded.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer and exploration.
        exploration_noise: standard deviation of the Gaussian noise on actions in training. Higher → more exploration.
        policy_noise: standard deviation of the noise on the target's actions. Higher → smoother values.
        noise_clip: largest noise on the target's actions.
        actor_interval: gradient steps between two updates of actor and targets. Higher → a better critic before the
            actor follows it.
        common: the settings of `ActorCritic`.
    """

    loss: TD3Loss

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        exploration_noise: float = 0.1,
        policy_noise: float = 0.2,
        noise_clip: float = 0.5,
        actor_interval: int = 2,
        **common: Any,
    ) -> None:
        super().__init__(env, training, replay, seed, **common)
        noise = {"exploration_noise": exploration_noise, "policy_noise": policy_noise, "noise_clip": noise_clip}
        require(NOT_NEGATIVE, "model", **noise)
        require(AT_LEAST_ONE, "model", actor_interval=actor_interval)
        self.exploration_noise = exploration_noise
        self.policy_noise = policy_noise
        self.noise_clip = noise_clip
        self.actor_interval = actor_interval

    def make_actor(self, observation_size: int, action_size: int) -> nn.Module:
        """Creates the deterministic actor."""
        return DeterministicActor(observation_size, action_size, self.hidden_sizes)

    def make_loss(self, actor: nn.Module, critics: list[TensorDictModule]) -> TD3Loss:
        """Creates the loss."""
        return TD3Loss(
            TensorDictModule(actor, ["observation"], ["action"]),
            critics,
            bounds=(-1.0, 1.0),
            policy_noise=self.policy_noise,
            noise_clip=self.noise_clip,
            loss_function="l2",
            reduction="none",
            use_prioritized_weights=False,
            deactivate_vmap=True,
        )

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One Adam for the critics, one for the actor."""
        actor = {"params": list(self.loss.actor_network_params.parameters()), "lr": self.actor_learning_rate}
        critics = {"params": list(self.loss.qvalue_network_params.parameters()), "lr": self.critic_learning_rate}
        return [self.make_adam([critics]), self.make_adam([actor])]

    def update(self, batch: TensorDictBase) -> tuple[Mapping[str, Tensor], Tensor]:
        """Steps the critics, and every ``actor_interval`` gradient steps the actor and the targets, on ``[B]`` rows.

        Returns:
            ``loss`` (the critics') and ``actor_loss`` (when the actor was stepped), and |δ|, ``float32[B]``.
        """
        critic_optimizer, actor_optimizer = self.optimizers()
        rows = self.rows_for_loss(batch)
        losses, written = self.loss.value_loss(rows)
        metrics = {"loss": self.critic_step(critic_optimizer, losses, batch)}
        if self.grad_steps % self.actor_interval == 0:
            actor_loss = self.actor_loss(rows["observation"])
            self.step(actor_optimizer, actor_loss)
            self._targets.step()
            metrics["actor_loss"] = actor_loss.detach()
        return metrics, abs_td_error(self.loss, written["td_error"])

    def regression_target(self, rows: TensorDictBase) -> Tensor:
        """Returns R + γ^n (1 − terminated) min Q_target(s', a'), ``float32[B]``, a' smoothed by noise."""
        return self.loss.value_loss(rows)[1]["target_value"]

    def actor_loss(self, observation: Tensor) -> Tensor:
        """Returns the mean of −Q₁(s, π(s)), ``observation`` being ``float32[B, D]``.

        TorchRL's loss, without its work for the second critic, which is not used.
        """
        critic = self.loss.qvalue_network_params[0].detach()
        return -self.q_value(critic, observation, self.actor(observation)).mean()

    def best_action(self, observation: Tensor) -> Tensor:
        """Returns the actor's action, ``float32[n, A]``."""
        return self.actor(observation)

    def noisy_action(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the actor's action with Gaussian noise, clipped to [-1, 1], ``float32[n, A]``."""
        action = self.actor(observation)
        noise = self.exploration_noise * torch.randn(action.shape, generator=generator).to(action.device)
        return (action + noise).clamp(-1.0, 1.0)
