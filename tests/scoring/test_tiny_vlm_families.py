"""The production scorer on a trained model of a second family, whose prompt carries times."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.tiny_vlm import measure
from examples.tiny_vlm.clips import ClipSet, make_clips
from examples.tiny_vlm.models import PROMPT
from examples.tiny_vlm.train import HERE, auc
from vlmrb.scoring.hf import HFScorer

FOLDER = HERE / "smolvlm"


@pytest.fixture(scope="module")
def clips() -> ClipSet:
    return make_clips(100, seed=78, balanced=False)


@pytest.fixture(scope="module")
def scorer() -> HFScorer:
    return measure.make_scorer(FOLDER)


@pytest.fixture(scope="module")
def scores(scorer: HFScorer, clips: ClipSet) -> NDArray[np.float32]:
    return measure.score(scorer, clips)


def test_it_tells_clips_with_a_milestone_from_others(
    scorer: HFScorer, clips: ClipSet, scores: NDArray[np.float32]
) -> None:
    assert auc(clips.labels, scores) >= 0.95
    assert (scores[clips.labels] > 0.5).mean() > 0.85
    assert (scores[~clips.labels] > 0.5).mean() < 0.15
    assert scorer.stats()["mass"] > 0.9


def test_event_clips_played_backwards_are_no_events(scorer: HFScorer, clips: ClipSet) -> None:
    backwards = measure.backwards_without_event(clips.select(clips.labels))
    assert len(backwards) > 20
    assert (measure.score(scorer, backwards) > 0.5).mean() < 0.2


def test_yes_and_no_swapped_in_the_prompt_swap_the_scores(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    some = clips.select(np.arange(8))
    swapped = measure.make_scorer(FOLDER, prompt=measure.replace(PROMPT, yes="no", no="yes", name="swapped"))
    np.testing.assert_allclose(measure.score(swapped, some), 1 - scores[:8], atol=1e-5)


def test_cached_and_batched_it_scores_as_plain_and_alone(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    some = clips.select(np.arange(8))
    plain = measure.score(measure.make_scorer(FOLDER, fast=False, batch_clips=1), some)
    np.testing.assert_allclose(scores[:8], plain, atol=1e-5)


def test_the_times_in_its_prompt_matter(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    some = clips.select(np.arange(8))
    other = measure.score(measure.make_scorer(FOLDER, fps=4.0), some)
    assert np.abs(other - scores[:8]).max() > 1e-3
