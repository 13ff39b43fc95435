"""Finds by the scorer itself what made a clip positive: windows of it are scored, ever closer around that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.backends import Answer
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.windows import SEARCHES, Search, Way, Window, cut

if TYPE_CHECKING:
    from vlmrb.replay.clips import ClipStore


MAX_PLACES = 4096  # contents of which it is remembered what made them positive


@dataclass
class _Round:
    """What a clip's search waits for.

    Attributes:
        search: goes on when all is answered.
        windows: what it asks about.
        content: of the clip, see `Bisection.begin`.
        answers: window → is it positive, as far as that is known.
    """

    search: Search
    windows: list[Window]
    content: bytes | None
    answers: dict[Window, bool] = field(default_factory=dict)


class Bisection:
    """Searches positive clips for the windows that made them so, down to a least length.

    The newest clips go first. Clips that are overwritten meanwhile, those of windows that the scorer fails on, and the
    oldest of those for which there is no room are given up: their rows keep equal credit. What was found in a clip
    holds for later ones that equal it.

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
        self._by: Way = by
        self._least = least
        self._threshold = threshold
        self._clips = clips
        self._renderer = renderer
        self._credit = credit
        self._max_waiting = max_waiting
        self._waiting: dict[int, list[Window]] = {}  # clip id → windows that have not been handed over
        self._in_flight: dict[int, list[Window]] = {}  # ticket → windows that are with the scorer
        self._rounds: dict[int, _Round] = {}  # clip id → round of its search
        self._places: OrderedDict[tuple[bytes, int], list[Window]] = OrderedDict()  # content, frames → decisive windows
        self._asked = 0
        self._located = 0
        self._dropped = 0

    def begin(self, clip_id: int, score: float, content: bytes | None = None) -> None:
        """Hears the scorer's answer for a clip in the store; positive ones are searched.

        Args:
            clip_id: the clip.
            score: the answer, in [0, 1].
            content: the same for clips that look the same to the scorer; ``None`` if nobody can tell.
        """
        if score > self._threshold and clip_id not in self._rounds:
            self._begin(clip_id, content)

    def _begin(self, clip_id: int, content: bytes | None) -> None:
        frames = self._frames(clip_id)
        known = None if content is None else self._places.get((content, frames))
        if known is None:
            self._go_on(clip_id, SEARCHES[self._by](Window(clip_id, 0, frames - 1), self._least), content)
        else:
            self._locate(clip_id, known)

    def _frames(self, clip_id: int) -> int:
        return int(self._clips.batch([clip_id]).lengths[0])

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

    def drop_all(self) -> None:
        """Ends all searches: nobody will answer any more."""
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
                self._go_on(
                    window.clip_id, waits.search, waits.content, [waits.answers[asked] for asked in waits.windows]
                )

    def _go_on(self, clip_id: int, search: Search, content: bytes | None, answers: list[bool] | None = None) -> None:
        """Has a search say what it asks about next; without answers, at first."""
        try:
            windows = next(search) if answers is None else search.send(answers)
        except StopIteration as end:
            self._rounds.pop(clip_id, None)
            if self._clips.contains(clip_id):
                self._remember(content, self._frames(clip_id), end.value)
            self._locate(clip_id, end.value)
            return
        self._rounds[clip_id] = _Round(search, windows, content)
        self._waiting[clip_id] = list(windows)

    def _remember(self, content: bytes | None, frames: int, windows: list[Window]) -> None:
        if content is None:
            return
        self._places[content, frames] = windows
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)

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

    def state_dict(self) -> dict[str, Any]:
        """Returns counts, the clips that are being searched, and what has been found, as plain types."""
        searched = [
            [clip_id, None if waits.content is None else waits.content.hex()] for clip_id, waits in self._rounds.items()
        ]
        places = [
            [content.hex(), frames, [[window.first, window.last] for window in windows]]
            for (content, frames), windows in self._places.items()
        ]
        counts = {"asked": self._asked, "located": self._located, "dropped": self._dropped}
        return {"counts": counts, "searched": searched, "places": places, "settings": self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Counts on, begins anew with the clips that were being searched, and keeps what was found by like settings."""
        counts = state["counts"]
        self._asked, self._located, self._dropped = counts["asked"], counts["located"], counts["dropped"]
        self.drop_all()
        self._places.clear()
        if state["settings"] == self._settings():
            for content, frames, windows in state["places"]:
                found = [Window(-1, first, last) for first, last in windows]
                self._remember(bytes.fromhex(content), frames, found)
        for clip_id, content in state["searched"]:
            if self._clips.contains(clip_id):
                self._begin(clip_id, None if content is None else bytes.fromhex(content))

    def _settings(self) -> list[Any]:
        return [self._by, self._least, self._threshold]
