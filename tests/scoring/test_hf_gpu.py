"""What only a GPU can show of HFScorer: the same answers as the processor's, in 16 bit, and memory that runs out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doorkey_clips import make_clips
from small_vlms import FAMILIES, FRAME_PIXELS, build_small_vlm

from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.hf import HFScorer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return build_small_vlm(request.param, tmp_path_factory.mktemp(request.param))


def ready(folder, **settings) -> HFScorer:
    scorer = HFScorer(str(folder), **{"frame_size": FRAME_PIXELS, "device": "cuda", **settings})
    scorer.setup()
    return scorer


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.02)])
def test_fast_and_plain_path_agree(folder, dtype, tolerance):
    clips = make_clips(8, 32, GridRenderer(8, 8), env_steps=120, instances=4, seed=1)
    plain = ready(folder, dtype=dtype, fast=False).score(clips)
    np.testing.assert_allclose(ready(folder, dtype=dtype, fast=True).score(clips), plain, atol=tolerance)


def test_pixels_are_the_processors_own_up_to_a_grey_level(folder):
    from vlmrb.scoring.vlm.pixels import encoder_pixels, resized_to

    scorer = ready(folder)
    chat = scorer._plain._chat
    clips = make_clips(8, 8, GridRenderer(8, 8), env_steps=20, instances=2)
    movie = clips.select(np.array([0])).frames(104)
    theirs = chat.inputs(movie)
    given = resized_to(chat.processor, theirs) if chat.family.encoder.sized_by_length else None
    ours = encoder_pixels(chat.processor, chat.family, movie[0], given, torch.device("cuda"))
    level = 1 / 255 / min(getattr(chat.processor.video_processor, "image_std", None) or [1.0])
    for name in chat.family.encoder.arguments.values():
        difference = (ours[name].cpu().float() - theirs[name].float()).abs().max().item()
        assert difference <= 1.5 * level, name


def test_a_batch_that_does_not_fit_is_halved(folder):
    clips = make_clips(8, 32, GridRenderer(8, 8), env_steps=400, instances=8, seed=1)
    scorer = ready(folder, batch_clips=64, fast=False)
    expected = ready(folder, batch_clips=4, fast=False).score(clips)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((used + (96 << 20)) / total)
    try:
        scores = scorer.score(clips)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert scorer.stats()["batch_halvings"] >= 1
    np.testing.assert_allclose(scores, expected, atol=1e-3)
