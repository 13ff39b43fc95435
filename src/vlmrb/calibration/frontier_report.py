"""What ways of asking a scorer are worth beside what they cost: judged, tabulated, the one to take as an overlay."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.calibration.report import REPLICATES, SPLIT_SEED
from vlmrb.calibration.statistics import best_threshold, confusion, halves, interval, resample, resampled_auc, roc_auc
from vlmrb.calibration.timing import Timing, ratio_interval

if TYPE_CHECKING:
    from vlmrb.calibration.frontier import Frontier


@dataclass(frozen=True)
class Judged:
    """One way of asking, judged.

    Attributes:
        clips_per_s: median of the rounds.
        ratio: to that of `Frontier.base`, median of the rounds.
        ratio_interval: of that median, 95 %.
        faster: whether it is faster than the configured way beyond doubt: that interval of their ratio lies above 1.
        auc: ROC AUC.
        auc_interval: 95 %, by bootstrap over groups.
        loss: AUC of the best point, less this one's.
        loss_interval: 95 %, by paired bootstrap over groups.
        within: whether the whole interval of the loss lies within the tolerance.
        on_frontier: no other point is as fast and as good, and better in one of both.
        threshold: τ of highest balanced accuracy on one half of the corpus.
        balanced_accuracy: at that τ, on the other half.
        tokens: of a clip with its prompt, as the scorer says; ``None`` if it does not.
        frame_hits: share of the frames of a timed pass that needed no encoding; ``None`` if the scorer does not say.
        peak_bytes: GPU memory, the scorer's weights included; ``None`` without a GPU.
    """

    clips_per_s: float
    ratio: float
    ratio_interval: tuple[float, float]
    faster: bool
    auc: float
    auc_interval: tuple[float, float]
    loss: float
    loss_interval: tuple[float, float]
    within: bool
    on_frontier: bool
    threshold: float
    balanced_accuracy: float
    tokens: float | None
    frame_hits: float | None
    peak_bytes: int | None


def judge_points(
    scores: Sequence[NDArray[np.float32]],
    timings: Sequence[Timing],
    ratios: Sequence[NDArray[np.float64]],
    labels: NDArray[np.bool_],
    groups: NDArray[np.int64],
    tolerance: float,
) -> tuple[list[Judged], int]:
    """Judges P points, the configured one first, and chooses one.

    Args:
        scores: P × ``float32[N]``.
        timings: P.
        ratios: P × ``float64[R]``, speed beside that of the base in the same round.
        labels: ``bool[N]``.
        groups: ``int64[N]``, see `ClipLabels`.
        tolerance: AUC that may be lost.

    Returns:
        The points judged, and the position of the one to take, see `choose`.
    """
    times = resample(groups, REPLICATES)
    samples = np.stack([resampled_auc(values, labels, times) for values in scores])  # [P, replicates]
    aucs = np.array([roc_auc(values, labels) for values in scores])
    speeds = np.array([np.median(values) for values in ratios])
    best = int(np.argmax(aucs))
    losses = [interval(samples[best] - mine) for mine in samples]
    within = np.array([high <= tolerance for _, high in losses])
    within[best] = True
    chosen_on, reported_on = halves(labels, groups, SPLIT_SEED)
    judged = []
    for row, (values, timing) in enumerate(zip(scores, timings, strict=True)):
        threshold = best_threshold(values[chosen_on], labels[chosen_on])
        judged.append(
            Judged(
                clips_per_s=float(np.median(timing.clips_per_s)),
                ratio=float(speeds[row]),
                ratio_interval=ratio_interval(ratios[row]),
                faster=ratio_interval(ratios[row] / ratios[0])[0] > 1,
                auc=float(aucs[row]),
                auc_interval=interval(samples[row]),
                loss=float(aucs[best] - aucs[row]),
                loss_interval=losses[row],
                within=bool(within[row]),
                on_frontier=_undominated(row, speeds, aucs),
                threshold=threshold,
                balanced_accuracy=confusion(values[reported_on], labels[reported_on], threshold).balanced_accuracy,
                tokens=timing.stats.get("tokens"),
                frame_hits=timing.stats.get("frame_hits"),
                peak_bytes=timing.peak_bytes,
            )
        )
    return judged, choose(judged, range(len(judged)))


def choose(judged: Sequence[Judged], rows: Sequence[int]) -> int:
    """Returns the one to take of some points: the fastest whose AUC is within the tolerance.

    What is not faster beyond doubt than the configured point does not take its place, if that is one of them. Where no
    AUC is within the tolerance, the highest is taken.

    Args:
        judged: all points, the configured one first.
        rows: positions of those to choose from.
    """
    good = [row for row in rows if judged[row].within]
    if not good:
        return max(rows, key=lambda row: judged[row].auc)
    if 0 in good:
        good = [row for row in good if row == 0 or judged[row].faster]
    return max(good, key=lambda row: judged[row].ratio)


def _undominated(row: int, speeds: NDArray[np.float64], aucs: NDArray[np.float64]) -> bool:
    as_good = (speeds >= speeds[row]) & (aucs >= aucs[row])
    return not (as_good & ((speeds > speeds[row]) | (aucs > aucs[row]))).any()


def frontier_facts(frontier: Frontier) -> dict[str, Any]:
    """Returns everything in plain types, for ``report.json`` and the page."""
    return {
        "label": frontier.label,
        "base": frontier.points[frontier.base].label,
        "tolerance": frontier.grid.tolerance,
        "timed_clips": frontier.timed_clips,
        "rounds": frontier.grid.rounds,
        "points": [
            {"label": point.label, "settings": point.settings, "chosen": row == frontier.chosen} | asdict(judged)
            for row, (point, judged) in enumerate(zip(frontier.points, frontier.judged, strict=True))
        ],
    }


def frontier_csv(facts: Mapping[str, Any]) -> str:
    """Returns one line per point; what is not known stays empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = []
    for point in facts["points"]:
        row = {"point": point["label"], **point["settings"]}
        for name, value in point.items():
            if name.endswith("_interval"):
                row |= {name.replace("_interval", "_low"): value[0], name.replace("_interval", "_high"): value[1]}
            elif name not in ("label", "settings"):
                row[name] = value
        rows.append(row)
    names = list(rows[0])
    writer.writerow(names)
    writer.writerows([["" if row[name] is None else row[name] for name in names] for row in rows])
    return text.getvalue()


