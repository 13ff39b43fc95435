"""The student's desk: every clip that the cache does not know passes here first, and is sent on by what it guesses."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.scoring.admission import AdmissionQueue, Content
from vlmrb.scoring.backends import Answer, Backend
from vlmrb.scoring.clips import Renderer
from vlmrb.scoring.failures import FailureLog
from vlmrb.scoring.meter import Counts
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.scoring.student.entries import Entry, Sent, Where
from vlmrb.scoring.student.trust import Trust

if TYPE_CHECKING:
    from vlmrb.replay.clips import ClipStore

logger = logging.getLogger(__name__)

BATCH_CLIPS = 64  # most clips in one message to the student
IN_FLIGHT = 2  # messages not answered yet
AGAIN_EVERY = 8  # messages between two that look at clips again


class StudentDesk:
    """Asks the student about clips, sends them on, and tells it what the scorer said.

    Args:
        config: see there.
        backend: where the student runs.
        clips: where clips are kept.
        renderer: makes observations of their snapshots.
        queue: the scorer's.
        threshold: τ, strictly exceeded by a positive score.
        counts: where stale and dropped clips are counted.
        deliver: writes guesses ``float32[B]`` of clips.
        credit: hears which transitions made clips positive, ``bool[B, L − 1]``.
        at_once: wait for the student's answers, which come within `Backend.submit`.
        max_waiting: most new clips waiting for the student; ``None`` for no bound.

    Attributes:
        trust: whether guesses count.
        sent: what has become of clips.
        answers: messages that the student has answered, or failed on.
    """

    def __init__(
        self,
        config: StudentConfig,
        backend: Backend,
        clips: ClipStore,
        renderer: Renderer,
        queue: AdmissionQueue,
        threshold: float,
        counts: Counts,
        deliver: Callable[[list[int], NDArray[np.float32]], None],
        credit: Callable[[list[int], NDArray[np.bool_]], None],
        at_once: bool = False,
        max_waiting: int | None = None,
    ) -> None:
        self.trust = Trust(config.min_recall, config.min_positives)
        self.sent = Sent()
        self.answers = 0
        self._config = config
        self._backend = backend
        self._clips = clips
        self._renderer = renderer
        self._queue = queue
        self._threshold = threshold
        self._counts = counts
        self._deliver = deliver
        self._credit = credit
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._new: deque[Entry] = deque()
        self._told: deque[Entry] = deque(maxlen=2 * config.memory_clips)
        self._settled: deque[Entry] = deque(maxlen=config.look_again)  # guessed or passed, oldest first
        self._in_flight: dict[int, list[Entry]] = {}
        self._next_ticket = 0
        self._report: dict[str, float] = {}
        self._learned: bytes | None = None  # as of its latest answer; its process may be busy, or gone
        self._restarts = 0
        self._begun = time.monotonic()
        self._cpu_s = 0.0
        self._given_up = False
        self._failures = FailureLog("student")

    def __len__(self) -> int:
        """Clips that are with the student, those that are looked at again left out."""
        return len(self._new) + sum(entry.waits for entries in self._in_flight.values() for entry in entries)

    @property
    def accepting(self) -> bool:
        """Whether the student is set up and may be handed clips."""
        return self._backend.accepting

    def overdue(self, before: int) -> bool:
        """Whether one of these clips was completed before that env step."""
        in_flight = (entry for entries in self._in_flight.values() for entry in entries)
        return any(entry.waits and entry.completed < before for entry in chain(self._new, in_flight))

    def add(self, key: bytes, clip_id: int, completed: int, described: Any, audited: bool) -> None:
        """Takes in a clip that has just been completed; the arguments are those of `AdmissionQueue.add`."""
        self._new.append(Entry(key, clip_id, completed, described, audited))

    def answered(self, contents: Sequence[Content], scores: Mapping[int, float]) -> None:
        """Hears what has been written of contents, by clip id: to learn from, and to be judged by."""
        for content in contents:
            score = next((scores[clip_id] for clip_id in reversed(content.clip_ids) if clip_id in scores), None)
            if score is None:
                continue
            if content.evidence and not math.isnan(content.guess):
                self.trust.note(content.guess > self._config.ask_from, score > self._threshold)
            self._told.append(Entry(content.key, content.clip_ids[-1], content.completed[-1], score=score))

    def poll(self) -> None:
        """Sends on what the student has looked at, and hands it what is waiting for it."""
        self._take(self._backend.collect())
        if self._backend.dead:
            self._give_up()
        elif self._backend.restarts > self._restarts:
            self._restarts = self._backend.restarts
            self._remind()
        while self._backend.accepting and len(self._in_flight) < IN_FLIGHT and (entries := self._message()):
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._in_flight[ticket] = entries
            clips = self._clips.batch([entry.clip_id for entry in entries], self._renderer)
            clips = clips.answering(np.array([entry.score for entry in entries], np.float32))
            self._backend.submit(ticket, clips)
            if self._at_once:
                self._take(self._backend.collect())
        self._bound()

    def close(self) -> None:
        """Stops the student; clips with it go back to waiting."""
        self._backend.close()
        waiting = [entry for entries in self._in_flight.values() for entry in entries if entry.waits]
        self._new.extendleft(reversed(waiting))
        self._in_flight.clear()

    def drop_all(self) -> None:
        """Forgets the clips that are with the student: nobody will score them."""
        self._counts.dropped += len(self)
        self._new.clear()
        self._in_flight.clear()
        self._backend.close()

    def stats(self) -> dict[str, float]:
        """Returns ``student_NAME``: what became of clips, how far it is to be trusted, and what it says of itself."""
        own = {
            "waiting": len(self),
            "to_scorer": self.sent.to_scorer,
            "guessed": self.sent.guessed,
            "passed": self.sent.passed,
            "changed": self.sent.changed,
            "trusted": float(self.trust.trusted),
            "recall": self.trust.recall,
            "precision": self.trust.precision,
            "cpu_share": self._cpu_s / max(time.monotonic() - self._begun, 1e-9),
        }
        return {f"student_{name}": value for name, value in (own | self._report).items()}

    def _take(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            entries = self._in_flight.pop(answer.ticket)
            self.answers += 1
            self._cpu_s += answer.cpu_s
            if answer.scores is None:
                self._failures.unguessed(answer, len(entries))
                self._unguessed(entries)
            else:
                self._report = answer.report
                self._learned = answer.state or self._learned
                probabilities = self._probabilities(answer)
                self._send_on(entries, probabilities)
                self._give_credit(entries, probabilities, answer.details)

    def _message(self) -> list[Entry]:
        """Returns what the student is to be handed next: answers first, then new clips, now and then old ones."""
        found = self._alive(self._told, BATCH_CLIPS)
        found += self._alive(self._new, BATCH_CLIPS - len(found))
        if self.trust.trusted and self._next_ticket % AGAIN_EVERY == 0:
            found += self._alive(self._settled, BATCH_CLIPS - len(found))
        return found

    def _alive(self, entries: deque[Entry], count: int) -> list[Entry]:
        """Takes up to ``count`` entries off a queue; clips that are no longer in the store leave it."""
        found: list[Entry] = []
        while entries and len(found) < count:
            entry = entries.popleft()
            if self._clips.contains(entry.clip_id):
                found.append(entry)
            else:
                self._counts.stale += entry.waits
        return found

    def _bound(self) -> None:
        """Makes room: clips whose rows are gone leave first, then the oldest; audited ones go on without a guess."""
        if self._max_waiting is None or len(self._new) <= self._max_waiting:
            return
        alive = self._alive(self._new, len(self._new))
        excess = max(0, len(alive) - self._max_waiting)
        self._new.extend(alive[excess:])
        for entry in alive[:excess]:
            if entry.audited:
                self._to_scorer(entry, math.nan)
            else:
                self._counts.dropped += 1

    def _probabilities(self, answer: Answer) -> NDArray[np.float64]:
        """Corrects guesses that are made as if every second clip were positive."""
        assert answer.scores is not None
        chance = np.clip(answer.scores.astype(np.float64), 1e-6, 1 - 1e-6)
        odds = chance / (1 - chance) * self.trust.prior / (1 - self.trust.prior)
        return odds / (1 + odds)

    def _send_on(self, entries: Sequence[Entry], probabilities: NDArray[np.float64]) -> None:
        guessed: list[tuple[Entry, float]] = []
        for entry, probability in zip(entries, probabilities.tolist(), strict=True):
            if not math.isnan(entry.score):
                continue
            if not self._clips.contains(entry.clip_id):
                self._counts.stale += entry.waits
                continue
            where = self._where(entry, probability)
            if entry.again and where is not Where.SCORER:
                before = self._clips.score_of(entry.clip_id) > self._threshold  # of NaN this is false
                self.sent.changed += (probability > self._threshold) != before
            if where is Where.SCORER:
                self._to_scorer(entry, probability)
            elif where is Where.STUDENT:
                guessed.append((entry, probability))
                self.sent.guessed += not entry.again
            else:
                self.sent.passed += not entry.again
            if where is not Where.SCORER:
                entry.again = True
                self._settled.append(entry)
        if guessed:
            guesses = np.array([probability for _, probability in guessed], np.float32)
            self._deliver([entry.clip_id for entry, _ in guessed], guesses)

    def _give_credit(
        self, entries: Sequence[Entry], probabilities: NDArray[np.float64], logits: NDArray[np.float32] | None
    ) -> None:
        """Says what made clips positive that count as such: by the scorer's answer, or else by a guess that stands."""
        score = np.array([entry.score for entry in entries])
        stands = np.array([self._config.role == "answering" and self.trust.trusted] * len(entries))
        positive = np.where(np.isnan(score), stands & (probabilities > self._threshold), score > self._threshold)
        if logits is None or not positive.any():
            return
        strongest = logits.max(1, keepdims=True)
        decisive = logits >= np.minimum(strongest, 0.0)  # each that makes a clip positive by itself
        rows = np.flatnonzero(positive)
        self._credit([entries[row].clip_id for row in rows.tolist()], decisive[rows])

    def _where(self, entry: Entry, probability: float) -> Where:
        if entry.audited or not self.trust.trusted:
            return Where.SCORER
        if probability <= self._config.ask_from:
            return Where.STUDENT if self._config.role == "answering" else Where.NOBODY
        if self._config.role == "answering" and probability >= self._config.ask_to:
            return Where.STUDENT
        return Where.SCORER

    def _to_scorer(self, entry: Entry, probability: float) -> None:
        self.sent.to_scorer += 1
        if entry.again:
            if math.isnan(self._clips.score_of(entry.clip_id)):
                self.sent.passed -= 1
            else:
                self.sent.guessed -= 1
        evidence = entry.audited or not (self.trust.trusted or self._queue.policy.reads_guesses)
        self._queue.add(
            entry.key,
            entry.clip_id,
            entry.completed,
            described=entry.described,
            audited=entry.audited,
            guess=probability,
            evidence=evidence,
        )

    def _unguessed(self, entries: Sequence[Entry]) -> None:
        """Sends clips on that the student has failed on; what it was to learn from them is lost."""
        for entry in entries:
            if entry.waits:
                self._to_scorer(entry, math.nan)  # a clip that is no longer in the store leaves the queue by itself

    def _give_up(self) -> None:
        if not self._given_up:
            self._given_up = True
            logger.error(
                "THE STUDENT IS GIVEN UP: %s. From now on every clip goes to the scorer, as far as the budget allows",
                self._backend.dead,
            )
        self._unguessed(list(self._new))
        self._new.clear()
        self._told.clear()

    def _remind(self) -> None:
        """Gives a new student what the old one had learned, and tells it again what the scorer has said."""
        if self._learned is not None:
            self._backend.restore(self._learned)
        scored = self._clips.scored(len(self._clips))
        kinds = [[row for row in scored if (row[1] > self._threshold) == positive] for positive in (False, True)]
        kept = sorted(row for rows in kinds for row in rows[-self._config.memory_clips :])
        self._told.clear()
        self._told.extend(Entry(b"", clip_id, 0, score=score) for clip_id, score in kept)

    # Persistence

    def state_dict(self) -> dict[str, Any]:
        """Returns the clips with the student, those to look at again, the evidence, and what it has learned.

        That is as of its latest answer: nobody waits for a busy student, and one that is gone has left it behind.
        """
        learned = None if self._learned is None else torch.frombuffer(bytearray(self._learned), dtype=torch.uint8)
        with_student = [e for entries in self._in_flight.values() for e in entries if math.isnan(e.score)]
        waiting = [entry for entry in (*with_student, *self._new) if not entry.again]
        settled = [entry for entry in (*self._settled, *with_student) if entry.again]
        return {
            "waiting": [[entry.clip_id, entry.completed, entry.audited] for entry in waiting],
            "settled": [[entry.clip_id, entry.completed] for entry in settled],
            "trust": self.trust.state_dict(),
            "sent": vars(self.sent).copy(),
            "learned": learned,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], look: Callable[[Sequence[int]], Sequence[tuple[bytes, Any]]]
    ) -> None:
        """Takes up where ``state`` was saved, and reminds a new student of what the old one had learned.

        Args:
            state: as `state_dict` returned it; of an earlier version it lacks what the student had learned, which then
                learns anew from the scorer's answers for the clips that are kept.
            look: finds keys and descriptions of clips in the store, as `Reception.look`.
        """
        self.trust.load_state_dict(state["trust"])
        self.sent = Sent(**state["sent"])
        for name, target in (("waiting", self._new), ("settled", self._settled)):
            alive = [row for row in state[name] if self._clips.contains(row[0])]
            self._counts.stale += len(state[name]) - len(alive) if name == "waiting" else 0
            for row, (key, described) in zip(alive, look([row[0] for row in alive]), strict=True):
                audited = bool(row[2]) if len(row) > 2 else False
                target.append(Entry(key, row[0], row[1], described, audited, again=name == "settled"))
        if state.get("learned") is not None:
            self._learned = state["learned"].numpy().tobytes()
        self._remind()
