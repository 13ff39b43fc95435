"""A chain in which one of two actions leads on and the other back to the start: chance finds the goal in 2^-N.

``chain:Chain-N-v0``, with a milestone at the goal. Nothing but the goal tells right from wrong.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs import EnvConfig, register
from vlmrb.envs.batch import SimulatorEnv
from vlmrb.envs.simulator import Spaces, Step

_NAME = re.compile(r"Chain-(\d+)-v0")


class ChainSimulator:
    """Snapshots are the state's number, ``uint8[1]``: 0 to N − 1, and N at the goal. Episodes last up to 4 N steps."""

    exact_resume = True

    def __init__(self, length: int, num_envs: int, seed: int) -> None:
        self.length, self.num_envs = length, num_envs
        self.spaces = Spaces((length,), np.float32, 1, 2)
        self.right = np.random.default_rng(0).integers(0, 2, length)  # the same chain for all seeds
        self.state, self.steps = np.zeros((2, num_envs), np.int64)

    def seed(self, seed: int) -> None: ...

    def restart(self, rows: NDArray[np.int64]) -> None:
        self.state[rows] = self.steps[rows] = 0

    def look(self) -> tuple[NDArray, NDArray]:
        snapshots = self.state[:, None].astype(np.uint8)
        return ChainRenderer(self.length).observe(snapshots), snapshots

    def step(self, action: NDArray) -> Step:
        right = action == self.right[self.state]
        self.state, self.steps = np.where(right, self.state + 1, 0), self.steps + 1
        success = self.state == self.length
        observation, snapshot = self.look()
        reward, truncated = success.astype(np.float32), self.steps >= 4 * self.length
        return Step(observation, snapshot, reward, success, success.copy(), truncated)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state.copy(), "steps": self.steps.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state[:], self.steps[:] = state["state"], state["steps"]

    def close(self) -> None: ...


class ChainRenderer:
    milestones = ("goal",)

    def __init__(self, length: int) -> None:
        self.length, self.name, self.layout = length, f"chain-{length}", self

    def observe(self, snapshots: NDArray) -> NDArray:
        return (snapshots == np.arange(self.length)).astype(np.float32)

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        cells = (snapshots == np.arange(self.length + 1))[..., None, :, None]
        return np.broadcast_to(cells * np.uint8(255), (*snapshots.shape[:-1], 4, self.length + 1, 3))

    def events(self, snapshots: NDArray) -> NDArray[np.bool_]:
        at_goal = snapshots == self.length  # [..., L, 1]
        return ~at_goal[..., :-1, :] & at_goal[..., 1:, :]


def _length(config: EnvConfig) -> int:
    match = _NAME.fullmatch(config.id.rpartition(":")[2])
    assert match is not None
    return int(match[1])


def claims(env_id: str) -> bool:
    return _NAME.fullmatch(env_id) is not None


def check(config: EnvConfig) -> None: ...


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    return SimulatorEnv(ChainSimulator(_length(config), num_envs, seed))


def make_renderer(config: EnvConfig) -> ChainRenderer:
    return ChainRenderer(_length(config))


register(sys.modules[__name__])  # type: ignore[arg-type]
