"""Stamps raw one-step rows with clip, episode and position, before n-step returns move anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from vlmrb.replay.clips import ClipStore

STAMP = "stamp"  # int64[..., 4]: entry in the clip store, position in the clip, episode id, outcome
_NO_OUTCOME = -1  # the row does not end its episode; 0, 1: it does, without or with success


class FinishedEpisodes(NamedTuple):
    """Rows of episodes whose last row has just been written.

    Attributes:
        slots: ``int64[K]``.
        generations: ``int64[K]``.
        success: ``int8[K]``, 0 or 1.
    """

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    success: NDArray[np.int8]


class VLMScoreTransform(Transform):
    """Cuts the stream of every environment into clips and follows its episodes, on the way into the buffer.

    `inv` sees blocks ``[n, T]`` of consecutive raw rows, takes ``snapshot`` and ``success`` off them, stamps each row,
    and hands frames to the clip store. A clip of L frames holds the L − 1 rows between them; it starts where the last
    one ended (sharing that frame) or at an episode's first state, and ends after L − 1 rows or with the episode. After
    the write the buffer calls `commit` with the slots that the rows have got.

    Args:
        clips: where clips go; ``None`` keeps no clips, only episodes.
        keep: keys that stay in the rows; all others are dropped.
    """

    def __init__(self, clips: ClipStore | None, keep: Sequence[NestedKey]) -> None:
        super().__init__()
        self.clips = clips
        self.keep = list(keep)
        self._reset_streams(0)
        self._next_episode = 0
        self._knows_success = False  # whether the rows carry ("next", "success")

    @property
    def num_envs(self) -> int:
        """Number of environments seen so far, 0 before the first block."""
        return len(self._episode)

    def _reset_streams(self, num_envs: int) -> None:
        self._episode = np.full(num_envs, -1, np.int64)  # −1: the next row begins an episode
        self._position = np.zeros(num_envs, np.int64)  # of the next row in its clip; 0: it begins one
        self._entry = np.full(num_envs, -1, np.int64)  # of the open clip
        self._succeeded = np.zeros(num_envs, bool)  # within the running episode
        # Slots and generations of the running episodes' rows, [n, W], of which the first _count[e] are filled.
        self._open_index = np.zeros((num_envs, 0), np.int64)
        self._open_generation = np.zeros((num_envs, 0), np.int64)
        self._count = np.zeros(num_envs, np.int64)

    def check(self, data: TensorDictBase) -> None:
        """Refuses a block that cannot be stamped, before anything has changed.

        Args:
            data: ``[n, T]``.

        Raises:
            ValueError: another number of environments than before, or a key is missing.
        """
        if self.num_envs and data.shape[0] != self.num_envs:
            raise ValueError(f"expected rows of {self.num_envs} environments as before, got {data.shape[0]}")
        present = data.keys(include_nested=True)
        for key in self.keep:
            if key not in present:
                raise ValueError(
                    f"the rows lack {key!r}, which replay.keep lists; they have {sorted(map(str, present))}"
                )
        if self.clips is not None and ("snapshot" not in present or ("next", "snapshot") not in present):
            raise ValueError(
                f"clips of {self.clips.clip_length} frames need 'snapshot' and ('next', 'snapshot') in the rows: "
                "take them from an environment that has snapshots, or set clip_length to None"
            )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.num_envs:
            self._reset_streams(tensordict.shape[0])
        num_envs, length = tensordict.shape
        done = _flags(tensordict.get(("next", "done")))  # [n, T]
        success = tensordict.get(("next", "success"), None)
        self._knows_success = success is not None
        steps = np.arange(length)
        ends = np.maximum.accumulate(np.where(done, steps, -1), axis=1)
        last_end = np.concatenate(
            [np.full((num_envs, 1), -1), ends[:, :-1]], axis=1
        )  # before each row; −1: none in this block
        begins = np.concatenate([self._episode[:, None] < 0, done[:, :-1]], axis=1)
        episode = self._number_episodes(begins)
        outcome = self._outcomes(done, None if success is None else _flags(success))
        if self.clips is None:
            entry = position = np.zeros_like(episode)
        else:
            rows_per_clip = self.clips.clip_length - 1
            position = np.where(last_end >= 0, steps - last_end - 1, self._position[:, None] + steps) % rows_per_clip
            entry = self._cut(tensordict, position, episode, done)
        self._episode = np.where(done[:, -1], -1, episode[:, -1])
        stamp = np.stack([entry, position, episode, outcome], axis=-1)
        return tensordict.select(*self.keep).set(STAMP, torch.from_numpy(stamp))

    def _number_episodes(self, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Numbers episodes in the order of their first rows' times; returns ``int64[n, T]``."""
        new = np.full(begins.shape[::-1], -1, np.int64)  # [T, n], so that earlier rows come first
        count = int(begins.sum())
        new[begins.T] = np.arange(self._next_episode, self._next_episode + count)
        self._next_episode += count
        return np.maximum(np.maximum.accumulate(new.T, axis=1), self._episode[:, None])

    def _outcomes(self, done: NDArray[np.bool_], success: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        """Returns per row whether it ends its episode, and how; ``int64[n, T]``."""
        outcome = np.full(done.shape, _NO_OUTCOME, np.int64)
        if success is None:
            return outcome
        if not done.any():
            self._succeeded |= success.any(axis=1)
            return outcome
        for env in np.flatnonzero(done.any(axis=1)):
            start = 0
            for end in np.flatnonzero(done[env]).tolist():
                outcome[env, end] = self._succeeded[env] or success[env, start : end + 1].any()
                self._succeeded[env] = False
                start = end + 1
            self._succeeded[env] = success[env, start:].any()
        going = ~done.any(axis=1)
        self._succeeded[going] |= success[going].any(axis=1)
        return outcome

    def _cut(
        self, data: TensorDictBase, position: NDArray[np.int64], episode: NDArray[np.int64], done: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Opens, fills and closes clips; returns each row's entry, ``int64[n, T]``."""
        assert self.clips is not None
        snapshots = data.get("snapshot").numpy()  # [n, T, S]
        after = data.get(("next", "snapshot")).numpy()
        time, env = np.nonzero((position == 0).T)
        entry = np.full(position.shape, -1, np.int64)
        if len(env):
            entry[env, time] = self.clips.open(episode[env, time], snapshots[env, time])
        # A row that opens no clip belongs to the one opened last before it, in this block or an earlier one.
        steps = np.arange(position.shape[1])
        opened = np.maximum.accumulate(np.where(entry >= 0, steps, -1), axis=1)
        inherited = np.take_along_axis(entry, np.maximum(opened, 0), axis=1)
        entry = np.where(opened >= 0, inherited, self._entry[:, None])
        self.clips.add_frames(entry.reshape(-1), position.reshape(-1) + 1, after.reshape(-1, *after.shape[2:]))
        closing = done | (position == self.clips.clip_length - 2)
        if closing.any():
            self.clips.close(entry[closing], position[closing] + 1)
        self._position = np.where(closing[:, -1], 0, position[:, -1] + 1)
        self._entry = np.where(closing[:, -1], -1, entry[:, -1])
        return entry

    def commit(
        self, index: NDArray[np.int64], generation: NDArray[np.int64], stamp: NDArray[np.int64], env_steps: int
    ) -> FinishedEpisodes | None:
        """Takes the slots of rows just written.

        Args:
            index: ``int64[n, T]``, slots.
            generation: ``int64[n, T]``.
            stamp: ``int64[n, T, 4]``, as `inv` stamped these rows.
            env_steps: env steps collected so far.

        Returns:
            All rows of the episodes that these rows complete, or ``None``.
        """
        if self.clips is not None:
            entry, position = stamp[..., 0].reshape(-1), stamp[..., 1].reshape(-1)
            self.clips.commit(entry, position, index.reshape(-1), generation.reshape(-1), env_steps)
        if not self._knows_success:
            return None
        self._remember(index, generation)
        outcome = stamp[..., 3]
        if not (outcome != _NO_OUTCOME).any():
            return None
        return self._finish(outcome, index.shape[1])

    def _remember(self, index: NDArray[np.int64], generation: NDArray[np.int64]) -> None:
        length = index.shape[1]
        needed = int(self._count.max()) + length
        if needed > self._open_index.shape[1]:
            extra = ((0, 0), (0, max(needed, 2 * self._open_index.shape[1]) - self._open_index.shape[1]))
            self._open_index = np.pad(self._open_index, extra)
            self._open_generation = np.pad(self._open_generation, extra)
        env = np.arange(self.num_envs)[:, None]
        at = self._count[:, None] + np.arange(length)
        self._open_index[env, at] = index
        self._open_generation[env, at] = generation
        self._count += length

    def _finish(self, outcome: NDArray[np.int64], length: int) -> FinishedEpisodes:
        """Takes the rows of ended episodes off the tables."""
        indices, generations, successes = [], [], []
        for env in np.flatnonzero((outcome != _NO_OUTCOME).any(axis=1)).tolist():
            start = 0
            for end in np.flatnonzero(outcome[env] != _NO_OUTCOME).tolist():
                stop = int(self._count[env]) - length + end + 1
                indices.append(self._open_index[env, start:stop].copy())
                generations.append(self._open_generation[env, start:stop].copy())
                successes.append(np.full(stop - start, outcome[env, end], np.int8))
                start = stop
            left = self._count[env] - start
            for table in (self._open_index, self._open_generation):
                table[env, :left] = table[env, start : start + left].copy()
            self._count[env] = left
        return FinishedEpisodes(np.concatenate(indices), np.concatenate(generations), np.concatenate(successes))

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the state of all streams, open clips' entries included, as tensors and numbers."""
        width = int(self._count.max(initial=0))
        arrays = {
            "episode": self._episode,
            "position": self._position,
            "entry": self._entry,
            "succeeded": self._succeeded,
            "count": self._count,
            "open_index": self._open_index[:, :width],
            "open_generation": self._open_generation[:, :width],
        }
        state: dict[str, Any] = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return state | {"next_episode": self._next_episode, "knows_success": self._knows_success}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores `get_extra_state`."""
        for name, value in state.items():
            setattr(self, f"_{name}", value.numpy().copy() if isinstance(value, Tensor) else value)


def _flags(tensor: Tensor) -> NDArray[np.bool_]:
    """``bool[n, T, 1]`` or ``bool[n, T]`` → ``bool[n, T]``."""
    return tensor.reshape(tensor.shape[:2]).numpy()
