"""Settings of the replay schemes beside the paper's: each is one optional field of `ReplayConfig`.

Importing this module does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, SHARE, require
from vlmrb.replay.schedule import LinearSchedule


@dataclass(frozen=True)
class RankConfig:
    """Rank-based PER; see `vlmrb.replay.rank.RankTerm`.

    Attributes:
        exponent: α ≥ 0. Higher → the largest errors dominate; the original uses 0.7.
        refresh_fraction: share of the buffer's capacity in env steps after which all ranks are taken anew. Lower →
            ranks are more exact, at O(N log N) each time.
    """

    exponent: float = 0.7
    refresh_fraction: float = 0.01

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(NOT_NEGATIVE, "replay.rank", exponent=self.exponent)
        require(POSITIVE_SHARE, "replay.rank", refresh_fraction=self.refresh_fraction)


@dataclass(frozen=True)
class ReLoConfig:
    """Reducible loss; see `vlmrb.replay.relo.ReLoTerm`.

    Attributes:
        map: of the difference of losses: ``relu`` (the original's for DQN and SAC) or ``exp`` (x + 1 above 0, eˣ below,
            so that no row is lost).
        exponent: α ≥ 0 of the mapped difference. Higher → rows that are about to be learnt dominate.
        eps: added before the exponent. Higher → rows without reducible loss are still drawn.
    """

    map: Literal["relu", "exp"] = "relu"
    exponent: float = 0.6
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(NOT_NEGATIVE, "replay.relo", exponent=self.exponent, eps=self.eps)
        if self.eps == 0 and self.map == "relu":
            require(POSITIVE, "replay.relo", eps=self.eps)


@dataclass(frozen=True)
class RulesConfig:
    """Rules over predicates of transitions (docs/replay/rules.md); see `vlmrb.replay.rules.term.RuleTerm`.

    Attributes:
        file: JSON file of the rules.
        eta: η > 0. Higher → rows that follow the rules dominate: one of which all rules are true is drawn e^η times as
            often as one of which none is.
    """

    file: str
    eta: float = 5.0

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(POSITIVE, "replay.rules", eta=self.eta)

    def require_for(self, env_id: str) -> None:
        """Refuses a file that cannot be read, or that holds rules for other environments.

        Raises:
            ValueError: says what is wrong.
        """
        from vlmrb.replay.rules.schema import read_rules

        rules = read_rules(self.file)
        if not rules.predicates.claims(env_id):
            raise ValueError(
                f"replay.rules.file={self.file} is made of predicates of {rules.family}, which env.id={env_id} is none "
                "of: name rules for it (docs/replay/rules.md)"
            )


@dataclass(frozen=True)
class EROConfig:
    """Experience replay optimisation; see `vlmrb.replay.ero.EROTerm`.

    Attributes:
        window_fraction: env steps between two masks, as a share of the buffer's capacity. Lower → φ gets more gradient
            steps from noisier returns, at O(N) each time.
        min_episodes: episodes that must have ended between two masks. Higher → surer returns, fewer masks.
        min_kept: share of the rows that a mask must keep to be used, in [0, 1). Higher → more variety, less freedom.
        learning_rate: Adam's step size for φ. Higher → faster and more at the mercy of chance.
        updates: gradient steps per mask. Higher → faster, on the same noisy reward.
        batch_size: rows per gradient step. Higher → they stand better for the whole mask, more time.
    """

    window_fraction: float = 0.02
    min_episodes: int = 10
    min_kept: float = 0.1
    learning_rate: float = 1e-3
    updates: int = 4
    batch_size: int = 1024

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        counts = {"min_episodes": self.min_episodes, "updates": self.updates, "batch_size": self.batch_size}
        require(AT_LEAST_ONE, "replay.ero", **counts)
        require(POSITIVE_SHARE, "replay.ero", window_fraction=self.window_fraction)
        require(POSITIVE, "replay.ero", learning_rate=self.learning_rate)
        if not 0 <= self.min_kept < 1:
            raise ValueError(f"replay.ero.min_kept={self.min_kept} must lie in [0, 1)")


@dataclass(frozen=True)
class AERConfig:
    """Attentive experience replay; see `vlmrb.replay.similarity.SimilaritySelector`.

    Attributes:
        candidates: λ₀ > 1, rows drawn per row of a batch at the start; the most similar are kept. Higher → training
            dwells more on states like the present ones, with fewer distinct rows.
        fraction: share of the env-step budget, counted after ``learning_starts``, over which λ falls to 1. Higher → it
            lasts longer; the bias of the choice too.
        similarity: ``cosine`` of observations, or ``features``: nearness in the network's last hidden layer, which
            costs a forward pass per gradient step.
    """

    candidates: float = 4.0
    fraction: float = 0.4
    similarity: Literal["cosine", "features"] = "cosine"

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(AT_LEAST_ONE, "replay.aer", candidates=self.candidates)
        require(POSITIVE_SHARE, "replay.aer", fraction=self.fraction)
        if self.candidates == 1:
            raise ValueError("replay.aer.candidates=1 has no effect: there would be nothing to choose from")

    def schedule(self, total_env_steps: int, learning_starts: int) -> LinearSchedule:
        """Returns λ over env steps: λ₀ until ``learning_starts``, then down to 1."""
        return LinearSchedule(self.candidates, 1.0, learning_starts, int(self.fraction * total_env_steps))


@dataclass(frozen=True)
class HERConfig:
    """Hindsight relabelling; see `vlmrb.replay.hindsight.HindsightTransform`.

    Attributes:
        share: probability of a row to be replayed with a goal that its episode achieved, in (0, 1]. Higher → faster
            away from rewards that never come, less practice of the goals that are really asked for.
        strategy: whose achieved goal: that of a ``future`` row of the episode, of its ``final`` row, of any row of the
            ``episode``, or of any row at all (``random``).
    """

    share: float = 0.8
    strategy: Literal["future", "final", "episode", "random"] = "future"

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(POSITIVE_SHARE, "replay.her", share=self.share)
        if self.strategy not in ("future", "final", "episode", "random"):
            raise ValueError(f"replay.her.strategy={self.strategy!r} must be future, final, episode or random")


@dataclass(frozen=True)
class ScoreRewardConfig:
    """The clip's score as a reward; see `vlmrb.replay.score_reward.ScoreRewardTransform`.

    Attributes:
        weight: of the score in the reward, positive. Higher → the scorer's opinion outweighs the environment's reward.
        mode: ``terminal``: the last row of a clip gets it; ``shaped``: every row gets its part, so that it comes
            earlier and tells less of when.
        threshold: τ in [0, 1): 1 for scores strictly above it and 0 for others, instead of the score; null takes scores
            as they are. Higher → fewer, surer rewards.
    """

    weight: float = 1.0
    mode: Literal["terminal", "shaped"] = "terminal"
    threshold: float | None = None

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(POSITIVE, "replay.score_reward", weight=self.weight)
        require(SHARE, "replay.score_reward", threshold=self.threshold)
        if self.threshold == 1:
            raise ValueError("replay.score_reward.threshold=1.0 has no effect: no score exceeds it")
        if self.mode not in ("terminal", "shaped"):
            raise ValueError(f"replay.score_reward.mode={self.mode!r} must be terminal or shaped")
