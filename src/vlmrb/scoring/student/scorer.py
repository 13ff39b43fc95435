"""The student as a scorer, so that it can run wherever scorers run: it learns from the answers that clips carry."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.scoring.student.parts import Kind, kind_of

if TYPE_CHECKING:
    from vlmrb.scoring.student.lesson import Lesson
    from vlmrb.scoring.student.student import Student

logger = logging.getLogger(__name__)

SCHEMA = 1  # of what is kept in checkpoints


class StudentScorer(Scorer):
    """Learns from clips with an answer, and guesses for all clips.

    Unlike other scorers it changes with every batch; its guesses are probabilities as if every second clip were a
    positive one.

    Args:
        config: see there.
        threshold: τ above which an answer is a yes; ``None`` learns scores as they are.
        pixels: whether the agent observes images.
        lesson: what it learns in `setup`; ``None`` for nothing.
    """

    name = "student"
    version = "1"
    needs = "observations"
    every_frame = True

    def __init__(
        self, config: StudentConfig, threshold: float | None, pixels: bool, lesson: Lesson | None = None
    ) -> None:
        self._config = config
        self._lesson = lesson
        self._threshold = threshold
        self._pixels = pixels
        self._student: Student | None = None
        self._due = 0.0  # training steps not taken yet
        self._details: NDArray[np.float32] | None = None
        self._changed = False  # since it was last asked for its state
        self._reminded = False  # is told again what it had learned from

    def setup(self) -> None:
        """Loads PyTorch, for which a busy machine needs more time than for a batch, and learns the lesson."""
        import vlmrb.scoring.student.student  # noqa: F401

        for observations, answers in () if self._lesson is None else self._lesson.parts():
            self._student_for(observations).remember(observations, answers)
        if self._student is not None:
            self._student.learn(self._config.corpus_steps)
            self._changed = True

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Learns from those of B clips whose answer is known, then guesses: ``float32[B]`` in [0, 1].

        Once restored it is told again what the scorer has said. Batches that hold nothing else fill its memory and
        teach it nothing, so that its guesses are those that it would have made.
        """
        observations = clips.observations()
        student = self._student_for(observations)
        told = np.flatnonzero(~np.isnan(clips.answers)) if clips.answers is not None else np.zeros(0, np.int64)
        self._reminded &= len(told) == len(clips)
        if len(told):
            assert clips.answers is not None
            student.remember(observations[told], clips.answers[told], again=self._reminded)
        if not self._reminded:
            before = student.steps
            self._due += self._config.steps_per_clip * len(clips)
            student.learn(int(self._due))
            self._due %= 1.0
            self._changed |= bool(len(told)) or student.steps > before
        guess = student.guess(observations)
        self._details = guess.transitions
        return (1 / (1 + np.exp(-guess.clips))).astype(np.float32)

    def details(self) -> NDArray[np.float32] | None:
        """Returns logits of transitions, ``float32[B, L − 1]``: how much each speaks for its clip's being positive."""
        return self._details

    def stats(self) -> dict[str, float]:
        """Returns training steps so far, the latest loss, and the positives that it remembers."""
        assert self._student is not None
        return {
            "steps": self._student.steps,
            "loss": self._student.loss,
            "positives": self._student.memory.positives,
        }

    def state(self) -> bytes | None:
        """Returns what it has learned, its memory left out (`Student.state_dict`)."""
        if self._student is None or not self._changed:
            return None
        import torch

        self._changed = False
        content = {"schema": SCHEMA, "kind": self._student.kind, "student": self._student.state_dict()}
        file = io.BytesIO()
        torch.save(content | {"due": self._due}, file)
        return file.getvalue()

    def restore(self, state: bytes) -> None:
        """Takes up what had been learned; if another version of the student had, it says so and begins anew."""
        import torch

        content = torch.load(io.BytesIO(state), weights_only=True)
        if content["schema"] != SCHEMA:
            logger.warning("the student begins anew: what it had learned is of schema %s", content["schema"])
            return
        if self._student is None:
            self._student = self._make(content["kind"])
        self._student.load_state_dict(content["student"])
        self._due = content["due"]
        self._reminded = True

    def _student_for(self, observations: NDArray) -> Student:
        if self._student is None:
            self._student = self._make(kind_of(observations.shape[2:], observations.dtype, self._pixels))
        return self._student

    def _make(self, kind: Kind) -> Student:
        from vlmrb.scoring.student.student import Student

        return Student(
            kind,
            0.5 if self._threshold is None else self._threshold,
            soft=self._threshold is None,
            learning_rate=self._config.learning_rate,
            memory_clips=self._config.memory_clips,
            seed=self._config.seed or 0,
        )
