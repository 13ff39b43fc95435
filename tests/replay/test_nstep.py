"""n-step returns against TorchRL's own transform; targets worked out by hand are in test_stream.py."""

from __future__ import annotations

import torch
from counting import World, collect
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs.transforms import MultiStepTransform

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.nstep import NStepTransform


def stream(num_envs: int, length: int, seed: int) -> TensorDict:
    """Returns random rows ``[num_envs, length]``; a quarter end their episodes, half of these in a terminal state."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_envs, length)
    done = torch.rand(*shape, 1, generator=generator) < 0.25
    after = {
        "observation": torch.randint(0, 1000, (*shape, 2), generator=generator),
        "reward": torch.randn(*shape, 1, generator=generator),
        "done": done,
        "terminated": done & (torch.rand(*shape, 1, generator=generator) < 0.5),
        "info": TensorDict({"deep": torch.arange(num_envs * length).reshape(shape)}, shape),
    }
    rows = {"observation": torch.arange(num_envs * length).reshape(shape), "next": TensorDict(after, shape)}
    return TensorDict(rows, shape)


@settings(max_examples=50, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    n_steps=st.integers(2, 5),
    seed=st.integers(0, 10**6),
)
def test_rows_are_those_of_torchrls_transform(num_envs, lengths, n_steps, seed):
    rows = stream(num_envs, sum(lengths), seed)
    rows["next", "done"][:, -1] = True
    mine = NStepTransform(n_steps, 0.9)
    blocks = [mine.inv(block) for block in rows.split(lengths, dim=1)]
    blocks = [block for block in blocks if block is not None]
    got = torch.cat([*blocks, mine.flush()], dim=1) if blocks else mine.flush()
    assert got.shape == rows.shape
    # TorchRL never ends a stream; given rows of other episodes afterwards, it gives out all of ours.
    filler = stream(num_envs, n_steps, seed + 1)
    theirs = MultiStepTransform(n_steps, 0.9, done_keys=[]).inv(torch.cat([rows, filler], dim=1))[:, : rows.shape[1]]
    for key in got.keys(True, True):
        torch.testing.assert_close(got[key], theirs[key], msg=str(key))


def test_rows_wait_until_their_returns_are_complete():
    mine = NStepTransform(3, 0.9)
    rows = stream(2, 5, seed=0)
    assert mine.inv(rows[:, :1]) is None
    assert mine.inv(rows[:, 1:2]) is None
    assert mine.inv(rows[:, 2:3])["observation"].tolist() == [[0], [5]]
    assert mine.inv(rows[:, 3:])["observation"].tolist() == [[1, 2], [6, 7]]
    assert mine.flush()["observation"].tolist() == [[3, 4], [8, 9]]
    assert mine.flush() is None


def test_rows_held_back_are_part_of_the_state():
    mine, other = NStepTransform(3, 0.9), NStepTransform(3, 0.9)
    rows = stream(2, 5, seed=0)
    mine.inv(rows[:, :4])
    other.load_state_dict(mine.state_dict())
    assert (mine.inv(rows[:, 4:]) == other.inv(rows[:, 4:])).all()


def test_a_buffer_saved_before_its_first_row_was_complete_goes_on():
    def make() -> VLMReplayBuffer:
        return VLMReplayBuffer(50, batch_size=4, clip_length=4, n_steps=4, gamma=0.9)

    blocks = list(collect(3, 1, World(9), 30))
    first, second = make(), make()
    for block in blocks[:2]:
        first.extend(block)
    assert len(first) == 0
    second.load_state_dict(first.state_dict())
    for block in blocks[2:]:
        first.extend(block)
        second.extend(block)
    assert (first[:] == second[:]).all()
    assert len(second) == 50
