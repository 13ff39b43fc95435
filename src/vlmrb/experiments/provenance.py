"""What a run was made with: versions, and the state of the sources."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vlmrb

PACKAGES = (
    *("vlmrb", "torch", "torchrl", "tensordict", "lightning", "numpy", "transformers", "ray"),
    *("gymnasium", "minigrid", "ogbench", "mujoco"),
)
GIT_TIMEOUT_S = 20


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_states() -> dict[str, dict[str, Any] | None]:
    """Returns `git_state` of this package's sources (``vlmrb``) and of the working directory (``working_dir``)."""
    return {"vlmrb": git_state(Path(vlmrb.__file__)), "working_dir": git_state(Path.cwd())}


def git_state(path: Path) -> dict[str, Any] | None:
    """Says which commit a path is checked out from.

    Args:
        path: a folder, or a file that has to be tracked itself (an installed package may lie in somebody's checkout).

    Returns:
        ``commit`` (its hash) and ``dirty`` (whether tracked files differ from it); ``None`` outside a checkout, before
        its first commit, or without git.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and _git(folder, "ls-files", "--error-unmatch", path.name) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
