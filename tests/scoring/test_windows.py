"""Searches for what made a clip positive, without a service: against brute force, how many windows, odd scorers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.windows import Search, Window, by_beginnings, by_halves, cut


def answer(search: Search, positive: Callable[[Window], bool]) -> tuple[list[Window], list[Window]]:
    """Returns the decisive windows, and all that were asked about."""
    asked: list[Window] = []
    try:
        windows = next(search)
        while True:
            asked += windows
            windows = search.send([positive(window) for window in windows])
    except StopIteration as end:
        return end.value, asked


def sees(events: np.ndarray) -> Callable[[Window], bool]:
    """Says yes where one of the transitions within a window, ``bool[L − 1]``, is an event."""
    return lambda window: bool(events[window.first : window.last].any())


def some_events(count: int) -> list[tuple[np.ndarray, int]]:
    """Returns events of clips of 2 to 40 frames, at least one in each, and least lengths."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        events = rng.random(rng.integers(1, 40)) < rng.choice([0.0, 0.1, 0.5])
        events[rng.integers(len(events))] = True
        found.append((events, int(rng.integers(2, 9))))
    return found


def test_halves_find_all_events_and_nothing_else() -> None:
    for events, least in some_events(500):
        clip = Window(3, 0, len(events))
        decisive, asked = answer(by_halves(clip, least), sees(events))
        credited = np.zeros_like(events)
        for window in decisive:
            assert window.frames <= least
            assert events[window.first : window.last].any()
            credited[window.first : window.last] = True
        assert credited[events].all()
        assert len(set(asked)) == len(asked)
        assert all(window.frames >= 2 and window.clip_id == 3 for window in asked)


def test_beginnings_enclose_the_first_end_at_which_the_answer_is_yes() -> None:
    for events, least in some_events(500):
        clip = Window(3, 0, len(events))
        yes = [end for end in range(1, len(events) + 1) if sees(events)(Window(3, 0, end))]
        (window,), asked = answer(by_beginnings(clip, least), sees(events))
        assert window.first < yes[0] <= window.last
        assert window.frames <= least
        assert all(one.first == 0 and 2 <= one.frames < clip.frames and one.clip_id == 3 for one in asked)
        assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(("frames", "least", "levels"), [(33, 2, 5), (33, 5, 3), (17, 3, 3), (3, 2, 1), (4, 4, 0)])
def test_a_single_event_takes_one_beginning_or_two_halves_a_level(frames: int, least: int, levels: int) -> None:
    for place in range(frames - 1):
        events = np.arange(frames - 1) == place
        clip = Window(0, 0, frames - 1)
        halves, asked_halves = answer(by_halves(clip, least), sees(events))
        beginnings, asked_beginnings = answer(by_beginnings(clip, least), sees(events))
        assert (len(asked_halves), len(asked_beginnings)) == (2 * levels, levels)
        assert halves == beginnings  # of lengths that halve evenly


def test_any_scorer_is_led_to_a_change_from_no_to_yes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        last, least = int(rng.integers(1, 40)), int(rng.integers(2, 6))
        says = rng.random(last + 1) < 0.5  # by the end of the beginning, whatever it begins with
        says[0], says[last] = False, True
        (window,), _ = answer(by_beginnings(Window(0, 0, last), least), lambda one, says=says: bool(says[one.last]))
        assert not says[window.first]
        assert says[window.last]
        assert window.frames <= least


def test_a_scorer_that_says_yes_to_nothing_but_the_whole_clip() -> None:
    clip = Window(0, 0, 32)
    assert answer(by_halves(clip, 2), lambda _: False)[0] == [clip]
    assert answer(by_beginnings(clip, 2), lambda _: False)[0] == [Window(0, 31, 32)]  # the last transition, as a goal's


@pytest.mark.parametrize("frames", [2, 3, 4, 9, 16])
def test_halves_share_a_frame_so_that_no_transition_is_lost(frames: int) -> None:
    window = Window(0, 5, 5 + frames - 1)
    assert window.frames == frames
    if frames > 2:
        first, second = window.halves()
        assert (first.first, first.last, second.last) == (window.first, second.first, window.last)
        assert max(first.frames, second.frames) < frames


def test_windows_are_cut_as_clips_of_the_same_shape() -> None:
    snapshots = np.arange(2 * 6 * 3).reshape(2, 6, 3)
    clips = ClipBatch(np.array([7, 8]), snapshots, np.array([6, 5]))
    windows = cut(clips, [Window(7, 0, 2), Window(8, 1, 4)])
    assert windows.clip_ids.tolist() == [7, 8]
    assert windows.lengths.tolist() == [3, 4]
    np.testing.assert_array_equal(windows.snapshots[0], snapshots[0, [0, 1, 2, 2, 2, 2]])
    np.testing.assert_array_equal(windows.snapshots[1], snapshots[1, [1, 2, 3, 4, 4, 4]])
