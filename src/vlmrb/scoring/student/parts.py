"""Cuts clips into the small inputs that a student judges: what changed between consecutive observations, and around it.

Events in which a scorer is interested (a key picked up, a door opened, the goal reached) are local changes. A network
that sees a change with its neighbourhood, and nothing else, has so little to tell apart that a few hundred answered
clips teach it, where one that sees whole observations takes tens of thousands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["grid", "vector", "pixels"]

OUTSIDE = 255  # what a symbolic grid's neighbourhood holds beyond its edge
REACH = 1  # cells around a change that belong to it
EDGE = 32  # pixels to which images are scaled down


@dataclass(frozen=True)
class Parts:
    """What some clips consist of.

    Attributes:
        inputs: ``[K, …]``, the distinct inputs.
        which: ``int64[M]``, the input of each part.
        clip: ``int64[M]``, the clip of each part, ascending.
        step: ``int64[M]``, the transition in its clip, 0 to L − 2.
    """

    inputs: NDArray
    which: NDArray[np.int64]
    clip: NDArray[np.int64]
    step: NDArray[np.int64]

    def of_clips(self, count: int) -> list[Parts]:
        """Takes the clips 0 … count − 1 apart, each with its own inputs."""
        starts = np.searchsorted(self.clip, np.arange(count + 1))
        found = []
        for first, last in zip(starts, starts[1:], strict=False):
            kept, which = np.unique(self.which[first:last], return_inverse=True)
            zero = np.zeros(last - first, np.int64)
            found.append(Parts(self.inputs[kept], which.reshape(-1), zero, self.step[first:last]))
        return found


def together(parts: Sequence[Parts]) -> Parts:
    """Puts clips, one each, beside each other; inputs that they share become one.

    Args:
        parts: of N ≥ 1 clips.
    """
    inputs = np.concatenate([one.inputs for one in parts])
    starts = np.cumsum([0, *(len(one.inputs) for one in parts)])
    which = np.concatenate([one.which + start for one, start in zip(parts, starts, strict=False)])
    clip = np.repeat(np.arange(len(parts)), [len(one.which) for one in parts])
    distinct, inverse = unique_rows(inputs)
    return Parts(inputs[distinct], inverse[which], clip, np.concatenate([one.step for one in parts]))


def unique_rows(rows: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds equal rows by their bytes.

    Args:
        rows: ``[K, …]``.

    Returns:
        The places of the distinct rows, ``int64[U]``, and for each row its place among them, ``int64[K]``.
    """
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    keys = flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize))).reshape(-1)
    _, places, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return places, inverse.reshape(-1)


class PartsMaker(ABC):
    """Turns observations into parts."""

    @abstractmethod
    def parts(self, observations: NDArray) -> Parts:
        """Cuts clips.

        Args:
            observations: ``[B, L, …]``, as the agent saw them; steps beyond a clip's end repeat its last one, so that
                nothing changes there.
        """


class GridChanges(PartsMaker):
    """For symbolic grids ``uint8[W, H, C]``: each cell that changes, with the cells around it before and after.

    Inputs are ``uint8[2, 3, 3, C]``.
    """

    def parts(self, observations: NDArray) -> Parts:
        """Cuts clips; see the class."""
        around = ((0, 0), (0, 0), (REACH, REACH), (REACH, REACH), (0, 0))
        before, after = observations[:, :-1], observations[:, 1:]
        clip, step, x, y = np.nonzero((before != after).any(-1))
        padded = np.pad(observations, around, constant_values=OUTSIDE)
        offsets = np.arange(2 * REACH + 1)
        columns, rows = x[:, None, None] + offsets[:, None], y[:, None, None] + offsets
        at = clip[:, None, None], step[:, None, None]
        changes = np.stack([padded[at[0], at[1] + later, columns, rows] for later in (0, 1)], 1)
        return _distinct(changes, clip, step)


class VectorChanges(PartsMaker):
    """For vectors: each transition as what it led to and what it changed. Inputs are ``float32[2·D]``."""

    def parts(self, observations: NDArray) -> Parts:
        """Cuts clips; see the class."""
        flat = observations.reshape(*observations.shape[:2], -1).astype(np.float32)
        before, after = flat[:, :-1], flat[:, 1:]
        clip, step = np.nonzero((before != after).any(-1))
        later = after[clip, step]
        return _distinct(np.concatenate([later, later - before[clip, step]], -1), clip, step)


class PixelChanges(PartsMaker):
    """For images ``uint8[H, W, C]`` or stacks of them ``uint8[K, H, W, C]``: each transition that changes a pixel.

    Inputs are ``uint8[2·C, h, w]``, before and after, at most 32 × 32 pixels.
    """

    def parts(self, observations: NDArray) -> Parts:
        """Cuts clips; see the class."""
        latest = observations[:, :, -1] if observations.ndim == 6 else observations  # of a stack
        changed = (latest[:, :-1] != latest[:, 1:]).reshape(*latest[:, 1:].shape[:2], -1).any(-1)
        small = np.moveaxis(_shrunk(latest), -1, -3)
        clip, step = np.nonzero(changed)
        return _distinct(np.concatenate([small[clip, step], small[clip, step + 1]], 1), clip, step)


def make_parts_maker(kind: Kind) -> PartsMaker:
    """Returns the maker for a kind of observations."""
    if kind == "grid":
        return GridChanges()
    return VectorChanges() if kind == "vector" else PixelChanges()


def kind_of(shape: Sequence[int], dtype: np.dtype, pixels: bool) -> Kind:
    """Tells the kind of observations.

    Args:
        shape: of one.
        dtype: the same.
        pixels: whether the environment says that they are images (`Spaces.pixels`).
    """
    if pixels:
        return "pixels"
    return "grid" if dtype == np.uint8 and len(shape) == 3 else "vector"


def _distinct(inputs: NDArray, clip: NDArray[np.int64], step: NDArray[np.int64]) -> Parts:
    places, which = unique_rows(inputs)
    return Parts(inputs[places], which, clip, step)


def _shrunk(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scales ``uint8[…, H, W, C]`` down by averaging whole blocks of pixels; what is left over at the edges goes."""
    factor = -(-max(images.shape[-3:-1]) // EDGE)
    if factor == 1:
        return images
    height, width = (size // factor for size in images.shape[-3:-1])
    cut = images[..., : height * factor, : width * factor, :]
    blocks = cut.reshape(*images.shape[:-3], height, factor, width, factor, images.shape[-1])
    return blocks.mean((-4, -2)).astype(np.uint8)
