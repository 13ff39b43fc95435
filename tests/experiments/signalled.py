"""`vlmrb` in a process of its own, ended by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120


def run_until(command: list[str], ready: Callable[[], bool], signals: list[signal.Signals]) -> tuple[int, str]:
    """Runs ``vlmrb`` until something holds, sends signals to it alone, and returns its exit code and what it said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmrb.cli", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in signals:
            process.send_signal(number)
        return process.wait(PATIENCE_S), process.communicate()[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def left_running(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(entry.read_text().replace("\0", " "))
        except OSError:  # gone meanwhile
            continue
    return [command for command in found if word in command]
