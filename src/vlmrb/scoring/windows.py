"""Which windows of a positive clip are scored to find what made it so: its halves, or its beginnings.

A search yields the windows to be scored next, is sent whether each of them is positive, and returns the decisive ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlmrb.scoring.clips import ClipBatch

Way = Literal["halves", "beginnings"]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive frames of a clip.

    Attributes:
        clip_id: of the clip.
        first: its first frame in the clip.
        last: its last one, at least one after the first; the transitions ``first`` to ``last − 1`` lie between.
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


Search = Generator[list[Window], list[bool], list[Window]]


def by_halves(clip: Window, least: int) -> Search:
    """Halves a positive clip, and of the halves the positive ones, one level after the other.

    All events are found that the scorer sees in a half by itself. A window without a positive half is decisive as a
    whole. Where a single event made the clip positive it takes 2·log₂(L ÷ least) windows.

    Args:
        clip: the whole clip.
        least: frames, at least 2; windows of no more are decisive without being halved.

    Yields:
        The halves of one level.

    Returns:
        The decisive windows; their transitions made the clip positive.
    """
    decisive: list[Window] = []
    level = [clip]
    while level:
        decisive += [window for window in level if window.frames <= least]
        wholes = [window for window in level if window.frames > least]
        answers = iter((yield [half for whole in wholes for half in whole.halves()]) if wholes else ())
        level = []
        for whole in wholes:
            positive = [half for half in whole.halves() if next(answers)]
            level += positive
            decisive += [] if positive else [whole]
    return decisive


def by_beginnings(clip: Window, least: int) -> Search:
    """Finds by binary search between which two ends of a clip's beginnings the answer turns from no to yes.

    The beginnings overlap, and differ in nothing but the transitions between their ends: these made the difference. A
    scorer that goes on saying yes once it has seen an event leads to the first event. Of any other it is some change
    from no to yes: there is one between the first frame, in which nothing can happen yet, and the whole clip, which is
    positive. Takes log₂(L ÷ least) windows, however many events there are.

    Args:
        clip: the whole clip.
        least: frames, at least 2; ends that enclose no more of them are near enough.

    Yields:
        One beginning of the clip.

    Returns:
        The decisive window, from the end of the longest beginning below it that is negative to the end of one that is
        positive.
    """
    no, yes = clip.first, clip.last
    while yes - no + 1 > least:
        end = (no + yes) // 2
        (positive,) = yield [Window(clip.clip_id, clip.first, end)]
        if positive:
            yes = end
        else:
            no = end
    return [Window(clip.clip_id, no, yes)]


SEARCHES: dict[Way, Callable[[Window, int], Search]] = {"halves": by_halves, "beginnings": by_beginnings}


def cut(clips: ClipBatch, windows: Sequence[Window]) -> ClipBatch:
    """Returns windows as clips of their own.

    Args:
        clips: B clips of up to L frames, the b-th of which the b-th window lies in.
        windows: B windows.

    Returns:
        Snapshots ``[B, L, S]``, padded by repeating a window's last frame, under the clips' ids.
    """
    first = np.array([window.first for window in windows])[:, None]
    last = np.array([window.last for window in windows])[:, None]
    frames = np.minimum(first + np.arange(clips.snapshots.shape[1]), last)
    snapshots = clips.snapshots[np.arange(len(windows))[:, None], frames]
    return ClipBatch(clips.clip_ids, snapshots, (last - first + 1)[:, 0], clips.renderer)
