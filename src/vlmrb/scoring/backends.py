"""Where a scorer runs: beside the learner in the same thread, or in a thread of its own. A process: see `process`."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.gpu import require_gpu_memory
from vlmrb.scoring.scorer import Scorer, ScorerError, checked_scores, checked_state

logger = logging.getLogger(__name__)

THREAD_GRACE_S = 5.0  # how long `close` waits for a batch that a thread is busy with
MAX_REPORTED = 32  # numbers that a scorer may report about itself, which keeps its process's messages small
MAX_NAME = 80  # characters of their names
FAILURES = (
    Exception,
    SystemExit,
)  # what foreign code may raise; KeyboardInterrupt is left out, as it may be the user's


@dataclass(frozen=True)
class Answer:
    """What became of one batch.

    Attributes:
        ticket: which batch.
        scores: ``float32[B]`` in [0, 1], or ``None`` if there are none.
        error: why there are none, in one line: the end of a sentence about the scorer, or, if fatal, a sentence.
        detail: the traceback, if there is one.
        blamed: the failure happened while this batch was being scored, so its clips may be the cause.
        fatal: the scorer broke its contract.
        busy_s: seconds that the scorer took, waiting in queues aside.
        report: what the scorer says about itself (`Scorer.stats`); NaN for what is no number.
        details: what it knows beyond one number a clip (`Scorer.details`), if anything.
        state: what it has learned (`Scorer.state`), if anything new.
        cpu_s: processor seconds of the scorer's process or thread since its last answer, or since it was started; other
            threads that libraries start count in a process only.
    """

    ticket: int
    scores: NDArray[np.float32] | None = None
    error: str = ""
    detail: str = ""
    blamed: bool = True
    fatal: bool = False
    busy_s: float = 0.0
    report: dict[str, float] = field(default_factory=dict)
    details: NDArray[np.float32] | None = None
    state: bytes | None = None
    cpu_s: float = 0.0


def set_up(scorer: Scorer) -> None:
    """Sets a scorer up, if the GPU has the memory that it says it needs.

    Raises:
        ScorerError: too little GPU memory is free, or the scorer itself refuses.
        Exception: whatever else the scorer raises.
    """
    require_gpu_memory(scorer)
    scorer.setup()


def answer(scorer: Scorer, ticket: int, clips: ClipBatch, restored: bytes | None = None) -> Answer:
    """Asks a scorer; whatever it raises becomes part of the answer.

    Args:
        scorer: who is asked.
        ticket: which batch.
        clips: the batch.
        restored: what the scorer takes up before (`Scorer.restore`), if anything.
    """
    begin = time.perf_counter()
    try:
        if restored is not None:
            scorer.restore(restored)
        scores = checked_scores(scorer, clips)
        details, state = scorer.details(), checked_state(scorer)
    except ScorerError as error:
        return Answer(ticket, error=str(error), fatal=True)
    except FAILURES as error:  # the service counts and reports it
        return Answer(ticket, error=f"raised {describe(error)}", detail=traceback.format_exc())
    busy_s = time.perf_counter() - begin
    return Answer(ticket, scores, busy_s=busy_s, report=report(scorer), details=details, state=state)


def report(scorer: Scorer) -> dict[str, float]:
    """Returns what a scorer says about itself, at most `MAX_REPORTED` numbers.

    What is no number becomes NaN, and so does, under a name that says why, the answer of a `Scorer.stats` that fails:
    `meter.ScoringMeter` warns of it.
    """
    try:
        stats = scorer.stats()
    except FAILURES as error:  # scores are what counts
        return {f"stats() raised {describe(error)}"[:MAX_NAME]: math.nan}
    if not isinstance(stats, Mapping):
        return {f"stats() returned a {type(stats).__name__}": math.nan}
    return {str(name)[:MAX_NAME]: _number(value) for name, value in list(stats.items())[:MAX_REPORTED]}


def _number(value: object) -> float:
    if isinstance(value, str | bytes):  # `float` would read them
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # whatever has a float in it: NumPy's and torch's scalars, too
    except FAILURES:
        return math.nan


def close_quietly(scorer: Scorer) -> None:
    """Closes a scorer; one that cannot even do that is reported, since nothing more depends on it."""
    try:
        scorer.close()
    except FAILURES:  # at the very end: must not hide why we are closing
        logger.warning("scorer %r failed in close()", scorer.name, exc_info=True)


def describe(error: BaseException) -> str:
    """Returns an exception's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


