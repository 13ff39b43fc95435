"""Experience replay optimisation (Zha et al. 2019) as a term: which rows are kept for replay is learnt from returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.replay.returns import ReturnWindow
from vlmrb.replay.terms import PriorityTerm

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from vlmrb.replay.keep_policy import KeepPolicy

KEPT, REWARD = "ero_kept", "ero_reward"

_FARTHEST = 5.0  # standard deviations from the mean at which features are cut


class EROTerm(PriorityTerm):
    """1 for rows that a mask I keeps, 0 for the others; I ~ Bernoulli(φ(f)), with φ learnt by REINFORCE.

    Training goes by windows of env steps. At the end of each, the change of the mean return of the episodes that ended
    in it is the reward of the mask that was in force: φ takes its gradient steps on a sample of rows, with the features
    that they had when the mask was drawn. Then a new mask is drawn for all rows. Rows written since are kept until the
    next one. The features are the row's reward, |δ| and age, each standardised over all rows at that moment.

    The reward is divided by the root mean square of the changes so far, so that its scale does not matter. A mask that
    keeps less than ``min_kept`` of the rows is not used: replay is uniform, and the mask gets the reward −1 at once, so
    that φ finds its way out.

    Args:
        window: env steps of a window, at least.
        min_episodes: episodes that must end in a window, which lasts longer if need be. Higher → a surer mean return,
            fewer gradient steps.
        min_kept: see above, in [0, 1). Higher → more variety, less freedom for φ.
        learning_rate: Adam's step size for φ. Higher → faster and more at the mercy of chance.
        updates: gradient steps at the end of a window.
        batch_size: rows per gradient step. Higher → the sample stands better for the whole mask.
        seed: of φ's first weights and of all draws.
    """

    name = "ero"
    column = KEPT
    initial = 1.0

    def __init__(
        self,
        window: float,
        min_episodes: int = 10,
        min_kept: float = 0.1,
        learning_rate: float = 1e-3,
        updates: int = 4,
        batch_size: int = 1024,
        seed: int = 0,
    ) -> None:
        if not 0 < window < np.inf or min(min_episodes, updates, batch_size) < 1:
            raise ValueError(
                "the ero term needs window > 0 and min_episodes, updates and batch_size ≥ 1, got "
                f"{window}, {min_episodes}, {updates} and {batch_size}"
            )
        if not 0 <= min_kept < 1 or not 0 < learning_rate < np.inf:
            raise ValueError(
                f"the ero term needs min_kept in [0, 1) and learning_rate > 0, got {min_kept} and {learning_rate}"
            )
        self.window = float(window)
        self.min_episodes = int(min_episodes)
        self.min_kept = float(min_kept)
        self.learning_rate = float(learning_rate)
        self.updates = int(updates)
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        self._returns = ReturnWindow()
        self._previous: float | None = None  # the mean return of the window before
        self._masks = 0  # drawn so far
        self._squares, self._changes = 0.0, 0  # sum of squares and number of the changes so far that were not 0
        self._sample: tuple[NDArray[np.float32], NDArray[np.bool_]] | None = None  # features and mask in force
        self._made_policy: KeepPolicy | None = None

    @property
    def policy(self) -> KeepPolicy:
        """φ, which is made when it is first needed."""
        if self._made_policy is None:
            from vlmrb.replay.keep_policy import KeepPolicy  # settings are judged without torch

            self._made_policy = KeepPolicy(3, self.learning_rate, self.seed)
        return self._made_policy

    def own_columns(self) -> dict[str, float]:
        """Returns the mask, the reward, and |δ| and birth, which the buffer has itself."""
        return {KEPT: self.initial, REWARD: 0.0, "td_error": 1.0, "env_step": -1.0}

    def columns_largest_first(self) -> tuple[str, ...]:
        """A row that was never drawn has the largest |δ| known."""
        return ("td_error",)

    def values_of(self, rows: TensorDictBase) -> dict[str, NDArray[np.float64]]:
        """Returns the rows' rewards, n-step ones if there are such."""
        return {REWARD: rows.get(("next", "reward")).double().numpy().reshape(-1)}

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns 0 for rows that are kept and −∞ for the others."""
        return np.log(values)

    def observe(self, block: TensorDictBase) -> None:
        """Adds up returns."""
        reward, done = (block.get(("next", name)).numpy().reshape(block.shape) for name in ("reward", "done"))
        self._returns.add(reward, done)

    def end_streams(self) -> None:
        """Begins the windows anew: returns of unfinished episodes, or of other players', tell nothing about a mask."""
        self._returns.forget()
        self._previous = self._sample = None

    def needs_refresh(self, env_steps: int) -> bool:
        """True when a window ends."""
        return self._returns.env_steps >= self.window and self._returns.episodes >= self.min_episodes

    def refresh(self, env_steps: int, columns: Mapping[str, NDArray]) -> None:
        """Rewards the old mask, and draws a new one for all rows."""
        mean = self._returns.mean()
        if self._previous is not None and self._sample is not None:
            self._learn(self._normalised(mean - self._previous), *self._sample)
        self._previous = mean
        self._returns.begin()
        self._masks += 1
        features = features_of(columns, env_steps)
        kept = self.policy.draw(features)
        picked = self.policy.pick(len(kept), self.updates * self.batch_size)
        self._sample = features[picked], kept[picked]
        if np.count_nonzero(kept) < max(1.0, self.min_kept * len(kept)):
            self._learn(-1.0, *self._sample)
            kept[:], self._sample = True, None
        columns[KEPT][:] = kept

    def gauges(self, columns: Mapping[str, NDArray]) -> dict[str, float]:
        """Returns the share of rows that the mask in force keeps, and how many masks there have been."""
        return {"ero_kept": float(columns[KEPT].mean()), "ero_masks": float(self._masks)}

    def _normalised(self, change: float) -> float:
        if change == 0:
            return 0.0
        self._squares += change**2
        self._changes += 1
        return change / math.sqrt(self._squares / self._changes)

    def _learn(self, reward: float, features: NDArray[np.float32], kept: NDArray[np.bool_]) -> None:
        if reward:
            for part in np.split(np.arange(len(kept)), self.updates):
                self.policy.reinforce(features[part], kept[part], reward)

    def state_dict(self) -> dict[str, Any]:
        """Returns φ, the window under way, the scale of rewards, and the sample of the mask in force."""
        import torch

        sample = None if self._sample is None else [torch.from_numpy(part.copy()) for part in self._sample]
        return {
            "policy": None if self._made_policy is None else self._made_policy.state_dict(),
            "returns": self._returns.state_dict(),
            "previous": self._previous,
            "squares": self._squares,
            "changes": self._changes,
            "masks": self._masks,
            "sample": sample,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._made_policy, self.seed = None, state["seed"]
        if state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
        self._returns.load_state_dict(state["returns"])
        self._previous, self._squares, self._changes = state["previous"], state["squares"], state["changes"]
        self._masks = state.get("masks", 0)  # not counted by earlier versions
        self._sample = None
        if state["sample"] is not None:
            features, kept = (part.numpy().copy() for part in state["sample"])
            self._sample = features, kept

    def __repr__(self) -> str:
        return (
            f"EROTerm(window={self.window}, min_episodes={self.min_episodes}, min_kept={self.min_kept}, "
            f"learning_rate={self.learning_rate}, updates={self.updates}, batch_size={self.batch_size})"
        )


def features_of(columns: Mapping[str, NDArray], env_steps: int) -> NDArray[np.float32]:
    """Returns reward, |δ| and age of N rows, ``float32[N, 3]``, each with mean 0 and variance 1 over the rows.

    What lies more than five standard deviations from the mean is cut there; a feature that all rows share is 0.

    Args:
        columns: name → ``[N]``.
        env_steps: now.
    """
    facts = (columns[REWARD], columns["td_error"], env_steps - columns["env_step"])
    features = np.empty((len(facts[0]), len(facts)), np.float32)
    for column, values in enumerate(facts):
        features[:, column] = _standardised(values)
    return features


def _standardised(values: NDArray) -> NDArray[np.float64]:
    mean, deviation = values.mean(), values.std()
    if deviation <= 1e-9 * np.abs(values).max():  # no more than rounding makes of equal values
        return np.zeros(len(values))
    return np.clip((values - mean) / deviation, -_FARTHEST, _FARTHEST)
