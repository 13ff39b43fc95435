"""A saved buffer continues exactly as it would have: same rows, same clips, same draws."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from counting import Pipeline, World, check_rows, collect
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import AgeTerm, TDTerm, VLMTerm

WORLD = World(11)
SCHEMES: dict[str, dict[str, Any]] = {
    "uniform": {"terms": lambda: [], "clip_length": None, "n_steps": 1},
    "per": {"terms": lambda: [TDTerm(0.6, 1e-6)], "lam": 1.0, "beta": 0.4, "clip_length": None},
    "vlm": {"terms": lambda: [VLMTerm()], "n_steps": 1},
    "vlm_td": {"terms": lambda: [VLMTerm(0.3), TDTerm()]},
    "vlm_td_age": {"terms": lambda: [VLMTerm(0.3), TDTerm(), AgeTerm(0.7)]},
}


def make(scheme: str = "vlm_td", capacity: int = 83, **kwargs: Any) -> VLMReplayBuffer:
    settings = {"lam": 0.5, "clip_length": 6, "n_steps": 3, "gamma": 0.9, "seed": 3} | SCHEMES[scheme] | kwargs
    return VLMReplayBuffer(capacity, batch_size=32, **settings | {"terms": settings["terms"]()})


def through_disk(state: dict[str, Any], path: Any) -> dict[str, Any]:
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


def same(first: Any, second: Any, where: str = "state") -> None:
    """Asserts that two states are equal to the last bit."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            same(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for i, pair in enumerate(zip(first, second, strict=True)):
            same(*pair, f"{where}[{i}]")
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype, where
        assert torch.equal(torch.nan_to_num(first, nan=-7.0), torch.nan_to_num(second, nan=-7.0)), where
    else:
        assert first == second or (first != first and second != second), where


def run(buffer: VLMReplayBuffer, blocks: list, drawn: list | None = None) -> VLMReplayBuffer:
    """Extends, scores (a block late), samples and updates: all that a run does."""
    for block in blocks:
        pending = [] if buffer.clips is None else buffer.clips.take_completed()
        buffer.extend(block)
        buffer.set_env_steps(buffer.env_steps)
        if pending:
            first = buffer.clips.rows_of(pending)
            scores = np.zeros(len(pending))
            scores[first.which] = buffer.columns["episode_id"][first.slots] % 7 / 7
            buffer.write_scores(pending, scores)
        for _ in range(2 if len(buffer) else 0):
            batch = buffer.sample()
            buffer.update_td_error(batch, (batch["observation"].sum(-1) % 5).double() / 4)
            if drawn is not None:
                drawn.append(batch)
    return buffer


@pytest.fixture(scope="module")
def blocks() -> list:
    return list(collect(4, 5, WORLD, 40))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "at", [0, 1, 3, 17]
)  # before the first block, with an empty storage, before and after wrapping
def test_n_blocks_plus_n_equal_2n_twice_in_a_row(scheme, at, blocks, tmp_path):
    straight: list = []
    reference = run(make(scheme), blocks[: at + 15], straight)
    first = run(make(scheme), blocks[:at])
    second = make(scheme, seed=99)
    second.load_state_dict(through_disk(first.state_dict(), tmp_path))
    same(second.state_dict(), first.state_dict())
    assert second.stats() == first.stats()
    resumed: list = []
    run(second, blocks[at : at + 7], resumed)
    third = run(make(scheme, seed=5), blocks[20:23])  # not even fresh
    third.load_state_dict(through_disk(second.state_dict(), tmp_path))
    run(third, blocks[at + 7 : at + 15], resumed)
    for expected, batch in zip(straight[-len(resumed) :], resumed, strict=True):
        for key in expected.keys(True, True):
            assert torch.equal(expected[key], batch[key]), key
    same(third.state_dict(), reference.state_dict())
    assert third.stats() == reference.stats()
    same(third.replay_frequencies(), reference.replay_frequencies())


def test_it_is_saved_in_the_middle_of_episodes_clips_and_returns(blocks):
    state = run(make(), blocks[:17]).state_dict()
    streams = state["streams"]["streams"]
    assert (streams["_episode"] >= 0).any()  # episodes under way,
    assert (streams["_position"] > 0).any()  # clips half cut,
    assert (streams["_count"] > 0).any()  # outcomes awaited,
    assert state["look_back"]["shape"] == [4, 2]  # returns not complete,
    assert state["writer"]["_write_count"] > 2 * 83  # storage wrapped,
    assert state["clips"]["completed"]  # clips waiting to be taken


def test_every_late_write_still_knows_whether_it_comes_too_late(blocks, tmp_path):
    buffer = run(make(), blocks[:17])
    ids = buffer.clips.take_completed()
    batch = buffer.sample()
    restored = make()
    restored.load_state_dict(through_disk(buffer.state_dict(), tmp_path))
    for one in (buffer, restored):
        run(one, blocks[17:19])
    assert restored.write_scores(ids, np.full(len(ids), 0.9)) == buffer.write_scores(ids, np.full(len(ids), 0.9))
    result = restored.update_td_error(batch, torch.ones(32))
    assert result == buffer.update_td_error(batch, torch.ones(32))
    assert result.written > 0
    assert result.stale > 0


