"""A scorer with a prompt that looks for green in frames: more or less keenly, as the prompt says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.prompts import Prompt, make_prompt
from vlmrb.scoring.scorer import Scorer


class GreenScorer(Scorer):
    """Scores the share of the brightest green among all that is bright.

    Args:
        prompt: "Is this good?" is answered half-heartedly, other prompts clearly.
        fails_at: batches after which it raises, once: it leaves a file behind, and goes on when that is there.
        trace: the file.
    """

    name, version = "green", "1"

    def __init__(self, prompt: str | Prompt = "grid", fails_at: int = -1, trace: str = "") -> None:
        self.prompt = make_prompt(prompt)
        self.fails_at = fails_at
        self.trace = trace
        self.batches = 0

    def stats(self) -> dict[str, float]:
        return {"batches": float(self.batches)}

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.batches += 1
        if self.batches - 1 == self.fails_at and not Path(self.trace).exists():
            Path(self.trace).touch()
            raise RuntimeError("the machine was\nswitched off")
        frames = clips.frames(self.frame_size).astype(np.float32)
        green = np.clip(frames[..., 1] - frames[..., 0], 0, None).sum((1, 2, 3))
        share = green / frames[..., 1].sum((1, 2, 3))
        return (0.5 * share if self.prompt.name == "grid_underspecified" else np.minimum(1, 1.9 * share)).astype(
            np.float32
        )
