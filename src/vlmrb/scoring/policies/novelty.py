"""Rare content first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.policies.changes import CODES, changes
from vlmrb.scoring.policy import SelectionPolicy, WaitingClips


class NovelFirst(SelectionPolicy):
    """Scores first what has seldom been seen to happen: early in training, progress is rare.

    A clip is as rare as the rarest thing that happens in it (`changes.changes`), counted over all clips completed so
    far, those not scored included. Among equally rare ones the newest goes first.
    """

    name = "novelty"

    def __init__(self) -> None:
        self._counts = np.zeros(CODES, np.int64)  # clips in which each change was seen

    def describe(self, clips: ClipBatch) -> Sequence[NDArray[np.int64]]:
        """Returns what changes in each of B clips, ``int64[K]`` codes."""
        return changes(clips)

    def note(self, described: Sequence[NDArray[np.int64]]) -> None:
        """Counts what changes in B clips."""
        np.add.at(self._counts, np.concatenate(described), 1)

    def rank(self, waiting: WaitingClips) -> NDArray[np.int64]:
        """Returns the clips from the rarest to the most common."""
        starts = np.cumsum([0, *(len(codes) for codes in waiting.described[:-1])])
        rarest = np.minimum.reduceat(self._counts[np.concatenate(waiting.described)], starts)
        return np.lexsort((-np.arange(len(waiting)), -waiting.newest, rarest))

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts that are not 0, as lists."""
        codes = np.flatnonzero(self._counts)
        return {"codes": codes.tolist(), "counts": self._counts[codes].tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counts."""
        self._counts[:] = 0
        self._counts[state["codes"]] = state["counts"]
