"""What a buffer tells about itself: counters, bytes, realised frequencies, and gauges of its replay scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vlmrb.replay.monitor import SCORED_KINDS
from vlmrb.replay.storage import row_bytes

if TYPE_CHECKING:
    from vlmrb.replay.buffer import VLMReplayBuffer


def counters(buffer: VLMReplayBuffer) -> dict[str, int | float | bool]:
    """See `VLMReplayBuffer.stats`."""
    stats: dict[str, int | float | bool] = {}
    stats["env_steps"] = buffer.env_steps
    stats["lam"] = buffer._sampler.lam
    stats["positives"] = buffer._sampler.positives
    stats["scored_rows"] = int(np.count_nonzero(buffer._priorities.columns.arrays["scored"]))
    stats["uniform_fallbacks"] = buffer._sampler.fallbacks
    for name, spec in buffer._priorities.columns.specs.items():
        if spec.late:
            stats[f"written/{name}"] = buffer._priorities.written[name]
            stats[f"stale/{name}"] = buffer._priorities.stale[name]
    if buffer._sampler.beta is not None:
        stats["beta"] = buffer._sampler.beta
    if buffer.clips is not None:
        stats["clips"] = len(buffer.clips)
        stats["clips_emitted"] = buffer.clips.emitted
        stats["clips_expired"] = buffer.clips.expired
    stats["bytes"] = buffer.nbytes
    return stats


def held_bytes(buffer: VLMReplayBuffer) -> int:
    """See `VLMReplayBuffer.nbytes`."""
    rows = row_bytes(buffer._storage._storage) * len(buffer) if buffer._storage.initialized else 0
    index = 0 if buffer.hindsight is None else buffer.hindsight.index.nbytes
    return rows + index + buffer._priorities.nbytes + (0 if buffer.clips is None else buffer.clips.nbytes)


def frequencies(buffer: VLMReplayBuffer) -> dict[str, float]:
    """See `VLMReplayBuffer.replay_frequencies`."""
    found = buffer.monitor.report(len(buffer), buffer._sampler, buffer._candidates(buffer._batch_size))
    if buffer.clips is not None:
        return found
    return {name: value for name, value in found.items() if not name.endswith(SCORED_KINDS)}


def gauges(buffer: VLMReplayBuffer) -> dict[str, float]:
    """See `VLMReplayBuffer.gauges`."""
    found = buffer._priorities.gauges(len(buffer))
    if buffer.selector is not None:
        found |= buffer.selector.gauges(buffer.env_steps)
    if buffer.score_reward is not None:
        found |= buffer.score_reward.gauges()
    if buffer.hindsight is not None:
        found |= buffer.hindsight.gauges()
    return found
