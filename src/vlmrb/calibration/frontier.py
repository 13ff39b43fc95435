"""What does a score cost, and what is it worth? The ways of asking one scorer, from dear to cheap.

One setting at a time is changed from the configured ones, then the best of each are put together. So a grid of four
settings takes their sum of measurements, not their product; what two settings do only in company stays unseen, but for
that one combination, which is measured like all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.calibration.corpus import Corpus
from vlmrb.calibration.frontier_report import Judged, choose, judge_points
from vlmrb.calibration.scores import Candidate, Scored, score_clips
from vlmrb.calibration.timing import LEAST_ROUNDS, Timing, ratio_interval, time_candidates
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.scorer import Scorer

FRAMES = "frames_per_clip"
OF_SCORER = ("frame_size", "batch_clips", "dtype")  # settings that are varied if the scorer's constructor takes them
USUAL_FRAMES = (32, 16, 8, 4)


@dataclass(frozen=True)
class Grid:
    """What is tried and how it is measured; an empty list is the usual one.

    Attributes:
        frames: frames per clip; usually 32, 16, 8 and 4, as far as clips are so long.
        frame_size: pixels; usually the configured ones and half of them.
        batch_clips: clips in one forward pass of the scorer; usually the configured ones and twice as many.
        dtype: of the scorer; usually the configured one, and with a GPU bfloat16.
        tolerance: ROC AUC that may be lost for speed.
        timed_clips: B clips that are timed.
        rounds: R, how often.
    """

    frames: Sequence[int] = ()
    frame_size: Sequence[int] = ()
    batch_clips: Sequence[int] = ()
    dtype: Sequence[str] = ()
    tolerance: float = 0.01
    timed_clips: int = 64
    rounds: int = LEAST_ROUNDS

    def __post_init__(self) -> None:
        """Refuses what cannot work, naming the options of the command line."""
        for option, values, least in (
            ("--frames", self.frames, 2),
            ("--frame_sizes", self.frame_size, 1),
            ("--batches", self.batch_clips, 1),
        ):
            if low := [value for value in values if value < least]:
                raise ValueError(f"{option} {low[0]} must be at least {least}")
        for option, named in (
            ("--frames", self.frames),
            ("--frame_sizes", self.frame_size),
            ("--batches", self.batch_clips),
            ("--dtypes", self.dtype),
        ):
            if twice := [value for value in named if list(named).count(value) > 1]:
                raise ValueError(f"{option} names {twice[0]} twice")
        if not 0 <= self.tolerance < 0.5:
            raise ValueError(f"--tolerance {self.tolerance} must lie in [0, 0.5)")
        for option, count, least in (
            ("--timed_clips", self.timed_clips, 1),
            ("--rounds", self.rounds, LEAST_ROUNDS),
        ):
            if count < least:
                raise ValueError(f"{option} {count} must be at least {least}")


@dataclass(frozen=True)
class Point:
    """One way of asking the scorer.

    Attributes:
        settings: all that is varied, by name.
        changed: those that differ from the configured ones.
        candidate: the scorer so configured, not set up.
    """

    settings: dict[str, Any]
    changed: dict[str, Any]
    candidate: Candidate

    @property
    def label(self) -> str:
        """What is changed, in short."""
        return ", ".join(_named(name, value) for name, value in self.changed.items()) or "as configured"

    def overlay(self) -> dict[str, Any]:
        """Returns the ``scoring`` section that makes a run ask like this."""
        candidate = self.candidate
        init_args = {} if candidate.prompt is None else {"prompt": candidate.prompt}
        init_args |= {name: value for name, value in self.changed.items() if name in OF_SCORER}
        scoring: dict[str, Any] = {FRAMES: candidate.frames_per_clip, "batch_clips": candidate.batch_clips}
        return scoring | ({"scorer": {"init_args": init_args}} if init_args else {})


@dataclass(frozen=True)
class Frontier:
    """What was found.

    Attributes:
        points: the configured way first.
        judged: what each is worth and costs.
        chosen: position of the one to take.
        base: position of the one that speed is a ratio to: the slowest of the first points, or the configured one if
            that is not faster beyond doubt.
        label: what scores were compared with.
        grid: how it was measured.
        timed_clips: clips that were timed.
        scored_now: clips that were scored for it, not found in the cache.
    """

    points: list[Point]
    judged: list[Judged]
    chosen: int
    base: int
    label: str
    grid: Grid
    timed_clips: int
    scored_now: int


def plan(corpus: Corpus, candidate: Candidate, grid: Grid) -> list[Point]:
    """Returns the configured way of asking and all that differ from it in one setting.

    Args:
        corpus: the clips.
        candidate: as it is configured, not set up yet.
        grid: what to try.

    Raises:
        ValueError: the scorer has no such setting, needs every frame, or there is nothing to try.
    """
    base, levels = _levels(corpus, candidate, grid)
    points = [_point(corpus, candidate, base, {})]
    for name, values in levels.items():
        points += [_point(corpus, candidate, base, {name: value}) for value in values if value != base[name]]
    if len(points) == 1:
        raise ValueError(
            f"--frontier: there is nothing to vary with scorer {candidate.scorer.name!r}: name --frames, or one of "
            "--frame_sizes, --batches and --dtypes if it has these settings"
        )
    return points


def find_frontier(
    corpus: Corpus, points: list[Point], label: str, grid: Grid, cache: ScoreCache, progress: bool = True
) -> Frontier:
    """Scores and times all points of a plan, then the combination of the best.

    Scores come through the cache; speed is always measured anew.

    Args:
        corpus: the clips.
        points: of `plan`.
        label: what scores are compared with.
        grid: how to measure.
        cache: where scores are kept.
        progress: show progress bars.

    Raises:
        ValueError: the scorer fails on clips.
        ScorerError: the scorer cannot be set up, or breaks its contract.
    """
    search = _Search(corpus, label, grid, cache, progress)
    search.add(points)
    if together := _combined(points, search.judge()[0]):
        search.add([_point(corpus, points[0].candidate, points[0].settings, together)])
    judged, chosen = search.judge()
    return Frontier(search.points, judged, chosen, search.base, label, grid, len(search.timed), search.scored_now)


@dataclass
class _Search:
    corpus: Corpus
    label: str
    grid: Grid
    cache: ScoreCache
    progress: bool
    points: list[Point] = field(default_factory=list)
    scores: list[NDArray[np.float32]] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    ratios: list[NDArray[np.float64]] = field(default_factory=list)
    scored_now: int = 0
    base: int = 0

    @property
    def timed(self) -> NDArray[np.int64]:
        """The clips that are timed, evenly spread over the corpus."""
        rows = np.linspace(0, len(self.corpus.clips) - 1, min(self.grid.timed_clips, len(self.corpus.clips)))
        return np.unique(rows.round().astype(np.int64))

    def add(self, points: list[Point]) -> None:
        """Scores and times more points; later ones in turns with the base of the first."""
        for point in points:
            found = self._score(point)
            self.scores.append(found.scores)
            self.scored_now += found.fresh
        beside = [self.points[self.base]] if self.points else []
        timings = self._time([*beside, *points])
        if not self.points:
            self.base = _slowest([timing.clips_per_s for timing in timings])
        base = timings[0 if beside else self.base].clips_per_s
        self.points += points
        self.timings += timings[len(beside) :]
        self.ratios += [timing.clips_per_s / base for timing in timings[len(beside) :]]

    def judge(self) -> tuple[list[Judged], int]:
        values, groups = self.corpus.labels()[self.label], self.corpus.clips.groups
        return judge_points(self.scores, self.timings, self.ratios, values, groups, self.grid.tolerance)

    def _score(self, point: Point) -> Scored:
        fresh = deepcopy(point.candidate)  # a scorer changes as it is set up, and the keys of its scores with it
        return score_clips(fresh, len(self.corpus.clips), self.corpus.batch, self.cache, self.progress)

    def _time(self, points: list[Point]) -> list[Timing]:
        """Times points, those that differ in frames alone with one scorer."""
        scorers: dict[str, Scorer] = {}
        candidates = []
        for point in points:
            settings = repr([(name, value) for name, value in point.settings.items() if name != FRAMES])
            scorer = scorers.setdefault(settings, deepcopy(point.candidate.scorer))
            candidates.append(replace(point.candidate, scorer=scorer))
        return time_candidates(candidates, self.corpus.batch(self.timed), self.grid.rounds, self.progress)


def _slowest(rates: Sequence[NDArray[np.float64]]) -> int:
    """Returns which point was slowest, the first one if that is not faster beyond doubt."""
    slowest = int(np.argmin([np.median(values) for values in rates]))
    return slowest if ratio_interval(rates[0] / rates[slowest])[0] > 1 else 0


def _point(corpus: Corpus, candidate: Candidate, base: Mapping[str, Any], changed: Mapping[str, Any]) -> Point:
    settings, label = {**base, **changed}, candidate.label
    init_args = {name: value for name, value in changed.items() if name in OF_SCORER}
    if init_args:
        candidate = candidate.varied({"scorer": {"init_args": init_args}})
    long = settings[FRAMES] == corpus.manifest["clip_length"]
    handed_over = max(candidate.batch_clips, changed.get("batch_clips", 1))  # no more can be asked about at once
    varied = replace(
        candidate,
        label=", ".join([label, *(_named(name, value) for name, value in changed.items())]),
        scorer=deepcopy(candidate.scorer),
        frames_per_clip=None if long else settings[FRAMES],
        batch_clips=handed_over,
    )
    return Point(settings, dict(changed), varied)


def _levels(corpus: Corpus, candidate: Candidate, grid: Grid) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Returns the configured settings and the values to try of each."""
    scorer, clip_length = candidate.scorer, corpus.manifest["clip_length"]
    base: dict[str, Any] = {FRAMES: min(candidate.frames_per_clip or clip_length, clip_length)}
    levels: dict[str, list[Any]] = {FRAMES: _frames(candidate, clip_length, grid.frames)}
    parameters = inspect.signature(type(scorer)).parameters
    for name, option in (("frame_size", "--frame_sizes"), ("batch_clips", "--batches"), ("dtype", "--dtypes")):
        named = list(getattr(grid, name))
        if name in parameters:
            base[name] = getattr(scorer, name, parameters[name].default)
            levels[name] = named or _usual(name, base[name])
        elif named:
            raise ValueError(f"{option}: the scorer {candidate.class_path} takes no {name}")
    if "frame_size" in levels:
        levels["frame_size"] = [size for size in levels["frame_size"] if _drawn(corpus, size, bool(grid.frame_size))]
    return base, levels


