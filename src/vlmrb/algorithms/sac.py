"""Soft actor-critic (Haarnoja et al. 2018, second version), one of the paper's two OGBench algorithms (section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import SACLoss

from vlmrb.algorithms.actor_critic import ActorCritic
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.losses.td_errors import abs_td_error
from vlmrb.networks.continuous import GaussianActor
from vlmrb.ranges import FINITE, POSITIVE, require
from vlmrb.replay.config import ReplayConfig


class SAC(ActorCritic):
    """SAC with an automatic temperature, on TorchRL's ``SACLoss``.

    Args:
        env: which environment; its observations must be flat vectors and its actions continuous and bounded.
        training: budgets and schedules.
        replay: the replay scheme.
        seed: seeds environments, buffer and exploration.
        actor_learning_rate: Adam's step size for the actor.
        initial_temperature: α at the start. Higher → more random play at first.
        temperature_learning_rate: Adam's step size for log α.
        target_entropy: the policy's entropy that α is adapted to, in nats, with actions scaled to [-1, 1]; null is −A.
            Higher → more exploration.
        common: the settings of `ActorCritic`.
    """

    loss: SACLoss

    def __init__(
        self,
        env: EnvConfig | None = None,
        training: TrainingConfig | None = None,
        replay: ReplayConfig | None = None,
        seed: int = 0,
        actor_learning_rate: float = 1e-3,
        initial_temperature: float = 1.0,
        temperature_learning_rate: float = 3e-4,
        target_entropy: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(env, training, replay, seed, actor_learning_rate=actor_learning_rate, **common)
        temperature = {
            "initial_temperature": initial_temperature,
            "temperature_learning_rate": temperature_learning_rate,
        }
        require(POSITIVE, "model", **temperature)
        require(FINITE, "model", target_entropy=target_entropy)
        self.initial_temperature = initial_temperature
        self.temperature_learning_rate = temperature_learning_rate
        self.target_entropy = target_entropy

    def make_actor(self, observation_size: int, action_size: int) -> nn.Module:
        """Creates the Gaussian actor."""
        return GaussianActor(observation_size, action_size, self.hidden_sizes)

    def make_loss(self, actor: nn.Module, critics: list[TensorDictModule]) -> SACLoss:
        """Creates the loss."""
        policy = ProbabilisticActor(
            TensorDictModule(actor, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            return_log_prob=True,
        )
        return SACLoss(
            policy,
            critics,
            loss_function="l2",
            alpha_init=self.initial_temperature,
            target_entropy=0.0,  # see set_constants
            reduction="none",
            scalar_output_mode="exclude",
            use_prioritized_weights=False,
            deactivate_vmap=True,
        )

    def set_constants(self) -> None:
        """As in the base, and the target entropy, whose buffer the loss makes when it is first asked for."""
        super().set_constants()
        self.loss.target_entropy.fill_(-len(self.bounds.low) if self.target_entropy is None else self.target_entropy)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One Adam for the critics, one for actor and temperature, whose losses share no parameter."""
        actor = {"params": list(self.loss.actor_network_params.parameters()), "lr": self.actor_learning_rate}
        temperature = {"params": [self.loss.log_alpha], "lr": self.temperature_learning_rate}
        critics = {"params": list(self.loss.qvalue_network_params.parameters()), "lr": self.critic_learning_rate}
        return [self.make_adam([critics]), self.make_adam([actor, temperature])]

    def update(self, batch: TensorDictBase) -> tuple[Mapping[str, Tensor], Tensor]:
        """Steps critics, then actor and temperature, then the targets, on ``[B]`` rows.

        Returns:
            ``loss`` (the critics'), ``actor_loss``, ``alpha`` and ``entropy``, and |δ|, ``float32[B]``.
        """
        critic_optimizer, actor_optimizer = self.optimizers()
        rows = self.rows_for_loss(batch)
        losses, written = self.loss.qvalue_v2_loss(rows)
        critic_loss = self.critic_step(critic_optimizer, losses, batch)
        actor_losses, policy = self.loss.actor_loss(rows)
        actor_loss = actor_losses.mean()
        self.step(actor_optimizer, actor_loss + self.loss.alpha_loss(policy["log_prob"]).mean())
        self._targets.step()
        metrics = {
            "loss": critic_loss,
            "actor_loss": actor_loss.detach(),
            "alpha": self.loss.log_alpha.detach().exp(),
            "entropy": -policy["log_prob"].mean(),
        }
        return metrics, abs_td_error(self.loss, written["td_error"])

    def regression_target(self, rows: TensorDictBase) -> Tensor:
        """Returns R + γ^n (1 − terminated) (min Q_target(s', a') − α log π(a'|s')), ``float32[B]``, a' drawn from π."""
        return self.loss._compute_target_v2(rows)

    def best_action(self, observation: Tensor) -> Tensor:
        """Returns the tanh of the Gaussian's location, ``float32[n, A]``."""
        loc, _ = self.actor(observation)
        return loc.tanh()

    def noisy_action(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a sample of the policy, ``float32[n, A]``."""
        loc, scale = self.actor(observation)
        return (loc + scale * torch.randn(loc.shape, generator=generator).to(loc.device)).tanh()
