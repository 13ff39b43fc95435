"""How far the runs of a study are, read off their folders, wherever they run."""

from __future__ import annotations

import csv
import heapq
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmrb.experiments.cells import Cell

TAIL_BYTES = 64 * 1024  # of a CSV file: some dozens of rows
READ = ("time/wall_s", "time/env_steps_per_s", "eval/success")  # columns, beside the counter of env steps


@dataclass(frozen=True)
class Progress:
    """Where a run is, by the newest row that it has written.

    Attributes:
        env_steps: taken so far.
        seconds: of training, evaluations included, over all attempts.
        env_steps_per_s: of the latest stretch, without evaluations; NaN if unknown.
        success: of the latest evaluation, in [0, 1]; NaN before the first.
        written: when the row was written, in seconds of `time.time`.
    """

    env_steps: int = 0
    seconds: float = 0.0
    env_steps_per_s: float = math.nan
    success: float = math.nan
    written: float = 0.0

    def seconds_left(self, total_env_steps: int, since: float) -> float:
        """Estimates the time to go from the time gone; NaN before the first row beyond step 0.

        Args:
            total_env_steps: the run's budget.
            since: when the run was started, in seconds of `time.time`; a resumed run's newest row may be older.
        """
        if not self.env_steps:
            return math.nan
        left = self.seconds / self.env_steps * max(0, total_env_steps - self.env_steps)
        return max(0.0, left - max(0.0, time.time() - max(self.written, since)))


def read_progress(folder: Path) -> Progress:
    """Reads a run's progress from ``metrics.csv`` and ``evaluations.csv``, as far as they are there.

    What cannot be read is left out: the runs themselves say what is wrong with their files.
    """
    found = Progress()
    for name, counter in (("evaluations.csv", "env_step"), ("metrics.csv", "step")):
        values: dict[str, float] = {}
        for row in last_rows(folder / name):
            cells = ((column, _number(row.get(column, ""))) for column in (counter, *READ))
            values |= {column: number for column, number in cells if math.isfinite(number)}
        if values.get(counter, -1) < found.env_steps:
            continue
        found = Progress(
            env_steps=int(values[counter]),
            seconds=values.get("time/wall_s", found.seconds),
            env_steps_per_s=values.get("time/env_steps_per_s", found.env_steps_per_s),
            success=values.get("eval/success", found.success),
            written=_written(folder / name),
        )
    return found


def last_rows(path: Path) -> list[dict[str, str]]:
    """Returns the last rows of a CSV file, however long it is; none if it cannot be read. Half a row is left out."""
    try:
        with path.open("rb") as file:
            header = file.readline(TAIL_BYTES).decode(errors="replace")
            start = file.tell()
            file.seek(max(start, file.seek(0, 2) - TAIL_BYTES))
            cut = file.tell() > start
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    columns = _cells(header)
    rows = (_cells(line) for line in lines[1 if cut else 0 :] if line.endswith("\n"))
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])  # by itself: a quote that a damaged line opens would swallow all others


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0


def estimate(
    running: Mapping[Cell, float], waiting: Sequence[Cell], durations: Iterable[tuple[Cell, float]], jobs: int
) -> float:
    """Estimates when the last run will have ended.

    Args:
        running: seconds left of each run that is under way; NaN if unknown.
        waiting: runs to come, in their order.
        durations: how long runs took or will take, in seconds: one of the same configuration is what a run to come is
            expected to take, on average; if there is none, any.
        jobs: runs at a time.

    Returns:
        Seconds from now; NaN if nothing is known.
    """
    known = [(cell.config, seconds) for cell, seconds in durations if math.isfinite(seconds)]
    if not known:
        return math.nan

    def expected(cell: Cell) -> float:
        same = [seconds for config, seconds in known if config == cell.config]
        return sum(same) / len(same) if same else sum(seconds for _, seconds in known) / len(known)

    ends = [expected(cell) if math.isnan(left) else left for cell, left in running.items()]
    places = ends + [0.0] * (jobs - len(ends))
    heapq.heapify(places)
    for cell in waiting:
        heapq.heappush(places, heapq.heappop(places) + expected(cell))
    return max(places)
