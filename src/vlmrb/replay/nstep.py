"""n-step returns on the way into the buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from vlmrb.replay.storage import nest

REWARD, DONE = ("next", "reward"), ("next", "done")


class NStepTransform(Transform):
    """Turns one-step rows into n-step rows: ``R = Σ_k γ^k r_{t+k}`` and the state that many steps later.

    Does what TorchRL's ``MultiStepTransform(n_steps, gamma, done_keys=[])`` does (a test compares the two), in a third
    of its time, with its look-back in the state, and keeping no views of the caller's memory. `inv` sees consecutive
    blocks ``[n_envs, T]`` and holds the last n − 1 rows of each environment back until the rows after them are known.
    Everything under ``next`` but the reward is that of the row where the return ends: the n-th, or the last of the
    episode. ``steps_to_next_obs``, ``int64[n_envs, T]``, says how many steps that took, and so the power of γ for the
    bootstrap.

    Args:
        n_steps: n ≥ 2.
        gamma: γ, discount factor per step.
    """

    def __init__(self, n_steps: int, gamma: float) -> None:
        super().__init__()
        self.n_steps = n_steps
        self.gamma = gamma
        self._keys: list[NestedKey] = []
        self._held: dict[NestedKey, Tensor] = {}  # leaves [n_envs, < n, …]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        if not self._keys:
            self._keys = list(tensordict.keys(include_nested=True, leaves_only=True))
        rows = {key: tensordict.get(key) for key in self._keys}
        if self._held:
            rows = {key: torch.cat([self._held[key], leaf], dim=1) for key, leaf in rows.items()}
        ready = rows[DONE].shape[1] - (self.n_steps - 1)
        self._held = {key: leaf[:, max(ready, 0) :].clone() for key, leaf in rows.items()}
        return self._combine(rows, ready) if ready > 0 else None

    def flush(self) -> TensorDictBase | None:
        """Returns the rows held back, as if their streams were truncated here; ``None`` if there are none."""
        rows, self._held = self._held, {}
        if not rows:
            return None
        rows[DONE][:, -1] = True
        return self._combine(rows, rows[DONE].shape[1])

    def _combine(self, rows: dict[NestedKey, Tensor], ready: int) -> TensorDict:
        """Returns the n-step rows that begin at the first ``ready`` of the one-step rows ``[n_envs, W]``."""
        num_envs, width = rows[DONE].shape[:2]
        done = rows[DONE].reshape(num_envs, width).numpy()
        time = np.arange(width)
        end = np.minimum.accumulate(np.where(done, time, width)[:, ::-1], axis=1)[
            :, ::-1
        ]  # of the episode, [n_envs, W]
        time = time[:ready]
        last = np.minimum(end[:, :ready], time + self.n_steps - 1)  # row where the return ends, [n_envs, ready]
        at = torch.from_numpy((last + width * np.arange(num_envs)[:, None]).reshape(-1))
        out: dict[NestedKey, Tensor] = {"steps_to_next_obs": torch.from_numpy(last - time + 1)}
        for key, leaf in rows.items():
            if key == REWARD:
                out[key] = self._returns(leaf, last - time)
            elif isinstance(key, tuple) and key[0] == "next":
                gathered = leaf.reshape(num_envs * width, *leaf.shape[2:]).index_select(0, at)
                out[key] = gathered.reshape(num_envs, ready, *leaf.shape[2:])
            else:
                out[key] = leaf[:, :ready]
        return nest(out, num_envs, ready)

    def _returns(self, reward: Tensor, further: NDArray[np.int64]) -> Tensor:
        """Sums rewards ``[n_envs, W, 1]`` over the row itself and ``further`` rows, ``int64[n_envs, ready]``."""
        ready = further.shape[1]
        rewards = reward.reshape(reward.shape[:2]).numpy()
        total = np.zeros_like(rewards[:, :ready])
        for k in range(min(self.n_steps, rewards.shape[1])):
            ahead = rewards[:, k : k + ready]  # shorter than `ready` only in a flush, where the episode ends before
            total[:, : ahead.shape[1]] += np.where(further[:, : ahead.shape[1]] >= k, self.gamma**k * ahead, 0)
        return torch.from_numpy(total).reshape(*further.shape, *reward.shape[2:])

    def get_extra_state(self) -> dict[str, Any] | None:
        """Returns the rows held back, as nested dicts of tensors."""
        if not self._held:
            return None
        shape = list(self._held[DONE].shape[:2])
        return {"shape": shape, "rows": nest(self._held, *shape).clone().to_dict()}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Restores `get_extra_state`."""
        self._keys, self._held = [], {}
        if state is not None:
            rows = TensorDict(state["rows"], state["shape"])
            self._keys = list(rows.keys(include_nested=True, leaves_only=True))
            self._held = {key: rows.get(key).clone() for key in self._keys}
