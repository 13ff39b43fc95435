from __future__ import annotations

import numpy as np
import pytest
from counting import World, collect

from vlmrb.replay.buffer import VLMReplayBuffer


class Names:
    """A renderer that is only passed on."""

    name = "names"


@pytest.fixture
def buffer() -> VLMReplayBuffer:
    buffer = VLMReplayBuffer(60, batch_size=8, clip_length=5)
    for block in collect(3, 4, World(9), 8):
        buffer.extend(block)
    return buffer


def test_completed_clips_are_handed_out_once_oldest_first(buffer):
    ids = buffer.clips.take_completed()
    assert ids
    assert buffer.clips.take_completed() == []
    assert set(buffer.clips.table()["clip_id"].tolist()) <= set(ids)


def test_a_batch_is_a_copy_that_outlives_its_clips(buffer):
    ids = buffer.clips.table()["clip_id"].tolist()
    batch = buffer.clips.batch(ids, Names())
    before = batch.snapshots.copy()
    assert batch.renderer.name == "names"
    assert batch.clip_ids.tolist() == ids
    buffer.clips.clear()
    assert (batch.snapshots == before).all()


def test_clips_can_be_asked_for_in_any_order_and_again(buffer):
    ids = buffer.clips.table()["clip_id"].tolist()
    forward, backward = buffer.clips.batch(ids), buffer.clips.batch(ids[::-1])
    assert (forward.snapshots == backward.snapshots[::-1]).all()
    assert (buffer.clips.batch([ids[2]] * 2).snapshots == forward.snapshots[2]).all()


def test_forgotten_clips_are_refused(buffer):
    assert not buffer.clips.contains(0)
    with pytest.raises(KeyError, match=r"clips \[0\] are not in the store"):
        buffer.clips.batch([0])


def test_open_clips_are_refused(buffer):
    kept = {clip for clip in range(buffer.clips.next_id) if buffer.clips.contains(clip)}
    open_clip = max(kept - set(buffer.clips.table()["clip_id"].tolist()))
    with pytest.raises(ValueError, match=rf"clips \[{open_clip}\] are still open"):
        buffer.clips.batch([open_clip])


def test_the_table_tells_ages_lengths_and_scores(buffer):
    table = buffer.clips.table()
    assert (np.diff(table["clip_id"]) > 0).all()
    assert (table["born"] <= buffer.env_steps).all()
    assert (table["born"] % 12 == 0).all()  # known at the end of a block
    assert ((table["rows"] >= 1) & (table["rows"] <= 4)).all()
    assert (table["live"] >= 1).all()
    assert np.isnan(table["score"]).all()
    buffer.write_scores(table["clip_id"][:1].tolist(), [0.75])
    assert buffer.clips.table()["score"][0] == 0.75


def test_ids_go_on_after_clearing(buffer):
    next_id = buffer.clips.next_id
    buffer.empty()
    buffer.extend(next(collect(3, 4, World(9), 1)))
    assert min(clip for clip in range(next_id + 20) if buffer.clips.contains(clip)) == next_id


def test_scores_need_clips():
    with pytest.raises(ValueError, match="me: this buffer keeps no clips"):
        VLMReplayBuffer(60, batch_size=8).write_scores([0], [0.5], source="me")
