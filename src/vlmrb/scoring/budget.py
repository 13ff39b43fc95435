"""How many clips a scorer may be shown: by the second, by the env step, in all."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, require

logger = logging.getLogger(__name__)

ROUNDING = 1e-9  # ten times 0.1 clips is one clip, whatever floating point says


@dataclass(frozen=True)
class BudgetConfig:
    """How many clips the scorer may be shown; of the settings that are not null, the strictest counts.

    What is counted are clips of distinct content when they are handed to the scorer, a second try of a failed clip
    included. What the cache answers costs nothing.

    Attributes:
        clips_per_s: clips per second of wall time, in which the run is alive. Higher → more clips scored.
        clips_per_env_step: clips per env step; a clip of L frames is completed every L − 1 env steps, so 0.02 of L = 16
            is a share of 30 %. Higher → more clips scored. The one of the two that does not depend on the machine.
        total: clips in the whole run.
        initial_burst: clips allowed at once when the run begins, beside what the rates allow later. Higher → the first
            successes are found sooner.
        burst: most clips that an unused rate saves up (each of the two rates by itself); what is beyond is lost.
            Higher → what was not used in one stretch may be used in the next, in larger bursts.

    Raises:
        ValueError: a setting lies outside its range, or none of the three is set.
    """

    clips_per_s: float | None = None
    clips_per_env_step: float | None = None
    total: int | None = None
    initial_burst: int = 0
    burst: int = 64

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        require(POSITIVE, "scoring.budget", clips_per_s=self.clips_per_s, clips_per_env_step=self.clips_per_env_step)
        require(AT_LEAST_ONE, "scoring.budget", total=self.total, burst=self.burst)
        require(NOT_NEGATIVE, "scoring.budget", initial_burst=self.initial_burst)
        if self.clips_per_s is None and self.clips_per_env_step is None and self.total is None:
            raise ValueError(
                "scoring.budget limits nothing: set clips_per_s, clips_per_env_step or total, or scoring.budget=null"
            )

    def require_for(self, frames_per_batch: int) -> None:
        """Refuses an allowance per block of training that could not be saved up until it is used.

        Args:
            frames_per_batch: env steps between two hand-overs.

        Raises:
            ValueError: naming the settings.
        """
        if self.clips_per_env_step is not None and self.clips_per_env_step * frames_per_batch > self.burst:
            raise ValueError(
                f"scoring.budget.clips_per_env_step={self.clips_per_env_step:g} allows "
                f"{self.clips_per_env_step * frames_per_batch:g} clips in each block of training.frames_per_batch="
                f"{frames_per_batch} env steps, and only scoring.budget.burst={self.burst} can be saved up: raise burst"
            )

    def clips_per_s_over(self, env_steps: int, env_steps_per_s: float) -> float:
        """Returns the clips per second that are allowed on average over a run.

        Args:
            env_steps: of the whole run.
            env_steps_per_s: its speed, above 0.
        """
        seconds = env_steps / env_steps_per_s
        return allowed(self, seconds, env_steps) / seconds


def allowed(config: BudgetConfig, seconds: float, env_steps: int) -> float:
    """Returns how many clips a budget allows in all within so many seconds and env steps."""
    rates = ((config.clips_per_s, seconds), (config.clips_per_env_step, env_steps))
    limits = [config.initial_burst + rate * passed for rate, passed in rates if rate is not None]
    return min([*limits, math.inf if config.total is None else config.total])


class Budget:
    """Counts clips against a `BudgetConfig`: one token bucket for each of its rates, and what is left in all.

    A bucket begins with ``initial_burst`` tokens and gains what its rate allows until it holds ``burst``; it loses
    nothing of what it holds. So from any moment on no more than max(``burst``, ``initial_burst``) + rate × time are
    allowed.

    Args:
        config: the settings.
    """

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self.used = 0
        self._seconds = 0.0  # in which the run was alive
        self._env_steps = 0
        self._tokens = {name: float(config.initial_burst) for name in self._rates()}
        self._looked: float | None = None
        self._said = False

    def _rates(self) -> dict[str, float]:
        named = {"clips_per_s": self.config.clips_per_s, "clips_per_env_step": self.config.clips_per_env_step}
        return {name: rate for name, rate in named.items() if rate is not None}

    def advance(self, now: float, env_steps: int) -> None:
        """Moves on to a moment.

        Args:
            now: seconds on a clock that goes forward; the time before the first call, and before the first one after
                a resume, does not count.
            env_steps: env steps collected so far.
        """
        passed = {
            "clips_per_s": 0.0 if self._looked is None else now - self._looked,
            "clips_per_env_step": float(env_steps - self._env_steps),
        }
        self._seconds += passed["clips_per_s"]
        self._looked, self._env_steps = now, env_steps
        for name, rate in self._rates().items():
            tokens = self._tokens[name]
            self._tokens[name] = max(tokens, min(tokens + rate * passed[name], self.config.burst))

    @property
    def available(self) -> int:
        """Clips that may be handed over now."""
        limits = [int(tokens + ROUNDING) for tokens in self._tokens.values()]
        if self.config.total is not None:
            limits.append(self.config.total - self.used)
        return max(0, min(limits))

    def spend(self, clips: int) -> None:
        """Counts clips that are handed over, at most `available`; says once when the total is spent."""
        self.used += clips
        for name in self._tokens:
            self._tokens[name] = max(0.0, self._tokens[name] - clips)
        if self.config.total is not None and self.used >= self.config.total and not self._said:
            self._said = True
            logger.warning(
                "scoring.budget.total=%d clips is spent at %s env steps: from now on only the cache answers, and what "
                "it does not know stays unscored",
                *(self.config.total, f"{self._env_steps:,}"),
            )

    def stats(self) -> dict[str, float]:
        """Returns clips ``budget_used`` and ``budget_allowed`` since the run began, and ``budget_share``, their ratio.

        What was allowed and could not be saved up is part of the allowance: a low share says that the scorer was too
        slow, or that there were too few clips.
        """
        allowance = allowed(self.config, self._seconds, self._env_steps)
        share = self.used / allowance if allowance else math.nan
        return {"budget_used": self.used, "budget_allowed": allowance, "budget_share": share}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that decides what is allowed next, as plain types."""
        return {
            "used": self.used,
            "seconds": self._seconds,
            "env_steps": self._env_steps,
            "tokens": dict(self._tokens),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state`` was taken; a rate that was not set then begins with its initial burst."""
        self.used, self._seconds, self._env_steps = state["used"], state["seconds"], state["env_steps"]
        self._tokens |= {name: tokens for name, tokens in state["tokens"].items() if name in self._tokens}
        self._looked = None
