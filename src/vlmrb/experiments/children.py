"""Runs beside each other, each in a process of its own, that stop when the process above them is told to."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, Self

POLL_S = 0.1


class Interruptible:
    """A context in which SIGTERM and Ctrl-C are noted instead of ending the process.

    A second Ctrl-C raises `KeyboardInterrupt`.

    Attributes:
        signal: what this process was told first; ``None`` while it was told nothing.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell starts background jobs with SIGINT ignored: they must not mind their neighbour's Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """This process's exit code by shell convention: 143 after SIGTERM, 130 after Ctrl-C, otherwise 0."""
        return 0 if self.signal is None else 128 + self.signal

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises `SystemExit` with code 143, so that nothing that was started is left behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.getsignal(signal.SIGTERM)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Children(Interruptible):
    """A context in which `vlmrb` processes run, and by the end of which none of them is left.

    SIGTERM and Ctrl-C are handed on as SIGTERM, on which `vlmrb fit` saves and exits. (After Ctrl-C in a terminal the
    children have a SIGINT of their own already; a second one would make them stop unsaved, a SIGTERM does nothing.)
    An exception has them save and exit too; only that of a second Ctrl-C kills them. If this process is killed, its
    children are told to stop as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: list[subprocess.Popen[bytes]] = []
        self._told: set[int] = set()

    def __exit__(self, *error: object) -> None:
        try:
            if error[1] is None or isinstance(error[1], Exception):
                self.stop()
                while self.wait():
                    pass
        finally:
            for child in self._running:
                child.kill()
                child.wait()
            super().__exit__(*error)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, arguments: Sequence[str], output: IO[Any] | None = None) -> subprocess.Popen[bytes]:
        """Starts ``vlmrb``; see `start_child`."""
        child = start_child(arguments, output)
        self._running.append(child)
        return child

    def wait(self, timeout_s: float = math.inf) -> list[subprocess.Popen[bytes]]:
        """Waits until at least one child has ended; returns those that have, none if none was running or time is up."""
        deadline = time.monotonic() + timeout_s
        while self._running:
            if self.signal is not None:
                self.stop()
            if ended := [child for child in self._running if child.poll() is not None]:
                self._running = [child for child in self._running if child not in ended]
                return ended
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        return []

    def stop(self) -> None:
        """Asks all that run to save and exit; asks each of them once."""
        for child in self._running:
            if child.pid not in self._told:
                self._told.add(child.pid)
                child.terminate()


def start_child(arguments: Sequence[str], output: IO[Any] | None = None) -> subprocess.Popen[bytes]:
    """Starts ``vlmrb`` in a process that stops with this one, on one core unless the environment says otherwise.

    Args:
        arguments: those of ``vlmrb``, the verb first.
        output: where stdout and stderr go, full tracebacks included, with nothing on stdin; ``None`` leaves all three
            as they are here.
    """
    defaults = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | ({} if output is None else {"VLMRB_DEBUG": "1"})
    return subprocess.Popen(
        [sys.executable, "-m", "vlmrb.experiments.child", str(os.getpid()), *arguments],
        stdin=None if output is None else subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=defaults | os.environ,
    )


def was_interrupted(exit_code: int) -> bool:
    """Says whether a run's exit code is that of one which was told to stop, while training or before."""
    return exit_code in (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)
