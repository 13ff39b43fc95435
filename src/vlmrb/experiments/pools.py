"""Where the runs of a study run: processes of this machine. `vlmrb.experiments.ray_pool` is the other place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from vlmrb.experiments.cells import Cell
from vlmrb.experiments.children import Children


class Pool(Protocol):
    """A context in which runs are started, and by the end of which none of them is left.

    When this process is told to stop, it asks the runs to save and exit.
    """

    def __enter__(self) -> Self:
        """Takes over SIGTERM and Ctrl-C."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Asks what still runs, which is something after an exception only, to save and exit."""

    @property
    def exit_code(self) -> int:
        """This process's exit code if it was told to stop, otherwise 0."""

    @property
    def jobs(self) -> int:
        """How many runs there is room for at present, at least 1."""

    def launch(self, cell: Cell) -> None:
        """Starts a run and records that, now or when its turn has come."""

    def ended(self, timeout_s: float) -> list[tuple[Cell, bool]]:
        """Waits for runs to end.

        Args:
            timeout_s: seconds to wait at most.

        Returns:
            Those that have ended, with whether they had begun, in which case their records say how they ended; none if
            time is up.
        """


class LocalPool(Children):
    """Runs in child processes.

    Args:
        jobs: runs at a time; ``None``: as many as there are cores for.
        resources: of one run: ``num_cpus`` counts.
    """

    def __init__(self, jobs: int | None, resources: Mapping[str, float]) -> None:
        super().__init__()
        cores = len(os.sched_getaffinity(0))
        self.jobs = jobs or max(1, int(cores / resources["num_cpus"]))
        self._cells: dict[subprocess.Popen[bytes], Cell] = {}

    def launch(self, cell: Cell) -> None:
        """Starts a run."""
        cell.record_start()
        with cell.log.open("a") as log:
            self._cells[self.start(cell.command[1:], log)] = cell

    def ended(self, timeout_s: float) -> list[tuple[Cell, bool]]:
        """Returns the runs that have ended within ``timeout_s`` seconds, their ends recorded; all of them had begun."""
        ended = [(child, self._cells.pop(child)) for child in self.wait(timeout_s)]
        for child, cell in ended:
            cell.record_end(child.returncode)
        return [(cell, True) for _, cell in ended]
