"""Schedules of the mixture weight λ and the importance exponent β over env steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSchedule:
    """A ramp from ``start`` to ``end``, flat before and after, so its value never leaves ``[start, end]``.

    Attributes:
        start: value up to ``begin``.
        end: value from ``begin + duration`` on.
        begin: env steps.
        duration: env steps; 0 jumps from ``start`` to ``end`` at ``begin``.
    """

    start: float
    end: float
    begin: int = 0
    duration: int = 0

    def __post_init__(self) -> None:
        if self.duration < 0 or self.begin < 0:
            raise ValueError(
                f"a schedule cannot begin at {self.begin} and last {self.duration} env steps: both must be ≥ 0"
            )

    def __call__(self, env_steps: int) -> float:
        """Returns the value after ``env_steps`` environment steps."""
        elapsed = env_steps - self.begin
        if elapsed < 0:
            return self.start
        if elapsed >= self.duration:
            return self.end
        return self.start + (self.end - self.start) * elapsed / self.duration
