"""Learning curves: the mean over seeds with a confidence band."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import ArrayLike, NDArray

Curve = tuple[ArrayLike, ArrayLike]
"""Env steps ``[K]``, increasing, and the value at each, ``[K]``."""


@dataclass(frozen=True)
class Style:
    """How a scheme is drawn, in every picture.

    Attributes:
        light: colour on a light page.
        dark: colour on a dark one.
        dashes: Matplotlib's line style.
    """

    light: str
    dark: str
    dashes: Any = "-"


# Okabe and Ito's colours, told apart with every common colour blindness; line styles tell them apart in print.
SCHEMES = {
    "uniform": Style("#6e7781", "#9aa4af", (0, (4, 2))),
    "per": Style("#E69F00", "#f0b429", (0, (1, 1.4))),
    "vlm": Style("#0072B2", "#58b4f0"),
    "vlm_td": Style("#009E73", "#3fcf9f", (0, (6, 1.5, 1, 1.5))),
}
"""The schemes that have a look of their own, in the order in which they stand."""
OTHERS = (("#D55E00", "#ff8f4a"), ("#CC79A7", "#e79ac5"), ("#3aa0d8", "#86d0f5"), ("#8c6bb1", "#b79be0"))
"""Colours of all other schemes, on a light and on a dark page."""
_DASHES = ("-", "--", "-.", ":")

# Student's t at 97.5 %, for 1, 2, … 30 degrees of freedom.
_T = (
    (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    + (2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860)
    + (2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423)
)


def scheme_order(label: str) -> tuple[int, str]:
    """Returns what to sort schemes by: those with a look of their own first, the others by name."""
    known = list(SCHEMES)
    return (known.index(label) if label in known else len(known), label)


def scheme_styles(kinds: Mapping[str, str]) -> dict[str, Style]:
    """Gives each scheme its look, the same whatever order they come in.

    Args:
        kinds: label → kind of scheme, such as ``per`` or ``vlm``. Of several of one kind, the one that is labelled so
            has the kind's look, else the first by name; all others have colours and dashes in the order of their names.
    """
    ordered = sorted(kinds, key=scheme_order)
    owners: dict[str, str] = {}
    for label in ordered:
        owners.setdefault(kinds[label], label)
    others = [label for label in ordered if kinds[label] not in SCHEMES or owners[kinds[label]] != label]
    styles = {}
    for label in ordered:
        if label in others:
            turn, place = divmod(others.index(label), len(OTHERS))
            styles[label] = Style(*OTHERS[place], _DASHES[turn % len(_DASHES)])
        else:
            styles[label] = SCHEMES[kinds[label]]
    return styles


def student_t(degrees_of_freedom: int) -> float:
    """Returns the factor of a two-sided 95 % interval, Student's t at 97.5 %.

    Args:
        degrees_of_freedom: at least 1.
    """
    if degrees_of_freedom <= len(_T):
        return _T[degrees_of_freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees_of_freedom)  # first term of the expansion, right to 0.002 from 31 on


def align_curves(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Puts curves of several seeds on common steps: all their own, over the range that all cover.

    Args:
        curves: one per seed; between their steps they are interpolated linearly.

    Returns:
        Env steps ``float64[K]`` and values ``float64[seeds, K]``.

    Raises:
        ValueError: no curve, an empty one, steps that do not increase, or no range that all cover.
    """
    if not curves:
        raise ValueError("no curves to average")
    known = [(np.asarray(steps, np.float64), np.asarray(values, np.float64)) for steps, values in curves]
    for steps, values in known:
        if steps.ndim != 1 or steps.shape != values.shape or not len(steps) or (np.diff(steps) <= 0).any():
            raise ValueError(f"a curve needs increasing steps and as many values, got {steps.shape}, {values.shape}")
    first, last = max(steps[0] for steps, _ in known), min(steps[-1] for steps, _ in known)
    if first > last:
        raise ValueError(f"the curves share no range of steps: one begins at {first:.0f}, another ends at {last:.0f}")
    grid = np.unique(np.concatenate([steps for steps, _ in known]))
    grid = grid[(grid >= first) & (grid <= last)]
    return grid, np.stack([np.interp(grid, steps, values) for steps, values in known])


