"""Snapshots of Gymnasium environments whose states a user can take and put back."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from vlmrb.envs import EnvConfig, make_env, make_renderer


class PendulumState:
    """What a Pendulum's picture is drawn from: angle, speed, and the torque of the arrow."""

    @staticmethod
    def get_state(env: gymnasium.Env) -> np.ndarray:
        pendulum = env.unwrapped
        torque = np.nan if pendulum.last_u is None else pendulum.last_u
        return np.array([*pendulum.state, torque])

    @staticmethod
    def set_state(env: gymnasium.Env, state: np.ndarray) -> None:
        pendulum = env.unwrapped
        pendulum.state, pendulum.last_u = state[:2], None if np.isnan(state[2]) else state[2]


def _pendulum(**settings: Any) -> EnvConfig:
    return EnvConfig(id="Pendulum-v1", **{"num_envs": 2, "state": f"{__name__}:PendulumState", **settings})


class ForgetfulState(PendulumState):
    """Puts the pole upright, whatever the state."""

    @staticmethod
    def set_state(env: gymnasium.Env, state: np.ndarray) -> None:
        env.unwrapped.state = np.zeros(2)


class IdleState(PendulumState):
    """Leaves the environment where it is."""

    @staticmethod
    def set_state(env: gymnasium.Env, state: np.ndarray) -> None:
        pass


class RaggedState(PendulumState):
    """Gives rows of different lengths."""

    @staticmethod
    def get_state(env: gymnasium.Env) -> Any:
        return [[1.0], [1.0, 2.0]]


class NoState(PendulumState):
    """Gives nothing."""

    @staticmethod
    def get_state(env: gymnasium.Env) -> Any:
        return None


class BrokenState(PendulumState):
    """Fails to put a state back."""

    @staticmethod
    def set_state(env: gymnasium.Env, state: np.ndarray) -> None:
        raise KeyError("theta")


def test_states_are_drawn_as_the_frames_that_would_have_been_stored() -> None:
    by_state, by_frame = _pendulum(), _pendulum(state=None)
    envs = [make_env(config, seed=1) for config in (by_state, by_frame)]
    renderers = [pickle.loads(pickle.dumps(make_renderer(config))) for config in (by_state, by_frame)]
    roots = [env.reset() for env in envs]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        action = 4 * torch.rand(2, 1, generator=generator) - 2
        steps = [env.step(root.set("action", action))["next"] for env, root in zip(envs, roots, strict=True)]
        frames, observations = zip(
            *(
                (renderer.render(step["snapshot"].numpy()), renderer.observe(step["snapshot"].numpy()))
                for renderer, step in zip(renderers, steps, strict=True)
            ),
            strict=True,
        )
        np.testing.assert_array_equal(*frames)
        np.testing.assert_array_equal(*observations)
        roots = [step.exclude("reward") for step in steps]
    sizes = [env.simulator.spaces.snapshot_size for env in envs]
    assert sizes == [3 * 8 + 3 * 4, 64 * 64 * 3 + 3 * 4]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("math", "has no function get_state and no set_state"),
        ("no_such.module", "cannot be imported"),
        ("", "cannot be imported"),
        (f"{__name__}:ForgetfulState", "a state put back where it was taken changes the frame"),
        (f"{__name__}:IdleState", "a state put back after some steps does not bring back its frame"),
        (f"{__name__}:RaggedState", "get_state failed: ValueError: .*inhomogeneous"),
        (f"{__name__}:NoState", "get_state must return an array of numbers"),
        (f"{__name__}:BrokenState", "set_state failed: KeyError: 'theta'"),
    ],
)
def test_a_state_hook_that_does_not_do_its_job_is_named(state: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^env.state '{state}'.*{message}"):
        make_env(_pendulum(state=state), seed=0)
