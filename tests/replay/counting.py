"""A world in which every state says who it is, so that whatever the buffer holds can be checked from the row itself.

State ``(e, k, t)``: environment, its k-th episode, step t. Lengths, rewards, endings and successes are functions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.collectors import Collector

from vlmrb.envs.batch import SimulatorEnv
from vlmrb.envs.simulator import Spaces, Step
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.scoring.clips import ClipBatch


class World:
    """The rules. ``max_length``: longest episode, in steps."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def length(self, e: Any, k: Any) -> Any:
        return 1 + (7919 * e + 104729 * k + 13 * e * k) % self.max_length

    def terminates(self, e: Any, k: Any) -> Any:
        return (e + k) % 2 == 0

    def reward(self, e: Any, k: Any, t: Any) -> Any:
        return (31 * e + 17 * k + 7 * t) % 11 / 10

    def succeeds(self, e: Any, k: Any, t: Any) -> Any:
        return (3 * e + 5 * k + t) % 13 == 0

    def outcome(self, e: int, k: int) -> int:
        return int(any(self.succeeds(e, k, t) for t in range(self.length(e, k))))

    def score(self, e: Any, k: Any, clip: Any) -> Any:
        """Score of an episode's clip-th clip: eleven values from 0 to 1."""
        return (5 * e + 3 * k + 7 * clip) % 11 / 10


