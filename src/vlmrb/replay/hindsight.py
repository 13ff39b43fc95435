"""Hindsight experience replay (Andrychowicz et al. 2017): rows are replayed as if what came of them had been the goal.

TorchRL's ``HERReplayBuffer`` asks for the rows of an episode side by side in a one-dimensional storage, judges rewards
anew but not ends, and draws from the global generator; here rows of several environments are interleaved, and a resumed
run goes on exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.her import HindsightStrategy
from torchrl.envs.transforms import Transform

from vlmrb.envs.registry import Goals
from vlmrb.replay.episodes import EpisodeIndex, Episodes

NEXT = ("next", "observation")


class HindsightTransform(Transform):
    """Gives a share of the rows of every batch, on the way out, a goal that their episode achieved.

    Such a row gets the new goal in its observation and in its next one, and reward and ``terminated`` as that goal
    would have had them; ``done`` holds besides where the episode really ended. All other rows, and what is stored, stay
    as they are.

    Which achieved goal that is, by ``strategy``:

    - ``future``: that of a row of the same episode, the row itself or a later one, all equally likely;
    - ``final``: that of the last row of the episode;
    - ``episode``: that of any row of the episode;
    - ``random``: that of any row.

    An episode that is still running ends with its last row so far, and of one that is being overwritten only the rows
    that are left count.

    Args:
        goals: reads, writes and judges goals.
        share: probability of a row to be relabelled, in (0, 1]. Higher → faster away from rewards that never come, less
            practice of the goals that are really asked for.
        strategy: see above.
        seed: of the transform's own generator.

    Attributes:
        index: where the rows of episodes lie; there once it is attached.
    """

    index: EpisodeIndex

    def __init__(self, goals: Goals, share: float = 0.8, strategy: str = "future", seed: int = 0) -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ValueError(f"hindsight needs a share in (0, 1], got {share}")
        self.goals = goals
        self.share = float(share)
        self.strategy = HindsightStrategy(strategy)
        self._generator = torch.Generator().manual_seed(seed)
        self._rows, self._relabelled, self._reached = 0, 0, 0  # since `gauges` was asked for

    def attach(self, capacity: int, next_observation: Callable[[Tensor], Tensor]) -> None:
        """Connects it with a buffer.

        Args:
            capacity: the buffer's slots.
            next_observation: returns what is stored as the next observation in slots ``int64[K]``, ``[K, …]``.
        """
        self.index = EpisodeIndex(capacity)
        self._next_observation = next_observation

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabels sampled rows ``[B]``, copies of what is stored, in place; ``index`` says where they lie.

        Rows that were read by ``buffer[…]`` come without, and stay as they are stored.
        """
        if "index" not in tensordict:
            return tensordict
        chance, place = torch.rand(2, len(tensordict), dtype=torch.float64, generator=self._generator).numpy()
        rows = np.flatnonzero(chance < self.share)
        self._rows += len(tensordict)
        self._relabelled += len(rows)
        if not len(rows):
            return tensordict
        sources = self.choose(tensordict["index"].numpy()[rows], place[rows])
        goal = self.goals.achieved(self._next_observation(torch.from_numpy(sources)).numpy())
        before, after = tensordict["observation"].numpy(), tensordict[NEXT].numpy()
        for observation in (before, after):
            observation[rows] = self.goals.place(observation[rows], goal)
        reward, terminated = self.goals.judge(after[rows])
        self._reached += int(np.count_nonzero(terminated))
        _flat(tensordict["next", "reward"])[rows] = reward
        _flat(tensordict["next", "terminated"])[rows] = terminated
        _flat(tensordict["next", "done"])[rows] |= terminated
        return tensordict

    def choose(self, slots: NDArray[np.int64], place: NDArray[np.float64]) -> NDArray[np.int64]:
        """Chooses the rows whose next observations are to be the goals.

        Args:
            slots: ``int64[K]``, the rows to be relabelled.
            place: ``float64[K]`` in [0, 1), what chance says of each.

        Returns:
            ``int64[K]``, slots.
        """
        if self.strategy is HindsightStrategy.RANDOM:
            return (place * self.index.size).astype(np.int64)
        episodes = self.index.of(slots)
        first = self._first(episodes)
        return self.index.slots(episodes.env, first + (place * (episodes.last - first + 1)).astype(np.int64))

    def _first(self, episodes: Episodes) -> NDArray[np.int64]:
        """Returns the time of the first row that may give the goal, ``int64[K]``."""
        if self.strategy is HindsightStrategy.FUTURE:
            return episodes.time
        return episodes.last if self.strategy is HindsightStrategy.FINAL else episodes.first

    def gauges(self) -> dict[str, float]:
        """Returns shares since the last call: relabelled rows, and those of them that reach their new goal."""
        found = {"her_relabelled": self._relabelled / self._rows} if self._rows else {}
        if self._relabelled:
            found["her_reached"] = self._reached / self._relabelled
        self._rows, self._relabelled, self._reached = 0, 0, 0
        return found

    def clear(self) -> None:
        """Forgets all rows."""
        self.index.clear()

    def get_extra_state(self) -> dict[str, Any]:
        """Returns index, generator, and what `gauges` has yet to report, as tensors and numbers."""
        return {
            "index": self.index.state_dict(),
            "generator": self._generator.get_state(),
            "window": [self._rows, self._relabelled, self._reached],
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores `get_extra_state`."""
        self.index.load_state_dict(state["index"])
        self._generator.set_state(state["generator"])
        self._rows, self._relabelled, self._reached = state.get("window", (0, 0, 0))  # not kept by earlier versions

    def __repr__(self) -> str:
        return f"HindsightTransform({self.goals!r}, share={self.share}, strategy={self.strategy.value!r})"


def _flat(leaf: Tensor) -> NDArray:
    """Returns ``[B, 1]`` or ``[B]`` as an array ``[B]`` of the same memory."""
    return leaf.view(len(leaf)).numpy()
