"""Has the clips of a buffer that was filled beforehand scored, before training begins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmrb.scoring.service import ScoringService

logger = logging.getLogger(__name__)


def score_beforehand(service: ScoringService, timeout_s: float) -> Iterator[int]:
    """Scores all clips that have been completed so far and waits for them, as far as the budget goes.

    Args:
        service: on the buffer.
        timeout_s: seconds to wait at most for each part; after the first part that takes longer, or is beyond the
            budget, nothing more is waited for, and the queue keeps of the rest what it has room for.

    Yields:
        How many clips each part held.

    Raises:
        ScorerError: see `ScoringService.poll`.
    """
    completed = service.take_completed()
    part = min(service.config.max_waiting, 8 * service.config.batch_clips)
    for start in range(0, len(completed), part):
        ids = completed[start : start + part]
        service.admit(ids)
        if not service.drain(timeout_s):
            spent = service.budget is not None and not service.budget.available
            why = "has no budget left" if spent and not service.stats()["in_flight"] else "is slow"
            logger.warning("scorer %r %s: training starts before all clips are scored", service.scorer.name, why)
            service.admit(completed[start + part :])
            service.queue.bound()
            return
        yield len(ids)
