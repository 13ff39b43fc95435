"""What a sweep shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vlmrb.experiments.cells import Cell
from vlmrb.experiments.progress import Progress, estimate, read_progress

REFRESH_S = 2.0
LINES_S = 60.0  # between two reports where there is no terminal
STATES = {"running": "cyan", "failed": "bold red", "interrupted": "yellow", "done": "green", "waiting": "dim"}
SCORED = 0.5  # share of its clips below which a run's scorer has told replay too little
ROWS_AROUND = 8  # lines of the terminal that are left to other things than rows


@dataclass
class Row:
    """A run as it is shown.

    Attributes:
        cell: the run.
        state: one of `STATES`.
        total: env steps of the whole run; ``None`` if unknown.
        progress: how far it is.
        since: when it was started last, in seconds of `time.time`.
        left_s: estimated seconds to go; NaN if unknown.
        warning: of one that is done: what its scorer left undone.
    """

    cell: Cell
    state: str
    total: int | None
    progress: Progress = field(default_factory=Progress)
    since: float = 0.0
    left_s: float = math.nan
    warning: str = ""

    def read_end(self) -> None:
        """Takes what the summary of a finished run says."""
        if (summary := self.cell.summary) is not None:
            self.progress = Progress(summary["env_steps"], summary["wall_s"], math.nan, summary["success"])
        self.warning = hardly_scored(self.cell)


class Board:
    """A context that follows runs and shows them.

    Args:
        cells: the runs of the study; those that have finished already count as done.
        budgets: env steps of the others, by names of configuration and scheme.
        title: of the table.
        console: where it is shown.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        budgets: Mapping[tuple[str, str], int],
        title: str,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(highlight=False)
        self._title = title
        self._rows = {
            cell.folder: Row(cell, "done" if cell.finished else "waiting", budgets.get((cell.config.stem, cell.label)))
            for cell in cells
        }
        for row in self._rows.values():
            if row.state == "done":
                row.read_end()
        self._todo = sum(row.state == "waiting" for row in self._rows.values())
        self._ended = 0
        self._begun = self._shown = time.monotonic()
        self._trouble = ""
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        """Says what there is to do, and shows the table if this is a terminal."""
        total = len(self._rows)
        self.say(f"{total} run{'s' if total > 1 else ''}, {total - self._todo} already finished")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError, ValueError):
                self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line, above the table if there is one; a terminal that is gone must not end the runs."""
        with suppress(OSError, ValueError):
            self.console.print(text, markup=False, soft_wrap=True)
            self.console.file.flush()

    def started(self, cell: Cell) -> None:
        """Notes that a run has been started."""
        row = self._rows[cell.folder]
        row.state, row.since = "running", time.time()

    def ended(self, cell: Cell, begun: bool = True) -> None:
        """Says how a run ended; one that had not ``begun`` waits again, for another sweep."""
        row = self._rows[cell.folder]
        if not begun:
            row.state = "waiting"
            return
        row.state = {"finished": "done", "interrupted": "interrupted"}.get(cell.status, "failed")
        if row.state == "done":
            row.read_end()
        else:
            row.progress = read_progress(cell.folder)
        self._ended += 1
        gone = time.monotonic() - self._begun
        self.say(f"[{self._ended}/{self._todo}, {gone:.0f} s] {cell.name}: {_outcome(row)}")

    def refresh(self, jobs: int) -> None:
        """Shows where everything is, if it is time.

        Args:
            jobs: runs at a time.
        """
        now = time.monotonic()
        if now - self._shown < (REFRESH_S if self._live is not None else LINES_S):
            return
        self._shown = now
        try:
            self._show(jobs)
        except Exception as error:  # whatever files hold and terminals do: the display must never end runs
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:  # said once
                self._trouble = trouble
                self.say(f"the state of the runs cannot be shown ({trouble})")

    def _show(self, jobs: int) -> None:
        self._read()
        if self._live is not None:
            self._live.update(self.table(jobs), refresh=True)
        else:
            for row in self._rows.values():
                if row.state == "running":
                    self.say(f"  {row.cell.name}: {', '.join(filter(None, _facts(row)))}")
            self.say(self.headline(jobs))

    def headline(self, jobs: int) -> str:
        """Returns the state of the study in one line."""
        counts = Counter(row.state for row in self._rows.values())
        parts = [f"{counts['done']} of {len(self._rows)} done"]
        parts += [f"{counts[state]} {state}" for state in STATES if state != "done" and counts[state]]
        left = self._left_s(jobs)
        times = f"{_duration(time.monotonic() - self._begun)} gone"
        if math.isfinite(left):
            end = datetime.now() + timedelta(seconds=left)
            times += f", about {_duration(left)} to go (until {end:%a %H:%M})"
        return f"{', '.join(parts)}; {times}"

    def table(self, jobs: int) -> Table:
        """Returns the table, cut to the terminal's height: what runs comes first, then what failed, and so on."""
        several = len({row.cell.config for row in self._rows.values()}) > 1
        table = Table(title=self._title, caption=self.headline(jobs), title_justify="left", caption_justify="left")
        for column in [*(["configuration"] if several else []), "scheme", "seed", "state"]:
            table.add_column(column)
        for column in ("env steps", "steps/s", "success", "time left"):
            table.add_column(column, justify="right")
        order = list(STATES)
        rows = sorted(self._rows.values(), key=lambda row: (order.index(row.state), -row.since))
        room = max(4, self.console.height - ROWS_AROUND)
        for row in rows[:room]:
            cell = row.cell
            state = ", ".join(filter(None, [row.state, row.warning]))
            names = [*([cell.config.stem] if several else []), cell.label, str(cell.seed), state]
            table.add_row(*names, *_facts(row, short=True), style=STATES[row.state])
        if len(rows) > room:
            table.add_row(f"and {len(rows) - room} more", style="dim")
        return table

    def _read(self) -> None:
        for row in self._rows.values():
            if row.state == "running":
                row.progress = read_progress(row.cell.folder)
                row.left_s = math.nan if row.total is None else row.progress.seconds_left(row.total, row.since)

    def _left_s(self, jobs: int) -> float:
        rows = list(self._rows.values())
        durations = [(row.cell, row.progress.seconds) for row in rows if row.state == "done"]
        durations += [
            (row.cell, row.progress.seconds / row.progress.env_steps * row.total)
            for row in rows
            if row.state == "running" and row.progress.env_steps and row.total
        ]
        running = {row.cell: row.left_s for row in rows if row.state == "running"}
        return estimate(running, [row.cell for row in rows if row.state == "waiting"], durations, jobs)


