"""Finds by the scorer itself what made a clip positive: its halves are scored, then the halves of the positive ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.backends import Answer
from vlmrb.scoring.clips import ClipBatch, Renderer

if TYPE_CHECKING:
    from vlmrb.replay.clips import ClipStore


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive frames of a clip.

    Attributes:
        clip_id: of the clip.
        first: its first frame in the clip.
        last: its last one, which the next window begins with.
    """

    clip_id: int
    first: int
    last: int

    @property
    def frames(self) -> int:
        """How many they are."""
        return self.last - self.first + 1

    def halves(self) -> tuple[Window, Window]:
        """Returns both halves, which share a frame, so that no transition falls between them."""
        middle = (self.first + self.last) // 2
        return Window(self.clip_id, self.first, middle), Window(self.clip_id, middle, self.last)


@dataclass
class _Search:
    """What is known of a clip.

    Attributes:
        decisive: windows that are positive and have no positive half, or are not to be halved.
        open: windows of which one half or both wait for their score: window → scores of its halves so far.
    """

    decisive: list[Window] = field(default_factory=list)
    open: dict[Window, dict[Window, float]] = field(default_factory=dict)


class Bisection:
    """Halves positive clips down to a least length, one level of halves after the other.

    It costs two calls of the scorer for each level of a clip that was positive once: 2·log₂(L ÷ least) where a single
    event made it so. A window without a positive half is taken as a whole. Clips that are overwritten meanwhile, and
    windows that the scorer fails on, are given up: their rows keep equal credit.

    Args:
        least: frames, at least 2, below which windows are not halved.
        threshold: τ, strictly exceeded by a positive score.
        clips: where clips are kept.
        renderer: draws their snapshots.
        credit: hears which transitions made clips positive: clip ids, and ``bool[B, L − 1]``.
    """

    def __init__(
        self,
        least: int,
        threshold: float,
        clips: ClipStore,
        renderer: Renderer | None,
        credit: Callable[[list[int], NDArray[np.bool_]], None],
    ) -> None:
        self._least = least
        self._threshold = threshold
        self._clips = clips
        self._renderer = renderer
        self._credit = credit
        self._waiting: deque[Window] = deque()
        self._in_flight: dict[int, list[Window]] = {}  # ticket → windows that are with the scorer
        self._searches: dict[int, _Search] = {}
        self._asked = 0
        self._located = 0

    def begin(self, clip_id: int, score: float) -> None:
        """Hears the scorer's answer for a clip in the store; positive ones are searched."""
        if not score > self._threshold or clip_id in self._searches:
            return
        frames = int(self._clips.batch([clip_id]).lengths[0])
        self._searches[clip_id] = _Search()
        self._refine(Window(clip_id, 0, frames - 1))
        self._finish(clip_id)

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
        return self._shown(windows)

    def _take(self, count: int) -> list[Window]:
        found: list[Window] = []
        while self._waiting and len(found) < count:
            window = self._waiting.popleft()
            if window.clip_id not in self._searches:
                continue
            if self._clips.contains(window.clip_id):
                found.append(window)
            else:
                self._give_up([window])
        return found

    def __len__(self) -> int:
        """Windows that wait, or are with the scorer."""
        return len(self._waiting) + sum(map(len, self._in_flight.values()))

    @property
    def handed_over(self) -> int:
        """Batches that are with the scorer."""
        return len(self._in_flight)

    def _shown(self, windows: Sequence[Window]) -> ClipBatch:
        whole = self._clips.batch([window.clip_id for window in windows], self._renderer)
        first = np.array([window.first for window in windows])[:, None]
        last = np.array([window.last for window in windows])[:, None]
        frames = np.minimum(first + np.arange(self._clips.clip_length), last)
        snapshots = whole.snapshots[np.arange(len(windows))[:, None], frames]
        return ClipBatch(whole.clip_ids, snapshots, (last - first + 1)[:, 0], self._renderer)

    def answered(self, answer: Answer) -> bool:
        """Hears an answer; returns whether it was about windows. Those without scores end the search in their clips."""
        windows = self._in_flight.pop(answer.ticket, None)
        if windows is None:
            return False
        if answer.scores is None:
            self._give_up(windows)
        else:
            self._go_on(windows, answer.scores)
        return True

    def close(self) -> None:
        """Ends all searches."""
        self._waiting.clear()
        self._in_flight.clear()
        self._searches.clear()

    def _go_on(self, windows: Sequence[Window], scores: NDArray[np.float32]) -> None:
        for window, score in zip(windows, scores.tolist(), strict=True):
            search = self._searches.get(window.clip_id)
            if search is None:
                continue
            parent = next(one for one in search.open if window in one.halves())
            halves = search.open[parent]
            halves[window] = score
            if len(halves) < 2:
                continue
            del search.open[parent]
            positive = [half for half, value in halves.items() if value > self._threshold]
            if not positive:
                search.decisive.append(parent)
            for half in positive:
                self._refine(half)
            self._finish(window.clip_id)

    def _give_up(self, windows: Sequence[Window]) -> None:
        for window in windows:
            self._searches.pop(window.clip_id, None)

    def stats(self) -> dict[str, float]:
        """Returns ``bisection_asked``, windows handed over, and ``bisection_located``, clips whose search has ended."""
        return {"bisection_asked": self._asked, "bisection_located": self._located}

    def _refine(self, window: Window) -> None:
        search = self._searches[window.clip_id]
        if window.frames <= max(self._least, 2):
            search.decisive.append(window)
            return
        search.open[window] = {}
        self._waiting.extend(window.halves())

    def _finish(self, clip_id: int) -> None:
        search = self._searches[clip_id]
        if search.open:
            return
        del self._searches[clip_id]
        self._located += 1
        if self._clips.contains(clip_id):
            decisive = np.zeros((1, self._clips.clip_length - 1), bool)
            for window in search.decisive:
                decisive[0, window.first : window.last] = True
            self._credit([clip_id], decisive)
