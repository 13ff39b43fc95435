"""Credit within clips: which rows get it, by brute force, and what it does to priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting import World, collect

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import CreditConfig, ReplayConfig
from vlmrb.replay.credit import CreditTerm
from vlmrb.replay.terms import VLMTerm

LENGTH = 5


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_credit_goes_to_each_decisive_transition_and_the_window_before_it(window: int) -> None:
    decisive = np.random.default_rng(0).random((40, 12)) < 0.15
    credits = CreditTerm(window).credits(decisive)
    for row, clip in enumerate(decisive):
        for step in range(12):
            assert credits[row, step] == clip[step : step + window + 1].any()


def filled(**settings: Any) -> tuple[VLMReplayBuffer, list[int]]:
    terms = [VLMTerm(0.5), CreditTerm(**settings)]
    buffer = VLMReplayBuffer(300, batch_size=64, terms=terms, lam=1.0, clip_length=LENGTH)
    for block in collect(2, 10, World(11), 6):
        buffer.extend(block)
    assert buffer.clips is not None
    return buffer, buffer.clips.take_completed()


def test_of_positive_clips_only_credited_rows_are_drawn() -> None:
    buffer, clips = filled(window=1)
    buffer.write_scores(clips[:4], [0.9, 0.9, 0.1, 0.9])
    decisive = np.zeros((3, LENGTH - 1), bool)
    decisive[0, 2], decisive[2, 0] = True, True  # nothing is said of the second and the fourth
    buffer.write_credit([clips[0], clips[2], 10_000], decisive)
    columns = buffer.columns
    drawn = {index for _ in range(50) for index in buffer.sample()["index"].tolist()}
    where = {(columns["clip_id"][slot].item(), columns["position"][slot].item()) for slot in drawn}
    assert buffer.clips is not None
    rows = {clip: buffer.clips.table()["rows"][buffer.clips.table()["clip_id"] == clip][0] for clip in clips[:4]}
    expected = {(clips[0], step) for step in (1, 2) if step < rows[clips[0]]}
    expected |= {(clip, step) for clip in (clips[1], clips[3]) for step in range(rows[clip])}
    assert where == expected


def test_the_floor_is_what_is_left_for_the_others() -> None:
    np.testing.assert_allclose(np.exp(CreditTerm(floor=0.25).log_priority(np.array([0.0, 1.0]))), [0.25, 1.0])


def test_late_credit_for_rows_that_are_gone_changes_nothing() -> None:
    buffer, clips = filled()
    buffer.empty()
    buffer.write_credit(clips, np.ones((len(clips), LENGTH - 1), bool))
    assert buffer.stats()["written/credit"] == 0


@pytest.mark.parametrize(("window", "floor"), [(-1, 0.0), (1, 1.0), (1, -0.1), (1, float("nan"))])
def test_settings_that_cannot_work_are_refused(window: int, floor: float) -> None:
    with pytest.raises(ValueError, match="credit term"):
        CreditTerm(window, floor)
    with pytest.raises(ValueError, match="replay: the credit term"):
        ReplayConfig(credit=CreditConfig(window, floor))


def test_credit_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replay\.credit is about clips with a score"):
        ReplayConfig(vlm=None, lam_max=0.0, credit=CreditConfig())
