"""The implicit quantile network's loss (Dabney et al. 2018, section 2.3 and algorithm 1).

TorchRL has no such loss. This is a plain ``nn.Module`` like `vlmrb.losses.dqn`, and for its reason: the functional
modules of TorchRL's ``LossModule`` cost as much as the learning itself on networks this small. The quantile levels are
arguments rather than drawn inside, so that equal arguments give equal losses.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from vlmrb.losses.targets import reward_and_discount
from vlmrb.networks.quantile import QuantileNetwork


class IQNLoss(nn.Module):
    """Regresses the quantiles of Z(s, a) on samples of R + γ^n (1 − terminated) Z(s', a*) by the quantile Huber loss.

    With y_j the target at its j-th level and δ_ij = y_j − Z_τi(s, a), an item's loss is
    Σ_i mean_j |τ_i − 1[δ_ij < 0]| L_κ(δ_ij) / κ, where L_κ is the Huber loss, δ²/2 up to κ and linear beyond. The
    action a* has the largest mean over K evenly spaced quantiles of the target network, or, with double Q, of the
    online one.

    Args:
        network: the online network.
        target_network: the same, updated from outside.
        gamma: discount factor per env step, in [0, 1].
        num_policy_quantiles: K.
        double_q: choose a* by the online network.
        kappa: κ > 0. Higher → quadratic for larger errors, nearer to expectiles than to quantiles.
    """

    def __init__(
        self,
        network: QuantileNetwork,
        target_network: QuantileNetwork,
        gamma: float,
        num_policy_quantiles: int = 32,
        double_q: bool = False,
        kappa: float = 1.0,
    ) -> None:
        super().__init__()
        self.network = network
        self.target_network = target_network
        self.gamma = gamma
        self.num_policy_quantiles = num_policy_quantiles
        self.double_q = double_q
        self.kappa = kappa

    @torch.no_grad()
    def target(self, batch: TensorDictBase, tau: Tensor) -> Tensor:
        """Returns the target's samples y_j, ``float32[B, N']``, at the levels ``tau``, ``float32[B, N']``."""
        following = batch["next", "observation"]
        features = self.target_network.features(following)
        chooser, seen = (
            (self.network, self.network.features(following)) if self.double_q else (self.target_network, features)
        )
        action = chooser.mean_over(seen, self.num_policy_quantiles).argmax(-1)
        value = _of_action(self.target_network.quantiles(features, tau), action)
        reward, discount = reward_and_discount(batch, self.gamma)
        return reward.unsqueeze(1) + discount.unsqueeze(1) * value

    def forward(self, batch: TensorDictBase, tau: Tensor, target_tau: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the loss of a batch.

        Args:
            batch: as for `vlmrb.losses.dqn.DQNLoss`.
            tau: levels of the online quantiles, uniform draws from [0, 1], ``float32[B, N]``.
            target_tau: levels of the target's, likewise, ``float32[B, N']``.

        Returns:
            The loss, a scalar, and the unweighted |δ|, ``float32[B]``: the distance between the means over the N'
            target samples and over the N online quantiles. That is the TD error of Q(s, a), the same quantity on the
            same scale as DQN's, so priorities mean the same under both. The quantile loss itself would not do: where
            returns are random it stays positive for a row that is perfectly learnt.
        """
        target = self.target(batch, target_tau)
        value = self._values(self.network, batch, tau)
        loss = self._item_losses(value, tau, target)
        weight = batch.get("priority_weight", None)
        if weight is not None:
            loss = loss * weight.to(loss.dtype)
        return loss.mean(), (target.mean(1) - value.detach().mean(1)).abs()

    @torch.no_grad()
    def reducible(self, batch: TensorDictBase, tau: Tensor, target_tau: Tensor) -> Tensor:
        """Returns each row's loss minus that of the target network on the same target and levels, ``float32[B]``."""
        target = self.target(batch, target_tau)
        online, old = (
            self._item_losses(self._values(network, batch, tau), tau, target)
            for network in (self.network, self.target_network)
        )
        return online - old

    @staticmethod
    def _values(network: QuantileNetwork, batch: TensorDictBase, tau: Tensor) -> Tensor:
        return _of_action(network(batch["observation"], tau), batch["action"].reshape(-1))

    def _item_losses(self, value: Tensor, tau: Tensor, target: Tensor) -> Tensor:
        """Returns the quantile Huber loss of ``float32[B, N]`` values against ``float32[B, N']``: ``float32[B]``."""
        error = target.unsqueeze(1) - value.unsqueeze(2)  # [B, N, N']
        size = error.abs()
        huber = torch.where(size <= self.kappa, 0.5 * error.square(), self.kappa * (size - 0.5 * self.kappa))
        tilt = (tau.unsqueeze(2) - (error.detach() < 0).to(tau.dtype)).abs()
        return (tilt * huber / self.kappa).mean(2).sum(1)


def _of_action(quantiles: Tensor, action: Tensor) -> Tensor:
    """Picks an action's quantiles: ``float32[B, N, A]`` and ``int64[B]`` → ``float32[B, N]``."""
    return quantiles[torch.arange(len(action), device=action.device), :, action]
