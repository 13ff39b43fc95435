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
from vlmrb.scoring.backends import Answer
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.controls import Flipped
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService

LENGTH = 16
SELDOM, OFTEN = 23, 5  # at most one event in a clip, and several
both_ways = pytest.mark.parametrize("by", ["halves", "beginnings"])


class EventScorer(Scorer):
    """Says yes where an event happens in the frames that it is shown: time reaches a multiple of ``every``."""

    name, version, needs = "events", "1", "snapshots"

    def __init__(self, every: int = SELDOM, fails_on: int = 0, error: type[BaseException] = RuntimeError) -> None:
        self.calls: list[int] = []
        self.every = every
        self.fails_on = fails_on  # frames of windows that it cannot take
        self.error = error

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.calls += clips.lengths.tolist()
        if (clips.lengths == self.fails_on).any():
            raise self.error("cannot")
        time = clips.snapshots[:, 1:, 1]
        steps = np.arange(1, clips.snapshots.shape[1]) < clips.lengths[:, None]
        return ((time % self.every == 0) & steps).any(1).astype(np.float32)


def make(scorer: Scorer, length: int = LENGTH, **settings: Any) -> tuple[VLMReplayBuffer, ScoringService]:
    buffer = make_buffer(terms=[VLMTerm(0.5), CreditTerm(window=0)], clip_length=length)
    return buffer, ScoringService(buffer, scorer, **{"backend": "sync", "bisect_to": 2} | settings)


def fill(buffer: VLMReplayBuffer, blocks: int = 12, end: float = 0.02) -> None:
    episodes = Episodes(end=end)
    for _ in range(blocks):
        buffer.extend(episodes.block(20))


def check_credit(buffer: VLMReplayBuffer, least: int, by: str, every: int = SELDOM) -> int:
    """Asserts that credit of positive clips lies within ``least`` frames of their events; returns how many clips.

    All events have credit, or the first of each clip alone, by ``beginnings``.
    """
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
        event = (rows["next", "observation"][of_clip.slots, 1] % every == 0).numpy().reshape(-1)
        if by == "beginnings":
            event &= of_clip.positions == of_clip.positions[event].min()
        assert credit[event].all()
        places = of_clip.positions[event]
        near = (np.abs(of_clip.positions[:, None] - places) < least).any(1)
        assert not credit[~near].any()
    return found


@both_ways
@pytest.mark.parametrize("every", [SELDOM, OFTEN])
@pytest.mark.parametrize("least", [2, 4])
def test_what_made_clips_positive_is_found_to_the_least_length(least: int, every: int, by: str) -> None:
    scorer = EventScorer(every)
    buffer, service = make(scorer, bisect_to=least, bisect_by=by)
    fill(buffer)
    service.poll(0)
    service.poll(0)
    assert check_credit(buffer, least, by, every) > 5
    stats = service.stats()
    assert stats["bisection_located"] == stats["positives"]
    assert stats["emitted"] == stats["scored"] == len(scorer.calls) - stats["bisection_asked"]
    levels = stats["positives"] * math.ceil(math.log2((LENGTH - 1) / (least - 1)))
    if by == "beginnings":
        assert stats["bisection_asked"] <= levels
    elif every == SELDOM:
        assert stats["bisection_asked"] <= 2 * levels


@pytest.mark.parametrize(("by", "calls"), [("halves", 8), ("beginnings", 4)])
def test_beginnings_take_half_of_the_calls(by: str, calls: int) -> None:
    buffer, service = make(EventScorer(), length=17, bisect_by=by)
    fill(buffer, end=0)  # clips of 16 transitions all
    service.poll(0)
    stats = service.stats()
    assert stats["bisection_asked"] == calls * stats["positives"] > 5 * calls


@both_ways
def test_in_a_thread_clips_and_windows_take_turns(by: str) -> None:
    buffer, service = make(EventScorer(), backend="thread", batch_clips=3, bisect_by=by)
    try:
        fill(buffer)
        assert service.drain(30)
        assert check_credit(buffer, 2, by) > 5
    finally:
        service.close()


def test_one_batch_at_a_time_clips_and_windows_take_turns_as_well() -> None:
    scorer = EventScorer()
    buffer, service = make(scorer, backend="thread", batch_clips=1, max_in_flight=1)
    try:
        fill(buffer, end=0)  # clips of 16 frames, which no window has
        assert service.drain(30)
        is_clip = [frames == LENGTH for frames in scorer.calls]
        last_clip = len(is_clip) - is_clip[::-1].index(True)
        assert not any(
            not (one or other) for one, other in zip(is_clip[:last_clip], is_clip[1:last_clip], strict=False)
        )
        assert is_clip.count(False) > 20
    finally:
        service.close()


@both_ways
def test_windows_are_counted_by_the_budget(by: str) -> None:
    scorer = EventScorer()
    buffer, service = make(scorer, budget=BudgetConfig(total=30), bisect_by=by)
    fill(buffer)
    service.poll(0)
    stats = service.stats()
    assert stats["bisection_asked"] > 0
    assert stats["budget_used"] == len(scorer.calls) == stats["scored"] + stats["bisection_asked"] == 30


