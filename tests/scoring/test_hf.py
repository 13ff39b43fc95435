from __future__ import annotations

import numpy as np
import pytest
from doorkey_clips import make_clips
from numpy.typing import NDArray
from small_vlms import FAMILIES, FRAME_PIXELS, build_small_vlm

from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.hf import HFScorer

LENGTH = 8


@pytest.fixture(scope="session", params=FAMILIES)
def folder(request, tmp_path_factory):
    return build_small_vlm(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def clips() -> ClipBatch:
    found = make_clips(8, LENGTH, GridRenderer(8, 8), env_steps=40, instances=4, seed=1)
    return found.select(np.arange(12))


def ready(folder, **settings) -> HFScorer:
    scorer = HFScorer(str(folder), **{"frame_size": FRAME_PIXELS, **settings})
    scorer.setup()
    return scorer


def scores(folder, clips: ClipBatch, **settings) -> NDArray[np.float32]:
    return ready(folder, **settings).score(clips)


def test_a_batch_gives_what_single_clips_give(folder, clips):
    scorer = ready(folder, fast=False)
    together = scorer.score(clips)
    alone = np.concatenate([scorer.score(clips.select(np.array([i]))) for i in range(len(clips))])
    assert together.std() > 1e-4
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_fast_and_plain_path_agree(folder, clips):
    np.testing.assert_allclose(scores(folder, clips, fast=True), scores(folder, clips, fast=False), atol=1e-6)
