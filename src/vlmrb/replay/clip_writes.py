"""Brings what was said about clips to their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vlmrb.replay.columns import WriteResult, whole_numbers
from vlmrb.replay.credit import CreditTerm

if TYPE_CHECKING:
    from vlmrb.replay.buffer import VLMReplayBuffer


def write_clip_scores(
    buffer: VLMReplayBuffer,
    clip_ids: Sequence[int] | NDArray | Tensor,
    scores: ArrayLike | Tensor,
    source: str,
    guessed: bool,
) -> WriteResult:
    """See `VLMReplayBuffer.write_scores`."""
    if buffer.clips is None:
        raise ValueError(f"{source}: this buffer keeps no clips (clip_length is None)")
    ids = whole_numbers(clip_ids, "clip_ids", source).reshape(-1).tolist()
    values = buffer._priorities.columns.checked("score", len(ids), scores, source)
    if not all(0 <= clip_id < buffer.clips.next_id for clip_id in ids):
        raise ValueError(f"{source}: clips {ids} were never handed out (the next id is {buffer.clips.next_id})")
    if incomplete := buffer.clips.incomplete(ids):
        raise ValueError(f"{source}: clips {incomplete} were never handed out: they are not complete yet")
    rows = buffer.clips.rows_of(ids)
    buffer.write_column("score", rows.slots, rows.generations, values[rows.which], source=source)
    buffer.clips.set_scores(ids, values, guessed)
    written = len(np.unique(rows.which))
    return WriteResult(written, len(ids) - written)


def write_clip_credit(
    buffer: VLMReplayBuffer, clip_ids: Sequence[int], decisive: NDArray[np.bool_], source: str
) -> None:
    """See `VLMReplayBuffer.write_credit`."""
    term = next((term for term in buffer.terms if isinstance(term, CreditTerm)), None)
    if term is None or buffer.clips is None or not len(clip_ids):
        return
    rows = buffer.clips.rows_of(clip_ids)
    credit = term.credits(decisive)[rows.which, rows.positions]
    buffer.write_column(term.column, rows.slots, rows.generations, credit, source=source)
