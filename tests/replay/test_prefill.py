"""Buffers that are filled before a run: with recorded episodes, or with the rows of an earlier one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.replay.counting import Pipeline, World, check_rows, collect

from vlmrb.callbacks.prefill import PrefillCallback
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.prefill import prefill_with_buffer, prefill_with_episodes, read_episode, write_episode
from vlmrb.replay.rank import RankTerm
from vlmrb.replay.terms import AgeTerm, TDTerm, VLMTerm

WORLD = World(max_length=23)
GAMMA = 0.9


def _buffer(**settings: Any) -> VLMReplayBuffer:
    defaults = {"batch_size": 8, "terms": [VLMTerm()], "lam": 0.5, "clip_length": 5, "gamma": GAMMA, "seed": 1}
    return VLMReplayBuffer(400, **{**defaults, **settings})


def _episodes(folder: Path) -> int:
    """Writes each episode of two environments that ends within the first 60 steps; returns their rows."""
    (block,) = collect(2, 60, WORLD, 1)
    rows = 0
    for env in range(2):
        ends = np.flatnonzero(block["next", "done"][env].reshape(-1).numpy()) + 1
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            steps = block[env, start:end]
            states = {
                name: torch.cat([steps[name], steps["next", name][-1:]]).numpy() for name in ("observation", "snapshot")
            }
            write_episode(
                folder / f"episode-{env}{start:03d}.npz",
                **states,
                action=steps["action"].numpy(),
                reward=steps["next", "reward"].reshape(-1).numpy(),
                success=steps["next", "success"].reshape(-1).numpy(),
                terminated=bool(steps["next", "terminated"][-1]),
            )
            rows += len(steps)
    return rows


@pytest.mark.parametrize("n_steps", [1, 3])
def test_recorded_episodes_become_the_rows_that_collecting_them_would_have_made(tmp_path: Path, n_steps: int) -> None:
    rows = _episodes(tmp_path)
    buffer = _buffer(n_steps=n_steps)
    *_, stored = prefill_with_episodes(buffer, sorted(tmp_path.glob("*.npz")))
    assert len(buffer) == len(check_rows(buffer, WORLD, GAMMA)) == rows
    assert stored == rows - (n_steps - 1)  # the last of them come when it is known that nothing follows
    assert buffer.env_steps == 0
    assert (buffer.columns["episode_success"][:rows] >= 0).all()
    ids = buffer.clips.take_completed()
    clips = buffer.clips.batch(ids)
    assert sum(clips.lengths - 1) == rows
    # The run's own environments, of another number, come next.
    Pipeline(buffer, WORLD, num_envs=4, blocks=6).run()
    assert len(np.unique(buffer.columns["episode_id"][: len(buffer)])) == buffer.columns["episode_id"].max() + 1


def test_rows_that_were_there_before_the_run_are_older_than_all_others(tmp_path: Path) -> None:
    rows = _episodes(tmp_path)
    buffer = _buffer(terms=[AgeTerm(10.0), RankTerm(1.0, 50)], n_steps=3)
    for _ in prefill_with_episodes(buffer, sorted(tmp_path.glob("*.npz"))):
        pass
    assert (buffer.columns["env_step"][:rows] == 0).all()
    assert (buffer.clips.table()["born"] == 0).all()
    priorities = buffer._sampler.priorities(rows)
    assert priorities == pytest.approx(np.full(rows, priorities[0]))
    assert all(term.needs_refresh(1) == isinstance(term, RankTerm) for term in buffer.terms)
    (block,) = collect(2, 10, WORLD, 1)
    index = buffer.extend(block).numpy()
    assert (buffer._sampler.priorities(len(buffer))[index] > priorities[0]).all()


@pytest.mark.parametrize("n_steps", [1, 3])
def test_an_earlier_buffer_gives_its_rows_and_nothing_that_was_learnt_about_them(n_steps: int) -> None:
    earlier = _buffer(n_steps=n_steps, terms=[VLMTerm(), TDTerm()])
    Pipeline(earlier, WORLD, blocks=31).run()  # the ring has come round
    assert (earlier.columns["scored"]).any()
    state, size = earlier.state_dict(), len(earlier)
    buffer = _buffer(n_steps=n_steps)
    prefill_with_buffer(buffer, state)
    saved, now = earlier[:], buffer[:]
    held_back = 4 * (n_steps - 1)
    same = torch.isin(torch.arange(size), (earlier._writer._cursor + torch.arange(held_back)) % 400, invert=True)
    for key in (("observation",), ("action",), ("next", "reward"), ("next", "observation")):
        assert torch.equal(saved[key][same], now[key][same])
    assert buffer.env_steps == 0
    assert not buffer.columns["scored"].any()
    assert (buffer.columns["env_step"][:size] == 0).all()
    assert (buffer.columns["td_error"][:size] == 1).all()
    assert buffer.stats()["positives"] == 0
    ids = buffer.clips.take_completed()
    assert ids == sorted(buffer.clips.table()["clip_id"].tolist())
    assert len(ids) == len(buffer.clips)  # none is left open
    buffer.write_scores(ids, np.ones(len(ids)))
    assert buffer.stats()["positives"] == size
    Pipeline(buffer, WORLD, num_envs=3, blocks=8).run()


def test_a_buffer_of_other_settings_is_refused_and_changes_nothing() -> None:
    earlier = _buffer()
    Pipeline(earlier, WORLD, blocks=3).run()
    for settings, name in (({"clip_length": 6}, "clip_length"), ({"n_steps": 2}, "n_steps")):
        buffer = _buffer(**settings)
        with pytest.raises(ValueError, match=f"filled with replay.{name}="):
            prefill_with_buffer(buffer, earlier.state_dict())
        assert len(buffer) == 0


def test_a_buffer_without_clips_takes_the_rows_of_one_with_clips_but_not_the_other_way_round() -> None:
    earlier = _buffer()
    Pipeline(earlier, WORLD, blocks=12).run()
    uniform = _buffer(terms=[], lam=0.0, clip_length=None)
    prefill_with_buffer(uniform, earlier.state_dict())
    assert torch.equal(uniform[:]["observation"], earlier[:]["observation"])
    assert (uniform.columns["clip_id"][: len(uniform)] == -1).all()
    Pipeline(uniform, WORLD, num_envs=3, blocks=8).run()
    with pytest.raises(ValueError, match="filled with replay.clip_length=None, and this run has 5"):
        prefill_with_buffer(_buffer(), uniform.state_dict())


def test_a_resumed_run_is_not_filled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _episodes(tmp_path)
    module: Any = SimpleNamespace(env_steps=100, buffer=_buffer(), scoring=None)
    with caplog.at_level("INFO", logger="vlmrb"):
        PrefillCallback(str(tmp_path)).on_train_start(SimpleNamespace(), module)
    assert len(module.buffer) == 0
    assert "a run that is resumed goes on with the rows that it has" in caplog.text


def test_a_file_that_is_no_episode_is_named(tmp_path: Path) -> None:
    _episodes(tmp_path)
    path = sorted(tmp_path.glob("*.npz"))[0]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"{path.name} is no episode that can be read"):
        read_episode(path)
    lengths = {"observation": np.zeros((3, 1)), "snapshot": np.zeros((3, 1)), "success": np.zeros(3, np.bool_)}
    write_episode(path, **lengths, action=np.zeros(3, np.int64), reward=np.zeros(3, np.float32), terminated=True)
    with pytest.raises(ValueError, match="one state more than steps is needed"):
        read_episode(path)
