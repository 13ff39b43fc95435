"""Scorers that take their time; light to import, as scoring processes do."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Needs, Scorer, ScorerError


class SleepingScorer(Scorer):
    """Sleeps for some seconds per clip, and answers with the share of frames that differ from the one before."""

    name = "sleeping"
    version = "1"
    needs: Needs = "frames"
    prompt = "Does the agent open the door at least once in this clip? Answer yes or no."

    def __init__(self, seconds_per_clip: float = 0.0) -> None:
        self.seconds_per_clip = seconds_per_clip

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        time.sleep(self.seconds_per_clip * len(clips))
        frames = clips.frames(self.frame_size)
        return (frames[:, 1:] != frames[:, :-1]).any((2, 3, 4)).mean(1).astype(np.float32)


class ChoosyScorer(SleepingScorer):
    """Takes frames of a few pixels only."""

    name = "choosy"
    frame_size = 24


class AbsentScorer(SleepingScorer):
    """Has no weights."""

    name = "absent"

    def setup(self) -> None:
        raise ScorerError("scorer 'absent' has no weights: fetch them")
