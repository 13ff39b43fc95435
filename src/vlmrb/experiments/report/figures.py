"""The pictures of a report, each for a light and a dark page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from vlmrb.experiments.report.statistics import curve, means
from vlmrb.experiments.report.table import Number, Table
from vlmrb.experiments.report.tasks import Arm, Task, common_schemes
from vlmrb.plots import (
    OTHERS,
    SCHEMES,
    Style,
    confidence_band,
    curves_caption,
    save_figure,
    scheme_styles,
    short_number,
)

CROWDED = 6  # schemes in one pair of axes
_PANELS = 4  # beside each other

_LIGHT = {"ink": "#1f2328", "soft": "#59636e", "faint": "#e4e8ec", "paper": "#ffffff"}
_DARK = {"ink": "#e6edf3", "soft": "#9198a1", "faint": "#30363d", "paper": "#161b22"}


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        key: its file's name.
        title: says what it shows, also to those who do not see it.
        caption: how to read it.
        light: PNG for a light page.
        dark: the same for a dark one.
        pdf: the light one as vectors, for a paper.
        width: in CSS pixels.
    """

    key: str
    title: str
    caption: str
    light: bytes
    dark: bytes
    pdf: bytes
    width: int


_Band = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Env steps, average, and its interval's ends, ``float64[K]`` each."""


def task_pictures(task: Task) -> list[Picture]:
    """Draws a task's learning curves and, where there are many schemes, each of the further ones by itself."""
    arms = [arm for arm in task.arms if arm.runs]
    if not arms:
        return []
    main = arms if len(arms) <= CROWDED else [arm for kind in SCHEMES if (arm := task.arm(kind)) is not None]
    main = main or arms[:CROWDED]
    pictures = [_curves(task, main)]
    if len(main) > 1:
        pictures.append(_areas(task, arms))
    further = [arm for arm in arms if arm not in main]
    return [*pictures, _small_multiples(task, further)] if further else pictures


def _curves(task: Task, arms: Sequence[Arm]) -> Picture:
    lines, bands = _styles(task), [_band(arm) for arm in arms]

    def draw(figure: Figure, dark: bool) -> None:
        axes = figure.subplots()
        for arm, band in zip(arms, bands, strict=True):
            _curve(axes, band, arm.name, lines[arm.label], dark)
        _as_success(axes)
        axes.set_title("success in evaluations", loc="left")
        axes.legend(frameon=False, fontsize="small", loc="best")

    told = curves_caption([len(arm.runs) for arm in arms])
    said = f"{told[0].upper()}{told[1:]}."
    return _picture(f"curves_{task.slug}", f"Learning curves, {task.title}", said, (5.9, 3.6), draw)


def _areas(task: Task, arms: Sequence[Arm]) -> Picture:
    lines = _styles(task)
    areas = [Number.of(found) for arm in arms for found in means([arm.area()])]

    def draw(figure: Figure, dark: bool) -> None:
        axes = figure.subplots()
        for place, (arm, area) in enumerate(zip(arms, areas, strict=True)):
            _whisker(axes, place, area, arm.area(), _color(lines[arm.label], dark))
        axes.set_yticks(range(len(arms)), [arm.label for arm in arms])
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.set_xlabel("success, averaged over training")
        axes.grid(axis="y", visible=False)

    caption = "Large dots: means, with their 95 % bootstrap intervals; small dots: seeds."
    size = (4.8, max(3.6, 0.22 * len(arms) + 0.8))  # inches; a line for each scheme
    return _picture(f"areas_{task.slug}", f"Success averaged over training, {task.title}", caption, size, draw)


def _small_multiples(task: Task, arms: Sequence[Arm]) -> Picture:
    beside = [arm for kind in ("uniform", "per") if (arm := task.arm(kind)) is not None]
    lines, bands = _styles(task), {arm.label: _band(arm) for arm in (*beside, *arms)}
    rows = math.ceil(len(arms) / _PANELS)

    def draw(figure: Figure, dark: bool) -> None:
        panels = figure.subplots(rows, _PANELS, sharex=True, sharey=True, squeeze=False).ravel()
        for panel, arm in zip(panels, arms, strict=False):
            for other in beside:
                _curve(panel, bands[other.label], other.name, lines[other.label], dark, thin=True)
            _curve(panel, bands[arm.label], arm.name, lines[arm.label], dark)
            _as_success(panel)
            panel.set_xlabel("")
            panel.set_title(arm.name, loc="left", fontsize="small")
        for number, panel in enumerate(panels):
            panel.set_visible(number < len(arms))
            panel.tick_params(labelbottom=number + _PANELS >= len(arms))
        figure.supxlabel("env steps", fontsize="small")
        if beside:
            panels[0].legend(handles=panels[0].get_lines()[: len(beside)], frameon=False, fontsize="small")

    caption = (
        "Each scheme by itself, thin lines: uniform replay and PER. Band: 95 % interval of the mean (Student's t), "
        "where there are several seeds."
    )
    size = (11.2, 2.1 * rows + 0.4)
    return _picture(f"schemes_{task.slug}", f"Further schemes, {task.title}", caption, size, draw)


