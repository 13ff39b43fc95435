"""Settings of a student. Importing this module does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, require


@dataclass(frozen=True)
class StudentConfig:
    """A small network that learns from the scorer's answers, so that fewer clips need be shown to the scorer.

    Until it is trusted, every clip goes to the scorer, as far as the budget allows. It is trusted while it would have
    found enough of the positives among clips that the scorer answered whatever the student thought of them.

    Attributes:
        role: ``answering``: the student's guess stands for the score where it is sure, until the scorer's own comes;
            ``screening``: only the scorer's answers count, and it is shown what the student takes for positive or is
            not sure of.
        ask_from: probability of a yes above which a guess is not a sure no. Lower → fewer positives missed, more clips
            for the scorer.
        ask_to: probability below which a guess is not a sure yes (``answering`` only). Higher → fewer false positives,
            more clips for the scorer.
        min_recall: share of the positives that the student must find to be trusted. Higher → a longer time in which
            the scorer sees every clip.
        min_positives: positives that this share is taken over, at least; the latest count. Higher → a surer figure
            and a longer time again.
        look_again: clips, of those that went to nobody or were answered by the student, that are guessed anew now and
            then, as it learns; the latest count. Higher → early mistakes are found, more work for the student.
        learning_rate: of Adam. Higher → learns from fewer answers, forgets sooner.
        steps_per_clip: training steps per clip that it is shown or told. Higher → learns from fewer answers, more of a
            CPU core.
        memory_clips: most answered clips of each kind that it learns from.
        corpus: a folder of ``vlmrb corpus``, of the run's environment, whose clips it learns from before the run
            begins; trust has to be earned all the same. Clips may be of another length. ``None``: it begins as a blank.
        corpus_scores: where ``vlmrb calibrate`` has kept what the run's scorer says of them: its folder, or a score
            cache's file.
        corpus_steps: training steps on them. Higher → a later beginning, in which clips wait for the student.
        seed: of its weights and draws; ``None`` follows ``scoring.seed``, which follows the run's.
    """

    role: Literal["answering", "screening"] = "answering"
    ask_from: float = 0.1
    ask_to: float = 0.9
    min_recall: float = 0.9
    min_positives: int = 20
    look_again: int = 1024
    learning_rate: float = 1e-2
    steps_per_clip: float = 0.1
    memory_clips: int = 2048
    corpus: str | None = None
    corpus_scores: str | None = None
    corpus_steps: int = 500
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        if self.role not in ("answering", "screening"):
            raise ValueError(f"scoring.student.role={self.role!r} must be answering or screening")
        require(SHARE, "scoring.student", ask_from=self.ask_from, ask_to=self.ask_to, min_recall=self.min_recall)
        require(AT_LEAST_ONE, "scoring.student", min_positives=self.min_positives, memory_clips=self.memory_clips)
        require(AT_LEAST_ONE, "scoring.student", corpus_steps=self.corpus_steps)
        require(NOT_NEGATIVE, "scoring.student", seed=self.seed)
        require(POSITIVE, "scoring.student", learning_rate=self.learning_rate, steps_per_clip=self.steps_per_clip)
        if self.look_again < 0:
            raise ValueError(f"scoring.student.look_again={self.look_again} must not be negative")
        if (self.corpus is None) != (self.corpus_scores is None):
            raise ValueError(
                f"scoring.student.corpus={self.corpus} and scoring.student.corpus_scores={self.corpus_scores} go "
                "together: a folder of vlmrb corpus, and one of vlmrb calibrate, where the scorer's answers are"
            )
        if self.ask_from >= self.ask_to:
            raise ValueError(
                f"scoring.student.ask_from={self.ask_from} must lie below scoring.student.ask_to={self.ask_to}: "
                "between them the student is not sure, and the scorer is asked"
            )
