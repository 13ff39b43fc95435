"""Clips on their way over a student's desk, and where they can go from there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Where(Enum):
    """What becomes of a clip."""

    SCORER = "scorer"
    STUDENT = "student"  # its guess stands for the score
    NOBODY = "nobody"


@dataclass(slots=True)
class Entry:
    """A clip on its way to the queue.

    Attributes:
        key: see `Content`.
        clip_id: the clip.
        completed: env step at which it was completed.
        described: see `Content`.
        audited: see `Content`.
        score: what the scorer has said of it; NaN if it has not.
        again: it has been guessed before.
    """

    key: bytes
    clip_id: int
    completed: int
    described: Any = None
    audited: bool = False
    score: float = math.nan
    again: bool = False

    @property
    def waits(self) -> bool:
        """Whether nothing has become of the clip yet."""
        return math.isnan(self.score) and not self.again


@dataclass
class Sent:
    """Clips that have left the desk in some way, since the run began.

    Attributes:
        to_scorer: clips sent on to the scorer's queue.
        guessed: clips for which the student's guess stands now.
        passed: clips that nobody looks at: surely negative, says the student.
        changed: clips of the latter two kinds of which it thought otherwise later.
    """

    to_scorer: int = 0
    guessed: int = 0
    passed: int = 0
    changed: int = 0
