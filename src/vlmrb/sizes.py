"""How much memory and disk a run will take, from its settings and a few rows of its environment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from vlmrb.envs import make_env
from vlmrb.replay.build import build_buffer
from vlmrb.replay.storage import GIB, Placement, row_bytes

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule

_SMALL = 1024  # rows; a power of two, at which the priority trees are full
_OPTIMISER_COPIES = 2  # Adam keeps two moments per weight


@dataclass(frozen=True)
class RunSizes:
    """Bytes that a run takes at its end.

    Attributes:
        capacity: rows of the buffer.
        filled: rows that the run's budget of env steps fills; memory and disk are taken as they are written.
        row_bytes: bytes of a row.
        in_files: rows lie in memory-mapped files.
        clip_bytes: bytes of a clip with its snapshots; 0 without clips.
        clip_rows: rows of a clip of full length; shorter episodes make more and shorter clips.
        beside_bytes: bytes per row of capacity for columns, priority trees and what clips note about slots.
        network_bytes: bytes of all networks.
    """

    capacity: int
    filled: int
    row_bytes: int
    in_files: bool
    clip_bytes: int
    clip_rows: int
    beside_bytes: float
    network_bytes: int

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows, in memory or in files."""
        return self.filled * self.row_bytes

    @property
    def clips_bytes(self) -> int:
        """Bytes of the clips, which always lie in memory; more if episodes end early."""
        return -(-self.filled // self.clip_rows) * self.clip_bytes if self.clip_rows else 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of rows, columns, priority trees and clips."""
        return self.rows_bytes + self.clips_bytes + int(self.capacity * self.beside_bytes)

    @property
    def memory_bytes(self) -> int:
        """What of the buffer lies in memory."""
        return self.buffer_bytes - (self.rows_bytes if self.in_files else 0)

    @property
    def sidecar_bytes(self) -> int:
        """Bytes of a checkpoint's replay side-car; as many are taken in memory while it is saved."""
        return self.rows_bytes + self.clips_bytes + int(self.filled * self.beside_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a `.ckpt`: networks and the optimiser's state."""
        return self.network_bytes * (1 + _OPTIMISER_COPIES)


def measure(module: OffPolicyModule) -> tuple[RunSizes, NDArray]:
    """Plays a few steps in a throw-away environment and stores them in a small buffer of the same settings.

    Neither the module nor any random stream changes.

    Args:
        module: with its networks built.

    Returns:
        The sizes, and the snapshots seen, ``[T, S]``.
    """
    replay = replace(module.replay, n_steps=min(module.replay.n_steps, 2))  # rows are as large for any n from 2 on
    with untouched_randomness():
        env = make_env(replace(module.env, num_envs=1, workers=0), seed=0)
        try:
            rows, data = [], env.reset()
            for _ in range(replay.n_steps + 1):
                row, data = env.step_and_maybe_reset(env.rand_action(data))
                rows.append(row)
        finally:
            env.close()
    block: TensorDictBase = torch.stack(rows, -1)
    small_rows = max(_SMALL, replay.batch_size)
    small = build_buffer(
        replace(replay, capacity=small_rows, storage="memory"),
        gamma=module.training_config.gamma,
        total_env_steps=module.training_config.total_env_steps,
        goals=module.goals,
    )
    beside = small.nbytes
    small.extend(block)
    size = row_bytes(small._storage._storage)
    clips = small.clips
    placement = Placement(replay.storage, replay.scratch_dir, int(replay.memory_limit_gib * GIB))
    sizes = RunSizes(
        capacity=replay.capacity,
        filled=min(replay.capacity, module.training_config.total_env_steps),
        row_bytes=size,
        in_files=placement.maps(replay.capacity * size),
        clip_bytes=0 if clips is None else (small.nbytes - beside - size * len(small)) // max(1, len(clips)),
        clip_rows=0 if clips is None else clips.clip_length - 1,
        beside_bytes=beside / small_rows,
        network_bytes=sum(tensor.nbytes for tensor in module.state_dict().values()),
    )
    return sizes, block["snapshot"].reshape(-1, block["snapshot"].shape[-1]).numpy()


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Puts the global random states of Python, NumPy and torch (CPU) back as they were."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