def together_picture(tasks: Sequence[Task]) -> Picture | None:
    """Draws success over the share of the budget, over all tasks at once; ``None`` if they share too few schemes."""
    labels, shared = common_schemes(tasks)
    if not shared:
        return None
    schemes = {label: [arm for task in shared for arm in task.arms if arm.label == label] for label in labels}
    lines = _styles(shared[0])
    grid = np.linspace(0, 1, 51)
    bands = {
        label: (grid, *curve([_at_shares(arm, grid) for arm in arms], interquartile=True))
        for label, arms in schemes.items()
    }

    def draw(figure: Figure, dark: bool) -> None:
        axes = figure.subplots()
        for label, band in bands.items():
            _curve(axes, band, label, lines[label], dark)
        _as_success(axes)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the budget of env steps")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylabel("success, IQM")
        axes.legend(frameon=False, fontsize="small")

    caption = f"Interquartile mean over the runs of {len(shared)} tasks; band: 95 % stratified bootstrap interval."
    return _picture("sample_efficiency", "Sample efficiency, all tasks together", caption, (6.4, 3.6), draw)


def factor_picture(table: Table) -> Picture | None:
    """Draws best success over the levels of a factor's table, ours and the paper's; ``None`` without ours."""
    columns = [column for column in table.columns if column.head == "best success"]
    if not table.ours or not columns:
        return None
    levels = [str(row.cells["level"]) for row in table.rows]
    ordered = [bool(re.fullmatch(r"[\d.]+", level)) for level in levels]

    def draw(figure: Figure, dark: bool) -> None:
        axes = figure.subplots()
        for number, column in enumerate(columns):
            offset = 0.12 * (number - (len(columns) - 1) / 2)
            color = (_DARK if dark else _LIGHT)["soft"] if column.paper else OTHERS[number % len(OTHERS)][dark]
            cells = [row.cells.get(column.key) for row in table.rows]
            known = [(place, cell) for place, cell in enumerate(cells) if isinstance(cell, Number) and cell.known]
            style: dict[str, Any] = {"marker": "D", "markerfacecolor": "none"} if column.paper else {"marker": "o"}
            axes.plot(
                [place + offset for place, _ in known],
                [cell.value for _, cell in known],
                **{"color": color, "label": column.group, "linestyle": "", **style},
            )
            joined = [(place + offset, cell.value) for place, cell in known if ordered[place]]
            places, values = [place for place, _ in joined], [value for _, value in joined]
            axes.plot(places, values, color=color, linewidth=1.2, linestyle="--" if column.paper else "-")
            for place, cell in known:
                low, high = cell.low, cell.high
                if not math.isnan(cell.spread):
                    low, high = cell.value - cell.spread, cell.value + cell.spread
                axes.plot([place + offset] * 2, [low, high], color=color, linewidth=1.2, solid_capstyle="butt")
        axes.set_xticks(range(len(levels)), levels)
        axes.set_xlim(-0.5, len(levels) - 0.5)
        axes.set_ylim(-0.04, 1.04)
        axes.set_xlabel(table.columns[0].head)
        axes.set_ylabel("best success")
        axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18))

    caption = "Bars: our 95 % bootstrap interval of the mean; the paper's ±, where it prints one. Filled: ours."
    return _picture(table.key, table.title, caption, (5.2, 3.5 + 0.16 * len(columns)), draw)


