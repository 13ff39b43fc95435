"""What the scoring service has done so far, in numbers."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

RECENT = 1024  # clips, or batches, that means, percentiles and rates are taken over
HISTOGRAM_BINS = 20


@dataclass
class Counts:
    """Clips since the run began, unless noted.

    Attributes:
        emitted: completed by the buffer.
        scored: their score was written.
        stale: all their rows were overwritten before the score came.
        dropped: no room in the queue or at the student's desk, or the scorer failed on them.
        cache_hits: of the scored, those that the scorer was not asked about.
        positives: of the scored, those above the threshold.
        failures: *batches* that got no answer.
        shown: handed to the scorer; equal ones once, second tries and windows of clips as well.
    """

    emitted: int = 0
    scored: int = 0
    stale: int = 0
    dropped: int = 0
    cache_hits: int = 0
    positives: int = 0
    failures: int = 0
    shown: int = 0


class ScoringMeter:
    """Counts clips and measures delays.

    Args:
        threshold: τ in [0, 1], strictly exceeded by a positive score.
        scorer: the scorer's name, for warnings.

    Attributes:
        counts: what has become of clips.
        asked: clips in the batches answered, since the run was started or resumed; so are the next two.
        batches: batches answered.
        busy_s: seconds that the scorer took for them, waiting in queues aside.
    """

    def __init__(self, threshold: float, scorer: str) -> None:
        self.counts = Counts()
        self.asked = 0
        self.batches = 0
        self.busy_s = 0.0
        self._threshold = threshold
        self._scorer = scorer
        self._report: dict[str, float] = {}
        self._warned = False
        self._histogram = np.zeros(HISTOGRAM_BINS, np.int64)
        self._latencies_ms: deque[float] = deque(maxlen=RECENT)
        self._delays: deque[int] = deque(maxlen=RECENT)
        self._written: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=RECENT)

    def answered(self, clips: int, seconds: float, busy_s: float, report: Mapping[str, float]) -> None:
        """Notes a batch that was answered.

        Args:
            clips: how many it had.
            seconds: from hand-over to answer.
            busy_s: seconds of it in which the scorer was at work.
            report: what the scorer says about itself; what is not finite is left out, with one warning.
        """
        self._latencies_ms.append(1000 * seconds)
        self.asked += clips
        self.batches += 1
        self.busy_s += busy_s
        self._report = {name: value for name, value in report.items() if math.isfinite(value)}
        if len(self._report) < len(report) and not self._warned:
            self._warned = True
            logger.warning(
                "scorer %r: stats() must give finite numbers by name; left out of the metrics, said once: %s",
                *(self._scorer, ", ".join(name for name in report if name not in self._report)),
            )

    def written(self, scores: NDArray[np.float32], delays: list[int]) -> None:
        """Notes scores written, ``float32[B]`` in [0, 1], and how many env steps after their clip's completion."""
        self.counts.scored += len(scores)
        self.counts.positives += int((scores > self._threshold).sum())
        bins = np.minimum((scores * HISTOGRAM_BINS).astype(np.int64), HISTOGRAM_BINS - 1)
        self._histogram += np.bincount(bins, minlength=HISTOGRAM_BINS)
        self._delays.extend(delays)
        self._written.append((time.monotonic(), len(scores)))

    def stats(self) -> dict[str, float]:
        """Returns the counts; shares; recent rates, latencies and delays, NaN before the first answer.

        ``scorer_NAME`` is what the scorer last said about itself.
        """
        counts, written = self.counts, list(self._written)
        latency = np.percentile(self._latencies_ms, (50, 95)) if self._latencies_ms else (np.nan, np.nan)
        delay = (np.mean(self._delays), np.percentile(self._delays, 95)) if self._delays else (np.nan, np.nan)
        return {
            **asdict(counts),
            "share_scored": counts.scored / max(1, counts.emitted),
            "share_positive": counts.positives / max(1, counts.scored),
            "clips_per_s": sum(clips for _, clips in written[1:]) / max(time.monotonic() - written[0][0], 1e-9),
            "latency_ms_p50": float(latency[0]),
            "latency_ms_p95": float(latency[1]),
            "delay_env_steps_mean": float(delay[0]),
            "delay_env_steps_p95": float(delay[1]),
            **{f"scorer_{name}": value for name, value in self._report.items()},
        }

    def histogram(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns how often scores fell into each of 20 equal bins: counts ``int64[20]`` and edges ``float64[21]``."""
        return self._histogram.copy(), np.linspace(0.0, 1.0, HISTOGRAM_BINS + 1)

    def state_dict(self) -> dict[str, Any]:
        """Returns counts and histogram; what is recent starts afresh in a resumed run."""
        return {"counts": asdict(self.counts), "histogram": torch.from_numpy(self._histogram.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores counts and histogram."""
        self.counts.__dict__.update(asdict(Counts(**state["counts"])))
        self._histogram = state["histogram"].numpy().copy()
