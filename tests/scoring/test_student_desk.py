"""Where clips go by a student's guess, and that none is lost on the way, whatever student and scorer do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.scoring.odd_scorers import GoodScorer, GreyRenderer
from tests.scoring.replay_tools import Episodes, make_buffer

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.credit import CreditTerm
from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring import throttle
from vlmrb.scoring.admission import Content
from vlmrb.scoring.backends import Answer, Backend
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.process import make_backend
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.student import desk as desk_module
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.scoring.student.desk import StudentDesk
from vlmrb.scoring.student.scorer import StudentScorer

Judge = Callable[[ClipBatch], NDArray[np.float32]]


class Shown:
    """Observations are the snapshots themselves."""

    name = "shown"

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        raise AssertionError("nobody asks for frames")

    def observe(self, snapshots: NDArray) -> NDArray:
        return snapshots


def truth(clips: ClipBatch) -> NDArray[np.float32]:
    """The scorer's opinion: every third episode is good."""
    return np.where(clips.snapshots[:, 0, 0] % 3 == 0, 0.9, 0.2).astype(np.float32)


class Oracle(Scorer):
    name, version, needs = "oracle", "1", "snapshots"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        return truth(clips)


class Scripted(Backend):
    """Answers when it is told to, and keeps what it was shown and told."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.batches: list[tuple[int, ClipBatch]] = []
        self.answers: list[Answer] = []
        self.told: dict[int, float] = {}
        self.shown: list[int] = []
        self.restored: list[bytes | None] = []
        self.open = True

    @property
    def accepting(self) -> bool:
        return self.open and not self.dead

    def submit(self, ticket: int, clips: ClipBatch) -> None:
        self.batches.append((ticket, clips))
        self.restored.append(self._restored_now())
        known = np.zeros(len(clips), bool) if clips.answers is None else ~np.isnan(clips.answers)
        self.shown += clips.clip_ids[~known].tolist()
        if clips.answers is not None:
            self.told |= dict(zip(clips.clip_ids[known].tolist(), clips.answers[known].tolist(), strict=True))

    def collect(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.batches.clear()

    def answer(self, good: bool = True) -> None:
        for ticket, clips in self.batches:
            learned = f"learned from {len(self.restored)}".encode()
            found = Answer(ticket, self.judge(clips), state=learned) if good else Answer(ticket, error="raised")
            self.answers.append(found)
        self.batches.clear()


class Desk:
    """A service whose scorer and student answer when they are told to."""

    def __init__(
        self, guess: Judge, buffer: VLMReplayBuffer | None = None, scoring: dict[str, Any] | None = None, **student: Any
    ) -> None:
        self.buffer = make_buffer(terms=[VLMTerm(0.5)]) if buffer is None else buffer
        self.student, self.scorer = Scripted(guess), Scripted(truth)
        defaults = {"min_positives": 2, "look_again": 0}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vlmrb.scoring.service.make_backend", lambda *_: self.scorer)
            patch.setattr("vlmrb.scoring.student.start.make_backend", lambda *_: self.student)
            self.service = ScoringService(
                self.buffer, Oracle(), Shown(), student=StudentConfig(**defaults | student), **scoring or {}
            )
        assert self.service.desk is not None
        self.desk = self.service.desk
        self.episodes = Episodes(end=0.3)

    def clips(self, count: int) -> list[int]:
        """Completes clips and lets the student look at them; returns their ids."""
        assert self.buffer.clips is not None
        first = self.buffer.clips.emitted
        while self.buffer.clips.emitted < first + count:
            self.buffer.extend(self.episodes.block(1))
        table = self.buffer.clips.table()["clip_id"]
        self.turn()
        return [int(clip_id) for clip_id in table[-(self.buffer.clips.emitted - first) :]]

    def turn(self) -> None:
        for _ in range(3):
            self.service.poll(0)
            self.student.answer()
        self.service.poll(0)

    def score(self) -> None:
        while self.service.queue.waiting or self.scorer.batches:
            self.scorer.answer()
            self.service.poll(0)
        self.scorer.answer()
        self.service.poll(0)

    def trusted(self) -> None:
        """Earns trust."""
        while not self.desk.trust.trusted:
            self.clips(4)
            self.score()
        self.turn()

    def written(self, ids: Sequence[int]) -> list[tuple[float, bool]]:
        assert self.buffer.clips is not None
        table = self.buffer.clips.table()
        rows = [int(np.flatnonzero(table["clip_id"] == clip_id)[0]) for clip_id in ids]
        return [(float(table["score"][row]), bool(table["guessed"][row])) for row in rows]


def right(clips: ClipBatch) -> NDArray[np.float32]:
    return np.where(truth(clips) > 0.5, 0.999, 0.001).astype(np.float32)


def unsure(clips: ClipBatch) -> NDArray[np.float32]:
    return np.full(len(clips), 0.6, np.float32)


def check_counts(service: ScoringService) -> dict[str, float]:
    stats = service.stats()
    places = ("scored", "waiting", "in_flight", "stale", "dropped", "student_guessed", "student_passed")
    assert stats["emitted"] == sum(stats[place] for place in places)
    return stats


def test_until_it_is_trusted_the_scorer_sees_every_clip_and_it_hears_every_answer() -> None:
    desk = Desk(right, min_positives=1000)
    ids = desk.clips(30)
    desk.score()
    desk.turn()
    assert sorted(desk.scorer.shown) == sorted(ids)
    assert desk.student.told == pytest.approx(dict(zip(ids, (score for score, _ in desk.written(ids)), strict=True)))
    assert not any(guessed for _, guessed in desk.written(ids))
    assert desk.desk.trust.recall == 1.0
    check_counts(desk.service)


def test_answering_sure_guesses_stand_for_scores_and_the_scorer_is_asked_about_the_others() -> None:
    desk = Desk(right)
    desk.trusted()
    desk.scorer.shown.clear()
    ids = desk.clips(20)
    desk.score()
    assert desk.scorer.shown == []
    written = desk.written(ids)
    assert all(guessed for _, guessed in written)
    assert desk.buffer.clips is not None
    expected = truth(desk.buffer.clips.batch(ids)) > 0.5
    assert [score > 0.5 for score, _ in written] == expected.tolist()
    assert 0 < expected.sum() < len(ids)
    desk.student.judge = unsure
    ids = desk.clips(20)
    desk.score()
    assert sorted(desk.scorer.shown) == sorted(ids)
    assert not any(guessed for _, guessed in desk.written(ids))
    assert check_counts(desk.service)["student_guessed"] == len(expected)


def test_screening_only_the_scorer_counts_and_sure_negatives_stay_unscored() -> None:
    desk = Desk(right, role="screening")
    desk.trusted()
    desk.scorer.shown.clear()
    ids = desk.clips(20)
    desk.score()
    assert desk.buffer.clips is not None
    positive = truth(desk.buffer.clips.batch(ids)) > 0.5
    assert sorted(desk.scorer.shown) == [clip_id for clip_id, yes in zip(ids, positive, strict=True) if yes]
    for (score, guessed), yes in zip(desk.written(ids), positive, strict=True):
        assert not guessed
        assert score > 0.5 if yes else np.isnan(score)
    assert check_counts(desk.service)["student_passed"] == (~positive).sum()


def test_audited_clips_go_to_the_scorer_whatever_it_thinks_and_take_its_trust_away() -> None:
    desk = Desk(right, scoring={"audit_share": 1.0})
    desk.trusted()
    desk.scorer.shown.clear()
    desk.student.judge = lambda clips: np.full(len(clips), 0.001, np.float32)  # it has forgotten everything
    ids = desk.clips(12)
    desk.score()
    assert sorted(desk.scorer.shown) == sorted(ids)
    assert not desk.desk.trust.trusted


def test_what_it_thinks_otherwise_of_later_is_put_right() -> None:
    desk = Desk(right, look_again=100)
    desk.trusted()
    desk.student.judge = lambda clips: np.full(len(clips), 0.001, np.float32)
    ids = desk.clips(20)
    assert all(score < 0.5 and guessed for score, guessed in desk.written(ids))
    desk.student.judge = right
    desk.scorer.shown.clear()
    for _ in range(20):
        desk.turn()
        desk.clips(1)
    assert desk.buffer.clips is not None
    expected = truth(desk.buffer.clips.batch(ids)) > 0.5
    assert [score > 0.5 for score, _ in desk.written(ids)] == expected.tolist()
    assert check_counts(desk.service)["student_changed"] >= expected.sum() > 0


@pytest.mark.parametrize(
    ("scoring", "student", "seed"),
    [({}, {}, 2), ({"seed": 5}, {}, 7), ({"seed": 5}, {"seed": 1}, 1), ({}, {"seed": 0}, 0)],
)
def test_a_student_is_given_the_seed_of_scoring_unless_it_has_its_own(
    scoring: dict[str, int], student: dict[str, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorers: list[StudentScorer] = []

    def noted(scorer: StudentScorer, *others: Any) -> Backend:
        scorers.append(scorer)
        return make_backend(scorer, *others)

    monkeypatch.setattr("vlmrb.scoring.student.start.make_backend", noted)
    settings = scoring | {"student": StudentConfig(**student)}
    ScoringService(make_buffer(), Oracle(), Shown(), backend="sync", **settings).close()
    scorers[0].score(ClipBatch(np.arange(1), np.zeros((1, 4, 3)), np.array([4]), Shown()))
    assert scorers[0]._student is not None
    assert scorers[0]._student._seed == seed


def test_its_share_of_the_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(desk_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    desk = Desk(right)
    desk.buffer.extend(desk.episodes.block(9))
    for good in (True, False):
        desk.service.poll(0)
        desk.student.answer(good)
        desk.student.answers = [replace(found, cpu_s=0.5) for found in desk.student.answers]
        desk.buffer.extend(desk.episodes.block(9))
    desk.service.poll(0)
    clock.now += 20.0
    assert check_counts(desk.service)["student_cpu_share"] == pytest.approx(1.0 / 20)


def test_a_student_that_fails_on_clips_or_dies_leaves_them_to_the_scorer(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(right, min_positives=1000)
    for _ in range(2):
        desk.buffer.extend(desk.episodes.block(9))
        desk.service.poll(0)
        desk.student.answer(good=False)
        desk.turn()
    said = [record.message for record in caplog.records if "student" in record.message]
    assert len(said) == 1
    assert "scorer 'student' gave no guesses for" in said[0]
    assert "(it raised); those that waited for one go to the scorer. Said once" in said[0]
    desk.score()
    assert check_counts(desk.service)["scored"] == desk.buffer.stats()["clips_emitted"] > 0
    desk.buffer.extend(desk.episodes.block(9))
    desk.student.open = False
    desk.service.poll(0)
    desk.student.dead = "it died"
    desk.service.poll(0)
    desk.score()
    stats = check_counts(desk.service)
    assert stats["scored"] == stats["emitted"]


def test_a_student_that_does_not_keep_up_is_left_the_newest_clips_and_the_scorer_those_of_the_audit() -> None:
    desk = Desk(
        right, min_positives=1000, scoring={"max_waiting": 40, "audit_share": 0.2, "budget": BudgetConfig(total=1)}
    )
    desk.student.open = False
    ids: list[int] = []
    for _ in range(5):
        ids += desk.clips(24)
        assert len(desk.desk) <= 40
    stats = check_counts(desk.service)
    passed_over = len(ids) - len(desk.desk)
    assert stats["student_to_scorer"] > 5
    assert stats["dropped"] == passed_over - stats["student_to_scorer"] > 20
    desk.student.open = True
    desk.turn()
    assert sorted(desk.student.shown) == ids[-40:]


def test_guesses_that_are_made_as_if_half_were_positive_are_corrected_by_how_many_are() -> None:
    desk = Desk(lambda clips: np.full(len(clips), 0.5, np.float32), min_positives=1000)
    desk.clips(30)
    desk.score()
    prior = desk.desk.trust.prior
    assert 0.15 < prior < 0.5
    desk.scorer.open = False  # they stay where they can be seen
    desk.clips(3)
    guesses = [content.guess for content in desk.service.queue.waiting.values()]
    assert guesses
    assert guesses == pytest.approx([prior] * len(guesses))


def test_a_resumed_desk_has_the_same_clips_and_evidence_and_a_student_that_knows_as_much() -> None:
    desk = Desk(right, role="screening", look_again=100)
    desk.trusted()
    desk.clips(20)
    desk.score()
    desk.student.open = False  # what comes now stays at the desk
    desk.buffer.extend(desk.episodes.block(9))
    desk.service.poll(0)
    waiting = len(desk.desk)
    assert waiting > 0
    buffer = make_buffer(terms=[VLMTerm(0.5)])
    buffer.load_state_dict(desk.buffer.state_dict())
    again = Desk(right, buffer=buffer, role="screening", look_again=100)
    again.service.load_state_dict(desk.service.state_dict())
    assert len(again.desk) == waiting
    assert again.desk.trust.recall == desk.desk.trust.recall
    assert again.desk.trust.trusted
    before, after = check_counts(desk.service), check_counts(again.service)
    assert {name: after[name] for name in before if name.startswith("student_")} == pytest.approx(
        {name: value for name, value in before.items() if name.startswith("student_")}, nan_ok=True
    )
    again.turn()
    assert again.student.restored[0] == desk.desk._learned is not None
    assert not any(again.student.restored[1:])
    assert buffer.clips is not None
    assert again.student.told == pytest.approx(dict(buffer.clips.scored(10_000)))
    again.score()
    assert check_counts(again.service)["waiting"] == 0


def test_a_resumed_queue_knows_the_guesses_and_which_clips_tell_how_good_they_are() -> None:
    desk = Desk(unsure, scoring={"policy": "uncertainty", "audit_share": 0.3})
    desk.scorer.open = False
    desk.clips(20)
    buffer = make_buffer(terms=[VLMTerm(0.5)])
    buffer.load_state_dict(desk.buffer.state_dict())
    again = Desk(unsure, buffer=buffer, scoring={"policy": "uncertainty", "audit_share": 0.3})
    again.service.load_state_dict(desk.service.state_dict())
    before, after = ([vars_of(content) for content in one.service.queue.waiting.values()] for one in (desk, again))
    assert after == before
    assert {content["evidence"] for content in after} == {True, False}
    assert all(0 < content["guess"] < 1 for content in after)


def vars_of(content: Content) -> dict[str, Any]:
    return {name: getattr(content, name) for name in Content.__slots__}


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("student", [True, False])
def test_no_clip_is_lost_in_a_run_that_is_resumed_with_a_student_or_without(student: bool, alive: bool) -> None:
    desk = Desk(right, scoring={"audit_share": 0.2})
    desk.trusted()
    desk.clips(20)
    desk.score()
    desk.student.open = False
    desk.buffer.extend(desk.episodes.block(30))
    desk.service.poll(0)
    assert len(desk.desk) > 10
    before, state = check_counts(desk.service), desk.service.state_dict()
    buffer = make_buffer(terms=[VLMTerm(0.5)])
    if alive:
        buffer.load_state_dict(desk.buffer.state_dict())
    resumed = Desk(right, buffer=buffer).service if student else ScoringService(buffer, Oracle(), backend="sync")
    resumed.load_state_dict(state)
    resumed.poll(0)
    after = resumed.stats()
    settled = sum(after.get(f"student_{name}", 0) for name in ("guessed", "passed"))
    assert after["emitted"] == before["emitted"] > before["student_guessed"] > 0
    assert after["emitted"] == settled + sum(
        after[name] for name in ("scored", "waiting", "in_flight", "stale", "dropped")
    )
    if alive and not student:
        assert after["scored"] == before["scored"] + before["waiting"]


def test_without_what_a_student_had_learned_a_checkpoint_is_of_an_earlier_version_and_teaches_it_again() -> None:
    desk = Desk(right)
    desk.trusted()
    state = desk.service.state_dict()
    del state["student"]["learned"]
    buffer = make_buffer(terms=[VLMTerm(0.5)])
    buffer.load_state_dict(desk.buffer.state_dict())
    again = Desk(right, buffer=buffer)
    again.service.load_state_dict(state)
    again.turn()
    assert not any(again.student.restored)
    assert buffer.clips is not None
    assert again.student.told == pytest.approx(dict(buffer.clips.scored(10_000)))


def test_a_checkpoint_holds_what_a_student_had_learned_when_it_died() -> None:
    desk = Desk(right)
    desk.trusted()
    desk.student.open, desk.student.dead = False, "it died"
    desk.service.poll(0)
    state = desk.service.state_dict()
    assert bytes(state["student"]["learned"].tolist()) == desk.desk._learned is not None


def test_a_student_that_is_started_again_is_reminded_of_the_latest_clips_of_each_kind() -> None:
    desk = Desk(right, memory_clips=5, min_positives=1000)
    desk.clips(60)
    desk.score()
    desk.turn()
    desk.student.told.clear()
    desk.student.restarts, learned = 1, desk.desk._learned
    restored = len(desk.student.restored)
    desk.turn()
    assert desk.student.restored[restored] == learned is not None
    assert not any(desk.student.restored[restored + 1 :])
    assert desk.buffer.clips is not None
    scored = desk.buffer.clips.scored(10_000)
    positive = [row for row in scored if row[1] > 0.5]
    negative = [row for row in scored if row[1] <= 0.5]
    assert len(positive) > 5
    assert desk.student.told == pytest.approx(dict(positive[-5:] + negative[-5:]))


@pytest.mark.parametrize("backend", ["sync", pytest.param("process", marks=pytest.mark.slow)])
def test_a_resumed_student_guesses_as_before_from_its_first_message_on(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[dict[int, float]] = []
    take = StudentDesk._take

    def watched(desk: StudentDesk, answers: Sequence[Answer]) -> None:
        for answer in answers:
            assert answer.scores is not None
            ids = [entry.clip_id for entry in desk._in_flight[answer.ticket]]
            messages.append(dict(zip(ids, answer.scores.tolist(), strict=True)))
        take(desk, answers)

    def prompt(scorer: Scorer, renderer: Renderer | None, config: ScoringConfig) -> Backend:
        return make_backend(scorer, renderer, replace(config, low_priority=False))  # a busy machine would starve it

    monkeypatch.setattr(StudentDesk, "_take", watched)
    monkeypatch.setattr("vlmrb.scoring.student.start.make_backend", prompt)
    settings = {"backend": backend, "student": StudentConfig(min_positives=1000)}
    buffer, episodes = make_buffer(terms=[VLMTerm(0.5)]), Episodes(end=0.3)
    service = ScoringService(buffer, GoodScorer(), GreyRenderer(), **settings)
    for _ in range(10):
        episodes.clips(buffer, 5)
        assert service.drain(590)
    while service.desk._told or service.desk._in_flight:
        service.poll(0)
        time.sleep(0.002)
    assert service.stats()["student_steps"] > 4
    state = service.state_dict()
    service.close()
    before = messages[-1]
    messages.clear()
    other = make_buffer(terms=[VLMTerm(0.5)])
    other.load_state_dict(buffer.state_dict())
    resumed = ScoringService(other, GoodScorer(), GreyRenderer(), **settings)
    resumed.load_state_dict(state)
    while resumed.desk._told or resumed.desk._in_flight:
        resumed.poll(0)
        time.sleep(0.002)
    after = {clip_id: guess for message in messages for clip_id, guess in message.items()}
    assert {clip_id: after[clip_id] for clip_id in before} == pytest.approx(before)
    assert resumed.stats()["student_steps"] == service.stats()["student_steps"]
    assert len(set(before.values())) > 1
    resumed.close()


class Waiting(Desk):
    """Training that waits for scores: collects a clip at env step 0, and the next at `now`."""

    def __init__(self, **scoring: Any) -> None:
        super().__init__(right, scoring={"max_delay_env_steps": 50, "timeout_s": 30.0} | scoring)
        self.now = 0
        self.asked = 0

    def collect(self, stop: Callable[[], bool]) -> int:
        """Returns how often it was asked whether to stop."""
        self.buffer.extend(self.episodes.block(9))
        self.service.poll(self.now)
        self.now += 60
        self.service.poll(self.now)
        self.asked = 0

        def counting() -> bool:
            self.asked += 1
            return stop()

        self.service.keep_up(counting)
        return self.asked


def test_collection_waits_for_clips_that_are_with_the_student_and_then_for_the_scorer() -> None:
    desk = Waiting()

    def answer() -> bool:
        if desk.asked == 3:
            desk.student.answer()
        if desk.asked == 6:
            desk.scorer.answer()
        return False

    assert desk.collect(answer) == 6
    stats = check_counts(desk.service)
    assert stats["scored"] == stats["emitted"] > 0


def test_without_a_budget_for_the_scorer_collection_waits_for_the_student_alone() -> None:
    desk = Waiting(budget=BudgetConfig(total=1))
    desk.service.budget.spend(1)

    def answer() -> bool:
        if desk.asked == 3:
            desk.student.answer()
        return False

    assert desk.collect(answer) == 3
    stats = check_counts(desk.service)
    assert stats["dropped"] == stats["emitted"] > 0


def test_a_signal_ends_the_wait_for_the_student_and_drops_nothing() -> None:
    desk = Waiting()
    assert desk.collect(lambda: desk.asked == 4) == 4
    stats = check_counts(desk.service)
    assert stats["waiting"] == stats["emitted"] > 0


def test_a_student_that_dies_while_it_is_waited_for_leaves_its_clips_to_the_scorer() -> None:
    desk = Waiting()

    def die() -> bool:
        if desk.asked == 3:
            desk.student.answer(good=False)  # the back-end gives up what is in flight
            desk.student.dead = "it died"
        if desk.asked > 3:
            desk.scorer.answer()
        return False

    desk.collect(die)
    stats = check_counts(desk.service)
    assert stats["scored"] == stats["emitted"] > 0


def test_a_student_that_is_silent_is_waited_for_only_so_long_and_again_once_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + 5.0)
    monkeypatch.setattr(throttle, "time", clock)
    desk = Waiting()
    assert desk.collect(lambda: False) == 13  # twice 30 s are over
    assert desk.collect(lambda: False) == 0
    assert [
        record.message for record in caplog.records if "the student has not been heard of for 65 s" in record.message
    ]
    assert check_counts(desk.service)["dropped"] == 0
    desk.turn()
    desk.score()
    desk.student.open = False
    caplog.clear()
    assert desk.collect(lambda: False) == 361  # twice 900 s, since it is not set up
    assert "the student has not been heard of for 1805 s" in caplog.text


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["extend", "extend", "poll", "student", "scorer", "fail", "shut", "open"]), max_size=60),
    st.sampled_from(["answering", "screening"]),
    st.sampled_from([right, unsure]),
    st.sampled_from([0.0, 0.3]),
)
def test_whatever_happens_no_clip_is_lost_from_the_counts_and_scores_are_the_scorers(
    events: list[str], role: str, guess: Judge, audit_share: float
) -> None:
    buffer = make_buffer(capacity=64, terms=[VLMTerm(0.5)])
    desk = Desk(guess, buffer, {"audit_share": audit_share, "max_waiting": 5}, role=role, look_again=10)
    for event in [*events, "open", *["poll", "student", "poll", "scorer"] * 60, "poll"]:
        if event == "extend":
            buffer.extend(desk.episodes.block(6))
        elif event == "poll":
            desk.service.poll(0)
        elif event in ("student", "fail"):
            desk.student.answer(good=event == "student")
        elif event == "scorer":
            desk.scorer.answer()
        else:
            desk.student.open = event == "open"
        check_counts(desk.service)
    stats = check_counts(desk.service)
    assert stats["waiting"] == stats["in_flight"] == 0
    assert buffer.clips is not None
    for clip_id, score in buffer.clips.scored(10_000):
        assert score == truth(buffer.clips.batch([clip_id]))[0]


def test_what_made_a_clip_positive_is_credited_if_it_counts_as_such() -> None:
    buffer = make_buffer(terms=[VLMTerm(0.5), CreditTerm(window=0)])

    class Telling(Scripted):
        def answer(self, good: bool = True) -> None:
            super().answer(good)
            for place, found in enumerate(self.answers):
                assert found.scores is not None
                logits = np.full((len(found.scores), 3), -3.0, np.float32)
                logits[:, 1] = np.log(found.scores / (1 - found.scores))
                self.answers[place] = replace(found, details=logits)

    desk = Desk(right, buffer)
    telling = Telling(right)
    desk.student = desk.desk._backend = telling
    desk.trusted()
    desk.clips(20)
    desk.score()
    desk.turn()
    assert buffer.clips is not None
    columns, decided = buffer.columns, 0
    for clip_id, score in zip(*(buffer.clips.table()[name].tolist() for name in ("clip_id", "score")), strict=True):
        rows = buffer.clips.rows_of([clip_id])
        credit = columns["credit"].numpy()[rows.slots]
        if score > 0.5:
            assert credit.tolist() == (rows.positions == 1).tolist()
            decided += 1
        else:
            assert (credit == 1).all()
    assert decided > 5