def cost_picture(task: Task, table: Table) -> Picture | None:
    """Draws gains over uniform replay by the share of clips shown to the scorer; ``None`` where all show alike.

    Args:
        task: whose schemes these are.
        table: its `cost_tables.cost_table`.
    """
    gains = {str(row.cells["scheme"]): row.cells.get("gain") for row in table.rows}
    shares = {str(row.cells["scheme"]): row.cells.get("shown_share") for row in table.rows}
    points = [
        (label, share.value, gain)
        for label, share in shares.items()
        if isinstance(share, Number) and isinstance(gain := gains[label], Number) and gain.known and share.value > 0
    ]
    if not points or max(share for _, share, _ in points) < 1.5 * min(share for _, share, _ in points):
        return None
    per = task.arm("per")
    line = gains.get(per.label) if per is not None else None
    styles = _styles(task)

    def draw(figure: Figure, dark: bool) -> None:
        axes = figure.subplots()
        axes.set_xscale("log")
        soft = (_DARK if dark else _LIGHT)["soft"]
        axes.axhline(0, color=soft, linewidth=1)
        lines = [("uniform", 0.0, soft)]
        if isinstance(line, Number) and line.known:
            color = _color(styles[per.label], dark) if per is not None else soft
            axes.axhline(line.value, color=color, linewidth=1.2, linestyle="--")
            if not math.isnan(line.low):
                axes.axhspan(line.low, line.high, color=color, alpha=0.1, linewidth=0)
            lines.append(("PER", line.value, color))
        beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        for label, height, color in lines:
            axes.annotate(label, (1, height), (4, 0), color=color, fontsize="small", **beside)
        for label, share, gain in points:
            color = _color(styles[label], dark)
            axes.plot([share] * 2, [gain.low, gain.high], color=color, linewidth=3, alpha=0.4, solid_capstyle="butt")
            axes.plot(share, gain.value, "o", color=color, markersize=6)
            axes.annotate(label, (share, gain.value), (6, 4), textcoords="offset points", color=color, fontsize="small")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("share of clips shown to the scorer")
        axes.set_title("gain in success over training, over uniform replay", loc="left")

    caption = "Means over seeds, paired with uniform replay's; bars and band: 95 % bootstrap intervals."
    return _picture(table.key, table.title, caption, (7.4, 4.4), draw)


def _at_shares(arm: Arm, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.interp(grid, run.steps / run.steps[-1], run.success) for run in arm.runs])


def _styles(task: Task) -> dict[str, Style]:
    return scheme_styles({arm.label: arm.kind for arm in task.arms if arm.runs})


def _color(style: Style, dark: bool) -> str:
    return style.dark if dark else style.light


def _band(arm: Arm) -> _Band:
    steps, mean, half = confidence_band([(run.steps, run.success) for run in arm.runs])
    return steps, mean, np.clip(mean - half, 0, 1), np.clip(mean + half, 0, 1)


def _curve(axes: Axes, band: _Band, label: str, style: Style, dark: bool, thin: bool = False) -> None:
    steps, value, low, high = band
    color = _color(style, dark)
    axes.plot(steps, value, color=color, linestyle=style.dashes, linewidth=1 if thin else 2, label=label)
    if not thin:
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _as_success(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(left=0)
    axes.set_xlabel("env steps")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _whisker(axes: Axes, place: float, number: Number, seeds: NDArray[np.float64], color: str) -> None:
    axes.plot([number.low, number.high], [place, place], color=color, linewidth=5, alpha=0.35, solid_capstyle="butt")
    axes.plot(number.value, place, "o", color=color, markersize=7)
    if len(seeds) > 1:
        axes.plot(seeds, np.full(len(seeds), place + 0.24), "o", color=color, markersize=2.6, alpha=0.7)


def _picture(
    key: str, title: str, caption: str, size: tuple[float, float], draw: Callable[[Figure, bool], None]
) -> Picture:
    images = []
    for dark, colors in ((False, _LIGHT), (True, _DARK)):
        with mpl.rc_context(_settings(colors)):
            figure = Figure(figsize=size, layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure, dark)
            image = io.BytesIO()
            figure.savefig(image, dpi=150)
            images.append(image.getvalue())
            if not dark:
                vectors = io.BytesIO()
                save_figure(figure, vectors, format="pdf")
    return Picture(key, title, caption, images[0], images[1], vectors.getvalue(), round(100 * size[0]))


def _settings(colors: Mapping[str, str]) -> dict[str, Any]:
    ink, soft, faint, paper = (colors[name] for name in ("ink", "soft", "faint", "paper"))
    settings: dict[str, Any] = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)
    settings |= dict.fromkeys(("text.color", "axes.titlecolor"), ink)
    settings |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), soft)
    settings |= dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    settings |= {"text.parse_math": False}  # a label's $ is a $
    settings |= {"axes.edgecolor": soft, "grid.color": faint, "axes.grid": True, "axes.axisbelow": True}
    return settings | {"axes.titlesize": "medium", "font.size": 10, "axes.titleweight": "bold"}
