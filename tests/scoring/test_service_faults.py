"""What the scoring service does when its scorer fails: never ends the run, never loses a clip from its counts."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_scorers import BrokenSetupScorer, GoodScorer, SlowScorer, Trouble, TroubledScorer, WrongScorer, expected_scores
from replay_tools import Episodes, check_counts, make_buffer

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.scoring.backends import Answer, Backend
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.service import ScoringService

BACKENDS = ["sync", "thread", "process"]


def serve(scorer: Scorer, episodes: Episodes | None = None, **options: Any) -> tuple[VLMReplayBuffer, ScoringService]:
    """Returns a buffer with 40 complete clips and a service that has not looked at them."""
    buffer = make_buffer()
    (episodes or Episodes(end=0.05)).clips(buffer, 40)
    return buffer, ScoringService(buffer, scorer, **{"backend": "process", "backoff_s": 0.01, **options})


def scored_right(buffer: VLMReplayBuffer) -> np.ndarray:
    """Returns the ids of the clips with scores, which must be the right ones."""
    table = buffer.clips.table()
    known = ~np.isnan(table["score"])
    ids = table["clip_id"][known]
    if not len(ids):
        return ids
    np.testing.assert_array_equal(table["score"][known], expected_scores(buffer.clips.batch(ids.tolist()).snapshots))
    return ids


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def poll_until(service: ScoringService, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, service.stats()
        service.poll(0)
        time.sleep(0.001)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scorer_that_raises_once_is_asked_again(backend: str, tmp_path: Path):
    scorer = TroubledScorer(Trouble("raise", times=1, count_file=str(tmp_path / "count")))
    buffer, service = serve(scorer, backend=backend)
    assert service.drain(30)
    service.close()
    stats = check_counts(service)
    assert (stats["scored"], stats["failures"], stats["restarts"]) == (stats["emitted"], 1, 0)
    assert len(scored_right(buffer)) == stats["scored"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_clip_that_always_makes_the_scorer_raise_is_dropped_alone(backend: str):
    buffer, service = serve(TroubledScorer(Trouble("raise", poison=17)), backend=backend)
    assert service.drain(30)
    service.close()
    stats = check_counts(service)
    assert (stats["dropped"], stats["failures"]) == (1, 2)
    assert set(buffer.clips.table()["clip_id"]) - set(scored_right(buffer)) == {17}


@pytest.mark.parametrize("backend", ["sync", "thread"])
def test_a_scorer_that_always_raises_ends_in_unscored_clips_not_in_an_error(
    backend: str, caplog: pytest.LogCaptureFixture
):
    _, service = serve(TroubledScorer(Trouble("raise")), backend=backend)
    with caplog.at_level(logging.WARNING):
        assert service.drain(30)
    service.close()
    stats = check_counts(service)
    assert stats["dropped"] == stats["emitted"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "scorer 'troubled'" in warnings[0]
    assert "RuntimeError: boom" in warnings[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scorer_that_calls_exit_has_failed_like_any_other(backend: str, caplog: pytest.LogCaptureFixture):
    buffer, service = serve(TroubledScorer(Trouble("exit", poison=17)), backend=backend)
    assert service.drain(30)
    service.close()
    assert check_counts(service)["dropped"] == 1
    assert set(buffer.clips.table()["clip_id"]) - set(scored_right(buffer)) == {17}
    assert "it raised SystemExit: 0" in caplog.text


def test_ctrl_c_interrupts_a_sync_scorer():
    _, service = serve(TroubledScorer(Trouble("interrupt")), backend="sync")
    with pytest.raises(KeyboardInterrupt):
        service.poll(0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", "oom", "hang"])
def test_a_process_that_dies_or_hangs_once_is_replaced_and_every_clip_gets_its_score(kind: str, tmp_path: Path):
    scorer = TroubledScorer(Trouble(kind, times=1, count_file=str(tmp_path / "count")))
    buffer, service = serve(scorer, timeout_s=1.5 if kind == "hang" else 60)
    poll_until(service, lambda: service._backend.pid is not None)
    first = service._backend.pid
    assert service.drain(30)
    assert is_gone(first)
    service.close()
    stats = check_counts(service)
    assert (stats["scored"], stats["restarts"]) == (stats["emitted"], 1)
    assert len(scored_right(buffer)) == stats["scored"]


def test_a_clip_that_kills_the_scorer_twice_is_dropped_alone():
    buffer, service = serve(TroubledScorer(Trouble("die", poison=17)))
    assert service.drain(30)
    service.close()
    stats = check_counts(service)
    assert (stats["dropped"], stats["restarts"]) == (1, 2)
    assert set(buffer.clips.table()["clip_id"]) - set(scored_right(buffer)) == {17}


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        (BrokenSetupScorer("die"), r"died while it was set up \(exit code 3\)"),
        (BrokenSetupScorer("raise"), "could not be set up .*RuntimeError: boom"),
        (BrokenSetupScorer("hang"), "was not set up within 0.5 s"),
        (TroubledScorer(Trouble("die")), r"died \(exit code 3\)"),
        (TroubledScorer(Trouble("oom")), r"died \(exit code -9\)"),
        (TroubledScorer(Trouble("hang")), "did not answer within 0.5 s"),
        (TroubledScorer(Trouble("raise")), "raised 3 times in a row"),
    ],
    ids=["setup dies", "setup raises", "setup hangs", "dies", "killed", "hangs", "raises"],
)
def test_a_scorer_that_never_answers_is_given_up_loudly_once_and_the_run_goes_on(
    scorer: Scorer, reason: str, caplog: pytest.LogCaptureFixture
):
    episodes, startup_timeout_s = Episodes(end=0.05), 0.5 if "was not set up" in reason else 60
    buffer, service = serve(scorer, episodes, max_restarts=1, timeout_s=0.5, startup_timeout_s=startup_timeout_s)
    with caplog.at_level(logging.WARNING):
        assert service.drain(30)
        assert check_counts(service)["dropped"] == buffer.clips.emitted
        episodes.clips(buffer, 20)  # experience goes on
        service.poll(1)
    stats = check_counts(service)
    assert stats["dropped"] == stats["emitted"] == buffer.clips.emitted
    assert stats["restarts"] == 1
    assert service._backend.pid is None
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "GIVEN UP" in errors[0]
    assert any(re.search(reason, record.getMessage()) for record in caplog.records)
    service.close()


def test_answers_in_between_start_the_count_of_restarts_anew(tmp_path: Path):
    scorer = TroubledScorer(Trouble("die", times=4, count_file=str(tmp_path / "count")))
    buffer = make_buffer()
    service = ScoringService(buffer, scorer, backoff_s=0.01, max_restarts=2, batch_clips=1, policy="oldest")
    episodes = Episodes()
    for death in range(4):
        (tmp_path / "count").write_bytes(b"x" * (3 if death % 2 else 4))  # every other round is a good one
        episodes.clips(buffer, 1)
        assert service.drain(30)
    service.close()
    stats = check_counts(service)
    assert stats["restarts"] == 2
    assert stats["scored"] == stats["emitted"]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("raise", "RuntimeError: boom"), ("exit", "SystemExit: 0"), ("interrupt", "KeyboardInterrupt")],
)
def test_a_thread_whose_setup_fails_is_given_up(kind: str, cause: str, caplog: pytest.LogCaptureFixture):
    _, service = serve(BrokenSetupScorer(kind), backend="thread")
    assert service.drain(10)
    service.close()
    assert check_counts(service)["dropped"] == service.stats()["emitted"]
    assert f"GIVEN UP: it could not be set up ({cause})" in caplog.text


def test_a_scorer_that_ends_its_thread_is_given_up_and_no_clip_stays_in_flight(caplog: pytest.LogCaptureFixture):
    episodes = Episodes(end=0.05)
    scorer = TroubledScorer(Trouble("interrupt", poison=17))
    buffer, service = serve(scorer, episodes, backend="thread", policy="oldest", batch_clips=4)
    assert service.drain(10)
    episodes.clips(buffer, 20)  # experience goes on
    service.poll(1)
    stats = check_counts(service)
    assert (stats["scored"], stats["in_flight"], stats["waiting"]) == (len(scored_right(buffer)), 0, 0)
    assert 0 < stats["scored"] < stats["emitted"] == buffer.clips.emitted
    assert "GIVEN UP: it ended its thread (raised KeyboardInterrupt)" in caplog.text
    service.close()
    check_counts(service)


@pytest.mark.parametrize(("kind", "cause"), [("raise", "RuntimeError: boom"), ("exit", "SystemExit: 0")])
def test_a_sync_scorer_whose_setup_fails_ends_the_run_before_it_begins(kind: str, cause: str):
    with pytest.raises(ScorerError, match=f"scorer 'broken setup' cannot be set up: {cause}"):
        serve(BrokenSetupScorer(kind), backend="sync")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("nan", "returned nan for 1 of 16 clips"),
        ("shape", r"returned shape \(16, 2\)"),
        ("range", "returned 1.5 for 16 of 16 clips"),
        ("none", r"returned shape \(\)"),
        ("text", "returned a list that is no array of real numbers"),
    ],
)
def test_an_answer_of_the_wrong_form_ends_the_run_in_one_readable_line(backend: str, kind: str, complaint: str):
    buffer, service = serve(WrongScorer(kind), backend=backend)
    with pytest.raises(ScorerError, match=complaint) as caught:
        service.drain(30)
    message = str(caught.value)
    assert message.startswith("scorer 'wrong' returned")
    assert "expected float32[16] in [0, 1]" in message
    assert "\n" not in message
    service.close()
    assert check_counts(service)["dropped"] in (16, 32)  # both batches may have come back
    assert len(scored_right(buffer)) == 0


def test_a_scorer_that_cannot_be_pickled_is_refused_with_advice():
    scorer = GoodScorer()
    scorer.model = lambda clips: clips
    with pytest.raises(
        ScorerError, match=r"scorer 'good' cannot be sent to a process.*scoring\.backend=thread"
    ) as caught:
        serve(scorer)
    assert "\n" not in str(caught.value)


def test_a_scorer_whose_class_the_process_cannot_find_ends_the_run_with_advice(monkeypatch: pytest.MonkeyPatch):
    import odd_scorers

    class Local(GoodScorer):
        name = "local"

    Local.__qualname__, Local.__module__ = "Local", "odd_scorers"
    monkeypatch.setattr(odd_scorers, "Local", Local, raising=False)
    _, service = serve(Local())
    with pytest.raises(ScorerError, match="scorer 'local' cannot be rebuilt in its process .*AttributeError"):
        service.drain(30)
    service.close()
    check_counts(service)


@pytest.mark.slow
def test_a_stopped_process_holds_nothing_up_and_is_replaced_after_the_time_out():
    buffer, service = serve(SlowScorer(0.01), timeout_s=1.5, batch_clips=2)
    poll_until(service, lambda: service.stats()["scored"] > 0)
    stopped = service._backend.pid
    os.kill(stopped, signal.SIGSTOP)
    slowest = 0.0
    while service._backend.pid == stopped:
        start = time.monotonic()
        service.poll(0)
        slowest = max(slowest, time.monotonic() - start)
    assert slowest < 1.0
    assert service.drain(30)
    assert is_gone(stopped)
    service.close()
    stats = check_counts(service)
    assert stats["scored"] == stats["emitted"]
    assert len(scored_right(buffer)) == stats["scored"]


class ScriptedBackend(Backend):
    """Answers as a test tells it to."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, ClipBatch]] = []
        self.answers: list[Answer] = []
        self.shown: list[int] = []
        self.open = True

    @property
    def accepting(self) -> bool:
        return self.open

    def submit(self, ticket: int, clips: ClipBatch) -> None:
        self.batches.append((ticket, clips))

    def collect(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.batches.clear()

    def answer(self, good: bool) -> None:
        if self.batches:
            ticket, clips = self.batches.pop(0)
            scores = expected_scores(clips.snapshots) if good else None
            self.answers.append(Answer(ticket, scores, error="" if good else "raised something"))

    def lose(self) -> None:
        self.answers += [Answer(ticket, error="died", blamed=i == 0) for i, (ticket, _) in enumerate(self.batches)]
        self.batches.clear()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["extend", "extend", "poll", "good", "bad", "lose", "shut", "open"]), max_size=60),
    st.sampled_from(["newest", "random", "oldest"]),
    st.sampled_from([1, 3, 1000]),
    st.booleans(),
)
def test_whatever_happens_no_clip_is_lost_from_the_counts_and_no_score_reaches_another_clip(
    events: list[str], policy: str, max_waiting: int, repeats: bool
):
    buffer, episodes = make_buffer(capacity=64), Episodes(contents=2 if repeats else 10**6, end=0.2)
    with pytest.MonkeyPatch.context() as patch:
        backend = ScriptedBackend()
        patch.setattr("vlmrb.scoring.service.make_backend", lambda *_: backend)
        service = ScoringService(
            buffer, GoodScorer(), policy=policy, max_waiting=max_waiting, batch_clips=3, cache=ScoreCache()
        )
    for step, event in enumerate([*events, "open", *["poll", "good"] * 200, "poll"]):
        if event == "extend":
            buffer.extend(episodes.block(6))
        elif event == "poll":
            service.poll(step)
        elif event in ("good", "bad"):
            backend.answer(event == "good")
        elif event == "lose":
            backend.lose()
        else:
            backend.open = event == "open"
        check_counts(service)
    stats = check_counts(service)
    assert stats["emitted"] == buffer.clips.emitted
    assert stats["waiting"] == stats["in_flight"] == 0
    assert stats["stale"] + stats["dropped"] > 0 or stats["scored"] == stats["emitted"]
    scored_right(buffer)
