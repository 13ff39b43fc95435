"""The (double) DQN loss, with little else around it.

TorchRL's ``DQNLoss`` computes the same numbers (the tests compare loss, gradients and errors), but swaps parameters
into functional modules at every call. On a network of 128-128 units that costs nearly as much as the learning itself:
`python benchmarks/loss.py` counts 1.9 times as many updates/s with this one.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from vlmrb.losses.targets import reward_and_discount

LossFunction = Literal["smooth_l1", "l2"]


class DQNLoss(nn.Module):
    """Regresses Q(s, a) on the n-step target (Mnih et al. 2015; double: van Hasselt et al. 2016).

    ``y = R + γ^n · (1 − terminated) · max_a Q_target(s', a)``; double DQN takes the action from the online network.

    Args:
        network: ``observation → float32[B, actions]``.
        target_network: the same, updated from outside.
        gamma: discount factor per env step, in [0, 1].
        double_q: choose the next action by the online network. Less over-estimation, one more forward pass.
        loss_function: ``smooth_l1`` bounds the gradient of large errors; ``l2`` does not.
    """

    def __init__(
        self,
        network: nn.Module,
        target_network: nn.Module,
        gamma: float,
        double_q: bool = False,
        loss_function: LossFunction = "smooth_l1",
    ) -> None:
        super().__init__()
        self.network = network
        self.target_network = target_network
        self.gamma = gamma
        self.double_q = double_q
        self.loss_function = loss_function

    @torch.no_grad()
    def target(self, batch: TensorDictBase) -> Tensor:
        """Returns the regression target, ``float32[B]``; ``batch`` as for `forward`."""
        following = batch["next", "observation"]
        values = self.target_network(following)
        if self.double_q:
            action = self.network(following).argmax(-1, keepdim=True)
            value = values.gather(-1, action).squeeze(-1)
        else:
            value = values.amax(-1)
        reward, discount = reward_and_discount(batch, self.gamma)
        return reward + discount * value

    def forward(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Computes the loss of a batch.

        Args:
            batch: ``observation``, ``action`` int64[B], ``next.observation``, ``next.reward`` float32[B, 1] (summed and
                discounted over ``steps_to_next_obs``, if that is there), ``next.terminated`` bool[B, 1], and optionally
                ``priority_weight`` float[B], which scales each item's loss.

        Returns:
            The loss, a scalar, and the unweighted absolute TD error |δ|, ``float32[B]``.
        """
        target = self.target(batch)
        value = _of_action(self.network, batch)
        loss = self._item_losses(value, target)
        weight = batch.get("priority_weight", None)
        if weight is not None:
            loss = loss * weight.to(loss.dtype)
        return loss.mean(), (value.detach() - target).abs()

    @torch.no_grad()
    def reducible(self, batch: TensorDictBase) -> Tensor:
        """Returns each row's loss minus that of the target network on the same target, ``float32[B]``."""
        target = self.target(batch)
        online, old = (
            self._item_losses(_of_action(network, batch), target) for network in (self.network, self.target_network)
        )
        return online - old

    def _item_losses(self, value: Tensor, target: Tensor) -> Tensor:
        if self.loss_function == "smooth_l1":
            return F.smooth_l1_loss(value, target, reduction="none")
        return (value - target).square()


def _of_action(network: nn.Module, batch: TensorDictBase) -> Tensor:
    """Returns Q(s, a), ``float32[B]``."""
    return network(batch["observation"]).gather(-1, batch["action"].reshape(-1, 1)).squeeze(-1)
