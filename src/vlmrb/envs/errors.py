"""Errors of code that others wrote: environments, wrappers, and the functions that a configuration names."""

from __future__ import annotations

from typing import Final

FAILURES: Final = (Exception, SystemExit)
"""What such code may raise and is told as its failure: an exit would end the run as if all were well. Ctrl-C passes."""


def reason(error: BaseException) -> str:
    """Returns type and message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
