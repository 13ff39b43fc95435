"""The paper's main comparison: VLM-RB against uniform replay and against PER, level by level and by domain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrb.experiments.report.paper import arm_deviations, paper, standing
from vlmrb.experiments.report.statistics import Estimate, mean_of_tasks, relative
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table
from vlmrb.experiments.report.tasks import Arm, Task

BASELINES = {"uniform": "uniform replay", "per": "PER"}
_PAPERS = "The paper's tasks"
_OTHER = "Other tasks, smaller ones for the most part: no figure of the paper stands beside these"
_OWN = "Other schemes: no figure of the paper stands beside these"


@dataclass(frozen=True)
class Pair:
    """A scheme and a baseline on the same task."""

    task: Task
    ours: Arm
    baseline: Arm

    @property
    def target(self) -> float:
        """The baseline's best success: the mean over seeds of their best evaluations."""
        return self.baseline.target or 0.0

    @property
    def never(self) -> str:
        """Says that the baseline never succeeded, where it did not, and so nothing can be reached."""
        return self.baseline.never if self.baseline.target is None else ""


def level_table(tasks: Sequence[Task], baseline: str) -> Table:
    """Compares with one baseline, the paper's levels first.

    Args:
        tasks: all of them.
        baseline: ``uniform`` or ``per``.
    """
    name = BASELINES[baseline]
    columns = [
        Column("task", "task"),
        Column("scheme", "scheme"),
        Column("success", "scheme", "share", "best success"),
        Column("baseline_success", name, "share", "best success"),
        Column("paper_success", "paper: VLM-RB", "share", "best success", True),
        Column("paper_baseline_success", f"paper: {name}", "share", "best success", True),
        Column("steps", "scheme", "steps", f"env steps to {name}'s best"),
        Column("baseline_steps", name, "steps", f"env steps to {name}'s best"),
        Column("less_steps", "difference", "change", f"env steps to {name}'s best"),
        Column("paper_steps", "paper: VLM-RB", "steps", f"env steps to {name}'s best", True),
        Column("paper_baseline_steps", f"paper: {name}", "steps", f"env steps to {name}'s best", True),
        Column("less_time", "measured time to it", "change"),
    ]
    rows: list[Row] = []
    notes: list[str] = []
    for level in paper()["levels"]:
        printed = _printed(level, baseline)
        found = list(_by_scheme(_pairs(tasks, baseline, level)))
        for pairs in found:
            algorithms = ", ".join(dict.fromkeys(pair.task.algorithm for pair in pairs))
            cells = {**_compared(pairs), "task": f"{level['name']}, {algorithms}", **printed}
            rows.append(Row(cells, section=_PAPERS))
            notes += _notes(level["name"], pairs)
        if not found:
            rows.append(Row({"task": level["name"], **printed}, section=_PAPERS))
        if level.get("reconstructed"):
            notes.append(f"The paper's figures for {level['name']} are reconstructed from its other tables.")
    others: list[Row] = []
    own: list[Row] = []
    for task in tasks:
        same = standing(task).same
        for pair in _others(task, baseline):
            row = {**_compared([pair]), "task": task.title}
            if pair.ours in task.published() and not same:
                others.append(Row(row, "smaller", _OTHER))
            else:
                own.append(Row(row, "" if same else "smaller", _OWN))
        if task.arm(baseline) is None and any(arm.runs for arm in task.arms):
            notes.append(f"{task.title}: no finished run of {name} to compare with.")
    others += own
    times = [cell for row in rows + others if isinstance(cell := row.cells.get("less_time"), Number)]
    if not any(cell.known or cell.why for cell in times):  # kept results have none
        columns = [column for column in columns if column.key != "less_time"]
    rows = rows + others if any("success" in row.cells for row in rows) else others + rows
    lead = (
        f"Success is the mean over seeds of a run's best evaluation; steps are those to the first evaluation at or "
        f"above that of {name}, and a run that never gets there counts as its whole budget. The paper's figures are "
        "means over the domain's two algorithms. Time is measured, and what else ran on the machine is in it."
    )
    return Table(f"against_{baseline}", f"Against {name}, level by level", columns, rows, lead, notes)


def gains_table(tasks: Sequence[Task]) -> Table:
    """Sums the paper's levels up by domain."""
    columns = [Column("domain", "domain"), Column("scheme", "scheme"), Column("levels", "levels run here")]
    for baseline, name in BASELINES.items():
        group = f"against {name}"
        columns += [
            Column(f"success_{baseline}", "best success", "percent", group),
            Column(f"paper_success_{baseline}", "paper", "percent", group, True),
            Column(f"steps_{baseline}", "env steps to its best", "change", group),
            Column(f"paper_steps_{baseline}", "paper", "change", group, True),
        ]
    rows = []
    for gain in paper()["gains"]:
        levels = [level for level in paper()["levels"] if level["domain"] == gain["domain"]]
        printed: dict[str, Cell] = {"domain": gain["domain"]}
        for baseline in BASELINES:
            printed |= {f"paper_{key}_{baseline}": Number(gain[baseline][key]) for key in ("success", "steps")}
        schemes: dict[str, dict[str, list[Pair]]] = {}
        for baseline in BASELINES:
            for level in levels:
                for pair in _pairs(tasks, baseline, level):
                    schemes.setdefault(pair.ours.name, {}).setdefault(baseline, []).append(pair)
        for scheme, found in schemes.items():
            here = {standing(pair.task).level for pairs in found.values() for pair in pairs}
            cells: dict[str, Cell] = {**printed, "scheme": scheme, "levels": f"{len(here)} of {len(levels)}"}
            for baseline, pairs in found.items():
                never = _never(pairs)
                cells[f"steps_{baseline}"] = never or Number.of(_less_steps(pairs))
                if all(pair.never for pair in pairs):
                    cells[f"success_{baseline}"] = never
                else:
                    success = relative([p.ours.best() for p in pairs], [p.baseline.best() for p in pairs])
                    cells[f"success_{baseline}"] = Number.of(success)
            rows.append(Row(cells))
        if not schemes:
            rows.append(Row({**printed, "levels": f"0 of {len(levels)}"}))
    lead = (
        "Relative to the baseline, over the means of the levels. Only runs of the paper's own tasks are in "
        "these, with the scheme that the paper has there."
    )
    return Table("gains", "By domain", columns, rows, lead)


