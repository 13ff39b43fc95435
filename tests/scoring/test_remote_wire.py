"""What travels between the remote scorer and its server arrives unchanged, and is believed only as far as checked."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from doorkey_clips import make_clips
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_scorers import GreyRenderer

from vlmrb.envs import EnvConfig, make_renderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.serving.wire import Identity, WireError, pack, read_answer, read_header, unpack

FRAMES = Identity("grey", "1", "", "frames", None)
LIMIT = 1 << 26


def some_clips(count: int = 5, length: int = 4, seed: int = 0) -> ClipBatch:
    rng = np.random.default_rng(seed)
    snapshots = rng.integers(0, 9, (count, length, 3))
    return ClipBatch(np.arange(count), snapshots, rng.integers(2, length + 1, count), GreyRenderer())


def reheaded(message: bytes, **changes: object) -> bytes:
    """Returns a request with changes to its header."""
    size = struct.unpack_from("<I", message, 8)[0]
    header = json.dumps({**json.loads(message[12 : 12 + size]), **changes}).encode()
    return message[:8] + struct.pack("<I", len(header)) + header + message[12 + size :]


@pytest.mark.parametrize("size", [None, 64])
def test_frames_arrive_byte_for_byte(size):
    renderer = make_renderer(EnvConfig(id="MiniGrid-DoorKey-6x6-v0"))
    clips = make_clips(6, 8, renderer, env_steps=40, instances=4)
    header, sent = unpack(pack(clips, replace(FRAMES, frame_size=size)), LIMIT)
    np.testing.assert_array_equal(sent.frames(size), clips.frames(size))
    np.testing.assert_array_equal(sent.lengths, clips.lengths)
    assert header.clips == len(sent) == len(clips)


def test_observations_and_snapshots_arrive_with_their_dtype():
    renderer = make_renderer(EnvConfig(id="MiniGrid-DoorKey-6x6-v0"))
    clips = make_clips(6, 8, renderer, env_steps=20, instances=4)
    sent = unpack(pack(clips, replace(FRAMES, needs="observations")), LIMIT)[1]
    np.testing.assert_array_equal(sent.observations(), clips.observations())
    assert sent.observations().dtype == clips.observations().dtype
    bare = ClipBatch(clips.clip_ids, clips.snapshots.astype(np.float32) / 3, clips.lengths)
    sent = unpack(pack(bare, replace(FRAMES, needs="snapshots")), LIMIT)[1]
    np.testing.assert_array_equal(sent.snapshots, bare.snapshots)
    assert sent.snapshots.dtype == np.float32


def test_each_distinct_frame_is_drawn_and_sent_once():
    class CountingRenderer(GreyRenderer):
        drawn = 0

        def render(self, snapshots, frame_size=None):
            self.drawn += len(snapshots.reshape(-1, snapshots.shape[-1]))
            return super().render(snapshots, frame_size)

    snapshots = np.zeros((6, 4, 3), np.int64)
    snapshots[:3, 2] = [1, 0, 0]
    snapshots[3:, 2] = [0, 1, 0]  # another state that looks the same
    clips = ClipBatch(np.arange(6), snapshots, np.full(6, 4), CountingRenderer())
    header, _ = read_header(pack(clips, FRAMES))
    assert header.shape == (2, 4, 4, 3)
    assert clips.renderer.drawn == 3


def test_selected_clips_keep_their_own_frames():
    clips = some_clips()
    sent = unpack(pack(clips, FRAMES), LIMIT)[1]
    rows = np.array([3, 1])
    np.testing.assert_array_equal(sent.select(rows).frames(), clips.select(rows).frames())


def test_frames_of_another_size_than_announced_are_not_handed_out():
    sent = unpack(pack(some_clips(), FRAMES), LIMIT)[1]
    with pytest.raises(ValueError, match="frame_size=None, the scorer wants 32"):
        sent.frames(32)


def test_clips_without_a_renderer_are_refused_by_the_scorers_name():
    clips = some_clips()
    with pytest.raises(ValueError, match="'grey' needs frames"):
        pack(ClipBatch(clips.clip_ids, clips.snapshots, clips.lengths), FRAMES)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 2}, "schema 2, this side speaks 1"),
        ({"clips": 0}, "number of clips"),
        ({"clips": 6}, "one length per clip"),
        ({"lengths": [1, 2, 3, 4, 5]}, "between 1 and 4"),
        ({"shape": []}, "shape"),
        ({"shape": [2, -1, 4, 3]}, "shape"),
        ({"shape": [1, 4, 4, 3]}, "not of the size"),
        ({"shape": [2**30, 2**10, 2**10, 3]}, "at most 67108864"),
        ({"dtype": "|O"}, "dtype object"),
        ({"dtype": "<f4"}, "must be uint8"),
        ({"dtype": "nonsense"}, "proper dtype"),
        ({"scorer": None}, "no description"),
        ({"scorer": {**vars(FRAMES), "needs": "money"}}, "needs"),
        ({"scorer": {**vars(FRAMES), "version": 1}}, "version"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_in_one_line(changes, reason):
    with pytest.raises(WireError, match=reason) as caught:
        unpack(reheaded(pack(some_clips(), FRAMES), **changes), LIMIT)
    assert "\n" not in str(caught.value)


def test_a_frame_that_was_not_sent_cannot_be_referred_to():
    message = pack(some_clips(), FRAMES)
    header, start = read_header(message)
    body = bytearray(zlib.decompress(message[start:]))
    for wrong in (header.shape[0], -1):
        body[-4:] = struct.pack("<i", wrong)
        with pytest.raises(WireError, match="not sent"):
            unpack(message[:start] + zlib.compress(bytes(body)), LIMIT)


def test_a_body_that_unpacks_to_more_than_announced_stops_there():
    message = pack(some_clips(), FRAMES)
    _, start = read_header(message)
    with pytest.raises(WireError, match="not of the size"):
        unpack(message[:start] + zlib.compress(bytes(1 << 24)), LIMIT)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.binary(max_size=8))
def test_whatever_is_damaged_on_the_way_is_noticed_or_harmless(place, rubbish):
    message = pack(some_clips(), FRAMES)
    damaged = message[: place % len(message)] + rubbish + message[place % len(message) + len(rubbish) :]
    try:
        _, sent = unpack(damaged, LIMIT)
    except WireError:
        return
    assert sent.frames(sent.renderer.frame_size).shape[0] == len(sent)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_rubbish_is_no_request(rubbish):
    with pytest.raises(WireError):
        read_header(rubbish)


def answer(**changes: object) -> bytes:
    return json.dumps({"schema": 1, "scorer": vars(FRAMES), "scores": [0.25, 1.0], **changes}).encode()


def test_scores_arrive_to_the_last_bit():
    scores = np.random.default_rng(0).random(1000).astype(np.float32)
    found, stats = read_answer(answer(scores=scores.tolist(), stats={"mass": 0.5, "who": "me"}), FRAMES, 1000)
    np.testing.assert_array_equal(found, scores)
    assert found.dtype == np.float32
    assert stats == {"mass": 0.5}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>hello</html>",
        b"[]",
        b"null",
        answer(schema=2),
        answer(scorer=None),
        answer(scorer={**vars(FRAMES), "version": "2"}),
        answer(scores=None),
        answer(scores=[0.5]),
        answer(scores=[0.5, float("nan")]),
        answer(scores=[0.5, 1.5]),
        answer(scores=["a", "b"]),
        answer(scores=[[0.5, 0.5]]),
        answer(scores={"a": 1}),
    ],
)
def test_an_answer_that_is_not_one_score_per_clip_by_the_right_scorer_is_refused(content):
    with pytest.raises(WireError):
        read_answer(content, FRAMES, 2)