def test_the_state_is_a_copy(blocks):
    buffer = run(make(), blocks[:17])
    state = buffer.state_dict()
    before = copy.deepcopy(state)
    run(buffer, blocks[17:])
    same(state, before)


def test_loading_leaves_the_state_alone(blocks):
    state = run(make(), blocks[:17]).state_dict()
    before = copy.deepcopy(state)
    buffer = make()
    buffer.load_state_dict(state)
    run(buffer, blocks[17:])
    same(state, before)


def test_only_rows_that_were_written_are_saved(blocks):
    buffer = run(make(capacity=10_000), blocks[:5])
    state = buffer.state_dict()
    assert state["rows"]["observation"].shape == (92, 3)
    assert state["rows"]["observation"].untyped_storage().nbytes() == 92 * 3 * 8
    assert state["columns"]["score"].shape == (92,)


def test_torchrls_dumps_and_loads_go_through_the_same_state(blocks, tmp_path):
    buffer = run(make(), blocks[:17])
    buffer.dumps(tmp_path / "a")
    restored = make()
    restored.loads(tmp_path / "a")
    restored.dumps(tmp_path / "b")
    same(torch.load(tmp_path / "b" / "replay.pt"), buffer.state_dict())
    check_rows(VLMReplayBufferView(restored), WORLD, 0.9)


class VLMReplayBufferView:
    """The buffer without its scores, which `run` gives by a rule of its own."""

    def __init__(self, buffer: VLMReplayBuffer) -> None:
        self._buffer = buffer
        self.columns = buffer.columns.clone()
        self.columns["score"][:] = float("nan")
        self.columns["scored"][:] = False
        self.n_steps, self.clips = buffer.n_steps, buffer.clips

    def __len__(self) -> int:
        return len(self._buffer)

    def __getitem__(self, index: Any) -> TensorDict:
        return self._buffer[index]


class TestRefusals:
    """A state that does not fit is refused in one line, and the buffer stays as it was."""

    @pytest.fixture
    def state(self, blocks):
        return run(make(), blocks[:17]).state_dict()

    def refuse(self, buffer: VLMReplayBuffer, state: Any, message: str) -> None:
        before = copy.deepcopy(buffer.state_dict())
        with pytest.raises(ValueError, match=message) as error:
            buffer.load_state_dict(state)
        assert "\n" not in str(error.value)
        same(buffer.state_dict(), before)

    def test_an_older_schema(self, state):
        message = "schema 0, this version reads schema 2: resume with the version that saved it"
        self.refuse(make(), state | {"schema": 0}, message)

    @pytest.mark.parametrize("schema", [3, None, "1"])
    def test_a_newer_or_unknown_schema(self, state, schema):
        self.refuse(make(), state | {"schema": schema}, f"schema {schema}, .*newer version")

    def test_something_else(self):
        self.refuse(make(), [1, 2, 3], "schema None")

    @pytest.mark.parametrize("missing", ["clips", "rows", "generator", "look_back"])
    def test_an_incomplete_state(self, state, missing):
        del state[missing]
        self.refuse(make(), state, rf"incomplete, it lacks \['{missing}'\]")

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"capacity": 84}, "capacity=83, this one capacity=84: resume with the saved one"),
            ({"clip_length": 5}, "clip_length=6, this one clip_length=5"),
            ({"n_steps": 1}, "n_steps=3, this one n_steps=1"),
            ({"gamma": 0.95}, "gamma=0.9, this one gamma=0.95"),
            ({"terms": lambda: [VLMTerm(0.3)]}, "terms=.*TDTerm"),
            ({"terms": lambda: [VLMTerm(0.4), TDTerm()]}, r"terms=.*threshold=0.4"),
        ],
    )
    def test_other_settings(self, state, blocks, other, message):
        self.refuse(run(make(**other), blocks[:7]), state, message)

    def test_rows_of_another_environment(self, state, blocks):
        state["rows"]["observation"] = state["rows"]["observation"][:, :2]
        self.refuse(run(make(), blocks[:7]), state, "other keys, shapes or dtypes")


def test_memory_mapped_rows_are_saved_and_restored(blocks, tmp_path):
    buffer = run(make(storage="memmap", scratch_dir=tmp_path), blocks[:17])
    restored = make(storage="memmap", scratch_dir=tmp_path)
    restored.load_state_dict(through_disk(buffer.state_dict(), tmp_path))
    in_memory = make(storage="memory")
    in_memory.load_state_dict(buffer.state_dict())
    drawn: list[list] = [[], [], []]
    for one, batches in zip((buffer, restored, in_memory), drawn, strict=True):
        run(one, blocks[17:20], batches)
    for batches in zip(*drawn, strict=True):
        assert all(torch.equal(batches[0]["observation"], batch["observation"]) for batch in batches)


def test_a_pipeline_goes_on_after_loading():
    world = World(9)
    buffer = make("vlm_td")
    pipeline = Pipeline(buffer, world, blocks=40)
    pipeline.run(11)
    pipeline.buffer = make("vlm_td")
    pipeline.buffer.load_state_dict(buffer.state_dict())
    pipeline.run()
    check_rows(pipeline.buffer, world, 0.9)
