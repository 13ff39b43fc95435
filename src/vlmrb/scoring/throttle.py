"""Lets collection wait for the scorer, so that no score comes too late."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmrb.scoring.service import ScoringService

logger = logging.getLogger(__name__)

PAUSE_S = 0.005  # between two looks while waiting
PATIENCE = 2  # times what a batch, or setting up, may take


class Throttle:
    """Holds the learner up while a clip is overdue that the scorer could be working on.

    A clip without a score is *overdue* once it was completed more than ``max_delay_env_steps`` ago. No clip gets older
    while collection waits, so it waits until none is overdue any more that

    - has been handed to the scorer, or
    - waits for it within the budget: the budget, if there is one, allows a clip at this moment.

    What is overdue then lies beyond the budget and is dropped, as its score would come too late or never. So a score is
    late by at most the bound and the env steps of one block of training.

    The wait ends in any case: each answer settles clips, a failing scorer's clips are tried twice, a scorer that is
    given up drops all. One of which nothing is heard for twice ``scoring.timeout_s`` (twice ``startup_timeout_s`` while
    it is not set up) is not waited for until it has answered again.

    Args:
        service: whose clips.
        max_delay_env_steps: the bound, at least 1.
    """

    def __init__(self, service: ScoringService, max_delay_env_steps: int) -> None:
        self._service = service
        self._bound = max_delay_env_steps
        self._waited_s = 0.0
        self._alive_s = 0.0  # the run's wall time, as of `_looked`
        self._looked: float | None = None
        self._silent_since: int | None = None  # batches answered when it fell silent; None while it is waited for

    def wait(self, env_steps: int, stop: Callable[[], bool]) -> None:
        """Waits as long as it takes; call it after `ScoringService.poll`.

        Args:
            env_steps: env steps collected so far.
            stop: asked again and again; true ends the wait.

        Raises:
            ScorerError: see `ScoringService.poll`.
        """
        now = time.monotonic()
        self._alive_s += 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if self._silent_since == self._service.meter.batches:
            return
        self._silent_since = None
        before = env_steps - self._bound
        if not self._owed(before) or self._wait(before, env_steps, stop):
            self._service.drop_waiting(before)
        self._waited_s += time.monotonic() - now

    def _wait(self, before: int, env_steps: int, stop: Callable[[], bool]) -> bool:
        """Returns whether it was waited to the end."""
        heard, signs = time.monotonic(), self._signs()
        while self._owed(before):
            if stop():
                return False
            time.sleep(PAUSE_S)
            self._service.poll(env_steps)
            now, latest = time.monotonic(), self._signs()
            if latest != signs:
                heard, signs = now, latest
            elif now - heard > PATIENCE * self._allowed_s():
                self._silent_since = self._service.meter.batches
                logger.warning(
                    "scorer %r has not been heard of for %.0f s: training goes on without waiting for it "
                    "(scoring.max_delay_env_steps=%d) until it answers again",
                    *(self._service.scorer.name, now - heard, self._bound),
                )
                return False
        return True

    def _owed(self, before: int) -> bool:
        """Whether a clip completed before that env step is being scored, or could be."""
        queue, budget = self._service.queue, self._service.budget
        overdue = queue.overdue(before)
        if not overdue or self._service.closed:
            return False
        return budget is None or budget.available > 0 or any(content.key not in queue.waiting for content in overdue)

    def _signs(self) -> tuple[int, int, bool]:
        meter = self._service.meter
        return meter.batches, meter.counts.failures, self._service.accepting

    def _allowed_s(self) -> float:
        config = self._service.config
        return config.timeout_s if self._service.accepting else config.startup_timeout_s

    def stats(self) -> dict[str, float]:
        """Returns ``throttled_s``, seconds waited since the run began, and ``throttled_share`` of its wall time."""
        alive_s = self._alive_s + (0.0 if self._looked is None else time.monotonic() - self._looked)
        return {"throttled_s": self._waited_s, "throttled_share": self._waited_s / alive_s if alive_s else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds so far."""
        return {"waited_s": self._waited_s, "alive_s": self._alive_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Counts on from there; the time in between does not count."""
        self._waited_s, self._alive_s, self._looked = state["waited_s"], state["alive_s"], None
