"""The production scorer on a model that really sees: a wire that is cut shows as scores that mean something else.

The bounds lie between the figures of the whole scorer and of the faulty ones in docs/results/tiny_vlm.json.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from examples.tiny_vlm import measure
from examples.tiny_vlm.clips import ClipSet, make_clips
from examples.tiny_vlm.models import PROMPT
from examples.tiny_vlm.train import HERE, auc
from vlmrb.scoring.hf import HFScorer
from vlmrb.scoring.prompts import PROMPTS
from vlmrb.scoring.vlm import loading
from vlmrb.settings import load_scoring

FOLDER = HERE / "perception_lm"
CONFIG = Path("configs/scorer/tiny_vlm.yaml")

# The prompt `grid`, version 1, as this model's tokenizer and chat template write it around 32 frames of 4 tokens.
BEFORE = [1, 3, 327, 204]
VIDEO = 5
AFTER = [375, 341, 271, 419, 412, 298, 316, 358, 398, 364, 262, 480, 439, 271, 405, 348, 496, 19, 417, 395, 354, 478]
AFTER += [467, 490, 400, 19, 394, 306, 361, 298, 306, 508, 372, 371, 340, 416, 401, 328, 307, 330, 36, 311, 308, 309]
AFTER += [312, 17, 273, 292, 272, 19, 2]
ASSISTANT = [3, 332, 204]


@pytest.fixture(scope="module")
def clips() -> ClipSet:
    return make_clips(200, seed=77, balanced=False)


@pytest.fixture(scope="module")
def scorer() -> HFScorer:
    return measure.make_scorer(FOLDER)


@pytest.fixture(scope="module")
def scores(scorer: HFScorer, clips: ClipSet) -> NDArray[np.float32]:
    return measure.score(scorer, clips)


def _some(clips: ClipSet) -> ClipSet:
    return clips.select(np.arange(24))


def test_it_tells_clips_with_a_milestone_from_others(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    assert auc(clips.labels, scores) >= 0.95
    assert (scores[clips.labels] > 0.5).mean() > 0.85
    assert (scores[~clips.labels] > 0.5).mean() < 0.15


@pytest.mark.parametrize("event", [0, 1, 2], ids=["key", "door", "goal"])
def test_it_sees_each_milestone_where_no_other_happens(scorer: HFScorer, event: int) -> None:
    clips = make_clips(600, seed=78)
    alone = clips.select(measure.only(clips, event))
    assert len(alone) > 20
    assert (measure.score(scorer, alone) > 0.5).mean() > 0.8


def test_nearly_all_probability_is_on_yes_and_no(scorer: HFScorer, scores: NDArray[np.float32]) -> None:
    assert scorer.stats()["mass"] > 0.9
    assert scorer.stats()["mass_min"] > 0.5


def test_without_the_spelling_it_answers_in_the_mass_is_gone(clips: ClipSet, caplog: pytest.LogCaptureFixture) -> None:
    scorer = measure.lower_case_only(measure.make_scorer(FOLDER))
    with caplog.at_level(logging.WARNING):
        measure.score(scorer, _some(clips))
    assert scorer.stats()["mass"] < 0.01
    assert "of the probability is on yes or no" in caplog.text


def _forwards_from_backwards(forwards: NDArray[np.float32], backwards: NDArray[np.float32]) -> float:
    labels = np.arange(len(forwards) + len(backwards)) < len(forwards)
    return auc(labels, np.concatenate((forwards, backwards)))


def test_event_clips_played_backwards_are_no_events(
    scorer: HFScorer, clips: ClipSet, scores: NDArray[np.float32]
) -> None:
    backwards = measure.backwards_without_event(clips.select(clips.labels))
    assert len(backwards) > 20
    turned = measure.score(scorer, backwards)
    assert (turned > 0.5).mean() < 0.2
    assert _forwards_from_backwards(scores[clips.labels], turned) > 0.9


def test_in_random_order_forwards_and_backwards_look_alike(
    scorer: HFScorer, clips: ClipSet, scores: NDArray[np.float32]
) -> None:
    forwards = clips.select(clips.labels)
    backwards = measure.backwards_without_event(forwards)
    shuffled = [measure.score(scorer, measure.shuffled(part)) for part in (forwards, backwards)]
    intact = _forwards_from_backwards(scores[clips.labels], measure.score(scorer, backwards))
    assert _forwards_from_backwards(*shuffled) < intact - 0.1


def test_blank_frames_tell_nothing(scorer: HFScorer, clips: ClipSet) -> None:
    blank = measure.score(scorer, _some(clips), measure.blank)
    np.testing.assert_array_equal(blank, blank[0])


def test_the_first_frame_alone_tells_little(scorer: HFScorer, clips: ClipSet) -> None:
    assert auc(clips.labels, measure.score(scorer, measure.first_frame_only(clips))) < 0.7


def test_with_colour_channels_swapped_events_are_missed(
    scorer: HFScorer, clips: ClipSet, scores: NDArray[np.float32]
) -> None:
    swapped = measure.score(scorer, clips, measure.channels_swapped)
    assert auc(clips.labels, swapped) < auc(clips.labels, scores) - 0.02
    assert (swapped[clips.labels] > 0.5).mean() < (scores[clips.labels] > 0.5).mean() - 0.1


def test_yes_and_no_swapped_in_the_prompt_swap_the_scores(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    question = measure.replace(PROMPT, yes="no", no="yes", name="swapped")
    swapped = measure.score(measure.make_scorer(FOLDER, prompt=question), _some(clips))
    np.testing.assert_allclose(swapped, 1 - scores[:24], atol=1e-5)


def test_asked_something_else_it_says_no(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    other = measure.score(measure.make_scorer(FOLDER, prompt=PROMPTS["grid_terse"]), clips)
    assert (other > 0.5).mean() < 0.05 < (scores > 0.5).mean()


@pytest.mark.parametrize("fast", [True, False])
def test_the_model_reads_the_golden_tokens(clips: ClipSet, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    read: list[torch.Tensor] = []
    load = loading.load

    def watched(*arguments: Any) -> Any:
        processor, model = load(*arguments)
        model.register_forward_pre_hook(lambda _, __, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True)
        return processor, model

    monkeypatch.setattr(loading, "load", watched)
    scorer = measure.make_scorer(FOLDER, fast=fast)
    measure.score(scorer, clips.select(np.arange(3)))
    golden = BEFORE + [VIDEO] * (32 * 4) + AFTER + ASSISTANT
    for tokens in torch.cat(read).tolist():
        assert tokens == golden


def test_without_a_generation_prompt_the_answers_are_others(
    clips: ClipSet, scores: NDArray[np.float32], tmp_path: Path
) -> None:
    assert measure.without_generation_prompt(FOLDER, tmp_path)
    other = measure.score(measure.make_scorer(tmp_path), clips)
    assert ((other > 0.5) == clips.labels).mean() < ((scores > 0.5) == clips.labels).mean() - 0.05


def test_a_clip_scores_alone_as_in_a_batch(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    for fast in (True, False):
        alone = measure.score(measure.make_scorer(FOLDER, batch_clips=1, fast=fast), _some(clips))
        np.testing.assert_allclose(alone, scores[:24], atol=1e-5)


def test_a_list_of_images_scores_as_the_video(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    images = measure.score(measure.make_scorer(FOLDER, video=False, fast=False), _some(clips))
    np.testing.assert_allclose(images, scores[:24], atol=1e-5)


def test_cached_features_score_as_fresh_ones(scorer: HFScorer, clips: ClipSet, scores: NDArray[np.float32]) -> None:
    plain = measure.score(measure.make_scorer(FOLDER, fast=False), _some(clips))
    again = measure.score(scorer, _some(clips))  # every frame of these is in the cache by now
    np.testing.assert_allclose(again, plain, atol=1e-5)
    np.testing.assert_allclose(scores[:24], plain, atol=1e-5)
    assert scorer.stats()["frame_hits"] > 0.5


def test_the_configuration_names_this_model(clips: ClipSet, scores: NDArray[np.float32]) -> None:
    configured = load_scoring([CONFIG]).scorer
    assert isinstance(configured, HFScorer)
    configured.setup()
    np.testing.assert_allclose(configured.score(_some(clips).batch()), scores[:24], atol=1e-5)


def test_the_kept_model_is_small_and_says_what_it_is() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 2e6
    assert "privileged labels" in (FOLDER / "README.md").read_text()
