"""What schemes gain over uniform replay, paired by seed, and what their scores cost: clips shown to the scorer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.experiments.report.runs import EMITTED, SHOWN
from vlmrb.experiments.report.statistics import means, paired
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table
from vlmrb.experiments.report.tasks import Arm, Task

TARGETS = (0.5, 0.8, 0.9)


def cost_table(task: Task) -> Table | None:
    """Sets what a task's schemes gain over uniform replay against the clips that the scorer was shown.

    Returns:
        ``None`` without uniform replay, or without another scheme. Of runs that do not say how many clips they showed
        only the gains.
    """
    uniform, per, full = (task.arm(kind) for kind in ("uniform", "per", "vlm"))
    arms = [arm for arm in task.arms if arm.runs]
    if uniform is None or len(arms) < 2:
        return None
    columns = [
        Column("scheme", "scheme"),
        Column("seeds", "seeds"),
        Column("shown", "clips", "plain", "shown to the scorer"),
        Column("shown_share", "of all", "portion", "shown to the scorer"),
        Column("area", "success over training", "share"),
        Column("gain", "over uniform", "signed", "gain in it"),
        Column("gain_share", f"÷ that of {full.label}" if full else "", "times", "gain in it"),
        Column("over_per", "over PER", "signed", "gain in it"),
        *(Column(f"to_{target}", f"{target}", "steps", "env steps to") for target in TARGETS),
        *(Column(f"wall_to_{target}", f"{target}", "seconds", "time to") for target in TARGETS),
    ]
    rows = [Row(_cost_row(arm, uniform, per, full)) for arm in arms]
    columns = [column for column in columns if any(row.cells.get(column.key) for row in rows)]
    lead = (
        "Gains are paired by seed. What a scorer is shown: clips, parts of clips, second tries and audits "
        "included; what its cache knows is free. A run that never reaches a success counts as its whole budget."
    )
    return Table(f"cost_{task.slug}", f"Gains, and what scores cost, {task.title}", columns, rows, lead)


def _cost_row(arm: Arm, uniform: Arm, per: Arm | None, full: Arm | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"scheme": arm.label, "seeds": str(len(arm.runs))}
    shown, emitted = arm.metric(SHOWN), arm.metric(EMITTED)
    if len(shown):
        cells["shown"] = Number.of(means([shown])[0])
    if len(shown) == len(emitted) and emitted.all() and len(shown):
        cells["shown_share"] = Number.of(means([shown / emitted])[0])
    cells["area"] = Number.of(means([arm.area()])[0])
    if arm is not uniform:
        cells["gain"] = _difference(arm, uniform)
    if per is not None and arm not in (uniform, per):
        cells["over_per"] = _difference(arm, per)
    if full is not None and arm not in (uniform, full):
        cells["gain_share"] = Number.of(paired(_areas(arm, uniform, full), _share_of_gain))
    for target in TARGETS:
        steps, reached = arm.steps_to(target)
        cells[f"to_{target}"] = Number.of(means([steps])[0], reached)
        seconds = arm.wall_to(target)
        if reached and not np.isnan(seconds).any():
            cells[f"wall_to_{target}"] = Number.of(means([seconds])[0], reached)
    return cells


def _difference(ours: Arm, theirs: Arm) -> Number:
    return Number.of(paired(_areas(ours, theirs), lambda first, second: (first - second).mean()))


def _share_of_gain(ours: NDArray[np.float64], uniform: NDArray[np.float64], full: NDArray[np.float64]) -> float:
    gain = float((full - uniform).mean())
    return float((ours - uniform).mean()) / gain if gain > 0 else math.nan


def _areas(*arms: Arm) -> Sequence[NDArray[np.float64]]:
    """Returns the areas of the seeds that all of these schemes have finished, ``float64[n]`` each."""
    by_seed: list[dict[Any, float]] = [
        {run.seed: area for run, area in zip(arm.runs, arm.area().tolist(), strict=True) if run.seed is not None}
        for arm in arms
    ]
    shared = sorted(set.intersection(*map(set, by_seed)))
    return [np.array([areas[seed] for seed in shared]) for areas in by_seed]
