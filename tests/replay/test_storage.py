from __future__ import annotations

import gc
import signal

import pytest
import torch
from counting import World, check_rows, collect
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from vlmrb.replay.buffer import VLMReplayBuffer

WORLD = World(9)


def filled(**kwargs) -> VLMReplayBuffer:
    buffer = VLMReplayBuffer(50, batch_size=16, n_steps=3, gamma=0.9, clip_length=4, **kwargs)
    for block in collect(4, 5, WORLD, 12):
        buffer.extend(block)
    return buffer


@pytest.mark.parametrize("storage", ["memory", "memmap"])
def test_rows_are_the_same_wherever_they_lie(storage, tmp_path):
    buffer = filled(storage=storage, scratch_dir=tmp_path)
    check_rows(buffer, WORLD, 0.9)
    batch = buffer.sample()
    stored = buffer.storage.get(batch["index"])
    for key in stored.keys(True, True):
        assert torch.equal(batch[key], stored[key])
        assert type(batch[key]) is torch.Tensor
    assert len(list(tmp_path.glob("*/observation.memmap"))) == (storage == "memmap")


def test_auto_maps_rows_that_exceed_the_limit():
    row = 3 * 8 + 8 + 3 * 8 + 4 + 1 + 1 + 8  # observation, action, next observation, reward, two flags, steps
    limit = 50 * row / 2**30
    assert isinstance(filled(memory_limit_gib=limit).storage, LazyTensorStorage)
    assert not isinstance(filled(memory_limit_gib=limit).storage, LazyMemmapStorage)
    assert isinstance(filled(memory_limit_gib=limit * 0.999).storage, LazyMemmapStorage)


def test_files_of_rows_go_with_the_buffer_and_are_shared_with_nobody(tmp_path):
    first, second = (filled(storage="memmap", scratch_dir=tmp_path) for _ in range(2))
    second.empty()
    check_rows(first, WORLD, 0.9)
    assert len(list(tmp_path.glob("*/observation.memmap"))) == 2
    del first, second
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_memory_mapped_rows_leave_signals_alone(tmp_path):
    # TorchRL's clean-up would delete them on SIGTERM, before a checkpoint is saved.
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    filled(storage="memmap")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_sample_is_a_copy():
    buffer = filled()
    batch = buffer.sample()
    before = buffer[:].clone()
    for leaf in batch.values(True, True):
        leaf.zero_()
    assert (buffer[:] == before).all()


def test_a_samples_shape_and_info():
    buffer = filled(beta=0.5)
    batch, info = buffer.sample(7, return_info=True)
    assert batch.batch_size == (7,)
    assert info.keys() == {"index", "index_generation", "priority_weight"}
    assert all(torch.equal(batch[key], value) for key, value in info.items())
    assert buffer.sample().batch_size == (16,)


def test_transforms_of_the_user_are_applied_on_the_way_out():
    buffer = filled()
    buffer.append_transform(lambda data: data.set("seen", data["observation"] + 1))
    batch = buffer.sample()
    assert torch.equal(batch["seen"], batch["observation"] + 1)


def test_single_rows_can_be_added():
    buffer = VLMReplayBuffer(50, batch_size=16, clip_length=4)
    for block in collect(1, 5, WORLD, 3):
        for t in range(5):
            assert buffer.add(block[0, t]) == len(buffer) - 1
    assert len(check_rows(buffer, WORLD, 0.9)) == 15


def test_bytes_are_those_of_rows_columns_trees_and_clips():
    small, large = filled().nbytes, filled(memory_limit_gib=1e-9).nbytes
    assert small == large
    assert small > 50 * (3 * 8 + 8 + 3 * 8 + 4 + 1 + 1 + 8)


def test_a_representation_that_says_what_it_is():
    assert repr(filled(lam=0.25)) == (
        "VLMReplayBuffer(capacity=50, size=50, terms=[], sampler=MixtureSampler(lam=0.25, beta=None, positives=50))"
    )
