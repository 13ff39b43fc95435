"""Starts a student beside a scorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.admission import AdmissionQueue
from vlmrb.scoring.clips import Renderer
from vlmrb.scoring.meter import Counts
from vlmrb.scoring.process import make_backend
from vlmrb.scoring.student.desk import BATCH_CLIPS, IN_FLIGHT, StudentDesk
from vlmrb.scoring.student.lesson import find_lesson
from vlmrb.scoring.student.scorer import StudentScorer

if TYPE_CHECKING:
    from vlmrb.replay.buffer import VLMReplayBuffer
    from vlmrb.scoring.config import ScoringConfig
    from vlmrb.scoring.scorer import Scorer


def make_desk(
    config: ScoringConfig,
    buffer: VLMReplayBuffer,
    renderer: Renderer | None,
    queue: AdmissionQueue,
    counts: Counts,
    deliver: Callable[[list[int], NDArray[np.float32]], None],
    pixels: bool,
    scorer: Scorer,
) -> StudentDesk:
    """Starts a student where the scorer runs, in a process of its own with one thread that gives way to training.

    Args:
        config: of scoring, with a student.
        buffer: keeps the clips.
        renderer: see `StudentDesk`; so are the next three.
        queue: see there.
        counts: see there.
        deliver: see there.
        pixels: whether the agent observes images.
        scorer: who is foreseen.

    Raises:
        ValueError: there is no renderer, which makes observations of snapshots; or see `find_lesson`.
    """
    assert config.student is not None
    assert buffer.clips is not None
    if renderer is None:
        raise ValueError("scoring.student looks at observations, which takes a renderer")
    where = replace(
        config,
        batch_clips=BATCH_CLIPS,
        max_in_flight=IN_FLIGHT,
        threads=1,
        duty_cycle=1.0,
        low_priority=config.backend == "process",
    )
    threshold, at_once, lesson = buffer.monitor.threshold, config.backend == "sync", None
    if config.student.corpus is not None:
        lesson = find_lesson(config.student, scorer, renderer, config.frames_per_clip, threshold)
    seed = config.student_seed
    student = StudentScorer(replace(config.student, seed=seed), buffer.score_threshold, pixels, lesson)
    backend = make_backend(student, renderer, where)
    return StudentDesk(
        config.student,
        backend,
        buffer.clips,
        renderer,
        queue,
        threshold,
        counts,
        deliver,
        buffer.write_credit,
        at_once,
        None if at_once else config.max_waiting,
    )
