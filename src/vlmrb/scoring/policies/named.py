"""Selection policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from vlmrb.scoring.policies.guessed import ExpectedFirst, UncertainFirst
from vlmrb.scoring.policies.novelty import NovelFirst
from vlmrb.scoring.policy import NewestFirst, OldestFirst, RandomOrder, SelectionPolicy

PolicyName = Literal["newest", "random", "oldest", "novelty", "uncertainty", "expected"]


def make_policy(policy: str | SelectionPolicy, seed: int | None = None) -> SelectionPolicy:
    """Returns the policy of that name, or the one given.

    Args:
        policy: name or policy.
        seed: of one that draws by chance and is named; ``None`` follows the run's.

    Raises:
        ValueError: no policy has that name.
    """
    if isinstance(policy, SelectionPolicy):
        return policy
    named: dict[str, Callable[[], SelectionPolicy]] = {
        "newest": NewestFirst,
        "oldest": OldestFirst,
        "random": lambda: RandomOrder(seed),
        "novelty": NovelFirst,
        "uncertainty": UncertainFirst,
        "expected": ExpectedFirst,
    }
    if policy not in named:
        raise ValueError(f"scoring.policy={policy!r} must be one of {', '.join(named)}, or a SelectionPolicy")
    return named[policy]()
