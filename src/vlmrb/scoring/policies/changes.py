"""What happens in a clip, coarsely: codes of what changes in its snapshots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch

COMPONENTS = 512  # of a snapshot that are looked at, evenly spaced if there are more
LOWEST, HIGHEST = -10, 5  # powers of 2 that sizes of change are rounded down to
NOTHING = 0  # the code of a clip in which nothing changes
_VALUES = 1 << 16
CODES = 1 + _VALUES + COMPONENTS


def changes(clips: ClipBatch) -> list[NDArray[np.int64]]:
    """Returns what changes in clips, as codes below `CODES`; equal content gives equal codes.

    Snapshots of whole numbers are compared from frame to frame: a code for each pair of values, old and new, that some
    component goes through, and one for each component that changes. Of snapshots with so many components that they
    are frames, first and last are compared, in a part of the components and in eighths of their range. Snapshots of
    real numbers are compared first to last: a code for component, direction and size, by powers of 2.

    Args:
        clips: B clips; renderer and padding do not count.

    Returns:
        B arrays ``int64[K]``, ascending and distinct, K ≥ 1.
    """
    stride = -(-clips.snapshots.shape[-1] // COMPONENTS)
    snapshots = clips.snapshots[..., ::stride]
    found = _sizes(snapshots) if snapshots.dtype.kind == "f" else _values(snapshots, coarse=stride > 1)
    places = np.unique(np.concatenate([np.arange(len(clips)) * CODES, *found]))
    clip, codes = np.divmod(places, CODES)
    parts = np.split(codes, np.searchsorted(clip, np.arange(1, len(clips))))
    return [part[1:] if len(part) > 1 else part for part in parts]  # `NOTHING` is said only where there is nothing


def _values(snapshots: NDArray, coarse: bool) -> list[NDArray[np.int64]]:
    """Returns clip × `CODES` + code of changes of whole numbers, ``[B, L, S]``."""
    if coarse:
        snapshots = snapshots[:, [0, -1]]
    if snapshots.dtype.itemsize == 1:
        snapshots = snapshots.view(np.uint8) >> (5 if coarse else 0)
    clip, frame, component = np.nonzero(snapshots[:, 1:] != snapshots[:, :-1])
    old = snapshots[clip, frame, component].astype(np.uint64)
    new = snapshots[clip, frame + 1, component].astype(np.uint64)
    if snapshots.dtype.itemsize == 1:
        pairs = old << np.uint64(8) | new
    else:  # more values than codes: pairs share them by chance
        pairs = (old * np.uint64(0x9E3779B97F4A7C15) ^ new * np.uint64(0xC2B2AE3D27D4EB4F)) >> np.uint64(48)
    first = clip * CODES + 1
    return [first + pairs.astype(np.int64), first + _VALUES + component]


def _sizes(snapshots: NDArray) -> list[NDArray[np.int64]]:
    """Returns clip × `CODES` + code of changes of real numbers, ``[B, L, S]``."""
    change = snapshots[:, -1].astype(np.float64) - snapshots[:, 0]
    clip, component = np.nonzero(np.abs(change) >= 2.0**LOWEST)
    change = change[clip, component]
    size = np.clip(np.floor(np.log2(np.abs(change))), LOWEST, HIGHEST).astype(np.int64) - LOWEST
    return [clip * CODES + 1 + component * 32 + size * 2 + (change > 0)]
