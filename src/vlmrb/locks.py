"""One process at a time writes into a folder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

LOCK = ".lock"


def lock_folder(folder: Path, option: str) -> IO[str]:
    """Takes a folder for this process until the returned file is closed or the process ends, however it ends.

    Args:
        folder: made if it is missing.
        option: what it is set by, for error messages: ``run_dir=`` or ``--out``.

    Raises:
        RuntimeError: another process holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise RuntimeError(f"{option}{folder} cannot be written ({error.strerror}): choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise RuntimeError(f"{option}{folder} is in use by another run: wait for it, or choose another") from error
    return lock
