"""Tables of one task's schemes, and of all tasks together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlmrb.experiments.report.paper import standing
from vlmrb.experiments.report.runs import SHOWN
from vlmrb.experiments.report.settings import differences
from vlmrb.experiments.report.statistics import (
    improvement,
    interquartile_mean,
    mean_of_tasks,
    means,
    relative,
)
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table
from vlmrb.experiments.report.tasks import Arm, Task, common_schemes

_SCHEME = ("env.", "training.", "model.", "evaluation.", "replay.n_steps", "replay.batch_size", "replay.capacity")


def schemes_table(task: Task) -> Table:
    """Puts a task's schemes beside each other."""
    columns = [
        Column("scheme", "scheme"),
        Column("scorer", "scorer"),
        Column("seeds", "seeds"),
        Column("final", "final success", "share", "success"),
        Column("area", "over training", "share", "success"),
        Column("best", "best", "share", "success"),
        Column("to_0.8", "0.8", "steps", "env steps to"),
        Column("to_uniform", "uniform's best", "steps", "env steps to"),
        Column("to_per", "PER's best", "steps", "env steps to"),
        Column("ahead_uniform", "uniform", "share", "chance to be ahead of"),
        Column("ahead_per", "PER", "share", "chance to be ahead of"),
        Column("final_iqm", "final success, IQM", "share"),
        Column("wall_s", "time of a run", "seconds"),
    ]
    baselines = {kind: task.arm(kind) for kind in ("uniform", "per")}
    rows = [_scheme_row(arm, baselines) for arm in task.arms]
    where = standing(task)
    notes = [f"{where.badge[0].upper()}{where.badge[1:]}: {'; '.join(where.reasons)}."] if where.reasons else []
    columns = [column for column in columns if any(row.cells.get(column.key) for row in rows)]
    lead = "" if task.name in task.title else f"In names of files: {task.slug}."
    return Table(f"schemes_{task.slug}", task.title, columns, rows, lead, [*notes, *_departures(task)])


def _scheme_row(arm: Arm, baselines: dict[str, Arm | None]) -> Row:
    started = len(arm.runs) + len(arm.others)
    cells: dict[str, Cell] = {"scheme": arm.label, "seeds": f"{len(arm.runs)} of {started}"}
    cells["scorer"] = arm.scorer.short if arm.scorer.kind != "none" else "none"
    if not arm.runs:
        return Row(cells, "other")
    steps, reached = {}, {}
    steps["to_0.8"], reached["to_0.8"] = arm.steps_to(0.8)
    for kind, baseline in baselines.items():
        if baseline is not None:
            if baseline.target is None:
                cells[f"to_{kind}"] = Number(math.nan, why=baseline.never)
            else:
                steps[f"to_{kind}"], reached[f"to_{kind}"] = arm.steps_to(baseline.target)
    columns = {"final": arm.final(), "best": arm.best(), "area": arm.area()}
    columns |= steps
    if not any(math.isnan(run.took_s) for run in arm.runs):
        columns["wall_s"] = arm.took()
    for key, found in zip(columns, means(list(columns.values())), strict=True):
        cells[key] = Number.of(found, reached.get(key))
    cells["final_iqm"] = Number.of(interquartile_mean([arm.final()]))
    for kind, baseline in baselines.items():
        if baseline is not None and baseline is not arm:
            cells[f"ahead_{kind}"] = Number.of(improvement([arm.area()], [baseline.area()]))
    return Row(cells)


def _departures(task: Task) -> list[str]:
    """Says where a scheme differs from the first one in more than its replay."""
    known = [arm for arm in task.arms if arm.settings]
    notes = []
    for arm in known[1:]:
        found = differences(known[0].settings, arm.settings)
        found = {key: values for key, values in found.items() if key.startswith(_SCHEME)}
        if found:
            text = ", ".join(f"{key} {mine} instead of {other}" for key, (other, mine) in found.items())
            notes.append(f"{arm.label} differs from {known[0].label} in more than its replay scheme: {text}.")
    return notes


