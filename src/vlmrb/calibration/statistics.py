"""How well scores tell success from failure. Pure functions of scores and labels.

Throughout, ``scores`` is ``float[N]`` in [0, 1], ``labels`` is ``bool[N]``, and a clip counts as positive at a
threshold τ if its score is strictly greater, as in replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.floating]
Labels = NDArray[np.bool_]

NAN = float("nan")


@dataclass(frozen=True)
class Confusion:
    """What a threshold makes of scores.

    Attributes:
        threshold: τ.
        true_positives: clips with success above τ.
        false_positives: clips without success above τ.
        false_negatives: clips with success at or below τ.
        true_negatives: clips without success at or below τ.
    """

    threshold: float
    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @property
    def share_positive(self) -> float:
        """Share of all clips above τ."""
        total = self.true_positives + self.false_positives + self.false_negatives + self.true_negatives
        return _ratio(self.true_positives + self.false_positives, total)

    @property
    def precision(self) -> float:
        """Of the clips above τ, the share with success; NaN if there are none."""
        return _ratio(self.true_positives, self.true_positives + self.false_positives)

    @property
    def recall(self) -> float:
        """Of the clips with success, the share above τ."""
        return _ratio(self.true_positives, self.true_positives + self.false_negatives)

    @property
    def fpr(self) -> float:
        """Of the clips without success, the share above τ."""
        return _ratio(self.false_positives, self.false_positives + self.true_negatives)

    @property
    def fnr(self) -> float:
        """Of the clips with success, the share at or below τ."""
        return _ratio(self.false_negatives, self.true_positives + self.false_negatives)

    @property
    def balanced_accuracy(self) -> float:
        """Mean of the shares of both classes that are on their side of τ."""
        return (self.recall + 1 - self.fpr) / 2

    def as_dict(self) -> dict[str, float]:
        """Returns everything by name."""
        names = ("share_positive", "precision", "recall", "fpr", "fnr", "balanced_accuracy")
        return {"threshold": self.threshold} | {name: getattr(self, name) for name in names}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else NAN


def confusion(scores: Scores, labels: Labels, threshold: float) -> Confusion:
    """Counts what a threshold makes of scores."""
    above = scores > np.asarray(threshold, scores.dtype)  # a float32 score of 0.7 is not above 0.7
    return Confusion(
        threshold,
        int((above & labels).sum()),
        int((above & ~labels).sum()),
        int((~above & labels).sum()),
        int((~above & ~labels).sum()),
    )


def ranks(values: NDArray) -> NDArray[np.float64]:
    """Ranks values from 1 on, equal ones sharing the mean of their places: ``float64[N]``."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse.reshape(-1)]


