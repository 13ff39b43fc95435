"""A simulation of slow scorers: another scorer's answers at the speed of a vision-language model, without its cost."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from vlmrb.ranges import POSITIVE, require
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer


class PacedScorer(Scorer):
    """Gives another scorer's answers, at a set speed.

    A simulation, for studies of what slow scorers cost: B clips take B / ``clips_per_s`` seconds. The other scorer's
    own time is part of them, the rest is slept and leaves the processor to training. Where the other scorer is slower
    than that, its answer comes when it comes (`stats` tells how often).

    Name and version say what is simulated, so that neither a cache nor a report takes its scores for the other's.

    Args:
        scorer: whose answers.
        clips_per_s: clips per second, above 0. Higher → scores come sooner. Vision-language models of 1 to 8 billion
            parameters are simulated by 2 to 200.

    Raises:
        ValueError: ``clips_per_s`` is not positive and finite.
    """

    def __init__(self, scorer: Scorer, clips_per_s: float) -> None:
        require(POSITIVE, "paced scorer", clips_per_s=clips_per_s)
        self.scorer = scorer
        self.clips_per_s = clips_per_s
        self.name = f"paced_{scorer.name}"
        self.version = f"1:{clips_per_s!r}:{scorer.version}"
        self.needs = scorer.needs
        self.frame_size = scorer.frame_size
        self.every_frame = scorer.every_frame
        self.memory_bytes = scorer.memory_bytes
        self.prompt = getattr(scorer, "prompt", "")  # part of the score cache's key
        self._batches = 0
        self._late = 0

    def objection(self, clips: ClipBatch) -> str | None:
        """Says what the other scorer says."""
        return self.scorer.objection(clips)

    def setup(self) -> None:
        """Sets the other scorer up."""
        self.scorer.setup()

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Returns the other scorer's answer for B clips, ``float32[B]`` in [0, 1], not before its time."""
        due = time.monotonic() + len(clips) / self.clips_per_s
        scores = self.scorer.score(clips)
        left_s = due - time.monotonic()
        self._batches += 1
        self._late += left_s < 0
        time.sleep(max(0.0, left_s))
        return scores

    def stats(self) -> dict[str, float]:
        """Returns what the other scorer reports, and ``late_share``: batches for which it was too slow, 0–1."""
        return {**self.scorer.stats(), "late_share": self._late / max(1, self._batches)}

    def details(self) -> NDArray[np.float32] | None:
        """Returns what the other scorer knows beyond its scores."""
        return self.scorer.details()

    def forget(self) -> None:
        """Lets the other scorer forget."""
        self.scorer.forget()

    def close(self) -> None:
        """Closes the other scorer."""
        self.scorer.close()
