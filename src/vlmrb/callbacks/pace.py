"""How fast training goes, whatever else the run stops for."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque


class Pace:
    """Env steps per second, as the median over batches: evaluations, checkpoints and pictures in between do not count.

    Args:
        batches: how many of the latest batches count; ``None`` counts all since `restart`.
    """

    def __init__(self, batches: int | None = None) -> None:
        self._seconds_per_env_step: deque[float] = deque(maxlen=batches)
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Forgets earlier batches; the next one begins now."""
        self._seconds_per_env_step.clear()
        self._last = time.perf_counter()

    def tick(self, env_steps: int) -> None:
        """Notes the end of a batch that took ``env_steps`` env steps."""
        now = time.perf_counter()
        self._seconds_per_env_step.append((now - self._last) / env_steps)
        self._last = now

    @property
    def env_steps_per_s(self) -> float:
        """NaN before the first batch."""
        if not self._seconds_per_env_step:
            return math.nan
        return 1.0 / max(statistics.median(self._seconds_per_env_step), 1e-9)
