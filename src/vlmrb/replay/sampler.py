"""Draws rows from ``q = λ·q^P + (1−λ)·q^U`` on a float64 sum tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrl.data import Storage
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.samplers.prioritized import SumSegmentTreeFp64

_REDRAWS = 64


class MixtureSampler(PrioritizedSampler):
    """A prioritised part and a uniform part in every batch (method: sampling).

    Its contract, one test per line:

    - A batch of B holds ``λ·B`` prioritised draws, stochastically rounded; they come first in the batch.
    - Prioritised draws follow ``q^P ∝ p``, uniform draws ``q^U = 1/N`` over the rows written; both with replacement.
    - A row of priority 0 is never drawn by the prioritised part; any other row can be, the last one included.
    - Scaling all priorities by a constant changes no draw.
    - While no row has a positive priority the whole batch is uniform, and counted in ``fallbacks``.
    - Importance weights, when β is set, are ``(N·q_i)^−β`` of the *mixture*, divided by the batch's maximum.
    - ``stratified`` prioritised draws come one from each of as many equal parts of the sum of all priorities; how often
      a row is drawn in the mean stays the same.
    - ``max_draws_per_positive`` bounds the prioritised draws of a batch by that many per row of positive priority.
    - Sampling changes nothing but the generator and the counters.
    - Priorities are finite and not negative; anything else is refused and leaves the tree as it was.
    - Saved and loaded, it continues with the same draws (the generator is the buffer's).

    Args:
        max_capacity: number of slots.
        lam: λ in [0, 1]. Higher → positives are replayed more often, everything else less.
        beta: β in [0, 1] of the importance weights; ``None`` emits none (as the paper does). Higher → less bias, less
            effect.
        max_draws_per_positive: cap on λ·B per row of positive priority; ``None`` is no cap. Lower → a single early
            positive clip cannot take half of every batch, but acts more slowly.
        stratified: see above (Schaul et al. 2016, appendix B.2.1).

    Attributes:
        fallbacks: batches that wanted prioritised draws and found no positive priority.
        last_prioritized: number of prioritised draws in the last batch, which come first in it.
    """

    def __init__(
        self,
        max_capacity: int,
        lam: float = 0.0,
        beta: float | None = None,
        max_draws_per_positive: float | None = None,
        stratified: bool = False,
    ) -> None:
        super().__init__(max_capacity, alpha=1.0, beta=0.0, eps=0.0, dtype=torch.float64)
        if max_draws_per_positive is not None and not max_draws_per_positive > 0:
            raise ValueError(f"max_draws_per_positive must be positive, got {max_draws_per_positive}")
        self.lam = lam
        self.beta = beta
        self.max_draws_per_positive = max_draws_per_positive
        self.stratified = stratified
        self.fallbacks = 0
        self.last_prioritized = 0

    def _init(self) -> None:
        self._sum_tree = SumSegmentTreeFp64(self._max_capacity)
        self._positives = 0
        self._max_priority = None

    @property
    def lam(self) -> float:
        """λ, the prioritised share of a batch, in [0, 1]."""
        return self._lam

    @lam.setter
    def lam(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"lam must lie in [0, 1], got {value}")
        self._lam = float(value)

    @property
    def beta(self) -> float | None:
        """β in [0, 1], the exponent of the importance weights; ``None`` when there are none."""
        return self._beta

    @beta.setter
    def beta(self, value: float | None) -> None:
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"beta must lie in [0, 1] or be None, got {value}")
        self._beta = None if value is None else float(value)

    @property
    def alpha(self) -> float:
        """1: exponents belong to the priority terms."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        raise ValueError("the mixture sampler has no alpha: set the exponent of a priority term")

    @property
    def positives(self) -> int:
        """Number of rows with a positive priority."""
        return self._positives

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return self._sum_tree.query(0, self._max_capacity)

    def priorities(self, size: int) -> NDArray[np.float64]:
        """Returns the priorities of the first ``size`` slots, ``float64[size]``."""
        return self._sum_tree[np.arange(size)]

    def set_priorities(self, index: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        """Writes priorities.

        Args:
            index: ``int64[K]``, slots; one that occurs twice must come with equal priorities.
            priority: ``float64[K]``, finite and ≥ 0.

        Raises:
            IndexError: a slot is outside the tree, which would not notice.
            ValueError: a priority is negative or not finite, or there are more or fewer than slots.
        """
        if index.shape != priority.shape:
            raise ValueError(f"expected one priority per slot, got {list(priority.shape)} for {list(index.shape)}")
        # A negative slot is a huge unsigned one: both ends in one comparison.
        if len(index) and index.view(np.uint64).max() >= self._max_capacity:
            raise IndexError(f"slots from {index.min()} to {index.max()} are not all within [0, {self._max_capacity})")
        self.set_composed(index, priority)

    def set_composed(self, index: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        """Writes priorities as `set_priorities` does, of slots known to exist: a few µs less on every update."""
        if len(priority) and not (priority.min() >= 0 and priority.max() < np.inf):
            raise ValueError("priorities must be finite and not negative")
        appeared, vanished = self._changes_of_sign(index, priority)
        self._sum_tree[index] = priority
        self._positives += appeared - vanished

    def _changes_of_sign(self, index: NDArray[np.int64], priority: NDArray[np.float64]) -> tuple[int, int]:
        was, becomes = self._sum_tree[index] > 0, priority > 0
        changed = was != becomes
        if not changed.any():
            return 0, 0
        slots = index[changed]
        first = np.unique(slots, return_index=True)[1]
        appeared = int(becomes[changed][first].sum())
        return appeared, len(first) - appeared

    def update_priority(self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None) -> None:
        """Writes priorities given as TorchRL gives them; see `set_priorities`."""
        slots = np.atleast_1d(torch.as_tensor(index).cpu().numpy()).astype(np.int64)
        values = torch.as_tensor(priority).detach().cpu().double().reshape(-1).numpy()
        self.set_priorities(slots, np.ascontiguousarray(np.broadcast_to(values, slots.shape)))

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Does nothing: the buffer composes the priorities of rows just written, in one place."""

    def draw(self, size: int, batch_size: int) -> NDArray[np.int64]:
        """Draws slots.

        Args:
            size: number of rows written, N.
            batch_size: B.

        Returns:
            ``int64[B]``, the ``last_prioritized`` prioritised draws first.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if size == 0:
            raise RuntimeError("cannot sample from an empty replay buffer")
        uniform = self._uniform(batch_size + 1)
        count = self._prioritized_count(uniform[0], batch_size)
        index = (uniform[1:] * size).astype(np.int64)
        if count:
            share = uniform[1 : count + 1]
            index[:count] = self._descend((np.arange(count) + share) / count if self.stratified else share)
        self.last_prioritized = count
        return index

    def _uniform(self, count: int) -> NDArray[np.float64]:
        return torch.rand(count, dtype=torch.float64, generator=self._rng).numpy()

    def _prioritized_count(self, rounding: float, batch_size: int) -> int:
        if self._lam == 0:
            return 0
        if self._positives == 0:
            self.fallbacks += 1
            return 0
        wanted = self.effective_lam(batch_size) * batch_size
        return min(int(wanted + rounding), batch_size)  # floating point may round B + 0.99… up to B + 1

    def effective_lam(self, batch_size: int) -> float:
        """Returns λ after the fall-back and the cap, for batches of ``batch_size``."""
        if self._positives == 0:
            return 0.0
        if self.max_draws_per_positive is None:
            return self._lam
        return min(self._lam, self.max_draws_per_positive * self._positives / batch_size)

    def _descend(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Maps draws from [0, 1) to slots by prefix sums, redrawing where rounding ended on a leaf of zero."""
        total = self.total
        # 1 − u lies in (0, 1]: a mass of 0 would find slot 0 whatever its priority.
        index = self._sum_tree.scan_lower_bound((1.0 - uniform) * total)
        for _ in range(_REDRAWS):
            np.minimum(index, self._max_capacity - 1, out=index)
            missed = self._sum_tree[index] <= 0
            if not missed.any():
                return index
            masses = (1.0 - self._uniform(int(missed.sum()))) * total
            index[missed] = self._sum_tree.scan_lower_bound(masses)
        raise RuntimeError(f"the priority tree is inconsistent: {_REDRAWS} draws in a row ended on rows of priority 0")

    def importance_weights(self, index: NDArray[np.int64], size: int, drawn: int | None = None) -> NDArray[np.float32]:
        """Returns ``(N·q_i)^−β / max`` over the batch, ``float32[B]`` in (0, 1]; β must be set.

        ``drawn`` is how many draws the batch was chosen from, ``None`` if it is all that was drawn.
        """
        if self._beta is None:
            raise ValueError("importance weights need beta")
        lam = self.effective_lam(len(index) if drawn is None else drawn)
        ratio = np.full(len(index), 1.0 - lam)  # N·q_i
        if lam:
            ratio += lam * size / self.total * self._sum_tree[index]
        weights = ratio**-self._beta
        return (weights / weights.max()).astype(np.float32)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draws slots of a storage, as TorchRL asks for them; see `sample_rows`."""
        return self.sample_rows(len(storage), batch_size)

    def sample_rows(
        self, size: int, count: int, choose: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Draws slots and their importance weights.

        Args:
            size: number of rows written, N.
            count: how many to draw, M.
            choose: maps the M slots drawn to the ascending positions of those that make up the batch; ``None`` takes
                all. The choice is not corrected for: weights are those that the slots have as draws.

        Returns:
            ``int64[B]`` and a dict with ``priority_weight: float32[B]`` if β is set.
        """
        index = self.draw(size, count)
        if choose is not None:
            chosen = choose(index)
            index = index[chosen]
            self.last_prioritized = int(np.searchsorted(chosen, self.last_prioritized))
        info = {}
        if self._beta is not None:
            info["priority_weight"] = torch.from_numpy(self.importance_weights(index, size, count))
        return torch.from_numpy(index), info

    def state_dict(self) -> dict[str, Any]:
        """Returns priorities, λ, β and counters; tensors and numbers only."""
        return {
            "priorities": torch.from_numpy(self.priorities(self._max_capacity)),
            "lam": self._lam,
            "beta": self._beta,
            "fallbacks": self.fallbacks,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the tree's inner sums come out bit for bit, each being the sum of its two children.

        Raises:
            ValueError: it was saved with another capacity.
        """
        priorities = state_dict["priorities"].numpy()
        if len(priorities) != self._max_capacity:
            raise ValueError(f"saved sampler has {len(priorities)} slots, this one {self._max_capacity}")
        lam, beta = state_dict["lam"], state_dict["beta"]
        self._init()
        self.set_priorities(np.arange(self._max_capacity), priorities)
        self.lam, self.beta = lam, beta
        self.fallbacks = state_dict["fallbacks"]

    def dumps(self, path: str | Path) -> None:
        """Saves to the folder ``path``."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), path / "sampler.pt")

    def loads(self, path: str | Path) -> None:
        """Loads from the folder ``path``."""
        self.load_state_dict(torch.load(Path(path) / "sampler.pt", weights_only=True))

    def __repr__(self) -> str:
        return f"MixtureSampler(lam={self._lam}, beta={self._beta}, positives={self._positives})"
