"""The replay policy φ of experience replay optimisation: a small network that says how surely a row is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vlmrb.networks.mlp import mlp

HIDDEN_SIZES = (32, 32)
_CHUNK = 4096  # rows at a time, whose hidden layers stay in the cache: up to twice as fast as all at once
_FIRST_LOGITS = 0.1  # scale of the last layer's first weights: φ begins near ½ for every row


class KeepPolicy:
    """φ(f) ∈ (0, 1) of ``float32[K, num_features]`` features, learnt by REINFORCE (Zha et al. 2019, section 3).

    It draws from a generator of its own, and making one changes no other.

    Args:
        num_features: of each row.
        learning_rate: Adam's step size.
        seed: of the first weights and of all draws.
    """

    def __init__(self, num_features: int, learning_rate: float, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = mlp([num_features, *HIDDEN_SIZES, 1], last_layer_scale=_FIRST_LOGITS)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)
        self._generator = torch.Generator().manual_seed(seed)

    def logits(self, features: Tensor) -> Tensor:
        """Returns log φ/(1 − φ), ``float32[K]``."""
        return self.network(features).squeeze(-1)

    @torch.no_grad()
    def draw(self, features: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Draws a mask I ~ Bernoulli(φ), ``bool[K]``: which rows are kept."""
        rows = torch.from_numpy(features)
        probability = torch.cat([torch.sigmoid(self.logits(part)) for part in rows.split(_CHUNK)])
        return (torch.rand(len(probability), generator=self._generator) < probability).numpy()

    def pick(self, size: int, count: int) -> NDArray[np.int64]:
        """Draws ``count`` of ``size`` rows uniformly with replacement, ``int64[count]``."""
        return torch.randint(size, (count,), generator=self._generator).numpy()

    def loss(self, features: Tensor, kept: Tensor, reward: float) -> Tensor:
        """Returns −r·mean(I·log φ + (1 − I)·log(1 − φ)), a scalar.

        Args:
            features: ``float32[M, num_features]``.
            kept: I, ``float32[M]``, 0 or 1.
            reward: r, the replay reward.
        """
        return reward * F.binary_cross_entropy_with_logits(self.logits(features), kept)

    def reinforce(self, features: NDArray[np.float32], kept: NDArray[np.bool_], reward: float) -> None:
        """Takes one gradient step: what was done in M rows becomes more likely if r > 0, else less; see `loss`."""
        self.optimizer.zero_grad()
        self.loss(torch.from_numpy(features), torch.from_numpy(kept.astype(np.float32)), reward).backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of weights, Adam's moments and the generator's state."""
        weights = {name: value.clone() for name, value in self.network.state_dict().items()}
        moments = self.optimizer.state_dict()["state"]
        return {
            "weights": weights,
            "moments": {
                index: {name: value.clone() for name, value in parameter.items()}
                for index, parameter in moments.items()
            },
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.network.load_state_dict(state["weights"])
        groups = self.optimizer.state_dict()["param_groups"]
        moments = {
            index: {name: value.clone() for name, value in parameter.items()}
            for index, parameter in state["moments"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._generator.set_state(state["generator"])
