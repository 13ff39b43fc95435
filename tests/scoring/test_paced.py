from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from odd_scorers import FrameScorer, GoodScorer, GreyRenderer, ReportingScorer

from vlmrb.scoring import paced
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.paced import PacedScorer
from vlmrb.scoring.scorer import identity
from vlmrb.settings import load_scoring


class FakeTime:
    """A clock that only sleeping, and whoever works, moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class WorkingScorer(GoodScorer):
    """Works for some seconds per batch."""

    def __init__(self, clock: FakeTime, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def score(self, clips: ClipBatch) -> np.ndarray:
        self.clock.now += self.seconds
        return super().score(clips)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def clips(count: int) -> ClipBatch:
    snapshots = np.arange(count * 4 * 3).reshape(count, 4, 3)
    return ClipBatch(np.arange(count), snapshots, np.full(count, 4), GreyRenderer())


@pytest.mark.parametrize(("count", "clips_per_s"), [(1, 2.0), (16, 20.0), (64, 200.0)])
def test_a_batch_takes_as_long_as_its_clips_and_the_others_time_is_part_of_it(
    clock: FakeTime, count: int, clips_per_s: float
) -> None:
    scorer, begin = PacedScorer(WorkingScorer(clock, 0.125), clips_per_s), clock.now
    answer = scorer.score(clips(count))
    assert clock.now - begin == pytest.approx(count / clips_per_s)
    assert clock.slept == pytest.approx([count / clips_per_s - 0.125])
    np.testing.assert_array_equal(answer, GoodScorer().score(clips(count)))
    assert scorer.stats() == {"late_share": 0.0}


def test_a_scorer_that_is_slower_itself_is_not_slept_for_and_said_to_be_late(clock: FakeTime) -> None:
    scorer = PacedScorer(WorkingScorer(clock, 1.0), 10.0)
    for count in (4, 40, 1, 2):
        scorer.score(clips(count))
    assert clock.slept == pytest.approx([0.0, 3.0, 0.0, 0.0])
    assert scorer.stats() == {"late_share": 0.75}


def test_what_the_other_scorer_needs_and_reports_is_handed_on(clock: FakeTime) -> None:
    scorer = PacedScorer(ReportingScorer({"mass": 0.5}), 10.0)
    scorer.score(clips(3))
    assert scorer.stats() == {"mass": 0.5, "clips": 3, "late_share": 0.0}
    assert PacedScorer(FrameScorer(), 10.0).needs == "frames"


def test_neither_the_other_scorers_scores_nor_those_of_another_speed_are_taken_for_its_own() -> None:
    scorers = [GoodScorer(), PacedScorer(GoodScorer(), 2.0), PacedScorer(GoodScorer(), 20.0)]
    assert [identity(scorer) for scorer in scorers] == [
        ("good", "1"),
        ("paced_good", "1:2.0:1"),
        ("paced_good", "1:20.0:1"),
    ]
    keys = [tuple(ScoreCache().keys(scorer, clips(1))) for scorer in scorers]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("clips_per_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_refused(clips_per_s: float) -> None:
    with pytest.raises(ValueError, match="clips_per_s=.* must be positive and finite"):
        PacedScorer(GoodScorer(), clips_per_s)


def test_its_overlay_names_it() -> None:
    scorer = load_scoring([Path(__file__).parents[2] / "configs/scorer/paced.yaml"]).scorer
    assert identity(scorer)[0] == "paced_sprites"