def roc_auc(scores: Scores, labels: Labels) -> float:
    """Returns the chance that a clip with success scores above one without, ties counting half; NaN for one class."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return NAN
    return float((ranks(scores)[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def roc_curve(scores: Scores, labels: Labels) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns false and true positive rate at every threshold, from (0, 0) to (1, 1)."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # equal scores fall together
    hits = np.cumsum(labels[order])[ends]
    misses = ends + 1 - hits
    return np.append(0.0, misses / max((~labels).sum(), 1)), np.append(0.0, hits / max(labels.sum(), 1))


def best_threshold(scores: Scores, labels: Labels) -> float:
    """Returns the threshold of highest balanced accuracy.

    It lies in the middle between two neighbouring scores; among equally good places the widest gap wins, so that the
    threshold is as far from any score as it can be, and then the one nearest to 0.5.
    """
    distinct, inverse = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    if len(distinct) < 2:
        return 0.5
    inverse = inverse.reshape(-1)
    with_success = np.cumsum(np.bincount(inverse, labels, len(distinct)))[:-1]  # at or below each place
    without = np.cumsum(np.bincount(inverse, ~labels, len(distinct)))[:-1]
    accuracy = (1 - with_success / max(labels.sum(), 1) + without / max((~labels).sum(), 1)) / 2
    middle, gap = (distinct[:-1] + distinct[1:]) / 2, np.diff(distinct)
    best = max(
        range(len(middle)),
        key=lambda i: (round(float(accuracy[i]), 12), round(float(gap[i]), 6), -abs(middle[i] - 0.5)),
    )
    return float(round(middle[best], 4)) if gap[best] > 1e-3 else float(middle[best])


@dataclass(frozen=True)
class ThresholdBin:
    """One line of the threshold table (the paper's tables 5 and 12).

    Attributes:
        lower: the bin's lower edge, which is also the threshold τ.
        share: share of all scores in the bin, ``[lower, lower + width)``.
        balanced_accuracy: at τ = ``lower``.
    """

    lower: float
    share: float
    balanced_accuracy: float


def threshold_table(scores: Scores, labels: Labels, width: float = 0.05) -> list[ThresholdBin]:
    """Tabulates balanced accuracy over thresholds, from the lowest bin that holds a score to the highest."""
    edges = np.arange(0, round(1 / width) + 1) * width
    place = np.minimum(np.floor(np.asarray(scores, np.float64) / width + 1e-6).astype(int), len(edges) - 2)
    share = np.bincount(place, minlength=len(edges) - 1) / len(scores)
    held = range(place.min(), place.max() + 1)
    return [
        ThresholdBin(
            float(round(edges[i], 6)),
            float(share[i]),
            confusion(scores, labels, float(round(edges[i], 6))).balanced_accuracy,
        )
        for i in held
    ]


@dataclass(frozen=True)
class ReliabilityBin:
    """One point of the reliability plot.

    Attributes:
        mean_score: of the clips in the bin.
        observed: share of them with success.
        count: how many they are.
    """

    mean_score: float
    observed: float
    count: int


def reliability(scores: Scores, labels: Labels, bins: int = 10) -> list[ReliabilityBin]:
    """Compares scores, taken as probabilities, with what happened; bins without clips are left out."""
    place = np.minimum((np.asarray(scores, np.float64) * bins).astype(int), bins - 1)
    return [
        ReliabilityBin(float(scores[place == i].mean()), float(labels[place == i].mean()), int((place == i).sum()))
        for i in range(bins)
        if (place == i).any()
    ]


def calibration_error(points: list[ReliabilityBin]) -> float:
    """Returns the mean distance between score and observed share, weighted by clips (expected calibration error)."""
    total = sum(point.count for point in points)
    return sum(point.count * abs(point.mean_score - point.observed) for point in points) / total


def spearman(first: Scores, second: Scores) -> float:
    """Returns the rank correlation of two scorers; NaN if one of them never varies."""
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm > 0 else NAN


def agreement(first: Labels, second: Labels) -> float:
    """Returns the share of clips that two scorers put on the same side."""
    return float((first == second).mean())


def halves(labels: Labels, groups: NDArray[np.int64], seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Splits clips in two, at random, with like shares of success, and no group in both.

    Returns:
        ``int64[K]`` and ``int64[N − K]``.
    """
    _, member = np.unique(groups, return_inverse=True)
    member = member.reshape(-1)
    size = np.bincount(member)
    positives = np.bincount(member, labels, len(size))
    order = np.random.default_rng(seed).permutation(len(size))
    order = order[np.lexsort((size[order], positives[order]))[::-1]]
    side = np.empty(len(size), np.int64)
    side[order] = np.arange(len(size)) % 4 % 3 > 0  # 0, 1, 1, 0: neither half always gets the larger group
    return np.flatnonzero(side[member] == 0), np.flatnonzero(side[member] == 1)


def resample(groups: NDArray[np.int64], replicates: int = 1000, seed: int = 0) -> NDArray[np.int64]:
    """Draws bootstrap samples of whole groups, since clips of one episode are no independent evidence.

    Args:
        groups: ``int64[N]``.
        replicates: R.
        seed: of the draws.

    Returns:
        ``int64[R, N]``, how often each clip is in each sample.
    """
    _, member = np.unique(groups, return_inverse=True)
    member = member.reshape(-1)
    count = int(member.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), replicates)  # [R, groups]
    return drawn[:, member]


def resampled_auc(scores: Scores, labels: Labels, times: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns `roc_auc` of each sample of `resample`, ``float64[R]``, NaN where a sample has one class only."""
    order = np.argsort(scores, kind="stable")
    starts = np.append(0, np.flatnonzero(np.diff(scores[order])) + 1)  # of runs of equal scores
    positive = np.add.reduceat(times[:, order] * labels[order], starts, axis=1)  # [R, distinct scores]
    negative = np.add.reduceat(times[:, order] * ~labels[order], starts, axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    with np.errstate(invalid="ignore"):
        return (positive * below).sum(axis=1) / (positive.sum(axis=1) * negative.sum(axis=1))


def resampled_confusion(
    scores: Scores, labels: Labels, threshold: float, times: NDArray[np.int64]
) -> list[dict[str, float]]:
    """Returns `Confusion.as_dict` of each sample of `resample`: R dictionaries."""
    above = scores > np.asarray(threshold, scores.dtype)
    cells = np.stack([above & labels, above & ~labels, ~above & labels, ~above & ~labels], axis=1)
    return [Confusion(threshold, *counts).as_dict() for counts in (times @ cells.astype(np.int64)).tolist()]


def interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Returns the middle 95 % of bootstrap values; undefined ones are left out."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return (float(np.quantile(known, 0.025)), float(np.quantile(known, 0.975))) if len(known) else (NAN, NAN)
