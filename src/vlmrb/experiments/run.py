"""`vlmrb sweep`: configurations × seeds → CSV, a table and a plot with confidence bands; resumable.

Every cell is one `vlmrb fit` in a process of its own. A cell that has finished is not run again, one that was
interrupted goes on from its last checkpoint, and one that failed stays in the table as failed.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vlmrb.experiments.cells import Cell, recorded_cells, require_same_settings
from vlmrb.experiments.children import Children
from vlmrb.experiments.results import write_results


def parse_seeds(text: str) -> list[int]:
    """Reads ``"0-4"``, ``"0,3,7"`` or a mixture; a seed named twice counts once.

    Raises:
        ValueError: the text is neither.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
            raise ValueError(f"seeds={text!r}: expected something like 0-4 or 0,3,7")
        seeds += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(seeds))


def sweep(
    base: str,
    overlays: Sequence[str],
    seeds: str = "0-4",
    out: str = "runs/sweep",
    jobs: int = 1,
    overrides: Sequence[str] = (),
) -> int:
    """Runs overlays × seeds on one configuration, then writes results.csv, table.csv, curves.png and commands.txt.

    Repeat the command to go on after an interruption. A folder holds one comparison: runs of earlier sweeps in it
    are in the results too, and other settings are refused.

    Args:
        base: the configuration that all cells share.
        overlays: replay overlays to compare, such as configs/replay/uniform.yaml.
        seeds: such as 0-4 or 0,3,7.
        out: folder of the sweep.
        jobs: cells at a time, one CPU core each (a scorer process takes another).
        overrides: further `vlmrb fit` options for every cell.
    """
    folder = Path(out)
    cells = plan(Path(base), [Path(overlay) for overlay in overlays], parse_seeds(seeds), folder, tuple(overrides))
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    require_same_settings(cells, folder)
    folder.mkdir(parents=True, exist_ok=True)
    commands = [shlex.join(cell.command) for cell in _scheme_by_scheme(cells, recorded_cells(folder))]
    (folder / "commands.txt").write_text("\n".join([shlex.join(["vlmrb", *sys.argv[1:]]), "", *commands, ""]))
    with Children() as children:
        _run_all([cell for cell in cells if not cell.finished], len(cells), jobs, children)
    started = recorded_cells(folder)
    write_results([cell for cell in _scheme_by_scheme(cells, started) if cell in started], folder)
    if children.signal is not None:
        print("\ninterrupted; repeat the command to go on")
        return children.exit_code
    return 0 if all(cell.finished for cell in cells) else 1


def plan(
    base: Path, overlays: Sequence[Path], seeds: Sequence[int], out: Path, overrides: tuple[str, ...]
) -> list[Cell]:
    """Lists the cells of a sweep, seed by seed, so that all schemes have results early.

    Raises:
        FileNotFoundError: a configuration does not exist.
        ValueError: no overlay, or two of the same name.
    """
    for path in (base, *overlays):
        if not path.is_file():
            raise FileNotFoundError(f"configuration {path} does not exist")
    names = [overlay.stem for overlay in overlays]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"overlays={[str(overlay) for overlay in overlays]}: expected one or more, of different names")
    return [
        Cell(base, overlay, seed, out / overlay.stem / f"seed_{seed}", overrides)
        for seed in seeds
        for overlay in overlays
    ]


def _scheme_by_scheme(cells: Sequence[Cell], recorded: Sequence[Cell]) -> list[Cell]:
    """Returns these cells and those of earlier sweeps, by scheme and seed, these cells' schemes first."""
    present = {cell.folder: cell for cell in [*cells, *recorded]}.values()
    order = list(dict.fromkeys(cell.label for cell in present))
    return sorted(present, key=lambda cell: (order.index(cell.label), cell.seed))


def _run_all(todo: Sequence[Cell], total: int, jobs: int, children: Children) -> None:
    """Runs cells, ``jobs`` at a time, and says how each ended; starts no more when told to stop."""
    print(f"{total} run{'s' if total > 1 else ''}, {total - len(todo)} already finished", flush=True)
    start = time.perf_counter()
    waiting, running, done = list(todo), dict[subprocess.Popen[bytes], Cell](), 0
    while running or (waiting and children.signal is None):
        while waiting and len(running) < jobs and children.signal is None:
            cell = waiting.pop(0)
            cell.record_start()
            with cell.log.open("a") as log:
                running[children.start(cell.command[1:], log)] = cell
        for child in children.wait():
            cell = running.pop(child)
            cell.record_end(child.returncode)
            done += 1
            name = f"[{done}/{len(todo)}, {time.perf_counter() - start:.0f} s] {cell.label} seed {cell.seed}"
            print(f"{name}: {_outcome(cell, child.returncode)}", flush=True)


def _outcome(cell: Cell, exit_code: int) -> str:
    summary = cell.summary
    if summary is not None and summary["finished"]:
        return f"success {summary['success']:.2f}"
    if cell.status == "interrupted":
        return "interrupted"
    how = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    return f"FAILED ({how}): {cell.last_words()} (log: {cell.log})"