def confidence_band(curves: Sequence[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Averages curves of several seeds, with the half-width of a 95 % confidence interval of their mean (Student's t).

    Args:
        curves: one per seed, put on common steps by `align_curves`.

    Returns:
        Env steps, mean and half-width, each ``float64[K]``; the half-width is NaN for a single curve.

    Raises:
        ValueError: as `align_curves`.
    """
    grid, table = align_curves(curves)
    n = len(table)
    half = student_t(n - 1) * table.std(0, ddof=1) / math.sqrt(n) if n > 1 else np.full(len(grid), np.nan)
    return grid, table.mean(0), half


def curves_caption(counts: Sequence[int]) -> str:
    """Says what lines and bands of learning curves are.

    Args:
        counts: seeds of each curve, at least one.
    """
    if max(counts) == 1:
        return "one run each, so there are no intervals"
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"line: mean of {seeds} seeds; band: 95 % interval of the mean (Student's t)"


def plot_learning_curves(
    curves: Mapping[str, Sequence[Curve]],
    path: str | os.PathLike[str],
    *,
    kinds: Mapping[str, str] | None = None,
    title: str = "",
    ylabel: str = "success",
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> None:
    """Draws one line per label, the mean over its seeds, within a 95 % confidence band where there are several seeds.

    A line below the axis says so, and how many seeds there are.

    Args:
        curves: label → one curve per seed: env steps ``[K]`` and values ``[K]``.
        path: the picture; its suffix says which kind (``.png``, ``.svg``, ``.pdf``).
        kinds: label → kind of scheme, which gives a line its look (`scheme_styles`); by default the label itself.
        title: above the picture.
        ylabel: what the values are.
        bounds: range of the values, to which bands and axis are clipped; ``None`` for unbounded ones.

    Raises:
        ValueError: nothing to draw, or a curve that `confidence_band` refuses.
    """
    if not curves:
        raise ValueError("no curves to plot")
    # Figure and canvas by themselves, without pyplot: no global state, no window system.
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = scheme_styles({label: (kinds or {}).get(label, label) for label in curves})
    for label, seeds in curves.items():
        style = styles[label]
        steps, mean, half = confidence_band(seeds)
        name = label if len(seeds) == 1 else f"{label} ({len(seeds)} seeds)"
        axes.plot(steps, mean, color=style.light, linestyle=style.dashes, linewidth=1.8, label=name)
        if len(seeds) > 1:
            low, high = mean - half, mean + half
            if bounds is not None:
                low, high = np.clip(low, *bounds), np.clip(high, *bounds)
            axes.fill_between(steps, low, high, color=style.light, alpha=0.15, linewidth=0)
    if bounds is not None:
        margin = 0.02 * (bounds[1] - bounds[0])
        axes.set_ylim(bounds[0] - margin, bounds[1] + margin)
    axes.set_xlim(left=0)
    axes.set_xlabel("env steps")
    figure.supxlabel(curves_caption([len(seeds) for seeds in curves.values()]), fontsize="small", color="#606060")
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=144)


def save_figure(figure: Figure, target: str | os.PathLike[str] | IO[bytes], **options: Any) -> None:
    """Writes a figure; a PDF has fonts that can be edited and that journals take, and no time in it.

    Args:
        figure: with a canvas.
        target: a path, whose suffix says which kind, or an open file.
        options: of `Figure.savefig`; ``format`` where the target has no suffix.
    """
    if options.get("format", Path(str(target)).suffix[1:]) == "pdf":
        options["metadata"] = {"CreationDate": None}
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it announces every letter
    with mpl.rc_context({"pdf.fonttype": 42}):
        figure.savefig(target, **options)


def short_number(value: float) -> str:
    """Writes 240000 as 240K."""
    for size, unit in ((1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
