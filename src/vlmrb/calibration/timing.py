"""How fast scorers are beside each other: the same clips in turns, so that what else a machine does hits them all."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.calibration.scores import Candidate, ask
from vlmrb.doctor import free_memory_bytes
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer

LEAST_ROUNDS = 6  # the fewest of which lowest and highest enclose the median with 95 % confidence
MARGIN = 1.25  # memory a scorer takes, over what it says


@dataclass(frozen=True)
class Timing:
    """How fast one candidate was.

    Attributes:
        clips_per_s: ``float64[R]``, in each round; frames drawn included, loading of the clips not.
        stats: what the scorer said about itself after the last round.
        peak_bytes: most GPU memory, its weights included; ``None`` without a GPU.
    """

    clips_per_s: NDArray[np.float64]
    stats: dict[str, float]
    peak_bytes: int | None


def time_candidates(
    candidates: Sequence[Candidate], clips: ClipBatch, rounds: int, progress: bool = True
) -> list[Timing]:
    """Times candidates in rounds, back and forth: each scores all clips once a round, warm, and with nothing kept.

    Candidates that share a scorer (the very object) take turns with it. Scorers are all set up at once if they say
    what memory they take and it is there; otherwise one after the other, in every round anew.

    Args:
        candidates: who is timed; their scorers are not set up, and closed afterwards.
        clips: B clips with all their frames.
        rounds: R.
        progress: show a progress bar.

    Raises:
        ValueError: a scorer fails on the clips.
        ScorerError: a scorer cannot be set up, or breaks its contract.
    """
    groups: dict[int, list[int]] = {}
    for number, candidate in enumerate(candidates):
        groups.setdefault(id(candidate.scorer), []).append(number)
    together = _fit_together([candidates[members[0]].scorer.memory_bytes for members in groups.values()])
    rates = np.full((len(candidates), rounds), np.nan)
    stats: list[dict[str, float]] = [{} for _ in candidates]
    peaks: list[int | None] = [None] * len(candidates)
    running = _Running(clips)
    with closing(running), tqdm(total=rates.size, unit="pass", desc="speed", disable=not progress) as bar:
        for this in range(rounds):
            way = -1 if this % 2 else 1
            for members in list(groups.values())[::way]:
                scorer = candidates[members[0]].scorer
                weights = running.start(scorer, [candidates[number] for number in members])
                for number in members[::way]:
                    scorer.forget()
                    before = _begin_peak()
                    rates[number, this] = len(clips) / _pass(candidates[number], clips)
                    stats[number] = dict(scorer.stats())
                    peaks[number] = _worst(peaks[number], weights - before)
                    bar.update()
                if not together:
                    running.stop(scorer)
    return [Timing(*found) for found in zip(rates, stats, peaks, strict=True)]


class _Running:
    """The scorers that are set up at present, each with the bytes that this took on the GPU."""

    def __init__(self, clips: ClipBatch) -> None:
        self._clips = clips
        self._weights: dict[int, tuple[Scorer, int]] = {}

    def start(self, scorer: Scorer, candidates: Sequence[Candidate]) -> int:
        """Sets a scorer up, unless it is, lets it score a batch for each of its candidates, and returns its bytes."""
        if id(scorer) not in self._weights:
            before = _allocated()
            self._weights[id(scorer)] = scorer, 0  # to be closed even if it cannot be set up
            scorer.setup()
            self._weights[id(scorer)] = scorer, _allocated() - before
            for candidate in candidates:
                few = np.arange(min(candidate.batch_clips, len(self._clips)))
                _pass(candidate, self._clips.select(few))
        return self._weights[id(scorer)][1]

    def stop(self, scorer: Scorer) -> None:
        del self._weights[id(scorer)]
        scorer.close()

    def close(self) -> None:
        for scorer, _ in list(self._weights.values()):
            self.stop(scorer)


def _pass(candidate: Candidate, clips: ClipBatch) -> float:
    """Scores all clips, and returns the seconds that took."""
    begin = time.perf_counter()
    for start in range(0, len(clips), candidate.batch_clips):
        part = clips.select(np.arange(start, min(start + candidate.batch_clips, len(clips))))  # drawn anew each time
        ask(candidate.scorer, candidate.shown(part))
    return max(time.perf_counter() - begin, 1e-9)


def ratio_interval(ratios: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the order statistics that enclose the median of what R rounds are drawn from, with 95 % confidence.

    Nothing is assumed about how they are distributed. Below `LEAST_ROUNDS` it is their range, and the confidence lower.

    Args:
        ratios: ``float64[R]``.
    """
    ordered, count = np.sort(ratios), len(ratios)
    drop, tail = 0, 0.0
    while drop < (count - 1) // 2:
        tail += math.comb(count, drop) / 2**count
        if 2 * (tail + math.comb(count, drop + 1) / 2**count) > 0.05:
            break
        drop += 1
    return float(ordered[drop]), float(ordered[count - 1 - drop])


def _fit_together(taken: Sequence[int | None]) -> bool:
    if len(taken) == 1:
        return True
    torch = _cuda()
    free = torch.cuda.mem_get_info()[0] if torch is not None else free_memory_bytes()
    known = [size for size in taken if size is not None]
    return len(known) == len(taken) and MARGIN * sum(known) <= free


def _cuda() -> Any:
    """Returns torch if a GPU is there; a scorer that does not use torch has not loaded it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _allocated() -> int:
    torch = _cuda()
    return 0 if torch is None else torch.cuda.memory_allocated()


def _begin_peak() -> int:
    torch = _cuda()
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
    return _allocated()


def _worst(known: int | None, beside_bytes: int) -> int | None:
    """Returns the larger of a known peak and the one of the latest pass, to which ``beside_bytes`` are added."""
    torch = _cuda()
    return None if torch is None else max(known or 0, torch.cuda.max_memory_allocated() + beside_bytes)
