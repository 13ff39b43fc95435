"""`python -m vlmrb.experiments.child PARENT VERB …`: `vlmrb VERB …` that is told to stop when PARENT is gone.

However the parent ends, even by SIGKILL, the run gets a SIGTERM, on which `vlmrb fit` saves and exits. So the folder of
a run may be busy for a moment when the next sweep comes to go on; it is waited for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from vlmrb.locks import lock_folder

PARENT_CHECK_S = 1.0
PATIENCE_S = 60.0  # what saving a large buffer may take


def main(arguments: Sequence[str]) -> int:
    """Runs one verb.

    Args:
        arguments: the parent's process id, then those of `vlmrb`.

    Returns:
        The verb's exit code.
    """
    from vlmrb.cli import main as vlmrb

    parent, *command = arguments
    stop_with(int(parent))
    if "--run_dir" in command:
        wait_until_free(Path(command[command.index("--run_dir") + 1]))
    sys.argv = ["vlmrb", *command]  # what a run writes down as its command
    return vlmrb(command)


def wait_until_free(folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Waits while another process holds a folder; whoever wants it after that is refused by the lock itself."""
    deadline = time.monotonic() + patience_s
    while folder.is_dir() and time.monotonic() < deadline:
        try:
            lock_folder(folder, "run_dir=").close()
            return
        except RuntimeError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                return
            time.sleep(0.5)


def stop_with(parent: int) -> None:
    """Has this process get a SIGTERM when its parent is gone, within a second.

    Args:
        parent: process id of the parent as it was when it started this process.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
