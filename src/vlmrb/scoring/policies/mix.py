"""Several policies, each for a share of the clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.ranges import POSITIVE_SHARE, require
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.policies.named import PolicyName, make_policy
from vlmrb.scoring.policy import SelectionPolicy, WaitingClips


@dataclass(frozen=True)
class MixPart:
    """A policy and its share.

    Attributes:
        share: of the clips that it chooses, in (0, 1].
        policy: a policy by its name or class path.
    """

    share: float
    policy: PolicyName | SelectionPolicy


class Mix(SelectionPolicy):
    """Lets several policies take turns by chance: each chooses its share of the clips, on average.

    Args:
        parts: the policies; their shares add up to 1.
        seed: of the turns, and of policies named ``random``; ``None`` follows the run's, and is 0 without one.

    Raises:
        ValueError: a share lies outside (0, 1], or they do not add up to 1.
    """

    def __init__(self, parts: list[MixPart], seed: int | None = None) -> None:
        for place, part in enumerate(parts):
            require(POSITIVE_SHARE, f"policy mix: parts[{place}]", share=part.share)
        self._shares = [part.share for part in parts]
        if not math.isclose(sum(self._shares), 1.0, abs_tol=1e-6):
            raise ValueError(f"policy mix: the shares of its parts must add up to 1, not {sum(self._shares):g}")
        self._policies = [
            make_policy(part.policy, None if seed is None else seed + place) for place, part in enumerate(parts)
        ]
        self._own_seed = seed
        self.follow(seed or 0)
        self.reads_guesses = any(policy.reads_guesses for policy in self._policies)
        self.name = "mix of " + ", ".join(
            f"{share:g} {policy.name}" for share, policy in zip(self._shares, self._policies, strict=True)
        )

    def follow(self, seed: int) -> None:
        """Lets turns, and policies that draw by chance, follow the run's seed, unless it or they have their own."""
        if self._own_seed is not None:
            seed = self._own_seed
        self._rng = np.random.default_rng([seed, len(self._policies)])
        for place, policy in enumerate(self._policies):
            policy.follow(seed + place)

    def describe(self, clips: ClipBatch) -> Sequence[tuple[Any, ...]] | None:
        """Returns what each of the policies says of B clips."""
        said = [policy.describe(clips) for policy in self._policies]
        if all(part is None for part in said):
            return None
        return list(zip(*([None] * len(clips) if part is None else part for part in said), strict=True))

    def note(self, described: Sequence[tuple[Any, ...]]) -> None:
        """Lets each of the policies take in B clips."""
        for policy, part in zip(self._policies, zip(*described, strict=True), strict=True):
            policy.note(part)

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips in the order in which policies in turn pick the best that is left for them."""
        count = len(waiting)
        if waiting.described[0] is None:
            views = [waiting] * len(self._policies)
        else:
            views = [waiting.describing(part) for part in zip(*waiting.described, strict=True)]
        orders = [iter(policy.rank(view).tolist()) for policy, view in zip(self._policies, views, strict=True)]
        turns = self._rng.choice(len(orders), size=count, p=np.array(self._shares) / sum(self._shares))
        ranked: dict[int, None] = {}
        for turn in turns.tolist():
            ranked[next(place for place in orders[turn] if place not in ranked)] = None
        return np.fromiter(ranked, np.int64, count)

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state and that of each policy."""
        return {"rng": self._rng.bit_generator.state, "parts": [policy.state_dict() for policy in self._policies]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores generator and policies."""
        self._rng.bit_generator.state = state["rng"]
        for policy, saved in zip(self._policies, state["parts"], strict=True):
            policy.load_state_dict(saved)
