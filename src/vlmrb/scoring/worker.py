"""The program of a scoring process: `python -m vlmrb.scoring.worker`, started by `process.ProcessBackend` only.

It is started afresh rather than forked or spawned by `multiprocessing`, so that neither the learner's threads and GPU
context nor the user's training script come along; only NumPy and what the scorer itself imports are loaded. Batches
come as a short message on a pipe and their snapshots in an anonymous file, answers go back on the pipe, and what the
scorer has learned in that file.
"""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from vlmrb.scoring.backends import Answer, answer, close_quietly, describe, set_up
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.mail import read_at, write_at
from vlmrb.scoring.scorer import Scorer, ScorerError

PR_SET_PDEATHSIG = 1
PARENT_CHECK_S = 1.0
GUARD_CHECK_S = 0.2
NICENESS = 10  # of a scorer of low priority: a tenth of the processor time of who wants it as well
AUTOGROUP = Path("/proc/self/autogroup")
MAX_TEXT = 4000  # characters of an error sent back, so that a message stays small enough to be taken whole


def main(
    pipe_fd: int,
    mail_fd: int,
    payload_fd: int,
    parent: int,
    log_level: int = logging.WARNING,
    duty_cycle: float = 1.0,
    low_priority: bool = False,
) -> int:
    """Scores batches until the pipe closes.

    Args:
        pipe_fd: a duplex pipe to the learner.
        mail_fd: the file that holds the snapshots of batches.
        payload_fd: a file that holds the pickled payload of `process.pack`.
        parent: the learner's process id.
        log_level: the learner's, so that what a scorer says about itself is heard wherever it works.
        duty_cycle: largest share of the time spent on batches, in (0, 1]; the process rests after each.
        low_priority: give way to whoever wants the same processor cores, once the scorer is set up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the learner decides when to stop
    guard_children((pipe_fd, mail_fd, payload_fd))
    die_with(parent)
    logging.basicConfig(format="%(levelname)s %(name)s (scoring process): %(message)s")
    logging.getLogger("vlmrb").setLevel(log_level)
    pipe = Connection(pipe_fd)
    try:
        scorer, renderer = _unpack(payload_fd)
    except Exception as error:  # whatever unpickling foreign classes raises
        pipe.send(("unusable", describe(error)[:MAX_TEXT]))
        return 1
    try:
        set_up(scorer)
    except ScorerError as error:
        pipe.send(("refused", str(error)[:MAX_TEXT]))
        return 1
    except Exception as error:  # foreign code
        pipe.send(("failed", describe(error)[:MAX_TEXT]))
        return 1
    if low_priority:  # not before: on a busy machine, setting up would run into its time limit
        give_way()
    pipe.send(("ready", None))
    rests_until = reported_s = 0.0
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            message = None
        if message is None:
            break
        # With a batch at hand the learner ends us by a signal, which a sleep does not hold up.
        time.sleep(max(0.0, rests_until - time.monotonic()))
        begin = time.monotonic()
        ticket, offset, dtype, shape, state_offset, state_bytes = message
        restored = bytes(read_at(mail_fd, state_offset, state_bytes)) if state_bytes else None
        found = answer(scorer, ticket, _read_batch(mail_fd, offset, np.dtype(dtype), shape, renderer), restored)
        end = time.monotonic()
        rest_s = (end - begin) * (1 / duty_cycle - 1)
        rests_until = end + rest_s
        place = None
        if found.state is not None:
            write_at(mail_fd, memoryview(found.state), state_offset)
            place = state_offset, len(found.state)
        spent_s = time.process_time()
        pipe.send(("answer", (replace(_short(found), cpu_s=spent_s - reported_s), rest_s, place)))
        reported_s = spent_s
    close_quietly(scorer)
    return 0


def give_way() -> None:
    """Lowers the priority for the processor of this process, with all threads and children that it has started so far.

    Linux may share the cores out by session first, and ours is our own: the session's priority is lowered as well.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
    with suppress(PermissionError):  # one that is nicer still stays so
        os.setpriority(os.PRIO_PGRP, 0, niceness)  # `nice` would leave out threads that are there already
    for _ in range(10):
        try:
            AUTOGROUP.write_text(str(NICENESS))
        except BlockingIOError:  # the kernel takes one such wish per tenth of a second from the whole machine
            time.sleep(0.1)
        except OSError:  # another system, or one that does not group by session: `nice` is enough there
            return
        else:
            return


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
    """Reads snapshots, clip ids and lengths, and answers, which lie one after the other."""
    snapshots = np.frombuffer(read_at(fd, offset, dtype.itemsize * math.prod(shape)), dtype).reshape(shape)
    offset += snapshots.nbytes
    clip_ids, lengths = np.frombuffer(read_at(fd, offset, 16 * shape[0]), np.int64).reshape(2, -1)
    answers = np.frombuffer(read_at(fd, offset + 16 * shape[0], 4 * shape[0]), np.float32)
    return ClipBatch(clip_ids, snapshots, lengths, renderer, answers)


def _short(found: Answer) -> Answer:
    return replace(found, error=found.error[:MAX_TEXT], detail=found.detail[-MAX_TEXT:], state=None)


if __name__ == "__main__":
    *numbers, share, low = sys.argv[1:]
    pipe_number, mail_number, payload_number, learner, level = map(int, numbers)
    sys.exit(main(pipe_number, mail_number, payload_number, learner, level, float(share), low == "1"))
