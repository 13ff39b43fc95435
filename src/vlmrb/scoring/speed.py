"""Does the scorer keep up with training? Measured while both are at work."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vlmrb.doctor import Check
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.service import ScoringService

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.scoring.budget import BudgetConfig

ENOUGH = 0.9  # expected share of clips scored below which the scorer counts as too slow


@dataclass(frozen=True)
class Speed:
    """What training asks for and what the scorer can do, on this machine, at this stage of training.

    Attributes:
        env_steps_per_s: speed of training.
        clips_per_s: clips that training completes.
        new_share: part of them that has to be shown to the scorer; the rest is answered by the cache.
        scorer_clips_per_s: clips that the scorer scores, its rests included (`ScoringConfig.duty_cycle`).
        handover_clips_per_s: clips that can be handed to it, so many after each batch of training; ``None`` if there is
            no such limit (``sync``).
        batch: clips in a batch, on average.
        busy_share: part of the time in which the scorer is at work.
        seconds: how long this was measured.
        budget_clips_per_s: clips that `ScoringConfig.budget` allows on average over the run at this speed; ``None``
            without a budget.
    """

    env_steps_per_s: float
    clips_per_s: float
    new_share: float
    scorer_clips_per_s: float
    handover_clips_per_s: float | None
    batch: float
    busy_share: float
    seconds: float
    budget_clips_per_s: float | None = None

    def within(self, budget: BudgetConfig | None, env_steps: int) -> Speed:
        """Returns the same with the allowance of a budget, over a run of so many env steps."""
        per_s = None if budget is None else budget.clips_per_s_over(env_steps, max(self.env_steps_per_s, 1e-9))
        return replace(self, budget_clips_per_s=per_s)

    @property
    def need_clips_per_s(self) -> float:
        """Clips that training asks the scorer for."""
        return self.clips_per_s * self.new_share

    @property
    def can_clips_per_s(self) -> float:
        """Clips that get scored if there are enough of them."""
        limits = (self.scorer_clips_per_s, self.handover_clips_per_s, self.budget_clips_per_s)
        return min(limit for limit in limits if limit is not None)

    @property
    def expected_share(self) -> float:
        """Part of the clips that will have a score."""
        return self._share(self.can_clips_per_s)

    @property
    def allowed_share(self) -> float:
        """Part of the clips that would have a score if the budget were all that limits it."""
        return 1.0 if self.budget_clips_per_s is None else self._share(self.budget_clips_per_s)

    @property
    def slowed_env_steps_per_s(self) -> float:
        """Speed of training if it waits for the scorer (`ScoringConfig.max_delay_env_steps`)."""
        wanted = self.need_clips_per_s
        if self.budget_clips_per_s is not None:
            wanted = min(wanted, self.budget_clips_per_s)
        return self.env_steps_per_s * min(1.0, self.scorer_clips_per_s / max(wanted, 1e-9))

    def _share(self, can_clips_per_s: float) -> float:
        if not self.need_clips_per_s:
            return 1.0
        return 1 - self.new_share * (1 - min(1.0, can_clips_per_s / self.need_clips_per_s))


def speed_check(speed: Speed, config: ScoringConfig) -> Check:
    """Will the scorer keep up?"""
    name = "scorer"
    found = (
        f"training makes {speed.env_steps_per_s:,.0f} env steps/s and with them {speed.clips_per_s:,.1f} clips/s, "
        f"{speed.new_share:.0%} of them new; the scorer does {speed.scorer_clips_per_s:,.1f} clips/s in batches of "
        f"{speed.batch:.1f}"
    )
    limited = speed.budget_clips_per_s is not None and speed.allowed_share < ENOUGH
    if limited:
        found += f"; scoring.budget allows {speed.budget_clips_per_s:,.1f} clips/s over the run"
    if config.backend == "sync":
        found += f"; training waits for every score, {speed.busy_share:.0%} of its time"
        return Check(name, "ok", found + (f"; {speed.allowed_share:.0%} of the clips get a score" if limited else ""))
    if config.max_delay_env_steps is not None:
        found += f"; {speed.allowed_share:.0%} of the clips get a score"
        slowed = f"{speed.slowed_env_steps_per_s:,.0f} env steps/s"
        return Check(name, "ok", f"{found}, and training waits for it (scoring.max_delay_env_steps): about {slowed}")
    found += f"; {speed.expected_share:.0%} of the clips get a score"
    if speed.expected_share >= ENOUGH or (limited and speed.budget_clips_per_s == speed.can_clips_per_s):
        return Check(name, "ok", found)
    if speed.can_clips_per_s < speed.scorer_clips_per_s:
        found += f", as no more than {speed.can_clips_per_s:,.1f} clips/s are handed to it"
        advice = f"raise scoring.batch_clips (now {config.batch_clips}) or scoring.max_in_flight"
        return Check(name, "warn", found, f"{advice} (now {config.max_in_flight}), or lower training.frames_per_batch")
    remedies = [f"a higher scoring.duty_cycle (now {config.duty_cycle:g})"] if config.duty_cycle < 1 else []
    remedies += [f"more clips at once (scoring.batch_clips, now {config.batch_clips})"]
    remedies += ["fewer frames of each (scoring.frames_per_clip; vlmrb calibrate --frontier)"]
    remedies += ["a longer replay.clip_length, which makes fewer clips", "a quicker scorer", "more servers"]
    return Check(name, "warn", found, "the rest is replayed uniformly; try " + ", ".join(remedies))


class SpeedWatch:
    """Measures over a stretch of training: from the first gradient step, and the first answer, which warms up, on.

    Args:
        service: who gets clips scored.
        seconds: least length of the stretch.
        batches: least number of answers in it.
    """

    def __init__(self, service: ScoringService, seconds: float = 5.0, batches: int = 2) -> None:
        self.seconds = seconds
        self.batches = batches
        self._service = service
        self._looks = 0
        self._begin: _Reading | None = None

    def look(self, module: OffPolicyModule) -> Speed | None:
        """Takes a look after each batch of training; returns the speed once it has been measured for long enough."""
        self._looks += 1
        meter = self._service.meter
        if self._begin is None:
            if module.grad_steps and meter.batches:
                self._begin = self._read(module)
            return None
        if time.perf_counter() - self._begin.time < self.seconds or meter.batches < self._begin.batches + self.batches:
            return None
        return self.speed(module)

    def speed(self, module: OffPolicyModule) -> Speed | None:
        """Returns the speed so far; ``None`` if nothing has been answered since the first batch."""
        begin, now = self._begin, self._read(module)
        if begin is None or now.batches == begin.batches:
            return None
        seconds, emitted, asked = now.time - begin.time, now.emitted - begin.emitted, now.asked - begin.asked
        busy_s = max(now.busy_s - begin.busy_s, 1e-9)
        known, config = now.known - begin.known, self._service.config
        at_once = config.max_in_flight * config.batch_clips
        return Speed(
            env_steps_per_s=(now.env_steps - begin.env_steps) / seconds,
            clips_per_s=emitted / seconds,
            new_share=1 - min(known, emitted) / emitted if emitted else 1.0,
            scorer_clips_per_s=asked / busy_s * config.duty_cycle,
            handover_clips_per_s=None if config.backend == "sync" else at_once * (now.looks - begin.looks) / seconds,
            batch=asked / (now.batches - begin.batches),
            busy_share=min(1.0, busy_s / seconds),
            seconds=seconds,
        )

    def _read(self, module: OffPolicyModule) -> _Reading:
        meter = self._service.meter
        return _Reading(
            time.perf_counter(),
            self._looks,
            module.env_steps,
            meter.counts.emitted,
            meter.counts.cache_hits,
            meter.asked,
            meter.batches,
            meter.busy_s,
        )


@dataclass(frozen=True)
class _Reading:
    time: float
    looks: int
    env_steps: int
    emitted: int
    known: int
    asked: int
    batches: int
    busy_s: float
