"""Finds by the scorer itself what made a clip positive: windows of it are scored, ever closer around that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.backends import Answer
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.windows import SEARCHES, Search, Way, Window, cut

if TYPE_CHECKING:
    from vlmrb.replay.clips import ClipStore


@dataclass
class _Round:
    """What a clip's search waits for.

    Attributes:
        search: goes on when all is answered.
        windows: what it asks about.
        answers: window → is it positive, as far as that is known.
    """

    search: Search
    windows: list[Window]
    answers: dict[Window, bool] = field(default_factory=dict)


class Bisection:
    """Searches positive clips for the windows that made them so, down to a least length.

    The newest clips go first. Clips that are overwritten meanwhile, those of windows that the scorer fails on, and the
    oldest of those for which there is no room are given up: their rows keep equal credit.

    Args:
        by: which windows the scorer is shown, see `vlmrb.scoring.windows`.
        least: frames, at least 2, to which the search goes down.
        threshold: τ, strictly exceeded by a positive score.
        clips: where clips are kept.
        renderer: draws their snapshots.
        credit: hears which transitions made clips positive: clip ids, and ``bool[B, L − 1]``.
        max_waiting: most windows waiting, those of the newest clip aside; ``None`` for no bound.
    """

    def __init__(
        self,
        by: Way,
        least: int,
        threshold: float,
        clips: ClipStore,
        renderer: Renderer | None,
        credit: Callable[[list[int], NDArray[np.bool_]], None],
        max_waiting: int | None = None,
    ) -> None:
        self._search = SEARCHES[by]
        self._least = least
        self._threshold = threshold
        self._clips = clips
        self._renderer = renderer
        self._credit = credit
        self._max_waiting = max_waiting
        self._waiting: dict[int, list[Window]] = {}  # clip id → windows that have not been handed over
        self._in_flight: dict[int, list[Window]] = {}  # ticket → windows that are with the scorer
        self._rounds: dict[int, _Round] = {}  # clip id → round of its search
        self._asked = 0
        self._located = 0
        self._dropped = 0

    def begin(self, clip_id: int, score: float) -> None:
        """Hears the scorer's answer for a clip in the store; positive ones are searched."""
        if not score > self._threshold or clip_id in self._rounds:
            return
        frames = int(self._clips.batch([clip_id]).lengths[0])
        self._go_on(clip_id, self._search(Window(clip_id, 0, frames - 1), self._least))

    def hand_over(self, ticket: int, count: int) -> ClipBatch | None:
        """Returns up to ``count`` windows to be scored next, as clips of L frames, padded with their last one.

        Args:
            ticket: by which their answer will be known.
            count: most windows.
        """
        windows = self._take(count)
        if not windows:
            return None
        self._in_flight[ticket] = windows
        self._asked += len(windows)
        return cut(self._clips.batch([window.clip_id for window in windows], self._renderer), windows)

    def _take(self, count: int) -> list[Window]:
        found: list[Window] = []
        for clip_id in sorted(self._waiting, reverse=True):
            if len(found) == count:
                break
            if not self._clips.contains(clip_id):
                self._give_up(clip_id)
                continue
            windows = self._waiting.pop(clip_id)
            room = count - len(found)
            found += windows[:room]
            if windows[room:]:
                self._waiting[clip_id] = windows[room:]
        return found

    def bound(self) -> None:
        """Makes room: clips whose rows are gone leave first, then the oldest ones."""
        if self._max_waiting is None or self._windows_waiting() <= self._max_waiting:
            return
        for clip_id in [clip_id for clip_id in self._waiting if not self._clips.contains(clip_id)]:
            self._give_up(clip_id)
        for clip_id in sorted(self._waiting)[:-1]:
            if self._windows_waiting() <= self._max_waiting:
                return
            self._give_up(clip_id)
            self._dropped += 1

    def _windows_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __len__(self) -> int:
        """Windows that wait, or are with the scorer."""
        return self._windows_waiting() + sum(map(len, self._in_flight.values()))

    @property
    def handed_over(self) -> int:
        """Batches that are with the scorer."""
        return len(self._in_flight)

    def answered(self, answer: Answer) -> bool:
        """Hears an answer; returns whether it was about windows. Those without scores end the search in their clips."""
        windows = self._in_flight.pop(answer.ticket, None)
        if windows is None:
            return False
        if answer.scores is None:
            for window in windows:
                self._give_up(window.clip_id)
        else:
            self._note(windows, answer.scores)
        return True

    def close(self) -> None:
        """Ends all searches."""
        self._waiting.clear()
        self._in_flight.clear()
        self._rounds.clear()

    def _note(self, windows: Sequence[Window], scores: NDArray[np.float32]) -> None:
        for window, score in zip(windows, scores.tolist(), strict=True):
            waits = self._rounds.get(window.clip_id)
            if waits is None:
                continue
            waits.answers[window] = score > self._threshold
            if len(waits.answers) == len(waits.windows):
                self._go_on(window.clip_id, waits.search, [waits.answers[asked] for asked in waits.windows])

    def _go_on(self, clip_id: int, search: Search, answers: list[bool] | None = None) -> None:
        """Has a search say what it asks about next; without answers, at first."""
        try:
            windows = next(search) if answers is None else search.send(answers)
        except StopIteration as end:
            self._rounds.pop(clip_id, None)
            self._locate(clip_id, end.value)
            return
        self._rounds[clip_id] = _Round(search, windows)
        self._waiting[clip_id] = list(windows)

    def _locate(self, clip_id: int, windows: Sequence[Window]) -> None:
        self._located += 1
        if self._clips.contains(clip_id):
            decisive = np.zeros((1, self._clips.clip_length - 1), bool)
            for window in windows:
                decisive[0, window.first : window.last] = True
            self._credit([clip_id], decisive)

    def _give_up(self, clip_id: int) -> None:
        self._rounds.pop(clip_id, None)
        self._waiting.pop(clip_id, None)

    def stats(self) -> dict[str, float]:
        """Returns counts since the run began.

        ``bisection_asked``: windows handed over; ``bisection_located``: clips whose search has ended;
        ``bisection_dropped``: clips whose search was given up for want of room.
        """
        return {
            "bisection_asked": self._asked,
            "bisection_located": self._located,
            "bisection_dropped": self._dropped,
        }
