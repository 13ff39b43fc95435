"""Follows the stream of every environment: which episode and which clip each row belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlmrb.replay.clips import ClipStore

# A stamp is int64[4]: the row's entry in the clip store, its position in the clip, its episode's id, and its outcome.
ENTRY, POSITION, EPISODE, OUTCOME = range(4)
NO_OUTCOME = -1  # the row does not end its episode; 0, 1: it does, without or with success


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


class Streams:
    """Cuts n streams of rows into episodes and clips.

    A clip of L frames holds the L − 1 rows between them; it starts where the last one ended (sharing that frame) or at
    an episode's first state, and ends after L − 1 rows or with the episode. So every row lies in exactly one clip, and
    both of its states are visible in it (method: objects).

    Args:
        num_envs: n.
        clips: where clips go; ``None`` keeps no clips, only episodes.
    """

    def __init__(self, num_envs: int, clips: ClipStore | None) -> None:
        self.num_envs = num_envs
        self.clips = clips
        self.next_episode = 0
        self.knows_success = False  # whether the rows say who succeeded
        self._episode = np.full(num_envs, -1, np.int64)  # −1: the next row begins an episode
        self._position = np.zeros(num_envs, np.int64)  # of the next row in its clip; 0: it begins one
        self._entry = np.full(num_envs, -1, np.int64)  # of the open clip
        self._succeeded = np.zeros(num_envs, np.bool_)  # within the running episode
        # Slot and generation of the running episodes' rows, [n, W, 2], of which the first _count[e] are filled.
        self._open = np.zeros((num_envs, 0, 2), np.int64)
        self._count = np.zeros(num_envs, np.int64)
        self._last: NDArray | None = (
            None  # [n, …], the last observation of each, to see whether the next block continues
        )

    def check_continues(self, before: NDArray, after: NDArray, done: NDArray[np.bool_]) -> None:
        """Refuses rows that do not continue each other: clips and n-step returns would mix unrelated states.

        Looks inside the block and at its seam with the last one.

        Args:
            before: ``[n, T, …]``, observation before each row.
            after: ``[n, T, …]``, observation after it.
            done: ``bool[n, T]``.

        Raises:
            ValueError: names the environments.
        """
        broken = _gaps(after[:, :-1], before[:, 1:], done[:, :-1])
        if self._last is not None:
            broken = broken | _gaps(self._last[:, None], before[:, :1], self._episode[:, None] < 0)
        if broken.any():
            raise ValueError(
                f"rows of environments {np.flatnonzero(broken).tolist()} do not continue where the ones before ended: "
                "pass blocks [n_envs, T] in the order of time, and call end_streams() when environments were reset"
            )
        self._last = after[:, -1].copy()

    def end(self, env_steps: int) -> None:
        """Ends all running episodes and open clips where they are; how these episodes would have ended stays unknown.

        Args:
            env_steps: env steps collected so far.
        """
        if self.clips is not None:
            started = self._position > 0
            self.clips.close(self._entry[started], self._position[started])
            self.clips.complete(self._entry[started], env_steps)
        self._episode[:] = -1
        self._position[:] = 0
        self._entry[:] = -1
        self._succeeded[:] = False
        self._last = None

    def forget_episodes(self) -> None:
        """Stops waiting for the outcomes of episodes whose rows have all been written."""
        self._count[:] = 0

    def stamp(
        self, done: NDArray[np.bool_], success: NDArray[np.bool_] | None, frames: tuple[NDArray, NDArray] | None
    ) -> NDArray[np.int64]:
        """Stamps a block of raw rows, and hands their frames to the clip store.

        Args:
            done: ``bool[n, T]``, which rows end their episodes.
            success: ``bool[n, T]``, or ``None`` if unknown.
            frames: snapshots ``[n, T, S]`` before and after each row; ``None`` without clips.

        Returns:
            ``int64[n, T, 4]``.
        """
        steps = np.arange(done.shape[1])
        stamp = np.zeros((*done.shape, 4), np.int64)
        begins = np.empty_like(done)
        begins[:, 0] = self._episode < 0
        begins[:, 1:] = done[:, :-1]
        episode = stamp[..., EPISODE]
        episode[:] = self._number_episodes(begins)
        self.knows_success = success is not None
        stamp[..., OUTCOME] = NO_OUTCOME if success is None else self._outcomes(done, success)
        if self.clips is not None and frames is not None:
            # Rows since the episode began in this block, or else since the open clip began; clips are cut every L − 1.
            began = np.maximum.accumulate(np.where(begins, steps, -1), axis=1)
            position = np.where(began >= 0, steps - began, self._position[:, None] + steps) % (
                self.clips.clip_length - 1
            )
            stamp[..., POSITION] = position
            stamp[..., ENTRY] = self._cut(self.clips, frames, position, episode, done)
        self._episode = np.where(done[:, -1], -1, episode[:, -1])
        return stamp

    def _number_episodes(self, begins: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Numbers episodes in the order of their first rows' times; returns ``int64[n, T]``."""
        count = int(np.count_nonzero(begins))
        if not count:
            return self._episode[:, None]
        new = np.full(begins.shape[::-1], -1, np.int64)  # [T, n], so that earlier rows come first
        new[begins.T] = np.arange(self.next_episode, self.next_episode + count)
        self.next_episode += count
        return np.maximum(np.maximum.accumulate(new, axis=0).T, self._episode[:, None])

    def _outcomes(self, done: NDArray[np.bool_], success: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns per row whether it ends its episode, and how; ``int64[n, T]``."""
        outcome = np.full(done.shape, NO_OUTCOME, np.int64)
        successes = success.cumsum(axis=1) + self._succeeded[:, None]  # since the episode began, or since the block did
        env, end = np.nonzero(done)
        at_end = successes[env, end]
        outcome[env, end] = at_end > _previous(env, at_end)
        earlier = np.zeros(self.num_envs, np.int64)
        earlier[env] = at_end  # of the last end in the block
        self._succeeded = successes[:, -1] > earlier
        return outcome

    def _cut(
        self,
        clips: ClipStore,
        frames: tuple[NDArray, NDArray],
        position: NDArray[np.int64],
        episode: NDArray[np.int64],
        done: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Opens, fills and closes clips; returns each row's entry, ``int64[n, T]``."""
        before, after = frames
        time, env = np.nonzero(position.T == 0)
        entry = np.full(position.shape, -1, np.int64)
        if len(env):
            entry[env, time] = clips.open(episode[env, time], before[env, time])
            # A row that opens no clip belongs to the one opened last before it, in this block or an earlier one.
            opened = np.maximum.accumulate(np.where(entry >= 0, np.arange(position.shape[1]), -1), axis=1)
            inherited = np.take_along_axis(entry, np.maximum(opened, 0), axis=1)
            entry = np.where(opened >= 0, inherited, self._entry[:, None])
        else:
            entry[:] = self._entry[:, None]
        clips.add_frames(entry.reshape(-1), position.reshape(-1) + 1, after.reshape(-1, *after.shape[2:]))
        closing = done | (position == clips.clip_length - 2)
        if closing.any():
            clips.close(entry[closing], position[closing] + 1)
        self._position = np.where(closing[:, -1], 0, position[:, -1] + 1)
        self._entry = np.where(closing[:, -1], -1, entry[:, -1])
        return entry

    def commit(
        self, slots: NDArray[np.int64], generations: NDArray[np.int64], stamp: NDArray[np.int64], env_steps: int
    ) -> FinishedEpisodes | None:
        """Takes the slots of rows just written.

        Args:
            slots: ``int64[n, T]``.
            generations: ``int64[n, T]``.
            stamp: ``int64[n, T, 4]`` of these rows; n-step returns deliver rows later than they were stamped.
            env_steps: env steps collected so far.

        Returns:
            All rows of the episodes that these rows complete, or ``None``.
        """
        if self.clips is not None:
            entry, position = stamp[..., ENTRY].reshape(-1), stamp[..., POSITION].reshape(-1)
            self.clips.commit(entry, position, slots.reshape(-1), generations.reshape(-1), env_steps)
        if not self.knows_success:
            return None
        self._remember(slots, generations)
        outcome = stamp[..., OUTCOME]
        if not (outcome != NO_OUTCOME).any():
            return None
        return self._finish(outcome)

    def _remember(self, slots: NDArray[np.int64], generations: NDArray[np.int64]) -> None:
        length, width = slots.shape[1], self._open.shape[1]
        needed = int(self._count.max()) + length
        if needed > width:
            self._open = np.pad(self._open, ((0, 0), (0, max(needed, 2 * width) - width), (0, 0)))
        env = np.arange(self.num_envs)[:, None]
        at = self._count[:, None] + np.arange(length)
        self._open[env, at, 0] = slots
        self._open[env, at, 1] = generations
        self._count += length

    def _finish(self, outcome: NDArray[np.int64]) -> FinishedEpisodes:
        """Takes the rows of ended episodes off the table."""
        env, end = np.nonzero(outcome != NO_OUTCOME)
        stops = self._count[env] - outcome.shape[1] + end + 1
        starts = _previous(env, stops)
        pieces = zip(env.tolist(), starts.tolist(), stops.tolist(), strict=True)
        rows = np.concatenate([self._open[e, start:stop] for e, start, stop in pieces])
        success = np.repeat(outcome[env, end].astype(np.int8), stops - starts)
        for e, stop in dict(zip(env.tolist(), stops.tolist(), strict=True)).items():  # the last end of each
            left = int(self._count[e]) - stop
            self._open[e, :left] = self._open[e, stop : stop + left]
            self._count[e] = left
        return FinishedEpisodes(rows[:, 0], rows[:, 1], success)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all streams, open clips' entries included, as tensors and numbers."""
        width = int(self._count.max(initial=0))
        state: dict[str, Any] = {}
        for name in ("_episode", "_position", "_entry", "_succeeded", "_count", "_open"):
            array = getattr(self, name)
            state[name] = torch.from_numpy((array[:, :width] if array.ndim > 1 else array).copy())
        state["_last"] = None if self._last is None else torch.from_numpy(self._last.copy())
        return state | {"next_episode": self.next_episode, "knows_success": self.knows_success}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value.numpy().copy() if isinstance(value, Tensor) else value)


def _gaps(after: NDArray, before: NDArray, ended: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns which streams have a row that begins in another state than the row before it led to, ``bool[n]``.

    Args:
        after: ``[n, K, …]``, states that rows led to.
        before: ``[n, K, …]``, states in which the rows after them begin.
        ended: ``bool[n, K]``, where an episode ended in between.
    """
    differs = after != before
    # Counting is several times as fast as reducing row by row, which only a gap needs.
    if np.count_nonzero(differs) == np.count_nonzero(differs[ended]):
        return np.zeros(len(ended), np.bool_)
    return (differs.reshape(*ended.shape, -1).any(axis=2) & ~ended).any(axis=1)


def _previous(env: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each event the value at the same environment's event before it, 0 at its first; events are sorted."""
    previous = np.zeros_like(values)
    previous[1:] = np.where(env[1:] == env[:-1], values[:-1], 0)
    return previous
