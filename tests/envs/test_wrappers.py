"""Bounds for actions that have none."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tests.envs.odd_worlds import Unbounded

from vlmrb.envs import EnvConfig, make_env
from vlmrb.envs.wrappers import BoundAction

ENV_ID = "tests.envs.odd_worlds:Unbounded-v0"


def _bounded(low: Any, high: Any) -> dict[str, Any]:
    return {"class_path": "vlmrb.envs.wrappers.BoundAction", "init_args": {"low": low, "high": high}}


@pytest.mark.parametrize("bound", [np.inf, np.finfo(np.float32).max])
def test_actions_without_finite_bounds_are_refused_with_a_way_out(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unbounded, "action_space", gymnasium.spaces.Box(-bound, bound, (2,), np.float32))
    with pytest.raises(ValueError, match=rf"^env.id '{ENV_ID}': its actions have no finite bounds, got Box") as caught:
        make_env(EnvConfig(ENV_ID, num_envs=1))
    assert "{class_path: vlmrb.envs.wrappers.BoundAction, init_args: {low: -1.0, high: 1.0}}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("low", "high"), [(-0.5, 2.0), ([-0.5, 0.0], [0.5, 2.0])])
@pytest.mark.parametrize("inside", [[], ["gymnasium.wrappers.ClipAction"]])
def test_the_wrapper_names_bounds_and_hands_actions_on(low: Any, high: Any, inside: list[str]) -> None:
    env = make_env(EnvConfig(ENV_ID, num_envs=2, max_steps=9, wrappers=[*inside, _bounded(low, high)]))
    spec = env.action_spec[0]
    np.testing.assert_array_equal(spec.space.low, np.broadcast_to(np.float32(low), 2))
    np.testing.assert_array_equal(spec.space.high, np.broadcast_to(np.float32(high), 2))
    rollout = env.rollout(9)
    assert torch.equal(rollout["next", "reward"][..., 0], rollout["action"].abs().amax(-1))


def test_clipping_takes_bounds_away() -> None:
    with pytest.raises(ValueError, match=r"^env.id 'Pendulum-v1': its actions have no finite bounds.*ClipAction"):
        make_env(EnvConfig("Pendulum-v1", num_envs=1, wrappers=["gymnasium.wrappers.ClipAction"]))


@pytest.mark.parametrize(
    ("env_id", "low", "high", "message"),
    [
        (ENV_ID, 1.0, 1.0, "BoundAction needs finite bounds, low below high, got low=1.0 and high=1.0"),
        (ENV_ID, -np.inf, 1.0, "BoundAction needs finite bounds"),
        (ENV_ID, [0.0, 0.0, 0.0], 1.0, "env.wrappers: .*BoundAction cannot be put around"),
        ("Pendulum-v1", -3.0, 1.0, r"BoundAction: low=-3.0 and high=1.0 reach beyond Box\(-2.0, 2.0"),
        ("CartPole-v1", -1.0, 1.0, "BoundAction needs Box actions, got Discrete"),
    ],
)
def test_bounds_that_cannot_be_are_refused(env_id: str, low: Any, high: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env(EnvConfig(env_id, num_envs=1, wrappers=[_bounded(low, high)]))


def test_what_goes_through_is_the_same_object() -> None:
    action = np.zeros(2, np.float32)
    assert BoundAction(Unbounded(), -1.0, 1.0).action(action) is action
