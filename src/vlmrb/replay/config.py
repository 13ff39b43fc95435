"""Settings of the replay buffer; every replay scheme is a few lines of them.

Importing this module does not load torch; `vlmrb.replay.build` makes a buffer of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlmrb.ranges import AT_LEAST_ONE, POSITIVE, SHARE, require
from vlmrb.replay.credit import CreditTerm
from vlmrb.replay.ero import EROTerm
from vlmrb.replay.rank import RankTerm
from vlmrb.replay.relo import ReLoTerm
from vlmrb.replay.rules.term import RuleTerm
from vlmrb.replay.schedule import LinearSchedule
from vlmrb.replay.schemes import AERConfig, EROConfig, HERConfig, RankConfig, ReLoConfig, RulesConfig, ScoreRewardConfig
from vlmrb.replay.terms import AgeTerm, PriorityTerm, TDTerm, VLMTerm

_ONE_OVERLAY = " (of configs/replay/ take one overlay only: each is a whole scheme, and turns the others off)"


@dataclass(frozen=True)
class TDConfig:
    """The |δ| term; see `vlmrb.replay.terms.TDTerm`.

    Attributes:
        exponent: α ≥ 0. Higher → large errors dominate; PER uses 0.6, VLM×TD 1.
        eps: added to |δ|. Higher → rows with tiny errors are still drawn; PER uses 1e-6.
    """

    exponent: float = 1.0
    eps: float = 0.0


@dataclass(frozen=True)
class VLMConfig:
    """The score term; see `vlmrb.replay.terms.VLMTerm`.

    Attributes:
        threshold: τ in [0, 1], strictly exceeded by a positive score; null takes raw scores. Higher → fewer, surer
            positives.
        unscored: provisional priority p̄ of rows without a score. Higher → new rows compete with positives until scored.
        exponent: on raw scores. Higher → only scores near 1 count.
    """

    threshold: float | None = 0.5
    unscored: float = 0.0
    exponent: float = 1.0


@dataclass(frozen=True)
class AgeConfig:
    """The freshness term; see `vlmrb.replay.terms.AgeTerm`.

    Attributes:
        turnover: τ, after which a row's priority has fallen to 37 %, as a share of the env steps that fill the buffer;
            0.1 to 0.5 is usual. Higher → older rows keep their weight.
    """

    turnover: float = 0.25

    def __post_init__(self) -> None:
        """Refuses settings outside their ranges."""
        require(POSITIVE, "replay.age", turnover=self.turnover)


@dataclass(frozen=True)
class CreditConfig:
    """Finer credit than by whole clips; see `vlmrb.replay.credit.CreditTerm`.

    Attributes:
        window: env steps before the decisive transition that are credited as well. Higher → more rows of a positive
            clip are replayed often.
        floor: factor of the other rows of a positive clip, in [0, 1). Higher → nearer to crediting the whole clip.
    """

    window: int = 8
    floor: float = 0.0


@dataclass(frozen=True)
class ImportanceConfig:
    """Importance weights from the mixture, β rising linearly over the whole run.

    Attributes:
        beta_start: β at the start. Higher → less bias early, weaker prioritisation.
        beta_end: β at the end of the env-step budget.
    """

    beta_start: float = 0.4
    beta_end: float = 1.0


@dataclass(frozen=True)
class ReplayConfig:
    """The replay buffer and its scheme. The defaults are VLM-only replay (the paper's MiniGrid setting).

    Attributes:
        capacity: rows kept. Higher → more varied, older experience, more memory.
        batch_size: rows per gradient step.
        clip_length: frames L per clip, ≥ 2; null keeps no clips (uniform or PER without a scorer). Higher → more
            context for the scorer, coarser credit, a later score.
        n_steps: steps n of the return. Higher → faster propagation of rewards, more off-policy bias.
        lam_max: λ after the warm-up. Higher → positives are replayed more often; 1 is pure priority.
        warmup_fraction: share of the env-step budget, counted after ``learning_starts``, over which λ rises from 0.
            Higher → a gentler start; 0 starts at ``lam_max``.
        td: |δ| as a factor of the priority, or null.
        vlm: the clip's score as a factor of the priority, or null.
        credit: which rows of a positive clip its score is about, as a factor of the priority, or null for all alike; a
            student or windows of clips say it (``scoring.student``, ``scoring.bisect_to``).
        age: freshness as a factor of the priority, or null.
        rank: the rank of |δ| as a factor of the priority (rank-based PER), or null.
        relo: the reducible loss as a factor of the priority, or null.
        rules: how true rules are of a row as a factor of the priority, or null.
        ero: replay what a mask keeps that is learnt from returns, or null.
        aer: draw more rows than a batch needs and train on those most like the present states, or null.
        her: replay rows with goals that were achieved in the place of those that were asked for, or null.
        score_reward: the clip's score as a part of the reward, or null.
        stratified: draw one row from each of as many equal parts of the priorities' sum as there are prioritised draws.
            A batch then follows the priorities more closely than by chance.
        importance_weights: correction of the loss, or null (the paper corrects nothing).
        max_draws_per_positive: cap on prioritised draws per batch and positive row, or null. Lower → a single early
            positive clip takes less of every batch, and acts more slowly.
        storage: ``memory``, ``memmap`` or ``auto`` (memory-mapped above ``memory_limit_gib``).
        memory_limit_gib: see ``storage``. Higher → more stays in memory.
        scratch_dir: where the folder for memory-mapped rows is made; null is the system's temporary one.
    """

    capacity: int = 100_000
    batch_size: int = 128
    clip_length: int | None = 32
    n_steps: int = 1
    lam_max: float = 0.5
    warmup_fraction: float = 0.1
    td: TDConfig | None = None
    vlm: VLMConfig | None = field(default_factory=VLMConfig)
    credit: CreditConfig | None = None
    age: AgeConfig | None = None
    rank: RankConfig | None = None
    relo: ReLoConfig | None = None
    rules: RulesConfig | None = None
    ero: EROConfig | None = None
    aer: AERConfig | None = None
    her: HERConfig | None = None
    score_reward: ScoreRewardConfig | None = None
    stratified: bool = False
    importance_weights: ImportanceConfig | None = None
    max_draws_per_positive: float | None = None
    storage: Literal["auto", "memory", "memmap"] = "auto"
    memory_limit_gib: float = 8.0
    scratch_dir: str | None = None

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, or would have no effect, naming them."""
        require(AT_LEAST_ONE, "replay", batch_size=self.batch_size, n_steps=self.n_steps)
        require(SHARE, "replay", lam_max=self.lam_max, warmup_fraction=self.warmup_fraction)
        limits = {"memory_limit_gib": self.memory_limit_gib, "max_draws_per_positive": self.max_draws_per_positive}
        require(POSITIVE, "replay", **limits)
        if self.capacity < self.batch_size:
            raise ValueError(f"replay.capacity={self.capacity} is smaller than replay.batch_size={self.batch_size}")
        if self.clip_length is not None and self.clip_length < 2:
            raise ValueError(
                f"replay.clip_length={self.clip_length} must be at least 2 frames: a clip needs one transition"
            )
        try:
            terms = self.terms()
        except ValueError as error:
            raise ValueError(f"replay: {error}") from error
        if not terms and self.lam_max > 0:
            raise ValueError(
                f"replay.lam_max={self.lam_max} has no effect without a priority: set td, vlm, age, rank, relo, ero or "
                "rules, or lam_max to 0"
            )
        if self.td is not None and self.rank is not None:
            raise ValueError("replay.td and replay.rank are two priorities by |δ|: set one of them to null")
        if self.ero is not None and self.lam_max == 0:
            raise ValueError("replay.ero has no effect at lam_max=0: uniform draws heed no mask")
        if self.stratified and self.lam_max == 0:
            raise ValueError("replay.stratified=true has no effect at lam_max=0: it is about prioritised draws")
        if self.rules is not None and self.lam_max == 0:
            raise ValueError("replay.rules has no effect at lam_max=0: it is about prioritised draws")
        if self.vlm is not None and self.clip_length is None:
            raise ValueError(f"replay.vlm needs clips to score: set replay.clip_length{_ONE_OVERLAY}")
        if self.credit is not None and self.vlm is None:
            raise ValueError("replay.credit is about clips with a score: set replay.vlm, or replay.credit to null")
        if self.score_reward is not None and self.clip_length is None:
            raise ValueError(f"replay.score_reward needs clips to score: set replay.clip_length{_ONE_OVERLAY}")
        if self.her is not None and self.n_steps > 1:
            raise ValueError(
                f"replay.her judges single steps anew, and replay.n_steps={self.n_steps} sums up several: set it to 1"
            )
        if self.importance_weights is not None:
            if self.lam_max == 0:
                raise ValueError(
                    "replay.importance_weights has no effect at lam_max=0: uniform draws need no correction"
                )
            betas = {"beta_start": self.importance_weights.beta_start, "beta_end": self.importance_weights.beta_end}
            require(SHARE, "replay.importance_weights", **betas)

    @property
    def needs_scores(self) -> bool:
        """Whether the scheme reads clip scores."""
        return self.vlm is not None or self.score_reward is not None

    @property
    def needs_td_errors(self) -> bool:
        """Whether the scheme reads |δ|."""
        return self.td is not None or self.rank is not None or self.ero is not None

    @property
    def threshold_in_force(self) -> tuple[str, float] | None:
        """The setting by which clips are told positive or not, and its τ; ``None`` where scores are read as they are.

        That of priorities goes before that of rewards.
        """
        if self.vlm is not None and self.vlm.threshold is not None:
            return "replay.vlm.threshold", self.vlm.threshold
        if self.score_reward is not None and self.score_reward.threshold is not None:
            return "replay.score_reward.threshold", self.score_reward.threshold
        return None

    def terms(self, seed: int = 0) -> list[PriorityTerm]:
        """Returns the priority terms that are switched on; ``seed`` is of those that draw by chance."""
        terms: list[PriorityTerm] = []
        if self.vlm is not None:
            terms.append(VLMTerm(self.vlm.threshold, self.vlm.unscored, self.vlm.exponent))
        if self.credit is not None:
            terms.append(CreditTerm(self.credit.window, self.credit.floor))
        if self.td is not None:
            terms.append(TDTerm(self.td.exponent, self.td.eps))
        if self.age is not None:
            terms.append(AgeTerm(self.age.turnover * self.capacity))
        if self.rank is not None:
            terms.append(RankTerm(self.rank.exponent, self.rank.refresh_fraction * self.capacity))
        if self.relo is not None:
            terms.append(ReLoTerm(self.relo.map, self.relo.exponent, self.relo.eps))
        if self.ero is not None:
            terms.append(self._ero_term(self.ero, seed))
        if self.rules is not None:
            terms.append(RuleTerm(self.rules.file, self.rules.eta))
        return terms

    def _ero_term(self, ero: EROConfig, seed: int) -> EROTerm:
        return EROTerm(
            ero.window_fraction * self.capacity,
            ero.min_episodes,
            ero.min_kept,
            ero.learning_rate,
            ero.updates,
            ero.batch_size,
            seed,
        )

    def require_for(self, env_id: str) -> None:
        """Refuses files that the scheme reads if they cannot be read or are for other environments.

        Raises:
            ValueError: says what is wrong.
        """
        if self.rules is not None:
            self.rules.require_for(env_id)

    def lam_schedule(self, total_env_steps: int, learning_starts: int) -> LinearSchedule:
        """Returns λ over env steps: 0 until ``learning_starts``, then up to ``lam_max`` over the warm-up."""
        return LinearSchedule(0.0, self.lam_max, learning_starts, int(self.warmup_fraction * total_env_steps))

    def beta_schedule(self, total_env_steps: int, learning_starts: int) -> LinearSchedule | None:
        """Returns β over env steps, or ``None`` without importance weights."""
        if self.importance_weights is None:
            return None
        duration = max(0, total_env_steps - learning_starts)
        return LinearSchedule(
            self.importance_weights.beta_start, self.importance_weights.beta_end, learning_starts, duration
        )