class Backend(ABC):
    """Runs a scorer. No method waits, except in `SyncBackend` and for a short while in `close`.

    Attributes:
        restarts: how often the scorer was started again.
        dead: why the scorer was given up; empty while there is hope.
    """

    restarts: int = 0
    dead: str = ""
    _to_restore: bytes | None = None

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """Whether the scorer is set up and may be handed a batch."""

    def restore(self, state: bytes) -> None:
        """Lets the scorer take up what it had learned, before the next batch: an `Answer.state` of another back-end."""
        self._to_restore = state

    def _restored_now(self) -> bytes | None:
        """Returns what is to be restored with the batch at hand."""
        state, self._to_restore = self._to_restore, None
        return state

    @abstractmethod
    def submit(self, ticket: int, clips: ClipBatch) -> None:
        """Hands a batch over; tickets are answered in the order in which they were submitted."""

    @abstractmethod
    def collect(self) -> list[Answer]:
        """Returns what was answered since the last call, and keeps the scorer running."""

    @abstractmethod
    def close(self) -> None:
        """Stops the scorer. Batches still unanswered are forgotten. May be called more than once."""


class SyncBackend(Backend):
    """Scores inside `submit`: the reference that the others are compared with.

    Raises:
        ScorerError: the scorer could not be set up.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._answers: list[Answer] = []
        self._closed = False
        try:
            set_up(scorer)
        except ScorerError:
            raise
        except FAILURES as error:
            raise ScorerError(f"scorer {scorer.name!r} cannot be set up: {describe(error)}") from error

    @property
    def accepting(self) -> bool:
        """Always, until closed."""
        return not self._closed

    def submit(self, ticket: int, clips: ClipBatch) -> None:
        """Scores the batch now."""
        begin_s = time.thread_time()
        found = answer(self._scorer, ticket, clips, self._restored_now())
        self._answers.append(replace(found, cpu_s=time.thread_time() - begin_s))

    def collect(self) -> list[Answer]:
        """Returns the answers of the batches submitted since."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Closes the scorer."""
        if not self._closed:
            self._closed = True
            close_quietly(self._scorer)


class ThreadBackend(Backend):
    """Scores in a thread of this process, for scorers that are quick or only wait (for a server, say).

    It cannot stop a scorer that hangs: such a one holds up its two batches and the thread until the program ends, and
    while it computes without releasing the interpreter's lock, training stands still. Use a process for anything slow.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._batches: queue.SimpleQueue[tuple[int, ClipBatch, bytes | None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._unanswered: deque[int] = deque()
        self._ready = False
        self._closed = False
        self._end = "ended its thread"  # why the thread is gone, once it is
        self._refusal: ScorerError | None = None
        self._thread = threading.Thread(target=self._run, name=f"scorer-{scorer.name}", daemon=True)
        self._thread.start()

    @property
    def accepting(self) -> bool:
        """Whether `Scorer.setup` has come back."""
        return self._ready and not self._closed and not self.dead

    def submit(self, ticket: int, clips: ClipBatch) -> None:
        """Queues the batch for the thread."""
        self._unanswered.append(ticket)
        self._batches.put((ticket, clips, self._restored_now()))

    def collect(self) -> list[Answer]:
        """Returns what the thread has answered; once it is gone, that the rest will get no scores.

        Raises:
            ScorerError: the scorer refused to be set up.
        """
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        gone = not self._closed and not self._thread.is_alive()  # asked first, so that no answer comes after the look
        answers = [self._answers.get_nowait() for _ in range(self._answers.qsize())]
        for _ in answers:
            self._unanswered.popleft()
        if gone:
            self.dead = f"it {self._end}"
            answers += [Answer(ticket, error=self._end) for ticket in self._unanswered]
            self._unanswered.clear()
        return answers

    def close(self) -> None:
        """Lets the thread end after the batch it is busy with; says so if that takes longer than a few seconds."""
        if self._closed:
            return
        self._closed = True
        self._batches.put(None)
        self._thread.join(THREAD_GRACE_S)
        if self._thread.is_alive():
            logger.warning("scorer %r is still busy in its thread, which ends with the program", self._scorer.name)

    def _run(self) -> None:
        try:
            set_up(self._scorer)
        except ScorerError as error:
            self._end, self._refusal = "could not be set up", error
            return
        except BaseException as error:  # Ctrl-C reaches the main thread only, so whatever this is, the scorer raised it
            self._end = f"could not be set up ({describe(error)})"
            return
        self._ready = True
        reported_s = 0.0
        try:
            while (batch := self._batches.get()) is not None and not self._closed:
                found, spent_s = answer(self._scorer, *batch), time.thread_time()
                self._answers.put(replace(found, cpu_s=spent_s - reported_s))
                reported_s = spent_s
        except BaseException as error:  # what `answer` does not take for an ordinary failure
            self._end = f"ended its thread (raised {describe(error)})"
        close_quietly(self._scorer)
