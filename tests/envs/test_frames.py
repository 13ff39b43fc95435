"""What frames that are kept cost, and who does without."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.envs.odd_worlds import Counting

from vlmrb.envs import EnvConfig, gymnasium, make_env
from vlmrb.evaluation import Film, evaluate

ENV_ID = "tests.envs.odd_worlds:Counting-v0"


def _config(**settings: Any) -> EnvConfig:
    return EnvConfig(ENV_ID, **{"num_envs": 3, "frame_size": 8, "kwargs": {"length": 4}, **settings})


def _evaluate(config: EnvConfig, video: bool = False) -> Any:
    module: Any = SimpleNamespace(
        evaluation_epsilon=0.0, play=lambda observation, *_: torch.zeros(len(observation), dtype=torch.int64)
    )
    return evaluate(module, config, episodes=3, seed=0, video=video)


class CountingState:
    """Takes and puts back the number of env steps."""

    @staticmethod
    def get_state(env: Any) -> np.ndarray:
        return np.array([env.unwrapped.steps])

    @staticmethod
    def set_state(env: Any, state: np.ndarray) -> None:
        env.unwrapped.steps = int(state[0])


@pytest.mark.parametrize("state", [None, f"{__name__}:CountingState"])
def test_an_evaluation_without_a_video_draws_no_frame_and_plays_alike(
    state: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "draws", 0)
    config = _config(state=state)
    blind = _evaluate(config)
    assert Counting.draws == 0
    seeing = _evaluate(config, video=True)
    assert Counting.draws > 0
    assert blind.lengths.tolist() == seeing.lengths.tolist() == [4, 4, 4]
    assert blind.returns.tolist() == seeing.returns.tolist() == [4.0, 4.0, 4.0]
    assert blind.successes.tolist() == seeing.successes.tolist() == [True, True, True]
    assert seeing.video[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_levels_are_those_of_an_environment_with_frames() -> None:
    config = EnvConfig("CartPole-v1", num_envs=3, frame_size=8, max_steps=9)
    rollouts = []
    for frames in (True, False):
        env = make_env(config, seed=4, frames=frames)
        torch.manual_seed(0)
        rollouts.append(env.rollout(30, break_when_any_done=False).exclude("snapshot", ("next", "snapshot")))
    assert (rollouts[0] == rollouts[1]).all()
    assert rollouts[0]["next", "done"].sum() >= 9


def test_families_that_keep_no_frames_are_made_as_always() -> None:
    config = EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=2)
    seeing, blind = (make_env(config, seed=0, frames=frames).reset() for frames in (True, False))
    assert (seeing == blind).all()


def test_each_state_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config()
    env = make_env(config)
    root = env.reset()
    env.rand_step(root)  # what frames cost is told by now
    root = env.reset()
    monkeypatch.setattr(Counting, "draws", 0)
    for _ in range(8):  # each instance ends twice
        _, root = env.step_and_maybe_reset(env.rand_action(root))
    assert Counting.draws == 3 * (8 + 2)


def test_what_frames_cost_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gymnasium, "_COSTS_TOLD", set())
    caplog.set_level("INFO")
    config = _config(kwargs={"length": 4, "draw_s": 0.004})
    _evaluate(config)
    assert not caplog.messages  # nothing is drawn
    for _ in range(2):
        make_env(config).rollout(6, break_when_any_done=False)
        _evaluate(config, video=True)
    (line,) = caplog.messages
    found = re.search(
        rf"^env.id {ENV_ID}: .* drawing one takes ([\d.]+) ms, which leaves at most (\d+) env steps/s to a process, "
        r"and a state takes 0.2 kB, 0.02 GB for 100,000 rows of replay.capacity; a smaller env.frame_size",
        line,
    )
    assert found is not None, line
    milliseconds, ceiling = float(found[1]), int(found[2])
    assert milliseconds >= 4.0
    assert ceiling == pytest.approx(1e3 / milliseconds, rel=0.02)


def test_what_frames_cost_is_measured_where_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gymnasium, "_COSTS_TOLD", set())
    monkeypatch.setattr(Counting, "draws", 0)
    caplog.set_level("INFO")
    env = make_env(_config(workers=1))
    env.rollout(2)
    env.close()
    assert len(caplog.messages) == 1
    assert Counting.draws == 0


@pytest.mark.parametrize("steps", range(1, 40))
@pytest.mark.parametrize("most", [3, 4, 5, 16])
def test_a_film_has_few_frames_evenly_spaced_with_the_first_and_the_last(steps: int, most: int) -> None:
    film = Film(most)
    for step in range(steps):
        film.add(torch.tensor([step]))
    shown = film.end(torch.tensor([steps])).reshape(-1).tolist()
    assert len(shown) <= most
    assert shown[0] == 0
    assert shown[-1] == steps
    assert set(np.diff(shown[:-1]).tolist()) <= {film.every}
    assert 0 < steps - shown[-2] <= film.every
    if steps < most:
        assert film.every == 1


def test_the_video_of_a_long_episode_is_thinned_out_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vlmrb.evaluation.VIDEO_FRAMES", 5)
    caplog.set_level("INFO", "vlmrb.evaluation")
    assert _evaluate(_config(), video=True).video[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert not caplog.messages
    long = _evaluate(_config(kwargs={"length": 11}), video=True)
    assert long.video[:, 0, 0, 0].tolist() == [0, 4, 8, 11]
    assert caplog.messages == ["the video shows one of 4 frames, as its episode of 11 env steps has more than 4"]
