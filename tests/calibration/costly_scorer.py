"""A scorer whose cost is known: a clock that it moves itself, and clips of which it is known which frames matter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from vlmrb.calibration import timing
from vlmrb.calibration.corpus import Corpus, CorpusWriter, LabelledClips
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer, ScorerError

LENGTH = 16
SIZE = 4  # pixels
LATE, EARLY = LENGTH - 1, 2  # the frames that may flash: one is always shown, the other from 8 frames a clip on
now = [0.0]  # seconds
log: list[str] = []  # setup, forget, close and the frames of the clips that were asked about


class CostlyScorer(Scorer):
    """Scores 1 if a frame flashes; sees nothing of frames smaller than `SIZE`.

    A clip costs its frames in seconds, times the share of `SIZE` that they have, half of that in bfloat16, and once
    more for each call of ``batch_clips``.
    """

    name = "costly"

    def __init__(
        self, frame_size: int | None = SIZE, batch_clips: int = 1, dtype: str = "float32", memory_bytes: int | None = 0
    ) -> None:
        self.frame_size, self.batch_clips, self.dtype = frame_size, batch_clips, dtype
        self.memory_bytes = memory_bytes
        self.version = dtype
        self.tokens = 0
        self.ready = False

    def setup(self) -> None:
        log.append("setup")
        if self.dtype == "float8":
            raise ScorerError("no such dtype")
        self.ready = True
        self.frame_size = self.frame_size or SIZE  # as scorers do that learn of it from their model

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        assert self.ready
        frames = clips.frames(self.frame_size)
        count, length, side = frames.shape[:3]
        log.append(f"{length}")
        self.tokens = 10 + length
        each = length * side / SIZE * (0.5 if self.dtype == "bfloat16" else 1.0)
        now[0] += each * (count + count / self.batch_clips)
        seen = frames.max(axis=(1, 2, 3, 4)) == 255 if side == SIZE else np.zeros(count, bool)
        return seen.astype(np.float32)

    def stats(self) -> dict[str, float]:
        return {"tokens": float(self.tokens)}

    def forget(self) -> None:
        log.append("forget")

    def close(self) -> None:
        log.append("close")
        self.ready = False


class EveryFrameScorer(CostlyScorer):
    """Needs all frames, and has nothing else to vary."""

    name = "every"
    every_frame = True

    def __init__(self) -> None:
        super().__init__()


class FramesScorer(CostlyScorer):
    """Has no settings at all."""

    name = "frames"

    def __init__(self) -> None:
        super().__init__()


def flashes(folder: Path, clips: int = 80) -> Corpus:
    """A corpus of which every other clip flashes, by turns late and early."""
    writer = CorpusWriter(
        folder,
        kind="videos",
        settings={},
        renderer={"frame_shape": [SIZE, SIZE, 3]},
        clip_length=LENGTH,
        milestones=[],
        command="vlmrb corpus …",
    )
    frames = np.random.default_rng(0).integers(0, 200, (clips, LENGTH, SIZE, SIZE, 3)).astype(np.uint8)
    success = np.arange(clips) % 2 == 0
    for clip in np.flatnonzero(success):
        frames[clip, LATE if clip % 4 else EARLY] = 255
    writer.append(
        LabelledClips(
            np.full(clips, LENGTH),
            success,
            np.zeros((clips, 0), bool),
            np.arange(clips) // 2,
            frames.reshape(clips, LENGTH, -1),
        )
    )
    return writer.finish([])


def configuration(folder: Path, kind: str = "CostlyScorer", name: str = "costly", **scoring: object) -> str:
    """Writes a configuration; settings of the scorer are those that begin with ``scorer_``."""
    init_args = {key.removeprefix("scorer_"): scoring.pop(key) for key in list(scoring) if key.startswith("scorer_")}
    scorer = {"class_path": f"costly_scorer.{kind}", "init_args": init_args}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"scoring": {"batch_clips": 8, **scoring, "scorer": scorer}}))
    return str(file)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in scorers alone."""
    now[0] = 0.0
    log.clear()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
