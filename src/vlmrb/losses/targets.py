"""The part of a regression target that all value-based losses share."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor


def reward_and_discount(batch: TensorDictBase, gamma: float) -> tuple[Tensor, Tensor]:
    """Returns R and γ^n (1 − terminated): what an n-step row earned, and the weight of the value that follows it.

    Args:
        batch: ``next.reward`` float32[B, 1], summed and discounted over ``steps_to_next_obs`` (if that is there, else
            one step), and ``next.terminated`` bool[B, 1]. A truncated row is followed by a value like any other.
        gamma: γ, discount factor per env step.

    Returns:
        Two ``float32[B]``.
    """
    steps = batch.get("steps_to_next_obs", None)
    discount = gamma if steps is None else gamma ** steps.reshape(-1)
    return batch["next", "reward"].reshape(-1), discount * ~batch["next", "terminated"].reshape(-1)
