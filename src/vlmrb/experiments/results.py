"""From runs of one configuration to results.csv, table.csv and pictures; docs/sweeps.md explains every column."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.experiments.cells import Cell
from vlmrb.experiments.report.files import read_yaml
from vlmrb.experiments.report.settings import scheme_kind
from vlmrb.plots import plot_learning_curves, short_number

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]  # env steps and success, ``[n]`` each
THRESHOLDS = ("0.5", "0.8", "0.9")
RESULT_FIELDS = ("scheme", "seed", "status", "env_step", "success")
TABLE_FIELDS = (
    *("scheme", "seeds_started", "seeds_finished"),
    *(f"{name}{part}" for name in ("success", "best_success", "area") for part in ("", "_low", "_high")),
    *(
        f"{name}_{threshold}{part}"
        for threshold in THRESHOLDS
        for name, part in (("steps_to", ""), ("steps_to", "_low"), ("steps_to", "_high"), ("reached", ""))
    ),
    "wall_s",
)


def curve_of(cell: Cell) -> Curve:
    """Returns a cell's evaluations so far.

    Raises:
        ValueError: its evaluations.csv is damaged, or those of a finished run do not go up to its end.
    """
    path, summary = cell.folder / "evaluations.csv", cell.summary
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):  # being written, or left behind by a killed process
        lines.pop()
    curve: list[tuple[float, float]] = []
    reader = csv.DictReader(lines)
    try:
        for row in reader:
            step, success = float(row["env_step"]), float(row["eval/success"])
            if not (0 <= success <= 1 and (curve[-1][0] if curve else -1) < step < math.inf):
                raise ValueError
            curve.append((step, success))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is damaged: line {reader.reader.line_num} holds no evaluation that could follow"
        ) from error
    if summary is not None and summary["finished"] and (not curve or curve[-1][0] != summary["env_steps"]):
        last = (
            f"ends at env step {curve[-1][0]:.0f}, and the run" if curve else "is empty or missing, and the run ended"
        )
        raise ValueError(f"{path} is damaged: it {last} at {summary['env_steps']}")
    steps, successes = zip(*curve, strict=True) if curve else ((), ())
    return np.array(steps, np.float64), np.array(successes, np.float64)


def confidence_interval(values: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval of the mean."""
    rng = np.random.default_rng(0)
    means = rng.choice(np.asarray(values, float), (resamples, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def write_results(cells: Sequence[Cell], out: Path) -> list[str]:
    """Writes ``results.csv`` (every evaluation), ``table.csv`` (per scheme), ``curves.png``/``.pdf``; prints the table.

    Args:
        cells: runs of one configuration, at least one.
        out: where the files go.

    Returns:
        What is wrong with runs that are damaged, and so in none of these.
    """
    curves, damages = _read_curves(cells)
    schemes = {label: [cell for cell in cells if cell.label == label] for label in (cell.label for cell in cells)}
    rows = [row for cell, curve in curves.items() for row in _result_rows(cell, curve)]
    _write_csv(out / "results.csv", RESULT_FIELDS, rows)
    table = [table_row(label, members, curves) for label, members in schemes.items()]
    _write_csv(out / "table.csv", TABLE_FIELDS, table)
    print(f"\n{cells[0].config.stem}\n{format_table(table)}\n")
    finished = [cell for cell in curves if cell.finished]
    if finished:
        labels = dict.fromkeys(cell.label for cell in finished)
        shown = {label: [curves[cell] for cell in finished if cell.label == label] for label in labels}
        first = finished[0].summary or {}  # all share the configuration
        title = f"{first['env']}, {first['algorithm']}"
        kinds = {label: _kind(next(cell for cell in finished if cell.label == label)) for label in labels}
        for ending in ("png", "pdf"):
            plot_learning_curves(shown, out / f"curves.{ending}", kinds=kinds, title=title)
        print(f"learning curves   {out}/curves.png, {out}/curves.pdf")
    else:
        print("no run has finished: there are no curves to draw yet")
    print(f"per scheme        {out}/table.csv\nevery evaluation  {out}/results.csv")
    return damages


def _kind(cell: Cell) -> str:
    """Returns the kind of a cell's scheme by what its run was set to, by its label where nothing says that."""
    try:
        return scheme_kind(read_yaml(cell.folder / "config.yaml")) or cell.label
    except ValueError:  # damaged, which is nothing that a picture has to fail for
        return cell.label


def _read_curves(cells: Sequence[Cell]) -> tuple[dict[Cell, Curve], list[str]]:
    """Returns the curves of all cells but damaged ones, and what is wrong with those."""
    curves, damages = {}, []
    for cell in cells:
        try:
            curves[cell] = curve_of(cell)
        except ValueError as error:
            damages.append(str(error))
    return curves, damages


def table_row(label: str, cells: Sequence[Cell], curves: Mapping[Cell, Curve]) -> dict[str, Any]:
    """Summarises the finished runs of one scheme; those without a curve are damaged and in no mean.

    A run that never reached a threshold counts as its whole budget, as in the paper's tables, if another did; where
    none did there is no number. One run alone has no interval.

    Returns:
        A row of ``TABLE_FIELDS``; what cannot be said is missing.
    """
    summarised = [(cell, summary) for cell in cells if cell in curves and (summary := cell.summary) is not None]
    finished = [(cell, summary) for cell, summary in summarised if summary["finished"]]
    row: dict[str, Any] = {"scheme": label, "seeds_started": len(cells), "seeds_finished": len(finished)}
    if not finished:
        return row
    summaries = [summary for _, summary in finished]
    values = {name: [summary[name] for summary in summaries] for name in ("success", "best_success")}
    values["area"] = [float(np.trapezoid(y, x) / x[-1]) for x, y in (curves[cell] for cell, _ in finished)]
    for threshold in THRESHOLDS:
        reached = [summary["env_steps_to"].get(threshold) for summary in summaries]
        row[f"reached_{threshold}"] = sum(step is not None for step in reached)
        if row[f"reached_{threshold}"]:
            budgets = [summary["env_steps"] for summary in summaries]
            values[f"steps_to_{threshold}"] = [
                budget if step is None else step for step, budget in zip(reached, budgets, strict=True)
            ]
    for name, numbers in values.items():
        digits = 0 if name.startswith("steps") else 3
        row[name] = _rounded(float(np.mean(numbers)), digits)
        if len(numbers) > 1:
            low, high = confidence_interval(numbers)
            row |= {f"{name}_low": _rounded(low, digits), f"{name}_high": _rounded(high, digits)}
    row["wall_s"] = round(float(np.mean([summary["wall_s"] for summary in summaries])), 1)
    return row


def format_table(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns what matters most of a table, in aligned columns."""
    lines = [("scheme", "seeds finished", "final success", "steps to 0.8", "steps to 0.9")]
    for row in table:
        success = "-"
        if "success" in row:
            success = f"{row['success']:.2f}"
            if "success_low" in row:
                success += f" [{row['success_low']:.2f}, {row['success_high']:.2f}]"
        seeds = f"{row['seeds_finished']} of {row['seeds_started']}"
        lines.append((row["scheme"], seeds, success, _steps(row, "0.8"), _steps(row, "0.9")))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _steps(row: Mapping[str, Any], threshold: str) -> str:
    reached, runs = row.get(f"reached_{threshold}"), row["seeds_finished"]
    if not runs:
        return "-"
    if not reached:
        return "never"
    steps = short_number(float(f"{row[f'steps_to_{threshold}']:.3g}"))
    return steps if reached == runs else f">{steps} ({reached} of {runs} seeds)"


def _result_rows(cell: Cell, curve: Curve) -> list[dict[str, Any]]:
    head = {"scheme": cell.label, "seed": cell.seed, "status": cell.status}
    points = zip(*curve, strict=True)
    return [{**head, "env_step": int(step), "success": success} for step, success in points] or [head]


def _rounded(value: float, digits: int) -> float:
    return round(value, digits) if digits else round(value)


def _write_csv(path: Path, fields: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
