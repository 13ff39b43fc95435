"""The program of a scoring process: `python -m vlmrb.scoring.worker`, started by `process.ProcessBackend` only.

It is started afresh rather than forked or spawned by `multiprocessing`, so that neither the learner's threads and GPU
context nor the user's training script come along; only NumPy and what the scorer itself imports are loaded. Batches
come as a short message on a pipe and their snapshots in an anonymous file, answers go back on the pipe.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vlmrb.scoring.backends import Answer, answer, close_quietly, describe
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.scorer import Scorer

PR_SET_PDEATHSIG = 1
PARENT_CHECK_S = 1.0
GUARD_CHECK_S = 0.2
MAX_TEXT = 4000  # characters of an error sent back, so that a message stays small enough to be taken whole


def main(pipe_fd: int, mail_fd: int, payload_fd: int, parent: int) -> int:
    """Scores batches until the pipe closes.

    Args:
        pipe_fd: a duplex pipe to the learner.
        mail_fd: the file that holds the snapshots of batches.
        payload_fd: a file that holds the pickled payload of `process.pack`.
        parent: the learner's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the learner decides when to stop
    guard_children((pipe_fd, mail_fd, payload_fd))
    die_with(parent)
    pipe = Connection(pipe_fd)
    try:
        scorer, renderer = _unpack(payload_fd)
    except Exception as error:  # whatever unpickling foreign classes raises
        pipe.send(("unusable", describe(error)[:MAX_TEXT]))
        return 1
    try:
        scorer.setup()
    except Exception as error:  # foreign code
        pipe.send(("failed", describe(error)[:MAX_TEXT]))
        return 1
    pipe.send(("ready", None))
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        if message is None:
            break
        ticket, offset, dtype, shape = message
        found = answer(scorer, ticket, _read_batch(mail_fd, offset, np.dtype(dtype), shape, renderer))
        pipe.send(("answer", _short(found)))
    close_quietly(scorer)
    return 0


def guard_children(fds: tuple[int, ...]) -> None:
    """Leaves a process behind that kills what the scorer has started once this process is gone, however that happens.

    The learner does so, too, but cannot if it is killed itself; nor can this process, which is then killed at once.

    Args:
        fds: what the guard must not hold open, above all the pipe, whose end tells the learner that we are gone.
    """
    worker = os.getpid()  # also the group's id: `process.ProcessBackend` starts us in a session of our own
    if os.fork():
        return
    for fd in fds:
        os.close(fd)
    while os.getppid() == worker:
        time.sleep(GUARD_CHECK_S)
    os.killpg(worker, signal.SIGKILL)  # this process included


def die_with(parent: int) -> None:
    """Makes this process end when its parent does, however that happens.

    On Linux the kernel sees to it at once, even if the scorer holds the interpreter's lock (it goes by the *thread*
    that started us, which is the learner's main one); elsewhere a thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _unpack(payload_fd: int) -> tuple[Scorer, Renderer | None]:
    with open(payload_fd, "rb", closefd=True) as file:
        file.seek(0)
        main_module, pickled = pickle.load(file)
        if main_module is not None:  # the scorer or renderer is defined in the user's script
            multiprocessing.spawn.prepare(main_module)
        return pickle.loads(pickled)


def _read_batch(fd: int, offset: int, dtype: np.dtype, shape: tuple[int, ...], renderer: Renderer | None) -> ClipBatch:
    """Reads snapshots, clip ids and lengths, which lie one after the other."""
    snapshots = np.frombuffer(_read(fd, offset, dtype.itemsize * math.prod(shape)), dtype).reshape(shape)
    clip_ids, lengths = np.frombuffer(_read(fd, offset + snapshots.nbytes, 16 * shape[0]), np.int64).reshape(2, -1)
    return ClipBatch(clip_ids, snapshots, lengths, renderer)


def _read(fd: int, offset: int, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            raise EOFError("the batch is shorter than announced")
        done += count
    return data


def _short(found: Answer) -> Any:
    return Answer(found.ticket, found.scores, found.error[:MAX_TEXT], found.detail[-MAX_TEXT:], fatal=found.fatal)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
