"""Finds the rows of an episode among the rows of several environments, which lie interleaved in a ring of slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_NEVER = -1
_OF_ROWS = ("_time", "_begin", "_end")
_OF_TIMES = ("_position", "_length", "_offset")


class Episodes(NamedTuple):
    """Where rows lie in their episodes, ``int64[K]`` each.

    Attributes:
        env: their environments.
        time: when they were collected, in vector steps.
        first: time of the first row of the episode that still has its slot.
        last: time of its last row, or of the last one so far.
    """

    env: NDArray[np.int64]
    time: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


class EpisodeIndex:
    """Tells in O(1) where in its episode a row lies, and in which slot any other row of the episode does.

    Rows are written in blocks ``[n, T]``, environment by environment, round robin. All environments move on together,
    so *time*, counted in vector steps, is one for all of them, and of the rows of one time that of environment e lies
    e·T slots behind that of environment 0. The rows of an episode are those of its environment between two times.

    Args:
        capacity: slots of the buffer.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Of each slot: the row's time, and the times of its episode's first and last row (`_NEVER`: it goes on).
        self._time, self._begin, self._end = (np.full(capacity, _NEVER, np.int64) for _ in range(3))
        # Of each of the last `capacity` times, a ring: how many rows were written before environment 0's of that time,
        # the length T of its block, and its place in the block. Rows that are still there are never older than that.
        self._position = np.zeros(capacity, np.int64)
        self._length, self._offset = np.ones(capacity, np.int32), np.zeros(capacity, np.int32)
        self.clear()

    def clear(self) -> None:
        """Forgets all rows."""
        self.written = 0  # rows, ever
        self.times = 0  # vector steps, ever
        self._open = np.zeros(0, np.int64)  # [n], when the running episode of each environment began; `_NEVER`: none

    @property
    def size(self) -> int:
        """Number of rows that still have their slots."""
        return min(self.written, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(getattr(self, name).nbytes for name in (*_OF_ROWS, *_OF_TIMES))

    def write(self, slots: NDArray[np.int64], done: NDArray[np.bool_]) -> None:
        """Notes a block of rows just written.

        Args:
            slots: ``int64[n, T]``, consecutive ones from where the last block ended, going on at slot 0 after the last.
            done: ``bool[n, T]``, which rows end their episodes.
        """
        num_envs, length = done.shape
        if len(self._open) != num_envs:  # the running episodes of other environments were ended before
            self._open = np.full(num_envs, _NEVER, np.int64)
        offset = np.arange(length)
        time = self.times + offset
        at = time % self.capacity
        self._position[at], self._length[at], self._offset[at] = self.written + offset, length, offset
        begins = np.empty_like(done)
        begins[:, 0] = self._open < 0
        begins[:, 1:] = done[:, :-1]
        begin = np.maximum.accumulate(np.where(begins, time, self._open[:, None]), axis=1)
        self._time[slots], self._begin[slots], self._end[slots] = time, begin, _NEVER
        self._open = np.where(done[:, -1], _NEVER, begin[:, -1])
        self.written += done.size
        self.times += length
        env, step = np.nonzero(done)
        self._close(env, begin[env, step], time[step])

    def end(self) -> None:
        """Ends all running episodes with their last rows so far."""
        env = np.flatnonzero(self._open >= 0)
        self._close(env, self._open[env], np.full(len(env), self.times - 1))
        self._open[:] = _NEVER

    def _close(self, env: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Notes the last rows' times of episodes ``[K]`` in all of their rows that are still there."""
        if not len(env):
            return
        first = np.maximum(first, self._oldest(env))
        counts = last - first + 1
        which = np.repeat(np.arange(len(env)), counts)
        since_first = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._end[self.slots(env[which], first[which] + since_first)] = last[which]

    def _oldest(self, env: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the time of the oldest row of environments ``[K]`` that is still there.

        It is one of the block that is being overwritten: of the environments before the one that the oldest row of all
        belongs to, nothing of that block is left, and of those after it all is. Environments of earlier streams count
        otherwise, but no episode of today's reaches back to their rows.
        """
        written_before = max(0, self.written - self.capacity)
        time = self._time[written_before % self.capacity]
        at = time % self.capacity
        length, offset = int(self._length[at]), int(self._offset[at])
        oldest_env = (written_before - self._position[at]) // length
        return time - offset + np.where(env < oldest_env, length, np.where(env == oldest_env, offset, 0))

    def of(self, slots: NDArray[np.int64]) -> Episodes:
        """Returns where the rows in slots ``int64[K]`` lie in their episodes."""
        time = self._time[slots]
        at = time % self.capacity
        env = (slots - self._position[at]) % self.capacity // self._length[at]
        last = self._end[slots]
        last = np.where(last == _NEVER, self.times - 1, last)
        return Episodes(env, time, np.maximum(self._begin[slots], self._oldest(env)), last)

    def slots(self, env: NDArray[np.int64], time: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the slots ``int64[K]`` of environments' rows of given times, both ``int64[K]``; must be there."""
        at = time % self.capacity
        return (self._position[at] + env * self._length[at].astype(np.int64)) % self.capacity

    def state_dict(self) -> dict[str, Any]:
        """Returns everything as tensors and numbers."""
        state: dict[str, Any] = {"written": self.written, "times": self.times, "open": torch.from_numpy(self._open)}
        for names, count in ((_OF_ROWS, self.size), (_OF_TIMES, min(self.times, self.capacity))):
            state |= {name: torch.from_numpy(getattr(self, name)[:count]) for name in names}
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict` of an index with the same capacity."""
        self.written, self.times = state["written"], state["times"]
        self._open = state["open"].numpy().copy()
        for name in (*_OF_ROWS, *_OF_TIMES):
            getattr(self, name)[: len(state[name])] = state[name].numpy()
