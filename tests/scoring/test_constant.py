from __future__ import annotations

import numpy as np
import pytest

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.constant import ConstantScorer
from vlmrb.scoring.scorer import checked_scores

CLIPS = ClipBatch(np.arange(3), np.random.default_rng(0).random((3, 4, 5)), np.full(3, 4))


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_every_clip_gets_the_value_without_being_rendered(value):
    scores = checked_scores(ConstantScorer(value), CLIPS)
    assert scores.dtype == np.float32
    assert scores.tolist() == [np.float32(value)] * 3


def test_another_value_is_another_version():
    assert ConstantScorer(0.3).version != ConstantScorer(0.30000001).version


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_value_that_is_no_score_is_refused(value):
    with pytest.raises(ValueError, match=r"^a constant score must lie in \[0, 1\], got [^\n]*$"):
        ConstantScorer(value)
