"""HFScorer on small models of four families: the answers are meaningless, but each must be the right one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from doorkey_clips import make_clips
from numpy.typing import NDArray
from small_vlms import FAMILIES, FRAME_PIXELS, WORDS, build_small_vlm

from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.hf import HFScorer
from vlmrb.scoring.prompts import PROMPTS

LENGTH = 8
EXACT = 1e-6  # in r: float32 on a CPU, summed in another order; the families differ by less than 4e-7
QUESTION = PROMPTS["grid"].text


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return build_small_vlm(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def plain(folder):
    return ready(folder, fast=False)


@pytest.fixture(scope="module")
def fast(folder):
    return ready(folder, fast=True)


@pytest.fixture(scope="module")
def clips() -> ClipBatch:
    found = make_clips(8, LENGTH, GridRenderer(8, 8), env_steps=40, instances=4, seed=1)
    return found.select(np.arange(10))


def ready(folder, **settings) -> HFScorer:
    scorer = HFScorer(str(folder), **{"frame_size": FRAME_PIXELS, **settings})
    scorer.setup()
    return scorer


def one_by_one(scorer: HFScorer, clips: ClipBatch) -> NDArray[np.float32]:
    return np.concatenate([scorer.score(clips.select(np.array([i]))) for i in range(len(clips))])


def shorter(clips: ClipBatch, length: int) -> ClipBatch:
    return dataclasses.replace(clips, snapshots=clips.snapshots[:, :length], lengths=clips.lengths.clip(max=length))


def by_generating(scorer: HFScorer, clips: ClipBatch) -> NDArray[np.float64]:
    """The way most people write it: one clip at a time through the processor, one generated token, a sum in Python."""
    model, processor = scorer._plain._model, scorer._plain._chat.processor
    vocabulary = processor.tokenizer.get_vocab()
    ids = [vocabulary[word.replace(" ", "Ġ")] for word in WORDS]
    found = []
    for movie in clips.frames(FRAME_PIXELS):
        video = {
            "total_num_frames": len(movie),
            "fps": 1.0,
            "width": movie.shape[2],
            "height": movie.shape[1],
            "duration": float(len(movie)),
            "frames_indices": list(range(len(movie))),
        }
        content = [{"type": "video", "video": movie}, {"type": "text", "text": QUESTION}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"do_sample_frames": False, "video_metadata": [video]},
        )
        generated = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        probability = generated.logits[0][0].double().softmax(-1)[ids]
        found.append(float(probability[:6].sum() / probability.sum()))
    return np.array(found)


def test_the_score_is_that_of_the_first_generated_token(plain, fast, clips):
    few = clips.select(np.arange(3))
    expected = by_generating(plain, few)
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(plain.score(few), expected, atol=EXACT)
    np.testing.assert_allclose(fast.score(few), expected, atol=EXACT)


def test_a_batch_gives_what_single_clips_give(plain, fast, clips):
    together = plain.score(clips)
    np.testing.assert_allclose(one_by_one(plain, clips), together, atol=EXACT)
    np.testing.assert_allclose(one_by_one(fast, clips), together, atol=EXACT)


def test_the_order_in_a_batch_does_not_matter(plain, fast, clips):
    order = np.random.default_rng(0).permutation(len(clips))
    for scorer in (plain, fast):
        np.testing.assert_allclose(scorer.score(clips.select(order)), scorer.score(clips)[order], atol=EXACT)


def test_repeated_frames_and_repeated_clips_change_nothing(plain, fast, clips):
    snapshots = clips.snapshots.copy()
    snapshots[0, :] = snapshots[0, 0]  # a still
    snapshots[1, 3:] = snapshots[1, 2]  # a short clip with its padding
    snapshots[2, 1::2] = snapshots[2, ::2]
    snapshots[3] = snapshots[0]
    odd = dataclasses.replace(clips, snapshots=snapshots, _frames={})
    alone = one_by_one(plain, odd)
    np.testing.assert_allclose(plain.score(odd), alone, atol=EXACT)
    np.testing.assert_allclose(fast.score(odd), alone, atol=EXACT)
    assert alone[3] == alone[0] != alone[1]


def test_an_odd_number_of_frames_is_fine(plain, fast, clips):
    odd = shorter(clips, LENGTH - 1)
    np.testing.assert_allclose(fast.score(odd), plain.score(odd), atol=EXACT)
    assert np.abs(fast.score(odd) - fast.score(clips)).max() > 1e-4


def test_features_kept_from_other_clips_change_nothing(folder, plain, clips):
    scorer = ready(folder, fast=True)
    scorer.score(clips.select(np.arange(5, 10)))
    encoded = scorer._fast._cache.encoded
    scores = scorer.score(clips)
    np.testing.assert_allclose(scores, plain.score(clips), atol=EXACT)
    again = scorer.score(clips)
    np.testing.assert_allclose(again, scores, atol=EXACT)
    assert scorer._fast._cache.encoded > encoded
    assert 0.5 < scorer.stats()["frame_hits"] < 1


def test_time_matters(plain, fast, clips):
    reversed_ = dataclasses.replace(clips, snapshots=clips.snapshots[:, ::-1].copy(), _frames={})
    for scorer in (plain, fast):
        assert np.abs(scorer.score(reversed_) - scorer.score(clips)).max() > 1e-3


def test_frames_of_another_size_are_resized_alike(folder, clips):
    plain, fast = (ready(folder, fast=choice, frame_size=40) for choice in (False, True))
    np.testing.assert_allclose(fast.score(clips), plain.score(clips), atol=EXACT)


def test_pixels_on_the_fast_path_are_the_processors_own_bit_for_bit(plain, clips):
    from vlmrb.scoring.vlm.pixels import encoder_pixels, resized_to

    chat = plain._plain._chat
    for size in (40, FRAME_PIXELS, 104):
        movie = clips.select(np.array([0])).frames(size)
        theirs = chat.inputs(movie)
        given = resized_to(chat.processor, theirs) if chat.family.encoder.sized_by_length else None
        ours = encoder_pixels(chat.processor, chat.family, movie[0], given, torch.device("cpu"))
        for name in chat.family.encoder.arguments.values():
            assert torch.equal(ours[name], theirs[name]), (size, name)


def expected_prompt(family: str) -> str:
    """The prompt of a clip of 8 frames of 64 pixels, by hand, as the model must read it."""
    turn = "<|start|>user\n{}" + QUESTION + "<|end|>\n<|start|>assistant\n"
    if family == "perception_lm":
        return turn.format("<|video|>" * 8 * 4)
    if family == "gemma4":
        frame = "<|image>" + "<|video|>" * 64 + "<image|>"
        return turn.format(" ".join(f"00:0{second} {frame}" for second in range(8)))
    if family == "qwen3_vl":
        pair = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
        pairs = "".join(f"<{second:.1f} seconds>{pair}" for second in (0.5, 2.5, 4.5, 6.5))
        return turn.format(f"<|vision_start|>{pairs}<|vision_end|>")
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_MEDIA_OUTTRO, DEFAULT_VIDEO_INTRO

    image = "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>"
    intro = DEFAULT_VIDEO_INTRO.format(frame_count="eight", video_duration="0:00:08")
    frames = "".join(f"\nFrame from 00:0{second}:{image}" for second in range(8))
    return f"<|im_start|>User: {intro}{frames}{DEFAULT_MEDIA_OUTTRO}{QUESTION}<end_of_utterance>\nAssistant:"


def test_the_model_reads_exactly_this_prompt(family, plain, clips):
    chat = plain._plain._chat
    found = chat.inputs(clips.frames(FRAME_PIXELS)[:2])["input_ids"]
    assert found[0].equal(found[1])
    tokenizer = chat.processor.tokenizer
    assert tokenizer.decode(found[0]) == expected_prompt(family)
    assert found[0].tolist() == tokenizer.encode(expected_prompt(family), add_special_tokens=False)


def test_clips_can_be_shown_as_lists_of_images(family, folder, plain, clips):
    images = ready(folder, video=False)
    few = clips.select(np.arange(4))
    together = images.score(few)
    np.testing.assert_allclose(one_by_one(images, few), together, atol=EXACT)
    assert images.version != plain.version
    difference = np.abs(together - plain.score(few)).max()
    # the same tokens in one family; the others put times, or pairs of frames, into a video's prompt only
    assert (difference <= EXACT) == (family == "perception_lm")


def test_the_frame_rate_moves_only_families_that_write_it_into_the_prompt(family, folder, plain, clips):
    quick = ready(folder, fps=4.0, fast=False)
    moved = np.abs(quick.score(clips) - plain.score(clips)).max() > EXACT
    assert moved == (family != "perception_lm")
    assert quick.version != plain.version


def test_it_reports_how_much_of_the_probability_is_on_the_answers(folder, clips, caplog):
    scorer = ready(folder)
    scorer.score(clips)
    scorer.score(clips)
    stats = scorer.stats()
    assert 0 < stats["mass_min"] <= stats["mass"] < 0.5
    assert stats["batch_halvings"] == 0
    assert sum("on yes or no" in record.message for record in caplog.records) == 1


def test_frames_are_rendered_at_the_size_of_the_models_patches(family, folder):
    scorer = ready(folder, frame_size=None)
    assert scorer.frame_size == (256 if family == "qwen3_vl" else FRAME_PIXELS)


def test_sixteen_bit_weights_move_scores_little(folder, plain, clips):
    few = clips.select(np.arange(4))
    half = ready(folder, dtype="bfloat16")
    assert half.version != plain.version
    np.testing.assert_allclose(half.score(few), plain.score(few), atol=0.03)
    np.testing.assert_allclose(half.score(few), ready(folder, dtype="bfloat16", fast=False).score(few), atol=0.02)


@pytest.mark.slow
def test_memory_stays_flat_over_hundreds_of_clips(folder):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    scorer = ready(folder, cache_mb=1)
    many = make_clips(8, LENGTH, GridRenderer(8, 8), env_steps=400, instances=8, seed=3)
    batches = [many.select(np.arange(start, start + 16)) for start in range(0, 320, 16)]
    for batch in batches[:5]:
        scorer.score(batch)
    before = resident()
    for batch in batches[5:]:
        scorer.score(batch)
    assert scorer._fast._cache.bytes <= 1 << 20
    assert resident() - before < 8 << 20
