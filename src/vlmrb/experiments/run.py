"""`vlmrb sweep`: configurations × seeds → CSV, a table and a plot with confidence bands; resumable.

Every cell is one `vlmrb fit` in a process of its own. A cell that has finished is not run again, one that was
interrupted goes on from its last checkpoint, and one that failed stays in the table as failed.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

THRESHOLDS = ("0.5", "0.8", "0.9")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a configuration, a replay overlay and a seed."""

    config: Path
    overlay: Path
    seed: int
    folder: Path
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The overlay's name, which names the curve."""
        return self.overlay.stem

    @property
    def command(self) -> list[str]:
        """The command that runs this cell."""
        return [
            *("vlmrb", "fit", "-c", str(self.config), "-c", str(self.overlay)),
            *("--seed_everything", str(self.seed), "--run_dir", str(self.folder), "--resume", "true"),
            *self.overrides,
        ]

    @property
    def finished(self) -> bool:
        """Whether its summary covers the whole budget."""
        return (self.folder / "summary.json").exists() and json.loads((self.folder / "summary.json").read_text())[
            "finished"
        ]

    def run(self) -> int:
        """Runs the cell in a process of its own, single-threaded; returns its exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (self.folder / "log.txt").open("a") as log:
            return subprocess.run(
                [sys.executable, "-m", "vlmrb.cli", *self.command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                check=False,
            ).returncode


def parse_seeds(text: str) -> list[int]:
    """Reads ``"0-4"``, ``"0,3,7"`` or a mixture.

    Raises:
        ValueError: the text is neither.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"seeds={text!r}: expected something like 0-4 or 0,3,7")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def sweep(
    base: str,
    overlays: Sequence[str],
    seeds: str = "0-4",
    out: str = "runs/sweep",
    jobs: int = 1,
    overrides: Sequence[str] = (),
) -> int:
    """Runs overlays × seeds on one configuration, then writes results.csv, table.csv, curves.png and commands.txt.

    Args:
        base: the configuration that all cells share.
        overlays: replay overlays to compare, such as configs/replay/uniform.yaml.
        seeds: such as 0-4 or 0,3,7.
        out: folder of the sweep.
        jobs: cells at a time, one CPU core each (a scorer process takes another).
        overrides: further `vlmrb fit` options for every cell.
    """
    cells = [
        Cell(Path(base), Path(overlay), seed, Path(out) / Path(overlay).stem / f"seed_{seed}", tuple(overrides))
        for seed in parse_seeds(seeds)
        for overlay in overlays
    ]
    for path in {cell.config for cell in cells} | {cell.overlay for cell in cells}:
        if not path.is_file():
            raise FileNotFoundError(f"configuration {path} does not exist")
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / "commands.txt").write_text(
        shlex.join(["vlmrb", *sys.argv[1:]]) + "\n\n" + "\n".join(shlex.join(cell.command) for cell in cells) + "\n"
    )
    codes = _run_all(cells, jobs)
    write_results(cells, Path(out))
    return 1 if any(codes.values()) else 0


def _run_all(cells: Sequence[Cell], jobs: int) -> dict[Cell, int]:
    """Runs what is not finished, ``jobs`` at a time, saying so; returns exit codes."""
    todo = [cell for cell in cells if not cell.finished]
    print(f"{len(cells)} runs, {len(cells) - len(todo)} already finished", flush=True)
    start = time.perf_counter()
    done = 0

    def run(cell: Cell) -> int:
        nonlocal done
        code = cell.run()
        done += 1
        outcome = f"success {summary_of(cell)['success']:.2f}" if code == 0 else f"FAILED ({code}), see {cell.folder}"
        print(f"[{done}/{len(todo)}] {cell.label} seed {cell.seed}: {outcome}, {time.perf_counter() - start:.0f} s")
        sys.stdout.flush()
        return code

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return dict(zip(todo, pool.map(run, todo), strict=True))


def summary_of(cell: Cell) -> dict[str, Any]:
    """Returns a cell's summary.json."""
    return json.loads((cell.folder / "summary.json").read_text())


def curve_of(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Returns a cell's evaluations: env steps and success, ``float64[n]`` each."""
    with (cell.folder / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    return np.array([float(r["env_step"]) for r in rows]), np.array([float(r["eval/success"]) for r in rows])


def confidence_interval(values: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval of the mean."""
    rng = np.random.default_rng(0)
    means = rng.choice(np.asarray(values, float), (resamples, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _rows(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    for cell in cells:
        if not cell.finished:
            yield {"scheme": cell.label, "seed": cell.seed, "status": "failed"}
            continue
        for step, success in zip(*curve_of(cell), strict=True):
            yield {
                **{"scheme": cell.label, "seed": cell.seed, "status": "finished"},
                **{"env_step": int(step), "success": success},
            }


def write_results(cells: Sequence[Cell], out: Path) -> None:
    """Writes ``results.csv`` (every evaluation), ``table.csv`` (per scheme) and ``curves.png``; prints the table."""
    from vlmrb.plots import plot_learning_curves

    fields = ["scheme", "seed", "status", "env_step", "success"]
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(_rows(cells))
    table = [_table_row(label, [cell for cell in cells if cell.label == label]) for label in _labels(cells)]
    with (out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in table for key in row)))
        writer.writeheader()
        writer.writerows(table)
    for row in table:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    curves = {
        label: [curve_of(cell) for cell in cells if cell.label == label and cell.finished] for label in _labels(cells)
    }
    plot_learning_curves({label: runs for label, runs in curves.items() if runs}, out / "curves.png")


def _labels(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.label for cell in cells))


def _table_row(label: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Summarises one scheme; a threshold never reached counts as the whole budget, as in the paper's tables."""
    finished = [cell for cell in cells if cell.finished]
    row: dict[str, Any] = {"scheme": label, "seeds_started": len(cells), "seeds_finished": len(finished)}
    if not finished:
        return row
    summaries = [summary_of(cell) for cell in finished]
    areas = [float(np.trapezoid(success, steps) / steps[-1]) for steps, success in map(curve_of, finished)]
    columns = {
        "success": [summary["success"] for summary in summaries],
        "best_success": [summary["best_success"] for summary in summaries],
        "area": areas,
    }
    for name, values in columns.items():
        low, high = confidence_interval(values)
        row |= {name: round(float(np.mean(values)), 3), f"{name}_low": round(low, 3), f"{name}_high": round(high, 3)}
    for threshold in THRESHOLDS:
        steps = [summary["env_steps_to"][threshold] for summary in summaries]
        low, high = confidence_interval(filled := [s or t["env_steps"] for s, t in zip(steps, summaries, strict=True)])
        row[f"steps_to_{threshold}"] = round(float(np.mean(filled)))
        row[f"steps_to_{threshold}_low"], row[f"steps_to_{threshold}_high"] = round(low), round(high)
        row[f"reached_{threshold}"] = sum(step is not None for step in steps)
    row["wall_s"] = round(float(np.mean([summary["wall_s"] for summary in summaries])), 1)
    return row
