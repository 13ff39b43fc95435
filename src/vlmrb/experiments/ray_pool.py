"""Runs of a study as tasks on a Ray cluster, whose nodes share this working directory and the study's folder."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from vlmrb.experiments.cells import Cell
from vlmrb.experiments.children import POLL_S, Interruptible, start_child
from vlmrb.experiments.records import read_record

LOCAL = "local"
RETRIES = 3  # of a run whose worker or node dies; it goes on from its last checkpoint
OBJECT_STORE_BYTES = 100 * 2**20  # of a local cluster: runs hand over next to nothing
SLICE_S = 0.5  # between two looks at signals
LEAVE_S = 120.0  # for runs to save after an error here
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # what clusters call them

# In a process of its own, as ray.init retries for minutes and may even abort its process.
CONNECT = """
import sys
from vlmrb.experiments.ray_pool import connect
try:
    connect(sys.argv[1])
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


class RayPool(Interruptible):
    """Runs as Ray tasks.

    A run whose worker dies is started again by Ray. If this process dies, Ray ends its tasks; in both cases a run goes
    on from its last checkpoint.

    Args:
        address: of the cluster, as ``ray.init`` takes it, or ``local`` for one that lasts as long as this context.
        jobs: runs at a time; ``None``: as many as the cluster has room for.
        resources: ``num_cpus`` and ``num_gpus`` of one run.
        timeout_s: seconds within which the cluster has to answer.
    """

    def __init__(self, address: str, jobs: int | None, resources: Mapping[str, float], timeout_s: float = 30.0) -> None:
        super().__init__()
        self._address = address
        self._limit = jobs
        self._resources = dict(resources)
        self._timeout_s = timeout_s
        self._cells: dict[Any, tuple[Cell, int]] = {}  # by task; with the attempts recorded before
        self._stopped = False

    def __enter__(self) -> Self:
        """Connects to the cluster, or starts one.

        Raises:
            RuntimeError: Ray is not installed, the address does not answer, or no node has room for a run.
        """
        self._ray = import_ray()
        if self._address != LOCAL:
            require_answer(self._address, self._timeout_s)
        connect(self._address, None if self._limit is None else self._limit * self._resources["num_cpus"])
        if not self._room() and self._limit is None:
            self._ray.shutdown()
            raise RuntimeError(
                f"no node of the Ray cluster has room for a run's resources {self._resources}: ask for less, or set "
                "jobs if nodes are started on demand"
            )
        options = {"max_retries": RETRIES, "retry_exceptions": False, **self._resources}
        self._task = self._ray.remote(run_cell).options(**options)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._stop()
            if error[1] is None or isinstance(error[1], Exception):
                self._let_save()
        finally:
            self._ray.shutdown()
            super().__exit__(*error)

    @property
    def jobs(self) -> int:
        """Runs at a time."""
        return self._limit or max(1, self._room())

    def launch(self, cell: Cell) -> None:
        """Hands a run to Ray, which starts it when a node has room."""
        self._cells[self._task.remote(cell, os.getcwd())] = cell, _attempts(cell)

    def ended(self, timeout_s: float) -> list[tuple[Cell, bool]]:
        """Returns the runs that ended, or were taken back, within ``timeout_s`` seconds; and whether they had begun."""
        deadline = time.monotonic() + timeout_s
        while self._cells:
            if self.signal is not None:
                self._stop()
            left = deadline - time.monotonic()
            done, _ = self._ray.wait(list(self._cells), num_returns=1, timeout=max(0.0, min(left, SLICE_S)))
            if done:
                cell, before = self._cells.pop(done[0])
                self._settle(done[0], cell, before)
                return [(cell, _attempts(cell) > before)]
            if left <= 0:
                break
        return []

    def _settle(self, task: Any, cell: Cell, before: int) -> None:
        """Sees to it that a run's record says how it ended."""
        try:
            self._ray.get(task)
        except self._ray.exceptions.TaskCancelledError:
            if _attempts(cell) > before and cell.exit_code is None:
                cell.record_end(128 + signal.SIGTERM)
        except self._ray.exceptions.RayTaskError as error:
            cell.record_failure(f"Ray could not start this run: {error.cause}")
        except self._ray.exceptions.RayError as error:
            cell.record_failure(f"Ray gave this run up: {' '.join(str(error).split())}")
        else:
            if _attempts(cell) == before:
                cell.record_failure("this run ended on another node, and left nothing here: is the folder shared?")

    def _stop(self) -> None:
        """Asks all that run to save and exit; takes back what has not begun."""
        if not self._stopped:
            self._stopped = True
            for task in self._cells:
                self._ray.cancel(task)

    def _let_save(self) -> None:
        """Waits for what was told to stop; a second Ctrl-C, or too long a time, ends it unsaved."""
        deadline = time.monotonic() + LEAVE_S
        left = list(self._cells)
        while left and time.monotonic() < deadline:
            _, left = self._ray.wait(left, num_returns=len(left), timeout=SLICE_S)

    def _room(self) -> int:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        needs = {NAMES[name]: amount for name, amount in self._resources.items() if amount}
        return sum(min(int(node.get(name, 0) / amount + 1e-6) for name, amount in needs.items()) for node in nodes)


def _attempts(cell: Cell) -> int:
    record = read_record(cell.folder)
    return 0 if record is None else len(record["attempts"])


def run_cell(cell: Cell, working_dir: str) -> None:
    """Runs a cell to its end, on whichever node this is called; a Ray task.

    Args:
        cell: what to run.
        working_dir: the sweep's.

    Raises:
        RuntimeError: the working directory is not there.
    """
    try:
        os.chdir(working_dir)
    except OSError as error:
        raise RuntimeError(f"{working_dir} is not there on this node: nodes must share the sweep's folder") from error
    cell.record_start()
    with cell.log.open("a") as log:
        child = start_child(cell.command[1:], log)
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
    except KeyboardInterrupt:  # how Ray cancels a task
        child.terminate()
        child.wait()
    cell.record_end(child.returncode)


def import_ray() -> Any:
    """Returns the package ``ray``.

    Raises:
        RuntimeError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise RuntimeError(f"Ray is not installed ({error}): pip install 'vlmrb[ray]', or leave --ray out") from error
    except OSError as error:  # a library that does not fit this machine
        raise RuntimeError(f"Ray cannot be loaded ({error}): install it anew, or leave --ray out") from error


def connect(address: str, num_cpus: float | None = None) -> None:
    """Connects this process to a cluster.

    Args:
        address: ``local`` starts a cluster that ends with this process.
        num_cpus: of a local cluster, if more than there are cores.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {}
    if address == LOCAL:
        cores = max(len(os.sched_getaffinity(0)), int(num_cpus or 0))
        options = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    import_ray().init(address=address, log_to_driver=False, logging_level="ERROR", **options)


def require_answer(address: str, timeout_s: float) -> None:
    """Refuses a cluster that cannot be reached.

    Raises:
        RuntimeError: it did not answer in time, or refused.
    """
    try:
        command = [sys.executable, "-c", CONNECT, address]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"Ray at {address} did not answer within {timeout_s:g} s: is that a head's address, as `ray start --head` "
            "prints it, and can it be reached from here?"
        ) from error
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise RuntimeError(f"Ray at {address} cannot be used: {said[-1]}")
