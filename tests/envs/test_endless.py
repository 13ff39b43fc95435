"""Episodes that never end: whole ones are waited for by evaluations and recordings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vlmrb import recording
from vlmrb.calibration.policies import RandomPlayer
from vlmrb.cli import main
from vlmrb.envs import EnvConfig, make_env
from vlmrb.envs import config as settings
from vlmrb.evaluation import evaluate
from vlmrb.recording import play_episodes
from vlmrb.replay.prefill import read_episode
from vlmrb.replay.storage import GIB

ENV_ID = "tests.envs.odd_worlds:Counting-v0"


def _evaluated(env: EnvConfig) -> list[int]:
    module: Any = SimpleNamespace(
        evaluation_epsilon=0.0, play=lambda observation, *_: torch.zeros(len(observation), dtype=torch.int64)
    )
    return evaluate(module, env, episodes=2, seed=0).lengths.tolist()


def _recorded(env: EnvConfig) -> list[int]:
    return [len(episode.action) for episode in play_episodes(env, RandomPlayer, episodes=2, seed=0)]


@pytest.mark.parametrize("played", [_evaluated, _recorded])
def test_an_episode_that_never_ends_asks_for_a_horizon(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "ENDLESS_STEPS", 6)
    with pytest.raises(ValueError, match=rf"^env.id '{ENV_ID}': an episode has not ended .* set env.max_steps$"):
        played(EnvConfig(ENV_ID, num_envs=2))
    assert played(EnvConfig(ENV_ID, num_envs=2, max_steps=10)) == [10, 10]


@pytest.mark.parametrize("played", [_evaluated, _recorded])
def test_an_episode_of_just_that_length_ends(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "ENDLESS_STEPS", 10)
    assert played(EnvConfig(ENV_ID, num_envs=2, kwargs={"length": 10})) == [10, 10]


def _gib(config: EnvConfig, env_steps: float) -> float:
    """Returns the memory of so many env steps."""
    root = make_env(config, num_envs=1).reset()
    return env_steps * (recording._OBJECTS + sum(root[name].nbytes for name in ("observation", "snapshot"))) / GIB


@pytest.mark.parametrize("num_envs", [1, 3])
def test_episodes_that_fill_the_memory_are_cut_and_new_ones_begin(num_envs: int) -> None:
    config = EnvConfig(ENV_ID, num_envs=num_envs, frame_size=8, max_steps=1_000_000)
    memory_gib = _gib(config, 20.5)
    first, second = (list(play_episodes(config, RandomPlayer, 6, 0, memory_gib)) for _ in range(2))
    assert len(first) == 6
    for episode, again in zip(first, second, strict=True):
        steps = len(episode.action)
        assert episode.cut
        assert not episode.terminated
        assert steps <= 21
        assert episode.observation.reshape(-1).tolist() == list(range(steps + 1))  # from its beginning
        np.testing.assert_array_equal(episode.snapshot[:, 0], np.arange(steps + 1))  # the frames'
        assert episode.reward.tolist() == [1.0] * steps
        assert episode.success.tolist() == [False] * steps
        assert len(episode.snapshot) == steps + 1
        np.testing.assert_array_equal(episode.action, again.action)


def test_episodes_that_fit_are_whole_beside_one_that_is_cut() -> None:
    config = EnvConfig(ENV_ID, num_envs=2, frame_size=8, kwargs={"length": 9})
    whole = list(play_episodes(config, RandomPlayer, 4, 0, _gib(config, 18.5)))
    assert [(len(episode.action), episode.cut, episode.terminated) for episode in whole] == [(9, False, True)] * 4
    assert all(episode.success.tolist() == [False] * 8 + [True] for episode in whole)
    cut = list(play_episodes(config, RandomPlayer, 4, 0, _gib(config, 15.5)))
    assert [(len(episode.action), episode.cut) for episode in cut] == [(8, True)] + [(9, False)] * 3


def test_nothing_of_the_other_instances_is_kept() -> None:
    config = EnvConfig(ENV_ID, num_envs=8, frame_size=8, kwargs={"length": 5})
    for episode in play_episodes(config, RandomPlayer, 8, 0):
        assert episode.snapshot.base is None or episode.snapshot.base.nbytes == episode.snapshot.nbytes


def test_a_recording_says_that_episodes_were_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EnvConfig(ENV_ID, num_envs=2, frame_size=8, max_steps=1_000_000)
    (tmp_path / "env.yaml").write_text(
        f"env: {{id: '{ENV_ID}', num_envs: 2, frame_size: 8, max_steps: {config.max_steps}}}\n"
    )
    out, memory = tmp_path / "episodes", f"{_gib(config, 20.5):.9f}"
    caplog.set_level("INFO", "vlmrb.recording")
    command = ["record", "-c", str(tmp_path / "env.yaml"), "--policy", "random", "--episodes", "4", "--out", str(out)]
    assert main([*command, "--memory_gib", memory]) == 0
    warning, summary = caplog.messages
    assert warning.startswith("episode 0 was cut after 11 env steps: those under way take more than --memory_gib ")
    assert warning.endswith("; a smaller env.max_steps, env.num_envs or env.frame_size keeps episodes whole")
    assert summary == f"4 episodes in {out}, 0 of them successful, 4 cut"
    for file in recording.episode_files(out):
        rows = read_episode(file)
        assert not rows["next", "terminated"].any()
        assert rows["next", "done"].reshape(-1).tolist() == [False] * (rows.numel() - 1) + [True]


@pytest.mark.parametrize("memory_gib", ["0", "-1"])
def test_no_memory_at_all_is_refused(memory_gib: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["record", "--out", str(tmp_path / "episodes"), f"--memory_gib={memory_gib}"]
    assert main(command) == 1
    assert "record.memory_gib=" in capsys.readouterr().err