def together_table(tasks: Sequence[Task]) -> Table | None:
    """Puts the schemes that several tasks share beside each other; ``None`` if there are none."""
    labels, shared = common_schemes(tasks)
    if not shared:
        return None
    columns = [
        Column("scheme", "scheme"),
        Column("scorers", "scorers"),
        Column("final", "final, mean", "share", "success"),
        Column("final_iqm", "final, IQM", "share", "success"),
        Column("area_iqm", "over training, IQM", "share", "success"),
        Column("steps", "env steps to its best", "change", "against uniform replay"),
        Column("ahead_uniform", "chance to be ahead", "share", "against uniform replay"),
        Column("ahead_per", "chance to be ahead", "share", "against PER"),
    ]
    rows = [Row(_together(label, shared)) for label in labels]
    names = "; ".join(task.title for task in shared)
    lead = "Tasks count equally in means; an IQM is the mean of the middle half of all runs."
    left = [task.title for task in tasks if task not in shared]
    notes = [f"What these have in common: {names}."]
    notes += [f"Not in these numbers, as they share fewer schemes: {'; '.join(left)}."] if left else []
    return Table("together", "All tasks together", columns, rows, lead, notes)


def _together(label: str, tasks: Sequence[Task]) -> dict[str, Cell]:
    arms = [_arm(task, label) for task in tasks]
    cells: dict[str, Cell] = {"scheme": label}
    cells["scorers"] = ", ".join(dict.fromkeys(arm.scorer.short for arm in arms if arm.scorer.kind != "none")) or "none"
    cells["final"] = Number.of(mean_of_tasks([arm.final() for arm in arms]))
    cells["final_iqm"] = Number.of(interquartile_mean([arm.final() for arm in arms]))
    cells["area_iqm"] = Number.of(interquartile_mean([arm.area() for arm in arms]))
    for kind in ("uniform", "per"):
        baseline = [arm for task in tasks if (arm := task.arm(kind)) is not None]
        if len(baseline) < len(tasks) or baseline[0].label == label:
            continue
        ahead = improvement([arm.area() for arm in arms], [arm.area() for arm in baseline])
        cells[f"ahead_{kind}"] = Number.of(ahead)
        if kind == "uniform":
            cells["steps"] = _less_steps(tasks, arms, baseline)
    return cells


def _less_steps(tasks: Sequence[Task], arms: Sequence[Arm], baseline: Sequence[Arm]) -> Number:
    never = [f"{arm.never} on {task.title}" for task, arm in zip(tasks, baseline, strict=True) if arm.target is None]
    if never:
        return Number(math.nan, why="; ".join(never))
    targets = [arm.target or 0.0 for arm in baseline]
    ours, theirs = (
        [arm.steps_to(target)[0] for arm, target in zip(side, targets, strict=True)] for side in (arms, baseline)
    )
    return Number.of(relative(ours, theirs, less=True))


def _arm(task: Task, label: str) -> Arm:
    return next(arm for arm in task.arms if arm.label == label)


def runs_table(tasks: Sequence[Task]) -> Table:
    """Lists all runs that were found, those first that are in no number."""
    columns = [
        Column("task", "task"),
        Column("scheme", "scheme"),
        Column("seed", "seed"),
        Column("status", "status"),
        Column("env_steps", "env steps", "plain"),
        Column("final", "final success", "share"),
        Column("wall_s", "time", "seconds"),
        Column("shown", "clips shown to the scorer", "plain"),
        Column("source", "where"),
        Column("ending", "how it ended"),
    ]
    rows = []
    for task in tasks:
        for arm in task.arms:
            for run in (*arm.others, *arm.runs):
                evaluated = bool(len(run.steps))
                final = float(run.success[-3:].mean()) if run.finished else math.nan
                cells: dict[str, Cell] = {"task": task.title, "scheme": arm.label, "status": run.status}
                cells |= {"seed": "–" if run.seed is None else str(run.seed), "source": str(run.source)}
                cells |= {"env_steps": Number(float(run.steps[-1])) if evaluated else None, "final": Number(final)}
                cells |= {"wall_s": Number(run.took_s), "shown": Number(run.metrics.get(SHOWN, math.nan))}
                rows.append(Row({**cells, "ending": run.ending}, "" if run.finished else "other"))
    rows.sort(key=lambda row: row.mark == "")
    return Table("runs", "Every run that was found", columns, rows)
