"""The pictures of a calibration report, each for a light and a dark page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vlmrb.calibration.manifest import write_whole
from vlmrb.calibration.statistics import confusion, roc_curve

_LIGHT = {"ink": "#1f2328", "faint": "#d8dee4", "paper": "#ffffff"}
_DARK = {"ink": "#e6edf3", "faint": "#3d444d", "paper": "#161b22"}
_WITH, _WITHOUT = "#009E73", "#D55E00"  # Okabe and Ito: told apart with every common colour blindness
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", "-.", ":")

Labels = NDArray[np.bool_]
Scores = NDArray[np.float32]


def plot_scorer(path: Path, scores: Scores, labels: Labels, label: str, judged: Mapping[str, Any]) -> None:
    """Draws one scorer: its scores by label, its reliability, and balanced accuracy over the threshold.

    Args:
        path: of the light picture, a PNG; the dark one lies beside it with ``_dark`` in its name.
        scores: ``float32[N]``.
        labels: ``bool[N]``.
        label: their name.
        judged: what the report says about this scorer and label.
    """
    for figure, axes in figures(path, 3):
        _histogram(axes[0], scores, labels, label, judged)
        _reliability(axes[1], judged["reliability"], label)
        _accuracy(axes[2], scores, labels, judged)
        figure.align_ylabels()


def plot_roc(path: Path, scores: Mapping[str, Scores], labels: Labels, label: str) -> None:
    """Draws the ROC curves of all scorers, name → ``float32[N]``, in one picture."""
    for _, (axes,) in figures(path, 1):
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle=":")
        for number, (name, values) in enumerate(scores.items()):
            fpr, tpr = roc_curve(values, labels)
            style = {"color": LINES[number % len(LINES)], "linestyle": _STYLES[number % len(_STYLES)]}
            axes.plot(
                fpr, tpr, label=name, linewidth=1.8, marker="o" if len(fpr) < 9 else None, markersize=3.5, **style
            )
        axes.set(xlabel="false positive rate", ylabel="true positive rate", title=f"ROC, {label}")
        axes.legend(frameon=False, loc="lower right", fontsize="small")


def _histogram(axes: Axes, scores: Scores, labels: Labels, label: str, judged: Mapping[str, Any]) -> None:
    edges = np.linspace(0, 1, 41).tolist()
    for which, color, name in ((labels, _WITH, f"{label}"), (~labels, _WITHOUT, f"no {label}")):
        axes.hist(scores[which], edges, color=color, alpha=0.6, label=f"{name} ({which.sum()})")
    axes.axvline(
        judged["at_configured"]["threshold"], color="#888888", linewidth=1.2, linestyle="--", label="τ configured"
    )
    axes.axvline(judged["at_best"]["threshold"], color=LINES[0], linewidth=1.2, label="τ best")
    axes.set(xlabel="score", ylabel="clips", title="scores by label", xlim=(0, 1))
    axes.legend(frameon=False, fontsize="small")


def _reliability(axes: Axes, points: list[dict[str, Any]], label: str) -> None:
    mean = np.array([point["mean_score"] for point in points])
    observed = np.array([point["observed"] for point in points])
    count = np.array([point["count"] for point in points])
    axes.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle=":")
    axes.plot(mean, observed, color=LINES[0], linewidth=1.2)
    axes.scatter(mean, observed, 12 + 120 * count / count.sum(), color=LINES[0], zorder=3)
    axes.set(xlabel="mean score", ylabel=f"share with {label}", title="reliability (dots by clips)")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.04, 1.04))


def _accuracy(axes: Axes, scores: Scores, labels: Labels, judged: Mapping[str, Any]) -> None:
    thresholds = np.linspace(0, 1, 201)
    values = [confusion(scores, labels, float(threshold)).balanced_accuracy for threshold in thresholds]
    axes.plot(thresholds, values, color=LINES[0], linewidth=1.8)
    axes.axvline(judged["at_configured"]["threshold"], color="#888888", linewidth=1.2, linestyle="--")
    axes.axvline(judged["at_best"]["threshold"], color=LINES[0], linewidth=1.2)
    axes.set(
        xlabel="threshold τ", ylabel="balanced accuracy", title="balanced accuracy", xlim=(0, 1), ylim=(0.45, 1.02)
    )


@contextmanager
def _theme(colors: Mapping[str, str]) -> Iterator[None]:
    ink, paper = colors["ink"], colors["paper"]
    settings = {
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.edgecolor": ink,
    }
    settings |= {"figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper}
    settings |= {"axes.titlesize": "medium", "grid.color": colors["faint"], "grid.linewidth": "0.8"}
    with mpl.rc_context(settings):
        yield


def figures(path: Path, panels: int, size: tuple[float, float] = (3.9, 3.3)) -> Iterator[tuple[Figure, NDArray[Any]]]:
    """Yields an empty figure with ``panels`` axes for each theme, and writes it when it has been drawn.

    Args:
        path: of the light picture; the dark one lies beside it with ``_dark`` in its name.
        panels: axes beside each other.
        size: width and height of one, in inches.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for colors, target in ((_LIGHT, path), (_DARK, path.with_name(f"{path.stem}_dark{path.suffix}"))):
        with _theme(colors):
            figure = Figure(figsize=(size[0] * panels + 0.3, size[1]), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots(1, panels, squeeze=False)[0]
            for one in axes:
                one.grid(True)
                one.set_axisbelow(True)
                one.spines[["top", "right"]].set_visible(False)
            yield figure, axes
            picture = io.BytesIO()
            figure.savefig(picture, dpi=110)
            write_whole(target, picture.getvalue())
