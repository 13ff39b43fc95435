"""Brings scores to the rows of their clips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.admission import Content
from vlmrb.scoring.meter import ScoringMeter
from vlmrb.scoring.scorer import ScoreControl

if TYPE_CHECKING:
    from vlmrb.replay.buffer import VLMReplayBuffer


class Delivery:
    """Writes scores to those clips that still have rows, changed by the control, and has them counted.

    Args:
        buffer: of the rows.
        control: changes scores; ``None`` changes nothing.
        meter: counts them.
        scorer: the scorer's name, for errors.
    """

    def __init__(self, buffer: VLMReplayBuffer, control: ScoreControl | None, meter: ScoringMeter, scorer: str) -> None:
        assert buffer.clips is not None
        self._buffer = buffer
        self._clips = buffer.clips
        self._control = control
        self._meter = meter
        self._source = f"scorer {scorer!r}"

    def scored(self, contents: list[Content], scores: NDArray[np.float32], env_steps: int) -> dict[int, float]:
        """Writes the scorer's answers ``float32[C]`` to all clips of C contents; all but one of each count as known.

        Returns:
            Clip id → what was written, of those clips that still have rows.
        """
        repeats = [len(content.clip_ids) for content in contents]
        clip_ids = [clip_id for content in contents for clip_id in content.clip_ids]
        completed = [step for content in contents for step in content.completed]
        self._meter.counts.cache_hits += len(clip_ids) - len(contents)
        return self._write(clip_ids, completed, np.repeat(scores, repeats), env_steps)

    def known(self, clip_ids: list[int], scores: NDArray[np.float32], env_steps: int) -> dict[int, float]:
        """Writes scores ``float32[B]`` that the cache knew of clips just completed; returns the same as `scored`."""
        self._meter.counts.cache_hits += len(clip_ids)
        return self._write(clip_ids, [env_steps] * len(clip_ids), scores, env_steps)

    def guessed(self, clip_ids: list[int], guesses: NDArray[np.float32]) -> None:
        """Writes a student's guesses ``float32[B]`` of clips in the store; no control changes them, no score counts."""
        self._buffer.write_scores(clip_ids, guesses, source="student", guessed=True)

    def _write(
        self, clip_ids: list[int], completed: list[int], scores: NDArray[np.float32], env_steps: int
    ) -> dict[int, float]:
        alive = np.array([self._clips.contains(clip_id) for clip_id in clip_ids], bool)
        if not alive.all():
            self._meter.counts.stale += int((~alive).sum())
            clip_ids, completed = np.array(clip_ids)[alive].tolist(), np.array(completed)[alive].tolist()
            scores = scores[alive]
        if not clip_ids:
            return {}
        if self._control is not None:
            scores = self._control.apply(scores)
        self._buffer.write_scores(clip_ids, scores, source=self._source)
        self._meter.written(scores, [env_steps - step for step in completed])
        return dict(zip(clip_ids, scores.tolist(), strict=True))