@pytest.mark.parametrize(("by", "fails_on"), [("halves", 5), ("beginnings", 8)])
def test_a_window_that_the_scorer_fails_on_ends_the_search_in_its_clip(
    by: str, fails_on: int, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, service = make(EventScorer(fails_on=fails_on), bisect_by=by, batch_clips=1)
    fill(buffer)
    for _ in range(3):
        service.poll(0)
    stats = service.stats()
    assert stats["failures"] > 0
    assert any("raised RuntimeError: cannot" in record.message for record in caplog.records)
    assert stats["bisection_located"] < stats["positives"]
    assert not service.bisection
    assert stats["scored"] + stats["dropped"] == stats["emitted"]  # whole clips of that length fail as well
    assert len(buffer) > (buffer.columns["credit"].numpy() == 0).sum() > 0  # other clips have been located


def test_that_the_scorer_fails_on_windows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    buffer, service = make(EventScorer(fails_on=9), bisect_by="beginnings", length=17, batch_clips=1)
    fill(buffer, end=0)  # whole clips have 17 frames
    service.poll(0)
    stats = service.stats()
    assert stats["failures"] == stats["positives"] > 1
    assert stats["scored"] == stats["emitted"]
    said = [record.message for record in caplog.records if record.name == "vlmrb.scoring.failures"]
    assert len(said) == 1
    assert (
        "scores for windows of positive clips (it raised RuntimeError: cannot); these clips are searched no" in said[0]
    )


def test_a_scorer_that_is_given_up_ends_all_searches() -> None:
    buffer, service = make(EventScorer(fails_on=8, error=KeyboardInterrupt), backend="thread", batch_clips=2)
    fill(buffer)
    assert service.drain(30)
    assert not service.bisection
    service.close()


@pytest.mark.parametrize(("by", "asked"), [("halves", 2), ("beginnings", 1)])
@pytest.mark.parametrize("handed_over", [False, True])
def test_clips_that_are_overwritten_are_searched_no_more(by: str, asked: int, handed_over: bool) -> None:
    buffer, service = make(EventScorer(), batch_clips=1, bisect_by=by)
    bisection = service.bisection
    assert bisection is not None
    fill(buffer)
    service.poll(0)
    located = bisection.stats()["bisection_located"]
    bisection.begin(0, 1.0)
    assert len(bisection) == asked
    windows = bisection.hand_over(10_000, 100) if handed_over else None
    buffer.empty()
    if windows is not None:
        assert bisection.answered(Answer(10_000, np.ones(len(windows), np.float32)))
    assert bisection.hand_over(10_001, 100) is None
    assert not bisection
    assert bisection.stats()["bisection_located"] == located


def searched(buffer: VLMReplayBuffer, service: ScoringService, count: int) -> list[int]:
    """Begins to search clips that are in the store; returns their ids, oldest first."""
    assert buffer.clips is not None
    assert service.bisection is not None
    fill(buffer, end=0)
    ids = buffer.clips.table()["clip_id"][:count].tolist()
    for clip_id in ids:
        service.bisection.begin(clip_id, 1.0)
    return ids


def test_windows_of_the_newest_clips_go_first() -> None:
    buffer, service = make(EventScorer())
    ids = searched(buffer, service, 5)
    bisection = service.bisection
    assert bisection is not None
    shown = [bisection.hand_over(ticket, count) for ticket, count in enumerate([3, 4, 100])]
    assert [clips.clip_ids.tolist() for clips in shown if clips is not None] == [
        [ids[4], ids[4], ids[3]],
        [ids[3], ids[2], ids[2], ids[1]],
        [ids[1], ids[0], ids[0]],
    ]


def test_where_too_many_windows_wait_the_oldest_clips_are_searched_no_more() -> None:
    buffer, service = make(EventScorer(), backend="thread", max_waiting=5)
    try:
        ids = searched(buffer, service, 6)
        bisection = service.bisection
        assert bisection is not None
        bisection.hand_over(10_000, 1)  # a window of the newest clip
        bisection.bound()
        assert len(bisection) - 1 == 5
        bisection.answered(Answer(10_000, error="raised"))
        clips = bisection.hand_over(10_001, 100)
        assert clips is not None
        assert clips.clip_ids.tolist() == [ids[4], ids[4], ids[3], ids[3]]
        assert service.stats()["bisection_dropped"] == 3
        bisection.begin(ids[5], 1.0)
        service.queue._max_waiting = bisection._max_waiting = 1
        bisection.bound()  # one clip is searched in any case
        assert bisection.hand_over(10_002, 100) is not None
    finally:
        service.close()


@pytest.mark.parametrize("settings", [{}, {"budget": BudgetConfig(total=400)}])
def test_a_scorer_that_training_waits_for_drops_windows_only_where_a_budget_lets_them_wait(
    settings: dict[str, Any],
) -> None:
    buffer, service = make(EventScorer(), max_waiting=2, **settings)
    fill(buffer)
    service.poll(0)
    assert service.bisection is not None
    assert service.bisection._max_waiting == (2 if settings else None)
    assert service.stats()["bisection_dropped"] == 0


def credits(buffer: VLMReplayBuffer) -> list[list[float]]:
    assert buffer.clips is not None
    ids = buffer.clips.table()["clip_id"].tolist()
    return [buffer.columns["credit"].numpy()[buffer.clips.rows_of([clip_id]).slots].tolist() for clip_id in ids]


@both_ways
def test_positive_clips_that_the_cache_knows_are_searched_and_equal_ones_once(by: str) -> None:
    cache = ScoreCache()
    first, service = make(EventScorer(), bisect_by=by, cache=cache)
    fill(first)
    first.end_streams()
    service.poll(0)
    service.poll(0)
    again = EventScorer()
    buffer, service = make(again, bisect_by=by, cache=cache)
    fill(buffer)
    buffer.end_streams()
    service.poll(0)
    stats = service.stats()
    assert stats["cache_hits"] == stats["scored"] > 0
    assert stats["bisection_located"] == stats["positives"] > 5
    assert stats["bisection_asked"] == len(again.calls) > 0
    assert credits(buffer) == credits(first)
    fill(buffer)  # the same clips once more
    buffer.end_streams()
    service.poll(0)
    assert service.stats()["bisection_asked"] == len(again.calls) == stats["bisection_asked"]
    assert service.stats()["bisection_located"] == service.stats()["positives"] == 2 * stats["positives"]
    assert check_credit(buffer, 2, by) == service.stats()["positives"]


def test_a_resumed_run_counts_on_goes_on_searching_and_knows_what_was_found() -> None:
    buffer, service = make(EventScorer(), cache=ScoreCache(), budget=BudgetConfig(total=10_000))
    fill(buffer)
    buffer.end_streams()
    service.poll(0)
    found = credits(buffer)
    assert buffer.clips is not None
    assert service.bisection is not None
    ids = buffer.clips.table()["clip_id"][:3].tolist()
    for clip_id in ids:
        service.bisection.begin(clip_id, 1.0)
    service.close()
    state = service.state_dict()
    resumed_buffer, resumed = make(EventScorer(), cache=ScoreCache(), budget=BudgetConfig(total=10_000))
    resumed_buffer.load_state_dict(buffer.state_dict())
    resumed.load_state_dict(state)
    assert resumed.bisection is not None
    assert resumed.bisection.stats() == service.bisection.stats()
    assert resumed.bisection.state_dict() == service.bisection.state_dict()
    clips = resumed.bisection.hand_over(10_000, 100)
    assert clips is not None
    assert sorted(set(clips.clip_ids.tolist())) == ids
    resumed.bisection.answered(Answer(10_000, error="raised"))
    asked = resumed.stats()["bisection_asked"]
    fill(resumed_buffer)
    resumed_buffer.end_streams()
    resumed.poll(0)
    assert resumed.stats()["bisection_asked"] == asked
    assert credits(resumed_buffer) == 2 * found


@pytest.mark.parametrize("change", [{"bisect_by": "beginnings"}, {"bisect_to": 3}])
def test_what_was_found_by_other_settings_is_searched_anew(change: dict[str, Any]) -> None:
    buffer, service = make(EventScorer(), cache=ScoreCache())
    fill(buffer)
    service.poll(0)
    _, resumed = make(EventScorer(), cache=ScoreCache(), **change)
    assert service.bisection is not None
    assert resumed.bisection is not None
    resumed.bisection.load_state_dict(service.bisection.state_dict())
    assert resumed.bisection.stats() == service.bisection.stats()
    assert not resumed.bisection.state_dict()["places"]


@both_ways
def test_what_a_control_alone_made_positive_is_not_searched(by: str) -> None:
    buffer, service = make(EventScorer(), bisect_by=by, control=Flipped(0.5))
    fill(buffer)
    service.poll(0)
    assert buffer.clips is not None
    table, credit, rows = buffer.clips.table(), buffer.columns["credit"].numpy(), buffer[:]
    true = wrong = 0
    for clip_id in table["clip_id"][table["score"] > 0.5].tolist():
        slots = buffer.clips.rows_of([clip_id]).slots
        happens = bool((rows["next", "observation"][slots, 1] % SELDOM == 0).any())
        assert happens or (credit[slots] == 1).all()
        true, wrong = true + happens, wrong + (not happens)
    assert service.stats()["bisection_located"] == true > 2
    assert wrong > 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bisect_to": 1}, r"scoring\.bisect_to=1 must be at least 2"),
        ({"bisect_by": "thirds"}, r"scoring\.bisect_by='thirds' must be halves or beginnings"),
        ({"bisect_by": "beginnings", "bisect_to": None}, r"scoring\.bisect_by=beginnings has no effect without"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(EventScorer(), **settings)
