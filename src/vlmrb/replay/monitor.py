"""What sampling really does: how often each kind of row is replayed, compared with uniform replay."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.replay.sampler import MixtureSampler

logger = logging.getLogger(__name__)

SCORED_KINDS = ("vlm_positive", "vlm_negative", "unscored")
KINDS = (*SCORED_KINDS, "successful_episode")
OVERSAMPLING_WARNING = 10.0


class SampleMonitor:
    """Notes what is drawn at a few µs per batch; everything costly waits until somebody asks.

    Args:
        columns: the buffer's columns, ``[capacity]`` each.
        threshold: a score above it counts as positive.
        history: batches remembered; older ones are forgotten, so that nobody has to ask.
    """

    def __init__(self, columns: Mapping[str, NDArray], threshold: float = 0.5, history: int = 1024) -> None:
        self._columns = columns
        self.threshold = float(np.float32(threshold))
        self._draws: deque[tuple[NDArray, NDArray, NDArray]] = deque(maxlen=history)
        self._last_shares: dict[str, float] | None = None
        self._warned = False

    def note(self, index: NDArray[np.int64], env_steps: int) -> None:
        """Notes the kinds and ages that rows have as they are drawn (later they may be scored, or gone)."""
        columns = self._columns
        age = env_steps - columns["env_step"][index]
        self._draws.append((columns["score"][index], columns["episode_success"][index], age))

    def _shares(self, score: NDArray, success: NDArray) -> dict[str, float]:
        count = max(1, len(score))
        unscored = np.count_nonzero(np.isnan(score))
        positive = np.count_nonzero(score > self.threshold)
        counts = (positive, len(score) - unscored - positive, unscored, np.count_nonzero(success == 1))
        return {kind: int(n) / count for kind, n in zip(KINDS, counts, strict=True)}

    def report(self, size: int, sampler: MixtureSampler, batch_size: int) -> dict[str, float]:
        """Summarises the draws since the last call and forgets them. O(N): for log time.

        Args:
            size: number of rows written, N.
            sampler: where the mixture's distribution is read from.
            batch_size: rows per sample.

        Returns:
            - ``frequency/KIND``: share among draws ÷ mean share among rows, at this call and the last (the paper's
              table 8: realised frequency ÷ uniform); NaN for a kind that does not occur. KIND: ``vlm_positive``,
              ``vlm_negative``, ``unscored``, ``successful_episode``.
            - ``share/KIND``: share among rows.
            - ``sampled_age``: mean age of what was drawn, env steps.
            - ``effective_sample_size``: ``1/Σ q_i²``, rows; N for uniform sampling.
            - ``max_oversampling``: the largest ``q_i`` ÷ uniform.
        """
        drawn = [np.concatenate(parts) for parts in zip(*self._draws, strict=True)] if self._draws else None
        self._draws.clear()
        shares = self._shares(self._columns["score"][:size], self._columns["episode_success"][:size])
        before, self._last_shares = self._last_shares or shares, shares
        result = {f"share/{kind}": share for kind, share in shares.items()}
        realised = dict.fromkeys(KINDS, np.nan) if drawn is None else self._shares(drawn[0], drawn[1])
        for kind in KINDS:
            mean_share = (shares[kind] + before[kind]) / 2
            result[f"frequency/{kind}"] = realised[kind] / mean_share if mean_share else np.nan
        result["sampled_age"] = np.nan if drawn is None else float(drawn[2].mean())
        lam = sampler.effective_lam(batch_size)
        ratio = np.full(max(size, 1), 1.0)  # q_i ÷ uniform
        if lam and size:
            ratio = 1 - lam + lam * size / sampler.total * sampler.priorities(size)
        result["effective_sample_size"] = float(size / np.mean(ratio**2))
        result["max_oversampling"] = float(ratio.max())
        if result["max_oversampling"] > OVERSAMPLING_WARNING and not self._warned:
            self._warned = True
            logger.warning(
                "a row is drawn %.0f times as often as under uniform replay (%d rows have a positive priority); "
                "max_draws_per_positive would cap that",
                result["max_oversampling"],
                sampler.positives,
            )
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns the draws not yet reported, as tensors and numbers."""
        return {
            "draws": [[torch.from_numpy(part) for part in draw] for draw in self._draws],
            "last_shares": self._last_shares,
            "warned": self._warned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._draws.clear()
        self._draws.extend(tuple(part.numpy() for part in draw) for draw in state["draws"])
        self._last_shares = state["last_shares"]
        self._warned = state["warned"]
