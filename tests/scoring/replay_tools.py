"""A replay buffer fed with made-up episodes, for tests of what happens to its clips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring.service import ScoringService

CLIP_LENGTH = 4
NUM_ENVS = 2


def make_buffer(capacity: int = 4096, **settings: Any) -> VLMReplayBuffer:
    settings = {"batch_size": 8, "terms": [VLMTerm(threshold=None)], "lam": 0.5, "clip_length": CLIP_LENGTH} | settings
    return VLMReplayBuffer(capacity, **settings)


class Episodes:
    """Rows of `NUM_ENVS` environments whose episodes end at random; every state is unlike all others.

    Args:
        seed: of the episodes' lengths.
        contents: how many different episodes there are; the k-th is like the (k mod contents)-th if lengths agree.
        end: chance that a step ends its episode.
        length: steps after which an episode ends at the latest.
    """

    def __init__(self, seed: int = 0, contents: int = 10**6, end: float = 0.1, length: int = 10**6) -> None:
        self.rng = np.random.default_rng(seed)
        self.contents = contents
        self.end = end
        self.length = length
        self.episode = np.arange(NUM_ENVS)
        self.time = np.zeros(NUM_ENVS, int)

    def _states(self) -> np.ndarray:
        return np.stack([self.episode % self.contents, self.time, self.time**2 + self.episode % self.contents], -1)

    def block(self, steps: int) -> TensorDict:
        """Returns rows ``[NUM_ENVS, steps]``."""
        rows = []
        for _ in range(steps):
            now = torch.tensor(self._states())
            self.time += 1
            then = torch.tensor(self._states())
            done = torch.tensor((self.rng.random(NUM_ENVS) < self.end) | (self.time >= self.length))[:, None]
            new = done[:, 0].numpy()
            self.episode[new] = self.episode.max() + 1 + np.arange(new.sum())
            self.time[new] = 0
            rows.append(
                TensorDict(
                    {
                        "observation": now.float(),
                        "snapshot": now,
                        "action": torch.zeros(NUM_ENVS, dtype=torch.int64),
                        "next": {
                            "observation": then.float(),
                            "snapshot": then,
                            "success": torch.zeros(NUM_ENVS, 1, dtype=torch.bool),
                            "reward": torch.zeros(NUM_ENVS, 1),
                            "done": done,
                            "terminated": done,
                            "truncated": torch.zeros_like(done),
                        },
                    },
                    batch_size=[NUM_ENVS],
                )
            )
        return torch.stack(rows, 1)

    def clips(self, buffer: VLMReplayBuffer, count: int) -> None:
        """Extends the buffer until ``count`` more clips are complete."""
        assert buffer.clips is not None
        target = buffer.clips.emitted + count
        while buffer.clips.emitted < target:
            buffer.extend(self.block(1))


def priorities(buffer: VLMReplayBuffer) -> np.ndarray:
    """Returns the priorities of all slots written, ``float64[K]``."""
    return buffer.sampler.priorities(len(buffer))


def check_counts(service: ScoringService) -> dict[str, float]:
    """Checks that no clip has got lost; returns the counts."""
    stats = service.stats()
    where = ("scored", "waiting", "in_flight", "stale", "dropped")
    assert stats["emitted"] == sum(stats[name] for name in where), {name: stats[name] for name in ("emitted", *where)}
    assert all(stats[name] >= 0 for name in where)
    return stats


def scores_of(buffer: VLMReplayBuffer, clip_ids: Sequence[int]) -> np.ndarray:
    """Returns the scores that rows of these clips have got, NaN for a clip without."""
    assert buffer.clips is not None
    table = buffer.clips.table()
    known = dict(zip(table["clip_id"].tolist(), table["score"].tolist(), strict=True))
    return np.array([known[clip_id] for clip_id in clip_ids])


def about_to_be_taken(buffer: VLMReplayBuffer) -> list[int]:
    """Returns the clips that the next `take_completed` will hand over, in its order, and leaves them there."""
    assert buffer.clips is not None
    return list(buffer.clips._completed)