def _pairs(tasks: Sequence[Task], baseline: str, level: Mapping[str, Any]) -> Iterator[Pair]:
    """Yields what stands beside the paper's figures on one of its levels."""
    for task in tasks:
        where = standing(task)
        against = task.arm(baseline)
        if against is not None and where.same and where.level == level["name"]:
            yield from (Pair(task, arm, against) for arm in _papers_schemes(task))


def _papers_schemes(task: Task) -> list[Arm]:
    """Returns the arms whose scheme is the one that the paper has on this task of its own."""
    where = standing(task)
    scheme = paper()["domains"][where.domain]["scheme"] if where.same else None
    return [arm for arm in task.published() if arm.kind == scheme]


def _others(task: Task, baseline: str) -> Iterator[Pair]:
    """Yields what no figure of the paper stands beside: all other schemes of a task but the baselines themselves."""
    against = task.arm(baseline)
    apart = [*_papers_schemes(task), *map(task.arm, BASELINES)]
    if against is not None:
        yield from (Pair(task, arm, against) for arm in task.arms if arm.runs and arm not in apart)


def _by_scheme(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    """Puts the two algorithms of a level together, scheme by scheme."""
    schemes: dict[str, list[Pair]] = {}
    for pair in pairs:
        schemes.setdefault(pair.ours.name, []).append(pair)
    yield from schemes.values()


def _printed(level: Mapping[str, Any], baseline: str) -> dict[str, Cell]:
    figures = level[baseline]
    return {
        "paper_success": Number(figures["success"][0]),
        "paper_baseline_success": Number(figures["success"][1]),
        "paper_steps": Number(figures["steps"][0]),
        "paper_baseline_steps": Number(figures["steps"][1]),
    }


def _compared(pairs: Sequence[Pair]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        "scheme": pairs[0].ours.name,
        "success": Number.of(mean_of_tasks([pair.ours.best() for pair in pairs])),
        "baseline_success": Number.of(mean_of_tasks([pair.baseline.best() for pair in pairs])),
    }
    if never := _never(pairs):
        return {**cells, **dict.fromkeys(("steps", "baseline_steps", "less_steps", "less_time"), never)}
    cells |= {"less_steps": Number.of(_less_steps(pairs)), "less_time": Number.of(_less_time(pairs))}
    for key, arms in (("steps", [p.ours for p in pairs]), ("baseline_steps", [p.baseline for p in pairs])):
        found = [arm.steps_to(pair.target) for arm, pair in zip(arms, pairs, strict=True)]
        average = mean_of_tasks([steps for steps, _ in found])
        runs, reached = sum(len(steps) for steps, _ in found), sum(count for _, count in found)
        cells[key] = Number(average.value, average.low, average.high, runs, reached)
    return cells


def _never(pairs: Sequence[Pair]) -> Number | None:
    """Returns a gap that names the baselines that never succeeded, ``None`` if there are none."""
    words = dict.fromkeys(
        f"{pair.never} on {pair.task.title}" if len(pairs) > 1 else pair.never for pair in pairs if pair.never
    )
    return Number(np.nan, why="; ".join(words)) if words else None


def _less_steps(pairs: Sequence[Pair]) -> Estimate:
    return relative(
        [pair.ours.steps_to(pair.target)[0] for pair in pairs],
        [pair.baseline.steps_to(pair.target)[0] for pair in pairs],
        less=True,
    )


def _less_time(pairs: Sequence[Pair]) -> Estimate:
    ours = [pair.ours.wall_to(pair.target) for pair in pairs]
    theirs = [pair.baseline.wall_to(pair.target) for pair in pairs]
    if any(np.isnan(times).any() for times in (*ours, *theirs)):
        return Estimate(np.nan)
    return relative(ours, theirs, less=True)


def _notes(level: str, pairs: Sequence[Pair]) -> Iterator[str]:
    departures = dict.fromkeys(text for pair in pairs for text in arm_deviations(pair.ours))
    if departures:
        yield f"{level}, {pairs[0].ours.name}: {'; '.join(departures)}."
    domain = paper()["domains"][standing(pairs[0].task).domain]
    missing = [name for name in domain["algorithms"] if name not in {pair.task.algorithm for pair in pairs}]
    if missing:
        yield f"{level}, {pairs[0].ours.name}: without {' and '.join(missing)}, which is in the paper's mean."