def _drawn(corpus: Corpus, frame_size: int, named: bool) -> bool:
    """Says whether frames can be drawn so small; if somebody named the size, they must be."""
    try:
        corpus.renderer.render(corpus.snapshots(np.arange(1))[:, 0], frame_size)
    except ValueError as error:
        if named:
            raise ValueError(f"--frame_sizes {frame_size}: frames cannot be drawn: {error}") from error
        return False
    return True


def _frames(candidate: Candidate, clip_length: int, named: Sequence[int]) -> list[int]:
    if long := [frames for frames in named if frames > clip_length]:
        raise ValueError(f"--frames {long[0]}: the corpus has clips of {clip_length} frames")
    if candidate.scorer.every_frame:
        if named:
            raise ValueError(
                f"--frames: scorer {candidate.scorer.name!r} reads what happens off consecutive frames, and cannot do "
                "without some of them"
            )
        return []
    usual = [clip_length, *(frames for frames in USUAL_FRAMES if frames < clip_length)]
    return sorted(named or usual, reverse=True)


def _usual(name: str, configured: Any) -> list[Any]:
    if name == "dtype":
        import torch

        return ["bfloat16"] if torch.cuda.is_available() else []
    if not isinstance(configured, int):
        return []
    return [configured // 2] if name == "frame_size" and configured > 1 else [2 * configured]


def _combined(points: Sequence[Point], judged: Sequence[Judged]) -> dict[str, Any] | None:
    """Puts together the value of each setting that `choose` takes; ``None`` if that is among the points already."""
    together: dict[str, Any] = {}
    for name in points[0].settings:
        rows = [row for row, point in enumerate(points) if set(point.changed) <= {name}]
        together |= points[choose(judged, rows)].changed
    return together if len(together) > 1 else None


def _named(name: str, value: Any) -> str:
    words = {FRAMES: "{} frames", "frame_size": "{} px", "batch_clips": "{} at once"}
    return words.get(name, "{}").format(value)
