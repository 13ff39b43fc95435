"""Bisection: a scorer that sees single transitions finds them; what it costs, what is given up, who goes first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.scoring.replay_tools import Episodes, make_buffer

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.credit import CreditTerm
from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring.bisection import Window
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService

LENGTH = 16
EVERY = 23  # a transition into a time that is a multiple of this is an event


class EventScorer(Scorer):
    """Says yes where an event happens in the frames that it is shown."""

    name, version, needs = "events", "1", "snapshots"

    def __init__(self, fails_on: int = 0) -> None:
        self.calls: list[int] = []
        self.fails_on = fails_on  # frames of windows that it cannot take

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.calls += clips.lengths.tolist()
        if (clips.lengths == self.fails_on).any():
            raise RuntimeError("cannot")
        time = clips.snapshots[:, 1:, 1]
        steps = np.arange(1, clips.snapshots.shape[1]) < clips.lengths[:, None]
        return ((time % EVERY == 0) & steps).any(1).astype(np.float32)


def make(scorer: Scorer, **settings: Any) -> tuple[VLMReplayBuffer, ScoringService]:
    buffer = make_buffer(terms=[VLMTerm(0.5), CreditTerm(window=0)], clip_length=LENGTH)
    return buffer, ScoringService(buffer, scorer, **{"backend": "sync", "bisect_to": 2} | settings)


def fill(buffer: VLMReplayBuffer, blocks: int = 12) -> None:
    episodes = Episodes(end=0.02)
    for _ in range(blocks):
        buffer.extend(episodes.block(20))


def check_credit(buffer: VLMReplayBuffer, least: int) -> int:
    """Asserts that credited rows of positive clips lie within ``least`` frames of an event; returns how many clips."""
    assert buffer.clips is not None
    columns, rows, found = buffer.columns, buffer[:], 0
    table = buffer.clips.table()
    for clip_id, score in zip(table["clip_id"].tolist(), table["score"].tolist(), strict=True):
        of_clip = buffer.clips.rows_of([clip_id])
        credit = columns["credit"].numpy()[of_clip.slots]
        if score <= 0.5:
            assert (credit == 1).all()
            continue
        found += 1
        event = (rows["next", "observation"][of_clip.slots, 1] % EVERY == 0).numpy().reshape(-1)
        assert credit[event].all()
        places = of_clip.positions[event]
        near = (np.abs(of_clip.positions[:, None] - places) < least).any(1)
        assert not credit[~near].any()
    return found


@pytest.mark.parametrize("least", [2, 4])
def test_what_made_clips_positive_is_found_to_the_least_length(least: int) -> None:
    scorer = EventScorer()
    buffer, service = make(scorer, bisect_to=least)
    fill(buffer)
    service.poll(0)
    service.poll(0)
    assert check_credit(buffer, least) > 5
    stats = service.stats()
    assert stats["bisection_located"] == stats["positives"]
    assert stats["bisection_asked"] <= stats["positives"] * 2 * math.ceil(math.log2((LENGTH - 1) / (least - 1)))
    assert stats["emitted"] == stats["scored"] == len(scorer.calls) - stats["bisection_asked"]


def test_in_a_thread_clips_and_windows_take_turns() -> None:
    buffer, service = make(EventScorer(), backend="thread", batch_clips=3)
    try:
        fill(buffer)
        assert service.drain(30)
        assert check_credit(buffer, 2) > 5
    finally:
        service.close()


def test_windows_are_counted_by_the_budget() -> None:
    scorer = EventScorer()
    buffer, service = make(scorer, budget=BudgetConfig(total=30))
    fill(buffer)
    service.poll(0)
    stats = service.stats()
    assert stats["bisection_asked"] > 0
    assert stats["budget_used"] == len(scorer.calls) == stats["scored"] + stats["bisection_asked"] == 30


def test_a_window_that_the_scorer_fails_on_ends_the_search_in_its_clip() -> None:
    buffer, service = make(EventScorer(fails_on=5))
    fill(buffer)
    for _ in range(3):
        service.poll(0)
    stats = service.stats()
    assert stats["failures"] > 0
    assert stats["bisection_located"] < stats["positives"]
    assert not service.bisection
    assert stats["scored"] + stats["dropped"] == stats["emitted"]  # whole clips of that length fail as well


def test_clips_that_are_overwritten_are_searched_no_more() -> None:
    buffer, service = make(EventScorer(), batch_clips=1)
    assert service.bisection is not None
    fill(buffer)
    service.poll(0)
    service.bisection.begin(0, 1.0)
    waiting = len(service.bisection)
    buffer.empty()
    assert service.bisection.hand_over(10_000, 100) is None
    assert waiting == 2
    assert not service.bisection


@pytest.mark.parametrize("frames", [2, 3, 4, 9, 16])
def test_halves_share_a_frame_so_that_no_transition_is_lost(frames: int) -> None:
    window = Window(0, 5, 5 + frames - 1)
    assert window.frames == frames
    if frames > 2:
        first, second = window.halves()
        assert (first.first, first.last, second.last) == (window.first, second.first, window.last)
        assert max(first.frames, second.frames) < frames


def test_a_least_length_that_is_no_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scoring\.bisect_to=1 must be at least 2"):
        make(EventScorer(), bisect_to=1)
