"""What a family's dynamics owe to the rest: arrays in, arrays out. Knows nothing of torch, so workers start quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True)
class Spaces:
    """Shapes and types of one instance.

    Attributes:
        observation_shape: of one observation.
        observation_dtype: its NumPy type.
        snapshot_size: S, elements of one snapshot.
        action: number of discrete actions, or ``(low, high)`` of a continuous one, each ``float32[A]``.
        snapshot_dtype: NumPy type of a snapshot.
        pixels: whether an observation is an image, ``uint8``, which networks see by convolutions; without it
            ``uint8[W, H, 3]`` is a symbolic grid.
    """

    observation_shape: tuple[int, ...]
    observation_dtype: DTypeLike
    snapshot_size: int
    action: int | tuple[NDArray[np.float32], NDArray[np.float32]]
    snapshot_dtype: DTypeLike = np.uint8
    pixels: bool = False


class Step(NamedTuple):
    """What a step of all instances leads to: the true states after it, before any reset. Arrays are the caller's.

    Attributes:
        observation: ``[n, *observation_shape]``.
        snapshot: ``[n, S]``.
        reward: ``float32[n]``.
        success: ``bool[n]``, the goal was reached by this very step.
        terminated: ``bool[n]``, the episode ended in a terminal state.
        truncated: ``bool[n]``, the episode ran into its horizon; may hold together with ``terminated``.
    """

    observation: NDArray
    snapshot: NDArray
    reward: NDArray[np.float32]
    success: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Simulator(Protocol):
    """Dynamics of ``num_envs`` instances. Never resets by itself.

    Attributes:
        num_envs: n.
        spaces: of one instance.
        exact_resume: whether ``load_state_dict`` continues every episode where it was; otherwise it starts new ones.
    """

    num_envs: int
    spaces: Spaces
    exact_resume: bool

    def step(self, action: NDArray) -> Step:
        """Moves every instance on; ``action`` is ``int64[n]`` or ``float32[n, A]``."""
        ...

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Begins new episodes in the given instances, ``int64[k]``."""
        ...

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns fresh arrays of the current observations ``[n, …]`` and snapshots ``[n, S]``."""
        ...

    def seed(self, seed: int) -> None:
        """Seeds the generator of levels to come."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as arrays, ints, strings and dictionaries of these."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        ...

    def close(self) -> None:
        """Lets go of windows, files and processes; a second call does nothing."""
        ...
