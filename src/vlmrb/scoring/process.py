"""A scorer in a process of its own: the back-end that can time out, kill and start again."""

from __future__ import annotations

import logging
import multiprocessing.spawn
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

import numpy as np

from vlmrb.scoring.backends import Answer, Backend, SyncBackend, ThreadBackend, describe
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.mail import anonymous_file, read_at, write_at
from vlmrb.scoring.scorer import MAX_STATE_BYTES, Scorer, ScorerError

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 60.0
CLIP_BYTES = 20  # that travel with a clip's snapshots: its id, its length, and its answer
MAX_RAISED = 3  # batches in a row that raise before the process counts as broken (a lost GPU context never recovers)
EXIT_GRACE_S = 2.0  # how long an idle process may take for `Scorer.close`
KILL_WAIT_S = 5.0  # how long `close` waits for a killed process
REAP_WAIT_S = 0.2  # the same in the middle of training
INSIDE = "VLMRB_SCORING_PROCESS"  # set in the environment of scoring processes
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ProcessBackend(Backend):
    """Runs a scorer in a process of its own and never waits for it.

    Life of the process: *starting* (imports and `Scorer.setup`) → *ready* → on a time-out, death or repeated failure it
    is killed with all its children → *pausing* (back-off) → *starting* … → *dead* after too many restarts in a row.

    What travels per batch is a message of a few hundred bytes on a pipe, which a pipe always takes, and the snapshots
    through an anonymous file in memory: a write there costs a copy and cannot block, whatever the other side does. What
    a scorer has learned goes the same way, in both directions, behind the snapshots of its batch.

    A scorer defined in the user's own script makes the process import that script (under another name than
    ``__main__``), as `multiprocessing` does: guard its start with ``if __name__ == "__main__"``, or define the scorer
    in a module.

    Args:
        scorer: must be picklable.
        renderer: travels with the scorer; must be picklable.
        config: time-outs, restarts, threads.

    Raises:
        ScorerError: scorer or renderer cannot be pickled, or this is a scoring process itself.
    """

    def __init__(self, scorer: Scorer, renderer: Renderer | None, config: ScoringConfig) -> None:
        if INSIDE in os.environ:
            raise ScorerError(
                "a scoring process must not start another: its scorer is defined in the training script, which must "
                'guard its start with if __name__ == "__main__"'
            )
        self._name = scorer.name
        self._config = config
        self._payload = anonymous_file(pack(scorer, renderer))
        self._mail = anonymous_file()
        self._slot_bytes = 0
        self._unanswered: deque[int] = deque()
        self._submitted = 0
        self._raised = 0  # batches in a row
        self._failures = 0  # processes in a row
        self._clock = 0.0  # when the present state, or the batch at the head, began
        self._rests_until = 0.0  # for `ScoringConfig.duty_cycle`; resting is no hanging
        self._state: Literal["starting", "ready", "pausing", "dead"] = "starting"
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        self._finalizer: weakref.finalize | None = None
        self._pipe: Connection | None = None
        self._poller = select.poll()
        self._start()

    @property
    def pid(self) -> int | None:
        """The scoring process, if there is one at present."""
        return None if self._process is None else self._process.pid

    @property
    def accepting(self) -> bool:
        """Whether `Scorer.setup` has come back in the present process."""
        return self._state == "ready"

    def submit(self, ticket: int, clips: ClipBatch) -> None:
        """Sends a batch."""
        assert self._pipe is not None
        snapshots = np.ascontiguousarray(clips.snapshots)
        numbers = np.stack([clips.clip_ids, clips.lengths]).astype(np.int64, copy=False)
        unknown = np.full(len(clips), np.nan, np.float32)
        answers = unknown if clips.answers is None else np.ascontiguousarray(clips.answers)
        if not self._slot_bytes:
            self._slot_bytes = (snapshots[0].nbytes + CLIP_BYTES) * self._config.batch_clips
        if snapshots.nbytes + CLIP_BYTES * len(clips) > self._slot_bytes:
            raise ValueError(f"a batch of {snapshots.nbytes} bytes of snapshots; the first one left {self._slot_bytes}")
        # Batches are answered in order, so the slot of the batch `max_in_flight` before this one is free again. The
        # room in it for what a scorer has learned takes no memory before something is written there.
        offset = self._submitted % self._config.max_in_flight * (self._slot_bytes + MAX_STATE_BYTES)
        state_offset, state = offset + self._slot_bytes, self._restored_now()
        self._submitted += 1
        write_at(self._mail.fileno(), snapshots.data, offset)
        write_at(self._mail.fileno(), numbers.data, offset + snapshots.nbytes)
        write_at(self._mail.fileno(), answers.data, offset + snapshots.nbytes + numbers.nbytes)
        if state is not None:
            write_at(self._mail.fileno(), memoryview(state), state_offset)
        if not self._unanswered:
            self._clock = max(time.monotonic(), self._rests_until)
        self._unanswered.append(ticket)
        try:
            self._pipe.send((ticket, offset, snapshots.dtype.str, snapshots.shape, state_offset, len(state or b"")))
        except OSError:
            logger.debug("scorer %r is gone; the next look finds out why", self._name, exc_info=True)

    def collect(self) -> list[Answer]:
        """Takes answers, and looks after the process."""
        if self._state == "dead":
            return []
        if self._state == "pausing":
            self._dying = [process for process in self._dying if process.poll() is None]
            if time.monotonic() >= self._clock and not self._dying:  # it may still hold the GPU
                self.restarts += 1
                try:
                    self._start()
                except OSError as error:  # no memory or no file descriptors are left, which may pass
                    return self._lose(f"could not be started ({error.strerror})")
            return []
        answers: list[Answer] = []
        while self._state in ("starting", "ready") and self._poller.poll(0):
            answers += self._receive()
        if self._state == "starting" and self._late(self._config.startup_timeout_s):
            answers += self._lose(f"was not set up within {self._config.startup_timeout_s:g} s")
        elif self._state == "ready" and self._unanswered and self._late(self._config.timeout_s):
            answers += self._lose(f"did not answer within {self._config.timeout_s:g} s", blame=True)
        return answers

    def close(self) -> None:
        """Stops the process: politely if it is idle, at once if it is busy."""
        if self._state == "ready" and not self._unanswered and self._process is not None and self._pipe is not None:
            try:
                self._pipe.send(None)
                self._process.wait(EXIT_GRACE_S)
            except (OSError, subprocess.TimeoutExpired):
                logger.debug("scorer %r did not end by itself", self._name, exc_info=True)
        self._stop(KILL_WAIT_S)
        for process in self._dying:
            _kill(process, KILL_WAIT_S)
        self._unanswered.clear()
        self._state = "dead"
        self._payload.close()
        self._mail.close()

    def _late(self, allowed_s: float) -> bool:
        return time.monotonic() - self._clock > allowed_s

    def _start(self) -> None:
        ours, theirs = Pipe(duplex=True)
        fds = (theirs.fileno(), self._mail.fileno(), self._payload.fileno())
        level = logging.getLogger("vlmrb").getEffectiveLevel()
        arguments = [str(number) for number in (*fds, os.getpid(), level)]
        arguments += [repr(self._config.duty_cycle), str(int(self._config.low_priority))]
        environment = {
            **os.environ,
            INSIDE: "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        if self._config.threads is not None:
            environment |= dict.fromkeys(THREAD_VARIABLES, str(self._config.threads))
        # A session of its own: a Ctrl-C in the terminal does not reach it, and it can be killed with whatever it
        # started.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vlmrb.scoring.worker", *arguments],
                pass_fds=fds,
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(
            self, _kill, self._process, KILL_WAIT_S
        )  # also at exit, should nobody call close
        self._pipe = ours
        self._poller = select.poll()
        self._poller.register(ours.fileno(), select.POLLIN)
        self._state, self._clock, self._raised, self._rests_until = "starting", time.monotonic(), 0, 0.0

    def _receive(self) -> list[Answer]:
        assert self._pipe is not None
        try:
            kind, content = self._pipe.recv()
        except (EOFError, OSError):
            return self._lose("died" if self._state == "ready" else "died while it was set up", blame=True, died=True)
        if kind == "ready":
            self._state = "ready"
            return []
        if kind == "unusable":
            self._stop(KILL_WAIT_S)
            raise ScorerError(
                f"scorer {self._name!r} cannot be rebuilt in its process ({content}): define it in a module, "
                "or use scoring.backend=thread"
            )
        if kind == "refused" and not self.restarts:
            self._stop(KILL_WAIT_S)
            raise ScorerError(content)
        if kind in ("refused", "failed"):
            return self._lose(f"could not be set up ({content})")
        found, rest_s, place = content
        if place is not None:  # its slot is written to again only once another batch has been handed over
            found = replace(found, state=bytes(read_at(self._mail.fileno(), *place)))
        return self._answered(found, rest_s)

    def _answered(self, found: Answer, rest_s: float) -> list[Answer]:
        expected = self._unanswered.popleft()
        assert found.ticket == expected, "the scorer answers in order"
        self._clock = self._rests_until = time.monotonic() + rest_s  # the next batch begins at the latest then
        if found.scores is not None:
            self._failures = self._raised = 0
            return [found]
        self._raised += 1
        if found.fatal or self._raised < MAX_RAISED:
            return [found]
        return [found, *self._lose(f"raised {MAX_RAISED} times in a row")]

    def _lose(self, reason: str, blame: bool = False, died: bool = False) -> list[Answer]:
        """Ends the process and plans the next one.

        Args:
            reason: what happened, as the end of a sentence about the scorer.
            blame: the batch at the head may have caused it.
            died: it ended by itself, so that its exit code tells something.

        Returns:
            Answers without scores for all batches under way.
        """
        if died and (code := self._exit_code()) is not None:
            reason += f" (exit code {code})"
        self._stop(REAP_WAIT_S)
        lost = [
            Answer(ticket, error=reason, blamed=blame and place == 0) for place, ticket in enumerate(self._unanswered)
        ]
        self._unanswered.clear()
        self._failures += 1
        if self._failures > self._config.max_restarts:
            self._state, self.dead = "dead", f"it {reason}, {self._failures} times without an answer in between"
            return lost
        pause = min(self._config.backoff_s * 2 ** (self._failures - 1), MAX_BACKOFF_S)
        logger.warning(
            "scorer %r %s; restart %d of at most %d in a row in %g s",
            *(self._name, reason, self._failures, self._config.max_restarts, pause),
        )
        self._state, self._clock = "pausing", time.monotonic() + pause
        return lost

    def _exit_code(self) -> int | None:
        """Returns the exit code of a process that is ending; killed at once, it might lose its own for the kill's."""
        assert self._process is not None
        try:
            return self._process.wait(REAP_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.debug("scorer %r closed its pipe and lives on", self._name)
            return None

    def _stop(self, wait_s: float) -> None:
        """Kills the process, if there is one, and waits ``wait_s`` for its end."""
        if self._process is None:
            return
        assert self._finalizer is not None
        assert self._pipe is not None
        process, self._process = self._process, None
        self._pipe.close()
        self._finalizer.detach()
        if _kill(process, wait_s) is None:
            self._dying.append(process)


def make_backend(scorer: Scorer, renderer: Renderer | None, config: ScoringConfig) -> Backend:
    """Starts a scorer where ``config.backend`` says.

    Raises:
        ScorerError: it cannot be set up (``sync``) or sent to its process (``process``).
    """
    if config.backend == "sync":
        return SyncBackend(scorer)
    if config.backend == "thread":
        return ThreadBackend(scorer)
    return ProcessBackend(scorer, renderer, config)


def pack(scorer: Scorer, renderer: Renderer | None) -> bytes:
    """Pickles what a scoring process needs.

    Raises:
        ScorerError: scorer or renderer cannot be pickled.
    """
    try:
        pickled = pickle.dumps((scorer, renderer))
    except Exception as error:  # pickling foreign classes raises nearly anything
        raise ScorerError(
            f"scorer {scorer.name!r} cannot be sent to a process of its own ({describe(error)}): load what is heavy in "
            "setup() and define it in a module, or use scoring.backend=thread"
        ) from error
    main_module: dict[str, Any] | None = None
    if b"__main__" in pickled:
        preparation = multiprocessing.spawn.get_preparation_data("scorer")
        main_module = {key: value for key, value in preparation.items() if key.startswith("init_main")}
    return pickle.dumps((main_module, pickled))


def _kill(process: subprocess.Popen[bytes], wait_s: float) -> int | None:
    """Kills a process with its children; returns its exit code if it is gone within ``wait_s``."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        logger.debug("scoring process %d is gone already", process.pid, exc_info=True)
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        logger.warning("scoring process %d does not go away yet", process.pid)
        return None
