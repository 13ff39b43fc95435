"""Fills a new buffer before a run: with recorded episodes, or with an earlier run's rows, unscored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.persistence import restore_rows

_STATES, _STEPS = ("observation", "snapshot"), ("action", "reward", "success")


def write_episode(
    path: Path,
    *,
    observation: NDArray,
    snapshot: NDArray,
    action: NDArray,
    reward: NDArray,
    success: NDArray[np.bool_],
    terminated: bool,
) -> None:
    """Writes one episode of T steps as a compressed ``.npz``.

    Args:
        path: the file.
        observation: ``[T + 1, …]``, the last one after the last step.
        snapshot: ``[T + 1, S]``.
        action: ``int64[T]`` or ``float32[T, A]``.
        reward: ``float32[T]``.
        success: ``bool[T]``, the goal was reached by that step.
        terminated: whether the last state is terminal; otherwise the episode was cut there.
    """
    states = {"observation": observation, "snapshot": snapshot}
    steps = {"action": action, "reward": reward, "success": success, "terminated": np.array(terminated)}
    unfinished = path.with_suffix(".part")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **states, **steps)
    unfinished.replace(path)


def read_episode(path: Path) -> TensorDict:
    """Reads what `write_episode` wrote as the rows of a collector, ``[1, T]``.

    Raises:
        ValueError: the file is damaged, or its arrays do not fit each other.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in (*_STATES, *_STEPS, "terminated")}
        return _rows(arrays)
    except Exception as error:  # zipfile, zlib, NumPy and torch each have their own
        raise ValueError(f"{path} is no episode that can be read: {error}") from error


def _rows(arrays: dict[str, NDArray]) -> TensorDict:
    length = len(arrays["action"])
    lengths = {name: len(arrays[name]) for name in (*_STATES, *_STEPS)}
    if not length or any(lengths[name] != length + (name in _STATES) for name in lengths):
        raise ValueError(f"one state more than steps is needed, got {lengths}")
    last = np.arange(length) == length - 1
    flags = {"terminated": last & bool(arrays["terminated"]), "done": last, "success": arrays["success"]}
    flags["truncated"] = last & ~flags["terminated"]
    after = {name: torch.from_numpy(array[:, None]) for name, array in flags.items()}
    after["reward"] = torch.from_numpy(arrays["reward"].astype(np.float32)[:, None])
    rows: dict[str, Any] = {"action": torch.from_numpy(arrays["action"]), "next": after}
    for name in _STATES:
        rows[name], after[name] = (torch.from_numpy(arrays[name][part]) for part in (slice(-1), slice(1, None)))
    return TensorDict(rows, [length]).unsqueeze(0)


def prefill_with_episodes(buffer: VLMReplayBuffer, paths: Sequence[Path]) -> Iterator[int]:
    """Stores recorded episodes as if they had been collected; their clips are handed out to be scored.

    Args:
        buffer: empty.
        paths: files that `write_episode` wrote.

    Yields:
        The rows in the buffer, after each episode.

    Raises:
        ValueError: a file cannot be read or does not fit those before.
    """
    for path in paths:
        rows = read_episode(path)
        try:
            buffer.extend(rows)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        yield len(buffer)
    buffer.change_streams()
    buffer.restart_clock()


def prefill_with_buffer(buffer: VLMReplayBuffer, state: Mapping[str, Any]) -> None:
    """Stores the rows of a saved buffer; nothing that was learnt about them is kept, and all clips are handed out anew.

    Args:
        buffer: empty.
        state: `VLMReplayBuffer.state_dict` of another one, with the same capacity, n-step return and clip length; its
            priority terms may be others.

    Raises:
        ValueError: the buffers do not fit.
    """
    restore_rows(buffer, state)
    buffer.change_streams()
    if buffer.clips is not None:
        buffer.clips.hand_out_again()
    buffer.restart_clock()
