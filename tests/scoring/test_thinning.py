"""Fewer frames of each clip: which ones, what the scorer and the cache see of them, and who refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from odd_scorers import FrameScorer, GoodScorer, GreyRenderer, expected_scores
from replay_tools import CLIP_LENGTH, Episodes, check_counts, make_buffer, scores_of

from vlmrb.preflight import thinning_checks
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.sprites import SpritesScorer


def numbered(lengths: list[int], frames: int) -> ClipBatch:
    """Clips whose k-th frame is the number k, short ones repeating their last."""
    real = np.array(lengths)
    snapshots = np.minimum(np.arange(frames), real[:, None] - 1)[..., None]
    return ClipBatch(np.arange(len(real)) + 7, snapshots, real)


def kept_of(length: int, frames: int) -> list[int]:
    """The frames nearest to evenly spaced places, the later one of two that are equally near."""
    if length <= frames:
        return list(range(length))
    if frames == 1:
        return [length - 1]
    places = [place * (length - 1) / (frames - 1) for place in range(frames)]
    return [max(range(length), key=lambda frame: (-abs(frame - place), frame)) for place in places]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 45))
def test_thinned_clips_hold_evenly_spaced_frames_of_their_real_length(
    lengths: list[int], padding: int, frames: int
) -> None:
    longest = max(lengths) + padding
    thinned = numbered(lengths, longest).thinned(frames)
    assert thinned.snapshots.shape == (len(lengths), min(frames, longest), 1)
    assert thinned.clip_ids.tolist() == [7 + row for row in range(len(lengths))]
    for row, length in enumerate(lengths):
        expected = kept_of(length, frames)
        assert thinned.lengths[row] == len(expected) == min(length, frames)
        shown = thinned.snapshots[row, :, 0].tolist()
        assert shown == expected + [length - 1] * (len(shown) - len(expected))
        assert shown[-1] == length - 1
        assert frames == 1 or shown[0] == 0


def test_a_clip_cannot_be_thinned_to_nothing() -> None:
    with pytest.raises(ValueError, match="thinned to 0 frames"):
        numbered([4], 4).thinned(0)


def test_one_frame_per_clip_is_no_clip() -> None:
    with pytest.raises(ValueError, match=r"scoring\.frames_per_clip=1 must be at least 2, or null"):
        ScoringConfig(frames_per_clip=1)


class CountingRenderer(GreyRenderer):
    """Counts what it draws."""

    def __init__(self) -> None:
        self.frames = 0

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        self.frames += snapshots[..., 0].size
        return super().render(snapshots, frame_size)


def score_all(scorer: Scorer, **settings: Any) -> tuple[Any, CountingRenderer, ScoreCache]:
    buffer, renderer, cache = make_buffer(), CountingRenderer(), ScoreCache()
    service = ScoringService(buffer, scorer, renderer, cache=cache, backend="sync", **settings)
    Episodes(seed=1, end=0.3).clips(buffer, 60)
    service.poll(100)
    assert check_counts(service)["scored"] == 60
    service.close()
    return buffer, renderer, cache


def test_the_service_shows_keys_and_renders_thinned_clips_and_writes_to_all_rows() -> None:
    frames = 2
    whole, drawn, known = score_all(FrameScorer())
    thin, drawn_thin, known_thin = score_all(FrameScorer(), frames_per_clip=frames)
    ids = thin.clips.table()["clip_id"].tolist()
    clips = thin.clips.batch(ids, GreyRenderer())
    assert (clips.lengths < CLIP_LENGTH).any()
    assert (clips.lengths == CLIP_LENGTH).any()
    np.testing.assert_array_equal(scores_of(thin, ids), FrameScorer().score(clips.thinned(frames)))
    assert (scores_of(thin, ids) != scores_of(whole, ids)).any()
    assert drawn_thin.frames * CLIP_LENGTH == drawn.frames * frames
    # Nothing of one is known to the other: not even of clips short enough to keep all frames, as these were padded.
    assert not set(known_thin.keys(FrameScorer(), clips.thinned(frames))) & set(known.keys(FrameScorer(), clips))
    # The rows: all of every clip, not only those beside the frames shown.
    rows = thin.clips.rows_of(ids)
    scored = thin.columns["scored"].numpy()[rows.slots]
    assert scored.all()
    assert len(rows.slots) == (clips.lengths - 1).sum()


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_other_back_ends_are_handed_thinned_clips_as_well(backend: str) -> None:
    buffer = make_buffer()
    service = ScoringService(buffer, GoodScorer(), backend=backend, frames_per_clip=3)
    Episodes(seed=2).clips(buffer, 40)
    service.poll(100)
    assert service.drain(60)
    service.close()
    ids = buffer.clips.table()["clip_id"].tolist()
    expected = expected_scores(buffer.clips.batch(ids).thinned(3).snapshots)
    np.testing.assert_array_equal(scores_of(buffer, ids), expected)


@pytest.mark.parametrize("scorer", [MilestonesScorer(), SpritesScorer()])
def test_scorers_that_read_consecutive_frames_refuse_thinned_clips(scorer: Scorer) -> None:
    with pytest.raises(ScorerError, match=rf"{scorer.name!r} reads .*frames_per_clip=4 leaves some out: set it to"):
        ScoringService(make_buffer(), scorer, GreyRenderer(), backend="sync", frames_per_clip=4)
    (check,) = thinning_checks(scorer, 4)
    assert (check.name, check.status) == ("clips", "fail")
    assert "set it to null" in check.advice
    assert thinning_checks(scorer, None) == []
    assert thinning_checks(GoodScorer(), 4) == []
