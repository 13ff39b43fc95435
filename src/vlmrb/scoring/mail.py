"""The file in memory through which learner and scoring process pass arrays; writing there cannot block."""

from __future__ import annotations

import io
import os
import tempfile


def anonymous_file(content: bytes = b"") -> io.BufferedRandom:
    """Returns a file without a name, in memory where the system can: nothing is left behind however a run ends."""
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("vlmrb-scoring"), "w+b")  # noqa: SIM115 — lives as long as the back-end
    else:
        file = tempfile.TemporaryFile("w+b")  # noqa: SIM115
    file.write(content)
    file.flush()
    return file


def write_at(fd: int, content: memoryview, offset: int) -> None:
    """Writes what is contiguous in memory."""
    view, done = content.cast("B"), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def read_at(fd: int, offset: int, size: int) -> bytearray:
    """Reads so many bytes.

    Raises:
        EOFError: there are fewer.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            raise EOFError("the batch is shorter than announced")
        done += count
    return data