class CountingSimulator:
    """The world's dynamics for the package's own TorchRL environment."""

    exact_resume = True

    def __init__(self, num_envs: int, world: World) -> None:
        self.num_envs, self.world = num_envs, world
        self.spaces = Spaces((3,), np.int64, snapshot_size=4, action=5, snapshot_dtype=np.int32)
        self._env = np.arange(num_envs)
        self._episode = np.full(num_envs, -1)
        self._t = np.zeros(num_envs, np.int64)

    def look(self) -> tuple[NDArray, NDArray]:
        observation = np.stack([self._env, self._episode, self._t], -1)
        return observation, np.concatenate([observation, np.full((self.num_envs, 1), 7)], -1).astype(np.int32)

    def restart(self, rows: NDArray[np.int64]) -> None:
        self._episode[rows] += 1
        self._t[rows] = 0

    def step(self, action: NDArray) -> Step:
        e, k, t, world = self._env, self._episode, self._t.copy(), self.world
        self._t += 1
        ended = self._t == world.length(e, k)
        ends_well = world.terminates(e, k)
        reward = world.reward(e, k, t).astype(np.float32)
        return Step(*self.look(), reward, world.succeeds(e, k, t), ended & ends_well, ended & ~ends_well)

    def seed(self, seed: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self._episode.copy(), "t": self._t.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._episode[:], self._t[:] = state["episode"], state["t"]

    def close(self) -> None: ...


def collect(num_envs: int, length: int, world: World, blocks: int) -> Iterator[TensorDictBase]:
    """Yields blocks ``[num_envs, length]`` from a TorchRL collector."""
    env = SimulatorEnv(CountingSimulator(num_envs, world))
    collector = Collector(
        env,
        lambda data: data.set("action", (data["observation"].sum(-1)) % 5),
        frames_per_batch=num_envs * length,
        total_frames=num_envs * length * blocks,
        use_buffers=False,
        trust_policy=True,
    )
    yield from collector
    collector.shutdown()


def identity(clips: ClipBatch) -> NDArray:
    """Returns who the frames of clips are, ``int[B, L, 3]``."""
    assert (clips.snapshots[..., 3] == 7).all()
    return clips.snapshots[..., :3]


class Pipeline:
    """collector → extend → score → sample → update, with scores and |δ| that come back late.

    Args:
        buffer: under test; n-step returns, terms and capacity are its own.
        delay: blocks between handing out a clip and writing its score, and between a sample and its |δ|.
        score: of clip ``c`` of episode k of environment e.
        abs_td_error: of rows ``(e, k, t)``.
    """

    def __init__(
        self,
        buffer: VLMReplayBuffer,
        world: World,
        *,
        num_envs: int = 4,
        length: int = 5,
        blocks: int = 40,
        delay: int = 0,
        score: Callable[..., Any] | None = None,
        abs_td_error: Callable[..., Any] | None = None,
    ) -> None:
        self.buffer, self.world, self.delay = buffer, world, delay
        self.score = score or world.score
        self.abs_td_error = abs_td_error or (lambda e, k, t: 0.1 + (e + 3 * k + 5 * t) % 9)
        self.blocks = collect(num_envs, length, world, blocks)
        self.emitted: list[NDArray] = []  # who the frames of each clip are, without padding
        self._clips: list[tuple[int, list[int], NDArray]] = []
        self._batches: list[tuple[int, TensorDictBase]] = []
        self._now = 0

    def run(self, blocks: int | None = None) -> Pipeline:
        """Runs some blocks, or all that are left."""
        for _ in range(blocks if blocks is not None else 10**9):
            block = next(self.blocks, None)
            if block is None:
                break
            self.buffer.extend(block)
            self.after_extend()
        return self

    def after_extend(self) -> None:
        buffer = self.buffer
        buffer.set_env_steps(buffer.env_steps)
        if buffer.clips is not None and (ids := buffer.clips.take_completed()):
            clips = buffer.clips.batch(ids)
            frames = identity(clips)
            self.emitted += [row[:length] for row, length in zip(frames, clips.lengths, strict=True)]
            e, k, t = frames[:, 0].T
            self._clips.append((self._now, ids, self.score(e, k, t // (buffer.clips.clip_length - 1))))
        if len(buffer):
            self._batches.append((self._now, buffer.sample()))
        while self._clips and self._clips[0][0] <= self._now - self.delay:
            _, ids, scores = self._clips.pop(0)
            buffer.write_scores(ids, scores, source="test")
        while self._batches and self._batches[0][0] <= self._now - self.delay:
            _, batch = self._batches.pop(0)
            e, k, t = batch["observation"].numpy().T
            buffer.update_td_error(batch, torch.from_numpy(np.broadcast_to(self.abs_td_error(e, k, t), len(e)).copy()))
        self._now += 1


def expected_row(world: World, e: int, k: int, t: int, n_steps: int, gamma: float) -> dict[str, Any]:
    """Returns the n-step row that begins in a state, from the world's rules."""
    steps = min(n_steps, world.length(e, k) - t)
    done = t + steps == world.length(e, k)
    return {
        "reward": sum(gamma**i * world.reward(e, k, t + i) for i in range(steps)),
        "next_observation": [e, k, t + steps],
        "done": done,
        "terminated": done and world.terminates(e, k),
        "steps": steps,
        "action": (e + k + t) % 5,
    }


def check_rows(buffer: VLMReplayBuffer, world: World, gamma: float) -> set[tuple[int, int, int]]:
    """Asserts that all rows and their columns are what the world's rules say; returns which rows are there."""
    size = len(buffer)
    rows = buffer[:]
    columns = buffer.columns[:size]
    seen = set()
    for i in range(size):
        e, k, t = rows["observation"][i].tolist()
        expected = expected_row(world, e, k, t, buffer.n_steps, gamma)
        assert rows["next", "observation"][i].tolist() == expected["next_observation"]
        assert rows["next", "reward"][i].item() == np.float32(expected["reward"]).item() or np.isclose(
            rows["next", "reward"][i].item(), expected["reward"], rtol=1e-5
        )
        assert rows["next", "done"][i].item() == expected["done"]
        assert rows["next", "terminated"][i].item() == expected["terminated"]
        assert rows["action"][i].item() == expected["action"]
        if buffer.n_steps > 1:
            assert rows["steps_to_next_obs"][i].item() == expected["steps"]
        if buffer.clips is not None:
            rows_per_clip = buffer.clips.clip_length - 1
            assert columns["position"][i].item() == t % rows_per_clip
            score = columns["score"][i].item()
            assert columns["scored"][i].item() == (not np.isnan(score))
            if not np.isnan(score):
                assert score == np.float32(world.score(e, k, t // rows_per_clip))
        success = columns["episode_success"][i].item()
        assert success in (-1, world.outcome(e, k))
        seen.add((e, k, t))
    assert len(seen) == size, "a row is there twice"
    return seen
