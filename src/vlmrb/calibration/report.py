"""Turns scores and labels into the numbers of a report: the paper's tables 5, 10, 12 and 14 for one's own task."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.calibration.corpus import Corpus
from vlmrb.calibration.scores import Candidate, Scored
from vlmrb.calibration.statistics import (
    agreement,
    best_threshold,
    calibration_error,
    confusion,
    halves,
    interval,
    reliability,
    resample,
    resampled_auc,
    resampled_confusion,
    roc_auc,
    spearman,
    threshold_table,
)

SCHEMA = 1
SPLIT_SEED = 0
REPLICATES = 1000

Labels = NDArray[np.bool_]


def usable_labels(corpus: Corpus) -> dict[str, Labels]:
    """Returns the labels that occur with both values, in both halves of the corpus.

    Raises:
        ValueError: there is none.
    """
    labels = corpus.labels()
    usable = {name: values for name, values in labels.items() if _in_both_halves(values, corpus.clips.groups)}
    if not usable:
        found = ", ".join(f"{values.sum()} of {len(values)} clips with {name}" for name, values in labels.items())
        raise ValueError(
            f"corpus {corpus.folder} holds clips of one class only, or too few of the other ({found}): there is "
            "nothing to tell apart; collect more, or with another --policy"
        )
    return usable


def _in_both_halves(values: Labels, groups: NDArray[np.int64]) -> bool:
    return all(0 < values[half].sum() < len(half) for half in halves(values, groups, SPLIT_SEED))


def choose_label(corpus: Corpus, wanted: str | None) -> str:
    """Returns the label by which τ is chosen: the wanted one, else milestones where they are known.

    Replay wants progress, of which whole successes are but the rarest kind: a τ that only lets them pass starves it.

    Raises:
        ValueError: the corpus has no such label, or only clips of one class of it.
    """
    usable = usable_labels(corpus)
    if wanted is None:
        return "milestone" if "milestone" in usable else "success"
    if wanted not in corpus.labels():
        raise ValueError(f"--label {wanted}: this corpus has only {', '.join(corpus.labels())}")
    if wanted not in usable:
        raise ValueError(
            f"--label {wanted}: the corpus holds clips of one class only, or too few of the other; use "
            f"{', '.join(usable)}"
        )
    return wanted


def build_report(
    corpus: Corpus, candidates: list[Candidate], scored: list[Scored], label: str, command: str
) -> dict[str, Any]:
    """Compares scores with every usable label.

    Args:
        corpus: the clips.
        candidates: the scorers.
        scored: their scores, in the same order.
        label: by which τ is chosen.
        command: how the report was asked for.

    Returns:
        Plain types, ready for JSON; what is undefined is ``None``.
    """
    labels, groups = usable_labels(corpus), corpus.clips.groups
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "label": label,
        "corpus": {
            "folder": str(corpus.folder),
            "command": corpus.manifest["command"],
            "kind": corpus.manifest["kind"],
            "clip_length": corpus.manifest["clip_length"],
            "renderer": corpus.renderer.name,
            "counts": corpus.manifest["counts"],
            "notes": corpus.manifest["notes"],
        },
        "scorers": [
            {
                "label": candidate.label,
                "name": candidate.scorer.name,
                "version": candidate.scorer.version,
                "class_path": candidate.class_path,
                "prompt": _prompt_text(candidate),
                "frames_per_clip": candidate.frames_per_clip,
                "scored_now": result.fresh,
                "clips_per_s": result.clips_per_s,
                "stats": result.stats,
                "by_label": {
                    name: judge(result.scores, values, groups, candidate.threshold) for name, values in labels.items()
                },
            }
            for candidate, result in zip(candidates, scored, strict=True)
        ],
    }
    report["pairs"] = _pairs(report["scorers"], scored, label)
    return without_nan(report)


def _prompt_text(candidate: Candidate) -> str | None:
    prompt = getattr(candidate.scorer, "prompt", None)
    return None if prompt is None else getattr(prompt, "text", str(prompt))


def verdict(auc_interval: Sequence[float]) -> str:
    """Says what the 95 % interval of a ROC AUC means for who would let this scorer guide replay."""
    low, high = auc_interval
    if high < 0.5:
        return "worse than guessing on these clips: it answers something else than was asked; do not use it as it is"
    if low <= 0.5:
        return "no better than guessing on these clips: do not use it as it is"
    return (
        "it tells these clips apart"
        if low >= 0.8
        else "it tells these clips apart poorly: look at the clips it got wrong"
    )


def verdicts(report: Mapping[str, Any]) -> list[str]:
    """Returns a line on each scorer of a report: its ROC AUC by the label that τ is chosen by, and what it comes to."""
    lines = []
    for scorer in report["scorers"]:
        judged = scorer["by_label"][report["label"]]
        low, high = judged["auc_interval"]
        measured = f"ROC AUC {judged['auc']:.3f} [{low:.3f}, {high:.3f}] by {report['label']}"
        lines.append(f"{scorer['label']}: {measured}: {verdict(judged['auc_interval'])}")
    return lines


def judge(scores: NDArray[np.float32], labels: Labels, groups: NDArray[np.int64], threshold: float) -> dict[str, Any]:
    """Compares one scorer with one label.

    Args:
        scores: ``float32[N]`` in [0, 1].
        labels: ``bool[N]``.
        groups: ``int64[N]``, see `ClipLabels`.
        threshold: the configured τ.
    """
    chosen_on, reported_on = halves(labels, groups, SPLIT_SEED)
    best = best_threshold(scores[chosen_on], labels[chosen_on])
    held_out = confusion(scores[reported_on], labels[reported_on], best).as_dict()
    points = reliability(scores, labels)

    times = resample(groups, REPLICATES)
    return {
        "positives": int(labels.sum()),
        "auc": roc_auc(scores, labels),
        "auc_interval": interval(resampled_auc(scores, labels, times)),
        "at_configured": confusion(scores, labels, threshold).as_dict()
        | {"intervals": _intervals(scores, labels, threshold, times)},
        "at_best": held_out
        | {
            "intervals": _intervals(scores[reported_on], labels[reported_on], best, times[:, reported_on]),
            "chosen_on": len(chosen_on),
            "reported_on": len(reported_on),
        },
        "thresholds": [asdict(line) for line in threshold_table(scores, labels)],
        "reliability": [asdict(point) for point in points],
        "calibration_error": calibration_error(points),
    }


def _intervals(
    scores: NDArray[np.float32], labels: Labels, threshold: float, times: NDArray[np.int64]
) -> dict[str, tuple[float, float]]:
    samples = resampled_confusion(scores, labels, threshold, times)
    return {name: interval([sample[name] for sample in samples]) for name in samples[0] if name != "threshold"}


def _pairs(scorers: list[dict[str, Any]], scored: list[Scored], label: str) -> list[dict[str, Any]]:
    """Compares every two scorers, each at its own best τ."""
    pairs = []
    for i, j in itertools.combinations(range(len(scored)), 2):
        first, second = scored[i].scores, scored[j].scores
        best = [scorers[k]["by_label"][label]["at_best"]["threshold"] for k in (i, j)]
        pairs.append(
            {
                "first": scorers[i]["label"],
                "second": scorers[j]["label"],
                "spearman": spearman(first, second),
                "agreement": agreement(first > np.float32(best[0]), second > np.float32(best[1])),
            }
        )
    return pairs


def scores_csv(corpus: Corpus, candidates: list[Candidate], scored: list[Scored]) -> str:
    """Returns one line per clip: its labels, and a column of scores for each scorer."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [*corpus.labels(), *corpus.milestones]
    writer.writerow(["clip", "group", "frames", *names, *(candidate.label for candidate in candidates)])
    clips = corpus.clips
    facts = np.column_stack(
        [np.arange(len(clips)), clips.groups, clips.lengths, *corpus.labels().values(), clips.milestones]
    )
    for row, line in enumerate(facts.astype(int).tolist()):
        writer.writerow([*line, *(repr(float(result.scores[row])) for result in scored)])
    return text.getvalue()


def calibrated_overlay(candidate: Candidate, judged: dict[str, Any], label: str, command: str) -> str:
    """Returns the overlay that makes a run use the chosen τ, and the prompt it was chosen for."""
    import yaml

    content: dict[str, Any] = {"replay": {"vlm": {"threshold": judged["at_best"]["threshold"]}}}
    if candidate.prompt is not None:
        content["scoring"] = {"scorer": {"init_args": {"prompt": candidate.prompt}}}
    at = judged["at_best"]
    remarks = [
        f"The threshold for {candidate.label}, chosen by {label} on {at['chosen_on']} clips; on the other "
        f"{at['reported_on']} its balanced accuracy is {at['balanced_accuracy']:.3f}.",
        "Goes after the scorer's own overlay.",
        command,
    ]
    head = "".join(f"# {remark}\n" for remark in remarks)
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def without_nan(value: Any) -> Any:
    """Returns plain types with ``None`` in the place of NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
