"""Executable specification of clips with their repetitions taken out, and of the features kept for frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doorkey_clips import make_clips
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.vlm.unique_frames import unique_frames
from vlmrb.scoring.vlm.vision_cache import VisionCache


class Shade:
    """Draws the first number of a snapshot as a grey; the second is not drawn."""

    name = "shade"

    def __init__(self) -> None:
        self.drawn = 0

    def render(self, snapshots, frame_size=None):
        self.drawn += len(snapshots)
        grey = snapshots[..., 0, None, None, None].astype(np.uint8)
        return np.broadcast_to(grey, (*snapshots.shape[:-1], 4, 4, 3)).copy()

    def observe(self, snapshots):
        return snapshots


def batch(snapshots, renderer) -> ClipBatch:
    snapshots = np.asarray(snapshots, np.int16)
    return ClipBatch(np.arange(len(snapshots)), snapshots, np.full(len(snapshots), snapshots.shape[1]), renderer)


def test_it_shows_exactly_the_clips_frames():
    clips = make_clips(6, 8, GridRenderer(6, 6), env_steps=60, instances=4)
    found = unique_frames(clips, 48)
    np.testing.assert_array_equal(found.movie(found.clips)[found.inverse], clips.frames(48))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=3, max_size=3), min_size=1, max_size=6)
)
def test_no_two_frames_and_no_two_clips_are_alike(states):
    clips = batch(states, Shade())
    found = unique_frames(clips, None)
    greys = found.frames[:, 0, 0, 0].tolist()
    assert sorted(greys) == sorted(set(np.array(states)[..., 0].ravel().tolist()))
    assert len(set(found.keys)) == len(greys)
    assert len({row.tobytes() for row in found.clips}) == len(found.clips)
    np.testing.assert_array_equal(found.movie(found.clips)[found.inverse], clips.frames())


def test_a_state_is_drawn_once():
    renderer = Shade()
    unique_frames(batch([[[1, 0], [1, 0], [2, 0]], [[2, 0], [1, 1], [1, 0]]], renderer), None)
    assert renderer.drawn == 3  # (1, 0), (2, 0) and (1, 1)


def test_keys_are_the_same_in_every_batch_and_tell_shapes_apart():
    one, two = (unique_frames(batch([states], Shade()), None) for states in ([[1, 0], [2, 0]], [[2, 1], [3, 0]]))
    assert set(one.keys) & set(two.keys) == {one.keys[one.frames[:, 0, 0, 0].tolist().index(2)]}

    class Wide(Shade):
        def render(self, snapshots, frame_size=None):
            return super().render(snapshots).reshape(*snapshots.shape[:-1], 2, 8, 3)

    assert not set(unique_frames(batch([[[1, 0], [2, 0]]], Wide()), None).keys) & set(one.keys)


def test_snapshots_may_have_any_shape():
    class Picture(Shade):
        def render(self, snapshots, frame_size=None):
            return super().render(snapshots.reshape(len(snapshots), -1))

    clips = batch(np.arange(12).reshape(1, 3, 4), Picture())
    pictures = ClipBatch(clips.clip_ids, clips.snapshots.reshape(1, 3, 2, 2), clips.lengths, Picture())
    assert unique_frames(pictures, None).frames[:, 0, 0, 0].tolist() == [0, 4, 8]


def test_clips_without_a_renderer_are_refused():
    with pytest.raises(ValueError, match="no renderer"):
        unique_frames(batch([[[1, 0], [1, 0]]], None), None)


# The cache of features


def feature(value: int, size: int = 4):
    return (torch.full((size, 2), float(value)),)


def keys(*values: int) -> list[bytes]:
    return [bytes([value]) for value in values]


def ask(cache: VisionCache, *values: int) -> list[int]:
    """Gets features and returns the positions that had to be computed; checks what comes back."""
    computed: list[int] = []

    def encode(missing):
        computed.extend(missing)
        return [feature(values[i]) for i in missing]

    found = cache.get(keys(*values), encode)
    assert [int(part[0][0, 0]) for part in found] == list(values)
    return computed


def test_features_are_computed_once_and_come_in_order():
    cache = VisionCache(1 << 20)
    assert ask(cache, 3, 1) == [0, 1]
    assert ask(cache, 1, 2, 3) == [1]
    assert (cache.asked, cache.encoded) == (5, 3)


def test_the_least_recently_used_goes_first_and_bytes_are_bounded():
    cache = VisionCache(3 * 32)  # three features of 4 × 2 float32
    ask(cache, 1, 2, 3)
    ask(cache, 1)
    ask(cache, 4)
    assert cache.bytes == 96
    assert ask(cache, 1, 3, 4) == []
    assert ask(cache, 2) == [0]


def test_more_features_than_fit_are_still_handed_out():
    cache = VisionCache(2 * 32)
    ask(cache, *range(10))
    assert (len(cache), cache.bytes) == (2, 64)


@pytest.mark.parametrize("room", [0, 31])
def test_without_room_nothing_is_kept(room):
    cache = VisionCache(room)
    ask(cache, 1)
    assert ask(cache, 1) == [0]
    assert (len(cache), cache.bytes) == (0, 0)
