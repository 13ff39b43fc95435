"""Gets finished clips scored and the scores written back, without making the learner wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.admission import AdmissionQueue, Content
from vlmrb.scoring.audit import Audit
from vlmrb.scoring.backends import Answer
from vlmrb.scoring.bisection import Bisection
from vlmrb.scoring.budget import Budget
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import Renderer
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.delivery import Delivery
from vlmrb.scoring.failures import MAX_ATTEMPTS, FailureLog
from vlmrb.scoring.meter import ScoringMeter
from vlmrb.scoring.persistence import load_service_state, service_state
from vlmrb.scoring.policies.named import make_policy
from vlmrb.scoring.process import make_backend
from vlmrb.scoring.reception import Reception
from vlmrb.scoring.scorer import FollowsSeed, ScoreControl, Scorer, ScorerError, identity, require_thinnable
from vlmrb.scoring.student.desk import StudentDesk
from vlmrb.scoring.student.start import make_desk
from vlmrb.scoring.throttle import Throttle

if TYPE_CHECKING:
    from vlmrb.replay.buffer import VLMReplayBuffer


ADMIT_CLIPS = 256  # clips looked at in one go, which bounds the memory that a burst takes


class ScoringService:
    """Owns the admission queue, the selection policy, the cache and the back-end; knows nothing of Lightning.

    Call `poll` regularly from the thread that owns the buffer. With the back-ends ``thread`` and ``process`` it never
    waits: it writes scores that have come back, takes in the clips completed since and hands over what the scorer can
    take. At all times ``emitted = scored + waiting + in_flight + stale + dropped``, counted in clips; with a student
    also ``+ student_guessed + student_passed``.

    A scorer that raises, hangs or dies costs the clips it was shown (each is tried twice), at worst all scores to come:
    replay then goes on as if they were never scored. A scorer that answers with something else than numbers in [0, 1],
    one per clip, ends the run.

    Args:
        buffer: where clips come from and scores go.
        scorer: who scores; `Scorer.setup` is called where it runs.
        renderer: draws snapshots for scorers that need frames or observations.
        cache: known scores; asked before anything is queued. ``None`` scores each clip, equal ones too.
        control: changes scores on their way into the buffer.
        pixels: whether the agent observes images, for a student.
        **settings: see `ScoringConfig`.

    Attributes:
        meter: what has been counted and measured.
        queue: what waits for the scorer.
        reception: what looks at clips before they wait.
        budget: what the scorer may still be shown; ``None`` without bounds.
        audit: what is drawn to be scored in any case; ``None`` if nothing is.
        throttle: what makes collection wait; ``None`` if nothing does.
        desk: where a student looks at clips; ``None`` without one.
        bisection: searches positive clips for what made them so; ``None`` does not.

    Raises:
        ScorerError: the scorer has no name or version, needs frames that ``frames_per_clip`` leaves out, or cannot be
            set up (``sync``) or sent to its process (``process``).
        ValueError: a setting cannot work.
    """

    def __init__(
        self,
        buffer: VLMReplayBuffer,
        scorer: Scorer,
        renderer: Renderer | None = None,
        *,
        cache: ScoreCache | None = None,
        control: ScoreControl | None = None,
        pixels: bool = False,
        **settings: Any,
    ) -> None:
        self.config = ScoringConfig(**settings)
        self._identity = identity(scorer)
        require_thinnable(scorer, self.config.frames_per_clip)
        if buffer.clips is None:
            raise ValueError(f"scorer {scorer.name!r} has no clips to score: set replay.clip_length")
        if renderer is None and scorer.needs != "snapshots":
            raise ValueError(f"scorer {scorer.name!r} needs {scorer.needs}, which takes a renderer")
        self.scorer = scorer
        self.cache = cache
        self.control = control
        self._clips = buffer.clips
        self._renderer = renderer
        self.meter = ScoringMeter(buffer.monitor.threshold, scorer.name)
        self._counts = self.meter.counts
        self.budget = None if self.config.budget is None else Budget(self.config.budget)
        share, bound = self.config.audit_share, self.config.max_delay_env_steps
        self.audit = Audit(share, buffer.monitor.threshold, self.config.policy_seed) if share else None
        self.throttle = None if bound is None else Throttle(self, bound)
        waits = self.config.backend != "sync" or self.budget is not None  # from one poll to the next
        room = self.config.max_waiting if waits else None
        policy = make_policy(self.config.policy)
        policy.follow(self.config.policy_seed)
        if isinstance(control, FollowsSeed):
            control.follow(self.config.control_seed)
        self.queue = AdmissionQueue(
            policy,
            room,
            self._clips.contains,
            self._counts,
        )
        self._delivery = Delivery(buffer, control, self.meter, scorer.name)
        self.desk: StudentDesk | None = None
        if self.config.student is not None:
            self.desk = make_desk(
                self.config, buffer, renderer, self.queue, self._counts, self._delivery.guessed, pixels, scorer
            )
        self.reception = Reception(
            self._clips, renderer, scorer, cache, self.audit, self.queue, self.config.frames_per_clip, self.desk
        )
        self._in_flight: dict[int, tuple[list[Content], float]] = {}  # ticket → contents, time of hand-over
        least = self.config.bisect_to
        self.bisection = (
            None
            if least is None
            else Bisection(
                self.config.bisect_by, least, buffer.monitor.threshold, self._clips, renderer, buffer.write_credit, room
            )
        )
        self._next_ticket = 0
        self._searched_last = False  # windows were handed over last
        self._env_steps = 0
        self._given_up = False
        self.closed = False
        self._refused = False  # the run ended because of its scorer, and needs no word about what it would have been
        self._failures = FailureLog(scorer.name)
        self._backend = make_backend(scorer, renderer, self.config)

    # The loop

    def poll(self, env_steps: int) -> None:
        """Moves everything on by what has happened since the last call; does nothing once closed.

        Args:
            env_steps: env steps collected so far; the clock that delays are measured with.

        Raises:
            ScorerError: the scorer's answer has the wrong form, or its process cannot rebuild it.
        """
        if self.closed:
            return
        self._env_steps = env_steps
        if self.budget is not None:
            self.budget.advance(time.monotonic(), env_steps)
        try:
            self._move_on()
        except ScorerError:
            self._refused = True
            raise

    def _move_on(self) -> None:
        self._take(self._backend.collect())
        if self._backend.dead and not self._given_up:
            self._give_up()
        self.admit(self.take_completed())
        if self.desk is not None:
            self.desk.poll()
        if self.queue.waiting or self.bisection:
            self.queue.bound()
            if self.bisection is not None:
                self.bisection.bound()
            self._hand_over()

    def take_completed(self) -> list[int]:
        """Returns the clips completed since the last call, for `admit`."""
        return self._clips.take_completed()

    def keep_up(self, stop: Callable[[], bool]) -> None:
        """Waits for the scorer where ``max_delay_env_steps`` says so; call it after `poll`, see `throttle.Throttle`.

        Args:
            stop: asked again and again; true ends the wait.

        Raises:
            ScorerError: see `poll`.
        """
        if self.throttle is not None:
            self.throttle.wait(self._env_steps, stop)

    def drop_waiting(self, before: int) -> None:
        """Drops what waits for the scorer, was not handed to it, and was completed before that env step."""
        self.queue.drop_overdue(before)

    @property
    def accepting(self) -> bool:
        """Whether the scorer is set up and may be handed clips."""
        return self._backend.accepting

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Waits until the scorer is set up, in a process or thread of its own.

        Args:
            timeout_s: seconds to wait at most.

        Returns:
            Whether it came to that; not if the scorer has been given up.

        Raises:
            ScorerError: see `poll`.
        """
        deadline = time.monotonic() + timeout_s
        while not (self._backend.accepting or self._backend.dead) and time.monotonic() < deadline:
            self._take(self._backend.collect())
            time.sleep(0.01)
        return self._backend.accepting

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing waits and nothing is in flight, but not for what the budget does not allow now.

        Args:
            timeout_s: seconds to wait at most.

        Returns:
            Whether it came to that in time.

        Raises:
            ScorerError: see `poll`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll(self._env_steps)
            if not (self.queue or self.desk or self.bisection):
                return True
            busy = self._in_flight or self.desk or (self.bisection is not None and self.bisection.handed_over)
            spent = self.budget is not None and not self.budget.available and not busy
            if spent or time.monotonic() >= deadline or self.closed:
                return False
            time.sleep(0.002)

    def close(self) -> None:
        """Stops the scorer; may be called more than once. Clips in flight go back to waiting."""
        if self.closed:
            return
        self.closed = True
        self._backend.close()
        if self.desk is not None:
            self.desk.close()
        for contents, _ in self._in_flight.values():
            for content in contents:
                self.queue.put_back(content)
        self._in_flight.clear()
        if not self._refused:
            self._failures.at_the_end(self._counts)

    # Monitoring and persistence

    def stats(self) -> dict[str, float]:
        """Returns counters in clips, and rates.

        Beside the fields of `meter.Counts`: ``waiting``, ``in_flight``, ``restarts``; ``share_scored`` (of the emitted;
        what a student has settled counts as well), ``share_positive`` (of the scored), ``clips_per_s``;
        ``latency_ms_p50`` and ``_p95`` (of a batch, from hand-over to answer), ``delay_env_steps_mean`` and ``_p95``
        (of a clip, from completion to the written score). Rates, latencies and delays are over the latest answers, NaN
        before the first. ``scorer_…`` is what the scorer reports about itself, ``control_…`` what the control does,
        ``budget_…``, ``audit…`` and ``throttled_…`` what `Budget`, `Audit` and `Throttle` say.
        """
        handed_over = [content for contents, _ in self._in_flight.values() for content in contents]
        stats = self.meter.stats() | {
            "waiting": sum(len(content.clip_ids) for content in self.queue.waiting.values()) + len(self.desk or ()),
            "in_flight": sum(len(content.clip_ids) for content in handed_over),
            "restarts": self._backend.restarts,
        }
        for part in (self.budget, self.audit, self.throttle, self.desk, self.bisection):
            stats |= {} if part is None else part.stats()
        if self.desk is not None:
            settled = self._counts.scored + self.desk.sent.guessed + self.desk.sent.passed
            stats["share_scored"] = settled / max(1, self._counts.emitted)
        if self.control is not None:
            stats |= {f"control_{name}": value for name, value in self.control.stats().items()}
        return stats

    def histogram(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns how often scores fell into each of 20 equal bins since the run began: counts and the 21 edges."""
        return self.meter.histogram()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, in tensors and plain types; clips in flight are saved as waiting."""
        return service_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where ``state`` was saved, in a new service on a buffer that has been restored already.

        Another scorer may take over from the one that was saved, with a warning.

        Raises:
            ValueError: the state is of another schema, policy or control; nothing is changed then.
        """
        load_service_state(self, state)

    # Taking clips in, handing them over, taking answers

    def admit(self, clip_ids: Sequence[int]) -> None:
        """Takes in clips that have just been completed, stale ones too; the queue may grow beyond its size."""
        for start in range(0, len(clip_ids), ADMIT_CLIPS):
            self._admit(clip_ids[start : start + ADMIT_CLIPS])

    def _admit(self, clip_ids: Sequence[int]) -> None:
        self._counts.emitted += len(clip_ids)
        if self._given_up:
            self._counts.dropped += len(clip_ids)
            return
        alive = [clip_id for clip_id in clip_ids if self._clips.contains(clip_id)]
        self._counts.stale += len(clip_ids) - len(alive)
        known, keys, scores = self.reception.admit(alive, self._env_steps)
        written = self._delivery.known(known, scores, self._env_steps)
        for clip_id, key, score in zip(known, keys, scores.tolist(), strict=True):
            self._search(clip_id, key, score, written)

    def _hand_over(self) -> None:
        """Hands clips over, in turn with windows of positive ones where there are both."""
        searching = 0 if self.bisection is None else self.bisection.handed_over
        while self._backend.accepting and len(self._in_flight) + searching < self.config.max_in_flight:
            allowed = self.config.batch_clips
            if self.budget is not None:
                allowed = min(allowed, self.budget.available)
            clips = None
            if self.bisection is not None and allowed and not (self._searched_last and self.queue.waiting):
                clips = self.bisection.hand_over(self._next_ticket, allowed)
            if clips is not None:
                searching += 1
                self._searched_last = True
                clips = self.reception.thinned(clips)
            else:
                contents = self.queue.choose(allowed) if allowed else []
                if not contents:
                    break  # nothing more is allowed, or no clip that waited has rows any more
                self._searched_last = False
                self._in_flight[self._next_ticket] = (contents, time.monotonic())
                clips = self.reception.shown([content.clip_ids[-1] for content in contents])
            self._counts.shown += len(clips)
            if self.budget is not None:
                self.budget.spend(len(clips))
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._backend.submit(ticket, clips)
            if self.config.backend == "sync":
                self._take(self._backend.collect())
                searching = 0

    def _take(self, answers: Sequence[Answer]) -> None:
        settled: list[Content] = []
        scores: list[NDArray[np.float32]] = []
        broken = ""
        for found in answers:
            if self.bisection is not None and self.bisection.answered(found):
                if found.scores is None:
                    self._counts.failures += 1
                    if not found.fatal:
                        self._failures.windows_unanswered(found)
                broken = broken or (found.error if found.fatal else "")
                continue
            contents, handed_over = self._in_flight.pop(found.ticket)
            if found.scores is not None:
                self.meter.answered(len(contents), time.monotonic() - handed_over, found.busy_s, found.report)
                settled += contents
                scores.append(found.scores)
                continue
            self._counts.failures += 1
            for content in contents:
                content.attempts += found.blamed
                if found.fatal or content.attempts >= MAX_ATTEMPTS:
                    self.queue.drop(content)
                else:
                    self.queue.put_back(content)
            if found.fatal:
                broken = broken or found.error
            else:
                self._failures.unanswered(found, len(contents))
        if settled:
            self._settle(settled, np.concatenate(scores))
        if broken:
            raise ScorerError(broken)

    def _settle(self, contents: list[Content], scores: NDArray[np.float32]) -> None:
        if self.cache is not None:
            self.cache.put_many([content.key for content in contents], scores)
        for content, score in zip(contents, scores, strict=True):
            self.queue.settle(content)
            if self.audit is not None:
                self.audit.scored(np.full(len(content.audited), score))
        written = self._delivery.scored(contents, scores, self._env_steps)
        if self.desk is not None:
            self.desk.answered(contents, written)
        for content, score in zip(contents, scores.tolist(), strict=True):
            for clip_id in content.clip_ids:
                self._search(clip_id, content.key, score, written)

    def _search(self, clip_id: int, key: bytes, score: float, written: Mapping[int, float]) -> None:
        """Has a clip searched that is positive; what a control alone made so holds nothing to be found."""
        if self.bisection is not None and clip_id in written:
            self.bisection.begin(clip_id, min(score, written[clip_id]), None if self.cache is None else key)

    def _give_up(self) -> None:
        self._given_up = True
        self._failures.given_up(self._backend.dead)
        self.queue.drop_all()
        if self.desk is not None:
            self.desk.drop_all()
        if self.bisection is not None:
            self.bisection.drop_all()