def _outcome(row: Row) -> str:
    cell, exit_code = row.cell, row.cell.exit_code
    if row.state == "done":
        return ", ".join(filter(None, [f"success {row.progress.success:.2f}", row.warning]))
    if row.state == "interrupted":
        return "interrupted"
    how = f"exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"killed by {signal_name(-exit_code)}"
    return f"FAILED ({how}): {cell.last_words()[0]} (log: {cell.log})"


def signal_name(number: int) -> str:
    """Returns what a signal is called; most of the real-time ones have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def hardly_scored(cell: Cell) -> str:
    """Returns a warning if a run's scorer has scored less than half of its clips; otherwise nothing."""
    share = cell.share_scored
    return "" if share is None or share >= SCORED else f"only {share:.1%} of the clips scored"


def _facts(row: Row, short: bool = False) -> list[str]:
    """Returns env steps, speed, success and time left, empty where unknown; with their units unless ``short``."""
    progress = row.progress
    steps, share = f"{progress.env_steps:,}" if progress.env_steps or row.state == "running" else "", ""
    if steps and row.total and row.state != "done":
        share = f" ({min(1.0, progress.env_steps / row.total):.0%})"
        steps += f"{' / ' if short else ' of '}{row.total:,}"
    speed = _number(progress.env_steps_per_s, ",.0f") if row.state == "running" else ""
    success = _number(progress.success, ".2f")
    left = _duration(row.left_s) if row.state == "running" and math.isfinite(row.left_s) else ""
    if short:
        return [steps + share, speed, success, left]
    return [
        f"{steps} env steps{share}",
        f"{speed} steps/s" if speed else "",
        f"success {success}" if success else "",
        f"{left} left" if left else "",
    ]


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
