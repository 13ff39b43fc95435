"""Scorers that differ only in the time they take; light to import, since scoring processes import this file."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Needs, Scorer


class TimedScorer(Scorer):
    """Calls every tenth clip or so a success, after so many seconds.

    Args:
        seconds_per_clip: how long each clip takes.
        meanwhile: ``sleep`` as a scorer on a GPU or a server does, or ``compute`` as one on this CPU.
    """

    version = "1"
    needs: Needs = "snapshots"

    def __init__(self, seconds_per_clip: float = 0.0, meanwhile: Literal["sleep", "compute"] = "sleep") -> None:
        self.name = f"timed-{seconds_per_clip:g}-{meanwhile}"
        self.seconds_per_clip = seconds_per_clip
        self.meanwhile = meanwhile

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Returns ``float32[B]``, 0 or 1, by the content of the clips."""
        end = time.monotonic() + self.seconds_per_clip * len(clips)
        if self.meanwhile == "sleep":
            time.sleep(max(0.0, end - time.monotonic()))
        while time.monotonic() < end:
            pass
        totals = clips.snapshots.reshape(len(clips), -1).sum(1, dtype=np.int64)
        return (totals % 10 == 0).astype(np.float32)
