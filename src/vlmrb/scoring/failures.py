"""What the log says of a scorer that fails."""

from __future__ import annotations

import logging

from vlmrb.scoring.backends import Answer
from vlmrb.scoring.meter import Counts

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2  # a clip that was there when the scorer failed twice is not shown again
MAX_REPORTS = 100  # distinct failures worth a warning


class FailureLog:
    """Speaks of failures, of each kind once.

    Args:
        scorer: its name.
    """

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._reported: set[str] = set()

    def unanswered(self, found: Answer, clips: int) -> None:
        """Warns of a batch of ``clips`` clips without an answer; the counter ``failures`` tells how often."""
        then = f"a clip is tried {MAX_ATTEMPTS} times, then left unscored. Said once, counted in `failures`"
        self._say(found, f"scores for {clips} clips", then)

    def windows_unanswered(self, found: Answer) -> None:
        """Warns of a batch of windows of positive clips without an answer."""
        then = "these clips are searched no more and keep equal credit. Said once, counted in `failures`"
        self._say(found, "scores for windows of positive clips", then)

    def unguessed(self, found: Answer, clips: int) -> None:
        """Warns of a batch of ``clips`` clips of which a student has made no guesses."""
        self._say(found, f"guesses for {clips} clips", "those that waited for one go to the scorer. Said once")

    def _say(self, found: Answer, what: str, then: str) -> None:
        if found.error in self._reported or len(self._reported) >= MAX_REPORTS:
            return
        self._reported.add(found.error)
        why = found.error if found.fatal else f"it {found.error}"
        logger.warning(
            "scorer %r gave no %s (%s); %s.%s", self._scorer, what, why, then, found.detail and "\n" + found.detail
        )

    def given_up(self, why: str) -> None:
        """Says that no more scores will come."""
        logger.error(
            "SCORER %r IS GIVEN UP: %s. Training goes on without new scores, and replay turns uniform as scored rows "
            "are overwritten. Resume the run from a checkpoint to try again.",
            *(self._scorer, why),
        )

    def at_the_end(self, counts: Counts) -> None:
        """Says so if a run had clips, and no score of any."""
        if counts.emitted and not counts.scored:
            why = f"{counts.failures} batches failed" if counts.failures else "it had not answered yet"
            logger.error(
                "scorer %r: NO CLIP WAS EVER SCORED (of %d; %s): as to scores, this was uniform replay",
                *(self._scorer, counts.emitted, why),
            )
