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


class _Awaited:
    """The scorer, or the student: waited for as long as it owes something and lets hear of itself.

    Args:
        who: for the log.
        owes: tells whether a clip that was completed before an env step is with it.
        signs: of life: answers so far, then whatever else changes.
        allowed_s: seconds that it may take at present.
        bound: for the log, `ScoringConfig.max_delay_env_steps`.
    """

    def __init__(
        self,
        who: str,
        owes: Callable[[int], bool],
        signs: Callable[[], tuple[int, ...]],
        allowed_s: Callable[[], float],
        bound: int,
    ) -> None:
        self._who = who
        self._owes = owes
        self._signs = signs
        self._allowed_s = allowed_s
        self._bound = bound
        self._heard = 0.0
        self._latest: tuple[int, ...] = ()
        self._silent_since: int | None = None  # answers when it fell silent; None while it is waited for

    @property
    def silent(self) -> bool:
        """Whether it has not answered since it was not heard of for too long."""
        return self._silent_since == self._signs()[0]

    def owed(self, before: int) -> bool:
        """Whether it is to be waited for."""
        return not self.silent and self._owes(before)

    def begin(self) -> None:
        """Is patient from now on."""
        self._heard, self._latest, self._silent_since = time.monotonic(), self._signs(), None

    def listen(self) -> None:
        """Loses patience if nothing has been heard for too long."""
        now, latest = time.monotonic(), self._signs()
        if latest != self._latest:
            self._heard, self._latest = now, latest
        elif now - self._heard > PATIENCE * self._allowed_s():
            self._silent_since = latest[0]
            logger.warning(
                "%s has not been heard of for %.0f s: training goes on without waiting for it "
                "(scoring.max_delay_env_steps=%d) until it answers again",
                *(self._who, now - self._heard, self._bound),
            )


class Throttle:
    """Holds the learner up while a clip is overdue that the scorer could be working on.

    A clip without a score is *overdue* once it was completed more than ``max_delay_env_steps`` ago. No clip gets older
    while collection waits, so it waits until none is overdue any more that

    - has been handed to the scorer,
    - waits for it within the budget: the budget, if there is one, allows a clip at this moment, or
    - is with a student, which decides whether the scorer is to be asked.

    What is overdue then lies beyond the budget and is dropped, as its score would come too late or never. So a score is
    late by at most the bound and the env steps of one block of training.

    The wait ends in any case: each answer settles clips, a failing scorer's clips are tried twice, a scorer that is
    given up drops all, a student that is given up hands its clips on. A scorer or student of which nothing is heard for
    twice ``scoring.timeout_s`` (twice ``startup_timeout_s`` while it is not set up) is not waited for until it has
    answered again.

    Args:
        service: whose clips.
        max_delay_env_steps: the bound, at least 1.
    """

    def __init__(self, service: ScoringService, max_delay_env_steps: int) -> None:
        self._service = service
        self._bound = max_delay_env_steps
        self._scorer = _Awaited(
            f"scorer {service.scorer.name!r}",
            self._scorer_owes,
            self._scorer_signs,
            self._scorer_allowed_s,
            self._bound,
        )
        self._student = _Awaited(
            "the student", self._student_owes, self._student_signs, self._student_allowed_s, self._bound
        )
        self._waited_s = 0.0
        self._alive_s = 0.0  # the run's wall time, as of `_looked`
        self._looked: float | None = None

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
        before = env_steps - self._bound
        if self._wait(before, env_steps, stop) and not self._scorer.silent:
            self._service.drop_waiting(before)
        self._waited_s += time.monotonic() - now

    def _wait(self, before: int, env_steps: int, stop: Callable[[], bool]) -> bool:
        """Returns whether it was waited to the end."""
        both = (self._scorer, self._student)
        awaited: list[_Awaited] = []
        while owing := [one for one in both if one.owed(before)]:
            for one in owing:
                if one not in awaited:
                    one.begin()
            awaited = owing
            if stop():
                return False
            time.sleep(PAUSE_S)
            self._service.poll(env_steps)
            for one in awaited:
                one.listen()
        return True

    def _scorer_owes(self, before: int) -> bool:
        queue, budget = self._service.queue, self._service.budget
        overdue = queue.overdue(before)
        if not overdue or self._service.closed:
            return False
        return budget is None or budget.available > 0 or any(content.key not in queue.waiting for content in overdue)

    def _scorer_signs(self) -> tuple[int, ...]:
        meter = self._service.meter
        return meter.batches, meter.counts.failures, self._service.accepting

    def _scorer_allowed_s(self) -> float:
        config = self._service.config
        return config.timeout_s if self._service.accepting else config.startup_timeout_s

    def _student_owes(self, before: int) -> bool:
        desk = self._service.desk
        return desk is not None and not self._service.closed and desk.overdue(before)

    def _student_signs(self) -> tuple[int, ...]:
        desk = self._service.desk
        return (0, False) if desk is None else (desk.answers, desk.accepting)

    def _student_allowed_s(self) -> float:
        desk, config = self._service.desk, self._service.config
        return config.timeout_s if desk is not None and desk.accepting else config.startup_timeout_s

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
