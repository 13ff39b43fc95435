"""Settings of the scoring service."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, require
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.policies.named import PolicyName
from vlmrb.scoring.policy import SelectionPolicy
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.scoring.windows import SEARCHES, Way


@dataclass(frozen=True)
class ScoringConfig:
    """How clips get to the scorer and what happens when it fails.

    Attributes:
        backend: where scores are computed. ``process`` lets training go on, and is the only one that can stop a scorer
            that hangs; ``thread`` starts at once but shares the interpreter with training, so it suits quick or waiting
            scorers; ``sync`` scores every clip before training goes on: reproducible, and as slow as the scorer.
        policy: which clips go first, and which are dropped last when there are more than the scorer can take.
            ``newest`` keeps scores close to the present policy; ``random`` covers all experience evenly; ``oldest``
            wastes nothing but lags behind without bound once the scorer is too slow; ``novelty`` prefers what seldom
            happens; ``uncertainty`` and ``expected`` go by a guess of the score, and are ``newest`` while nobody
            guesses. A class path gives any other, such as `policies.Mix`.
        audit_share: share of all completed clips, drawn by chance, that is scored before all others, whatever the
            policy: what the metrics ``scoring/audit_…`` then say holds for all clips. 0 draws none. Higher → surer
            figures, less of the scorer's time for what the policy prefers.
        budget: how many clips the scorer may be shown; ``None`` for as many as it can take.
        student: a small network that learns what the scorer says, so that it need not be asked about most clips;
            ``None`` asks about all. It runs where the scorer does, in a process of its own, with one thread.
        bisect_to: frames, at least 2, down to which the scorer is shown windows of positive clips, to find what made
            them positive (``replay.credit``). ``None`` does not. Lower → finer credit, more calls.
        bisect_by: which windows. ``halves``: of the clip, then of the positive halves, which finds all events, by about
            2·log₂(L ÷ bisect_to) more calls for each clip with a single one. ``beginnings``: overlapping ones that all
            begin with the clip, by binary search over their ends, which finds the first event, with all that leads to
            it in view, by log₂(L ÷ bisect_to) more calls.
        max_delay_env_steps: collection waits for the scorer while a clip that was completed longer ago is being scored,
            or could be within the budget; what is older and beyond the budget is dropped. ``None`` never waits. Lower →
            fresher scores and no rows replayed blindly, at the price of speed. At least a few times
            ``training.frames_per_batch``.
        max_waiting: most distinct clips waiting for the scorer. At most as many wait for the student, beyond which the
            oldest are dropped, and as many windows of positive clips (``bisect_to``), of which the newest go first.
            Higher → more clips to choose from, older scores.
        batch_clips: most clips in one call of the scorer. Higher → more clips/s from a GPU, more memory,
            longer delay. One poll hands over at most ``max_in_flight × batch_clips``.
        frames_per_clip: most frames of a clip that the scorer is shown, evenly spaced over its real length, the first
            and the last always among them; at least 2. ``None`` shows all. Lower → fewer frames to draw, encode and
            read, so more clips/s; what happens between two frames shows only in what it leaves behind. Refused with
            scorers that read events off consecutive frames (`Scorer.every_frame`).
        max_in_flight: batches handed over and not answered yet. 2 keeps a scorer busy; more only commits to clips
            earlier.
        timeout_s: seconds a batch may take before its process is killed (process only). Higher → patience with a slow
            scorer, longer silence with a hung one.
        startup_timeout_s: seconds `Scorer.setup` may take (process only); a large model loads for minutes.
        max_restarts: restarts in a row, without a batch answered in between, before the scorer is given up and replay
            goes on without new scores (process only).
        backoff_s: seconds before the first restart, doubled with each further one in a row, at most 60 (process only).
        threads: CPU threads of the scoring process, left to the libraries' own choice if ``None``. Higher → faster
            scores on a CPU, slower training beside them (process only).
        duty_cycle: largest share of the time in which the scoring process computes, in (0, 1]; it rests after each
            batch (process only). Lower → more of a shared GPU or CPU is left to training, fewer clips/s, later scores.
        low_priority: the scoring process gives way where training wants the same CPU cores, once its scorer is set up
            (process only). Kernels on a shared GPU are not ordered by it: CUDA's stream priorities hold within one
            process, and the usual stream has the lowest already; ``duty_cycle`` is what bounds the scorer there.
        seed: of all that is drawn by chance here: the ``random`` policy, what is audited, controls and the student, as
            far as they are given none of their own. ``None`` follows the run's (``seed_everything``), and is 0 without
            one.
    """

    backend: Literal["process", "thread", "sync"] = "process"
    policy: PolicyName | SelectionPolicy = "newest"
    audit_share: float = 0.0
    budget: BudgetConfig | None = None
    student: StudentConfig | None = None
    bisect_to: int | None = None
    bisect_by: Way = "halves"
    max_delay_env_steps: int | None = None
    max_waiting: int = 1024
    batch_clips: int = 16
    frames_per_clip: int | None = None
    max_in_flight: int = 2
    timeout_s: float = 120.0
    startup_timeout_s: float = 900.0
    max_restarts: int = 3
    backoff_s: float = 1.0
    threads: int | None = 1
    duty_cycle: float = 1.0
    low_priority: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        if self.backend not in ("process", "thread", "sync"):
            raise ValueError(f"scoring.backend={self.backend!r} must be process, thread or sync")
        require(SHARE, "scoring", audit_share=self.audit_share)
        require(AT_LEAST_ONE, "scoring", max_delay_env_steps=self.max_delay_env_steps)
        require(NOT_NEGATIVE, "scoring", seed=self.seed)
        for name in ("max_waiting", "batch_clips", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"scoring.{name}={getattr(self, name)} must be at least 1")
        if self.frames_per_clip is not None and self.frames_per_clip < 2:
            raise ValueError(f"scoring.frames_per_clip={self.frames_per_clip} must be at least 2, or null")
        if self.bisect_to is not None and self.bisect_to < 2:
            raise ValueError(f"scoring.bisect_to={self.bisect_to} must be at least 2 frames, or null")
        if self.bisect_by not in SEARCHES:
            raise ValueError(f"scoring.bisect_by={self.bisect_by!r} must be {' or '.join(SEARCHES)}")
        if self.bisect_by != "halves" and self.bisect_to is None:
            raise ValueError(
                f"scoring.bisect_by={self.bisect_by} has no effect without scoring.bisect_to: set it to a number of "
                "frames, or leave bisect_by out"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"scoring.threads={self.threads} must be at least 1, or null")
        if not 0 < self.duty_cycle <= 1:
            raise ValueError(f"scoring.duty_cycle={self.duty_cycle} must lie in (0, 1]")
        for name, unset in (("duty_cycle", 1), ("low_priority", False)):
            if self.backend != "process" and getattr(self, name) != unset:
                raise ValueError(
                    f"scoring.{name}={getattr(self, name)} needs a scoring process: set scoring.backend=process, or "
                    f"leave {name} out (scoring.backend is {self.backend})"
                )
        for name in ("timeout_s", "startup_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"scoring.{name}={getattr(self, name)} must be positive")
        for name in ("max_restarts", "backoff_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"scoring.{name}={getattr(self, name)} must not be negative")

    def following(self, seed: int) -> ScoringConfig:
        """Returns the settings with this seed, unless they have one."""
        return self if self.seed is not None else replace(self, seed=seed)

    @property
    def policy_seed(self) -> int:
        """Of policy and audit."""
        return self.seed or 0

    @property
    def control_seed(self) -> int:
        """Of a control that has none of its own."""
        return self.policy_seed + 1

    @property
    def student_seed(self) -> int:
        """Of the student."""
        own = None if self.student is None else self.student.seed
        return self.policy_seed + 2 if own is None else own

    def require_for(self, frames_per_batch: int, clip_length: int | None) -> None:
        """Refuses settings that do not go together with those of training and replay.

        Args:
            frames_per_batch: env steps of a block of training.
            clip_length: frames of a clip; ``None`` if there are no clips.

        Raises:
            ValueError: naming the settings.
        """
        if self.budget is not None:
            self.budget.require_for(frames_per_batch)
        bound = self.max_delay_env_steps
        if bound is None or clip_length is None:
            return
        if bound < frames_per_batch:
            raise ValueError(
                f"scoring.max_delay_env_steps={bound} must be at least one block, "
                f"training.frames_per_batch={frames_per_batch}"
            )
        clips = (bound + frames_per_batch) // (clip_length - 1)
        if self.budget is None and self.backend != "sync" and clips > self.max_waiting:
            raise ValueError(
                f"scoring.max_delay_env_steps={bound} lets {clips} or more clips wait, and scoring.max_waiting="
                f"{self.max_waiting} drops what is beyond: raise max_waiting, or lower max_delay_env_steps"
            )
