"""Attentive experience replay (Sun, Zhou, Li 2020): train on rows whose states are like those the agent is in now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from vlmrb.replay.schedule import LinearSchedule

STATE = "observation"  # the key of a row's state

_TINY = 1e-12  # length of a vector below which it has no direction


class SimilaritySelector:
    """Of λ·B candidates that the sampler draws, keeps the B whose states are most similar to the agent's current state.

    The current states are the last next observations of all environments in the newest block; a candidate's similarity
    is the largest to any of them. Of an environment whose episode ended with that block this is the state in which it
    ended: where the next episode begins is not known before its first row. Candidates that are equally similar are
    chosen by chance. When λ has fallen to 1 nothing is computed.

    Args:
        factor: λ ≥ 1 over env steps. Higher → a stronger preference for similar states, and fewer distinct rows.
        similarity: ``cosine`` of the observations as they are, or ``features``: minus the Euclidean distance of what
            `features` makes of them.

    Attributes:
        features: ``[K, …]`` observations → ``float32[K, F]`` on the CPU; to be set before the first sample if
            ``similarity`` asks for it.
    """

    def __init__(self, factor: LinearSchedule, similarity: Literal["cosine", "features"] = "cosine") -> None:
        if similarity not in ("cosine", "features"):
            raise ValueError(f"similarity must be 'cosine' or 'features', got {similarity!r}")
        if min(factor.start, factor.end) < 1:
            raise ValueError(f"there must be at least as many candidates as rows in a batch, got {factor}")
        self.factor = factor
        self.similarity = similarity
        self.features: Callable[[Tensor], Tensor] | None = None
        self._states: Tensor | None = None  # [n, …]

    def observe(self, block: TensorDictBase) -> None:
        """Takes the current states off a block of raw rows ``[n, T]``."""
        self._states = block["next", STATE][:, -1].clone()

    def candidates(self, batch_size: int, env_steps: int) -> int:
        """Returns how many candidates are wanted, λ·B to the nearest whole number; B if no current state is known."""
        return batch_size if self._states is None else round(self.factor(env_steps) * batch_size)

    def gauges(self, env_steps: int) -> dict[str, float]:
        """Returns how many candidates there are for each row of a batch, for the metrics."""
        return {"aer_candidates": self.factor(env_steps)}

    def similarities(self, observation: Tensor) -> Tensor:
        """Returns each candidate's similarity, ``float32[M]``, of ``[M, …]`` observations; higher is more similar."""
        assert self._states is not None, "candidates asks for no choice without current states"
        if self.similarity == "features":
            if self.features is None:
                raise ValueError("similarity='features' needs a function: set the selector's features")
            return -torch.cdist(self.features(observation), self.features(self._states)).amin(1)
        return (_directions(observation) @ _directions(self._states).T).amax(1)

    def choose(self, observation: Tensor, count: int, generator: torch.Generator) -> NDArray:
        """Chooses among candidates.

        Args:
            observation: ``[M, …]``, their states.
            count: how many to choose, at most M.
            generator: decides between candidates that are equally similar.

        Returns:
            ``int64[count]``, ascending positions among the candidates.
        """
        order = torch.randperm(len(observation), generator=generator)
        best = self.similarities(observation)[order].topk(count, sorted=False).indices
        return order[best].sort().values.numpy()

    def state_dict(self) -> dict[str, Any]:
        """Returns the current states."""
        return {"states": None if self._states is None else self._states.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._states = None if state["states"] is None else state["states"].clone()

    def __repr__(self) -> str:
        """Names what a resumed run must have in common; λ's schedule may be stretched, as that of the mixture may."""
        return f"SimilaritySelector(factor={self.factor.start}, similarity={self.similarity!r})"


def _directions(observation: Tensor) -> Tensor:
    """Returns ``[K, …]`` observations as vectors of length 1, ``float32[K, D]``; zero stays zero."""
    vectors = observation.flatten(1).float()
    return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(_TINY)