def frontier_overlay(frontier: Frontier, facts: Mapping[str, Any], command: str) -> str:
    """Returns the overlay that makes a run ask as the chosen point does, with the figures behind it.

    Args:
        frontier: what was found.
        facts: of `frontier_facts`.
        command: how it was found.
    """
    import yaml

    point, at = frontier.points[frontier.chosen], facts["points"][frontier.chosen]
    scoring = point.overlay()
    low, high = at["ratio_interval"]
    auc_low, auc_high = at["auc_interval"]
    remarks = [
        f"{at['label']}: the fastest way of asking whose ROC AUC by {facts['label']} is not worse than the best one's "
        f"by more than {facts['tolerance']:g}.",
        f"{at['clips_per_s']:.3g} clips/s, {at['ratio']:.2f} [{low:.2f}, {high:.2f}] times those of: {facts['base']}.",
        f"ROC AUC {at['auc']:.3f} [{auc_low:.3f}, {auc_high:.3f}], {at['loss']:.3f} below the best one's and with 95 % "
        f"confidence at most {max(at['loss_interval'][1], 0):.3f}; the threshold's balanced accuracy is "
        f"{at['balanced_accuracy']:.3f}.",
        "Goes after the scorer's own overlay. Clips must be as long as the corpus's.",
        command,
    ]
    content = {"scoring": scoring, "replay": {"vlm": {"threshold": at["threshold"]}}}
    head = "".join(f"# {remark}\n" for remark in remarks)
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
