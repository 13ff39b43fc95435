"""The picture of a cost frontier: clips/s against ROC AUC."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from vlmrb.calibration.plots import LINES, figures

# Where a label may stand, in points from its dot: the first place that is free is taken.
_PLACES = [(7, 6), (7, -13), (-7, 6), (-7, -13), (0, 14), (0, -21), (14, 20), (14, -28), (-14, 20), (-14, -28)]
_PLACES += [(0, 32), (0, -40), (20, 42), (-20, 42), (20, -50), (-20, -50), (0, 60), (0, -70)]


def plot_frontier(path: Path, facts: Mapping[str, Any]) -> None:
    """Draws the points with their intervals, the line that nothing is better than, and the chosen one.

    Args:
        path: of the light picture, a PNG; the dark one lies beside it with ``_dark`` in its name.
        facts: of `frontier_facts`.
    """
    points = facts["points"]
    unit = next(point["clips_per_s"] for point in points if point["label"] == facts["base"])
    ratio = np.array([[point["ratio"], *point["ratio_interval"]] for point in points])
    speed = unit * ratio[:, 0]  # a point's own clips/s may be of another time, when the machine was slower
    auc = np.array([[point["auc"], *point["auc_interval"]] for point in points])
    across = unit * np.abs(ratio[:, 1:] - ratio[:, :1])
    along = np.abs(auc[:, 1:] - auc[:, :1])
    line = [row for row in np.argsort(speed) if points[row]["on_frontier"]]
    for figure, (axes,) in figures(path, 1, (7.2, 4.6)):
        axes.errorbar(speed, auc[:, 0], along.T, across.T, fmt="none", ecolor="#888888", elinewidth=1.0, zorder=2)
        axes.plot(speed[line], auc[line, 0], color=LINES[0], linewidth=1.6, label="frontier", zorder=3)
        axes.scatter(speed, auc[:, 0], 30, color=LINES[0], zorder=4)
        chosen = next(row for row, point in enumerate(points) if point["chosen"])
        axes.scatter(
            *(speed[chosen], auc[chosen, 0], 170),
            facecolors="none",
            edgecolors=LINES[1],
            linewidths=2.0,
            zorder=5,
            label="chosen",
        )
        least = auc[:, 0].max() - facts["tolerance"]
        axes.axhline(least, color="#888888", linewidth=0.8, linestyle=":", label=f"best − {facts['tolerance']:g}")
        axes.set_xscale("log")
        axes.set(xlabel="clips/s", ylabel=f"ROC AUC by {facts['label']}", title="cost and worth of a score")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.4g}" if _leads(value) else "")
        axes.margins(0.12, 0.15)
        axes.legend(frameon=False, fontsize="small", loc="best")
        places = {point["label"]: (speed[row], auc[row, 0]) for row, point in enumerate(points)}
        _write_labels(figure, axes, places, points[chosen]["label"], [points[row]["label"] for row in line])


def _leads(value: float) -> bool:
    """Says whether a tick between powers of ten is one of those that get a number."""
    return round(value / 10 ** np.floor(np.log10(value))) in (2, 3, 5, 7)


def _write_labels(
    figure: Figure, axes: Axes, places: Mapping[str, tuple[float, float]], chosen: str, line: Sequence[str]
) -> None:
    """Writes each label beside its dot where it hides neither a dot, nor the line, nor another label."""
    figure.canvas.draw()
    at = dict(zip(places, axes.transData.transform(list(places.values())), strict=True))
    taken = [_box(place, 11 if label == chosen else 5) for label, place in at.items()]
    for one, other in itertools.pairwise(line):
        steps = int(np.hypot(*(at[other] - at[one])) // 6) + 1
        taken += [_box(place, 1) for place in np.linspace(at[one], at[other], steps)]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    inside = axes.get_window_extent(renderer)
    for label, place in sorted(places.items(), key=lambda item: -len(item[0])):  # the longest is hardest to place
        options: list[tuple[int, Annotation, Bbox]] = []
        for shift in _PLACES:
            note = _note(axes, label, place, shift)
            note.update_positions(renderer)
            box = Text.get_window_extent(note, renderer).padded(2)  # without its arrow, which leads to the dot
            outside = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
            options.append((sum(box.overlaps(other) for other in taken) + 100 * outside, note, box))
            if not options[-1][0]:
                break
        _, best, box = min(options, key=lambda option: option[0])
        for _, note, _ in options:
            if note is not best:
                note.remove()
        taken.append(box)


def _box(place: NDArray[np.float64], reach: float) -> Bbox:
    return Bbox.from_bounds(place[0] - reach, place[1] - reach, 2 * reach, 2 * reach)


def _note(axes: Axes, label: str, place: tuple[float, float], shift: tuple[int, int]) -> Annotation:
    line = {"arrowstyle": "-", "color": "#888888", "linewidth": 0.6} if max(map(abs, shift)) > 13 else None
    return axes.annotate(
        label,
        place,
        shift,
        textcoords="offset points",
        ha="left" if shift[0] > 0 else "right" if shift[0] < 0 else "center",
        fontsize=8,
        color=mpl.rcParams["text.color"],
        arrowprops=line,
        zorder=6,
    )
