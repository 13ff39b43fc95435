"""What a student learns before the run: the scorer's answers for a corpus's clips, as `vlmrb calibrate` kept them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vlmrb.calibration.corpus import Corpus
    from vlmrb.scoring.clips import Renderer
    from vlmrb.scoring.scorer import Scorer
    from vlmrb.scoring.student.config import StudentConfig

logger = logging.getLogger(__name__)

PART = 256  # clips that are read at once


@dataclass(frozen=True)
class Lesson:
    """Clips of a corpus that the scorer has answered; picklable, as the student reads them in its own process.

    Attributes:
        corpus: where they lie.
        rows: ``int64[K]``, which of its clips.
        answers: ``float32[K]`` in [0, 1], what the scorer said.
    """

    corpus: Corpus
    rows: NDArray[np.int64]
    answers: NDArray[np.float32]

    def parts(self) -> Iterator[tuple[NDArray, NDArray[np.float32]]]:
        """Yields observations ``[B, L, …]`` and answers ``float32[B]``; L is the corpus's, not the run's."""
        for start in range(0, len(self.rows), PART):
            part = slice(start, start + PART)
            yield self.corpus.batch(self.rows[part]).observations(), self.answers[part]


def find_lesson(
    config: StudentConfig, scorer: Scorer, renderer: Renderer, frames_per_clip: int | None, threshold: float
) -> Lesson:
    """Looks up what a scorer has said of a corpus's clips.

    The corpus's own labels are not read: a student learns what the scorer says, as it could in any run.

    Args:
        config: names the corpus and where its scores are.
        scorer: of the run.
        renderer: of the run.
        frames_per_clip: most frames of a clip that the scorer is shown; ``None`` shows all.
        threshold: τ, strictly exceeded by a positive score.

    Raises:
        ValueError: there is no such corpus, its clips are of another environment, the scorer has not been asked about
            them, or has said the same of all.
    """
    from vlmrb.calibration.corpus import load_corpus

    assert config.corpus is not None
    named = f"scoring.student.corpus={config.corpus}"
    try:
        corpus = load_corpus(config.corpus)
    except ValueError as error:
        raise ValueError(f"{named}: {error}") from error
    if (why := _unlike(corpus, renderer)) is not None:
        raise ValueError(f"{named} {why}: make one with vlmrb corpus and the run's own configuration")
    answers = _answers(config, corpus, scorer, frames_per_clip)
    rows = np.flatnonzero(~np.isnan(answers))
    if not len(rows):
        raise ValueError(
            f"{named}: none of its {len(answers):,} clips has a score by scorer {scorer.name!r}, version "
            f"{scorer.version!r}, as the run is to ask it, in scoring.student.corpus_scores={config.corpus_scores}; "
            f"this makes them: vlmrb calibrate -c SCORER.yaml --corpus {config.corpus} --out {config.corpus_scores}"
        )
    positive = int((answers[rows] > threshold).sum())
    if positive in (0, len(rows)):
        raise ValueError(
            f"{named}: scorer {scorer.name!r} finds {positive:,} of its {len(rows):,} clips positive "
            f"(τ = {threshold:g}), from which nothing can be learnt: take another corpus (vlmrb corpus --successes) or "
            "another replay.vlm.threshold"
        )
    logger.info("the student learns from %d clips of %s, %d of them positive", len(rows), config.corpus, positive)
    if len(rows) < len(answers):
        logger.warning("%s: %d of its %d clips have no score yet", named, len(answers) - len(rows), len(answers))
    return Lesson(corpus, rows, answers[rows])


def _unlike(corpus: Corpus, renderer: Renderer) -> str | None:
    """Says why a corpus's clips are not such as the run's, if they are not."""
    if corpus.manifest["kind"] == "videos":
        return "holds videos, of which a student has no observations"
    if corpus.renderer.name != renderer.name:
        return f"is of another environment, or drawn otherwise ({corpus.renderer.name}, the run's are {renderer.name})"
    snapshots = corpus.snapshots(np.zeros(1, np.int64))
    theirs = corpus.renderer.observe(snapshots)
    try:
        ours = renderer.observe(snapshots)
    except ValueError as error:
        return f"holds states that the run's environment does not know ({error})"
    if (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape):
        return None
    shapes = f"{theirs.dtype}{list(theirs.shape[2:])}, the run's are {ours.dtype}{list(ours.shape[2:])}"
    return f"has other observations ({shapes})"


def _answers(config: StudentConfig, corpus: Corpus, scorer: Scorer, frames_per_clip: int | None) -> NDArray[np.float32]:
    """Returns the scorer's answers for all clips, ``float32[N]``, NaN where there is none."""
    from vlmrb.scoring.cache import ScoreCache

    assert config.corpus_scores is not None
    path = Path(config.corpus_scores)
    file = path / "scores.sqlite" if path.is_dir() else path
    found = np.full(len(corpus.clips), np.nan, np.float32)
    if not file.is_file():  # opening it would make it
        return found
    cache = ScoreCache(file)
    try:
        for start in range(0, len(found), PART):
            rows = np.arange(start, min(start + PART, len(found)))
            clips = corpus.batch(rows)
            shown = clips if frames_per_clip is None else clips.thinned(frames_per_clip)
            found[rows] = cache.get_many(cache.keys(scorer, shown))
    finally:
        cache.close()
    return found
