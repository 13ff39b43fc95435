"""Scores the clips of several requests together, so that one bad request spoils no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer, checked_scores
from vlmrb.serving.wire import SentRows


def score_requests(
    scorer: Scorer, requests: Sequence[ClipBatch], batch_clips: int
) -> list[NDArray[np.float32] | Exception]:
    """Scores requests, as many clips at a time as the scorer may take.

    Requests with clips of one shape share the scorer's batches; if one of them fails, they are scored one by one.

    Args:
        scorer: has been set up.
        requests: clips as `wire.unpack` makes them.
        batch_clips: most clips in one call of the scorer.

    Returns:
        Per request its scores ``float32[B]``, or what the scorer raised.
    """
    answers: dict[int, NDArray[np.float32] | Exception] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, clips in enumerate(requests):
        groups.setdefault(_shape(clips), []).append(number)
    for members in groups.values():
        found = _attempt(scorer, [requests[number] for number in members], batch_clips)
        if isinstance(found, Exception) and len(members) > 1:
            for number in members:
                answers[number] = _attempt(scorer, [requests[number]], batch_clips)
        elif isinstance(found, Exception):
            answers[members[0]] = found
        else:
            ends = np.cumsum([len(requests[number]) for number in members])[:-1]
            answers.update(zip(members, np.split(found, ends), strict=True))
    return [answers[number] for number in range(len(requests))]


def merge(requests: Sequence[ClipBatch]) -> ClipBatch:
    """Puts clips of one shape into one batch."""
    if len(requests) == 1:
        return requests[0]
    snapshots = [clips.snapshots for clips in requests]
    rows = [clips.renderer.rows for clips in requests if isinstance(clips.renderer, SentRows)]
    renderer = None
    if rows:
        starts = np.cumsum([0, *(len(part) for part in rows)])[:-1]
        snapshots = [part + start for part, start in zip(snapshots, starts, strict=True)]
        renderer = SentRows(np.concatenate(rows), requests[0].renderer.frame_size)  # type: ignore[union-attr]
    lengths = np.concatenate([clips.lengths for clips in requests])
    return ClipBatch(np.arange(len(lengths)), np.concatenate(snapshots), lengths, renderer)


def _attempt(scorer: Scorer, requests: Sequence[ClipBatch], batch_clips: int) -> NDArray[np.float32] | Exception:
    try:
        clips = merge(requests)
        parts = [
            checked_scores(scorer, clips.select(np.arange(start, min(start + batch_clips, len(clips)))))
            for start in range(0, len(clips), batch_clips)
        ]
        return np.concatenate(parts)
    except Exception as error:  # foreign code raises anything; the client is told
        return error


def _shape(clips: ClipBatch) -> tuple[object, ...]:
    rows = clips.renderer.rows if isinstance(clips.renderer, SentRows) else clips.snapshots[0]
    return clips.snapshots.shape[1:], clips.snapshots.dtype.str, rows.shape[1:], rows.dtype.str
