"""The scoring service on a real replay buffer, with scorers that work."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import pytest
import torch
from odd_scorers import (
    BrokenSetupScorer,
    FrameScorer,
    GatedScorer,
    GoodScorer,
    GreyRenderer,
    SlowScorer,
    Trouble,
    TroubledScorer,
    expected_scores,
)
from replay_tools import Episodes, about_to_be_taken, check_counts, make_buffer, priorities, scores_of

from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring.audit import Audit
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.controls import Flipped, Shuffled
from vlmrb.scoring.policy import RandomOrder
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.service import ScoringService


def fill_and_score(backend: str, capacity: int, blocks: int = 40, **settings: Any) -> np.ndarray:
    """Returns all priorities after the same experience, whatever the back-end."""
    buffer, episodes = make_buffer(capacity), Episodes(seed=3)
    service = ScoringService(buffer, GoodScorer(), backend=backend, max_waiting=10_000, **settings)
    for block in range(blocks):
        buffer.extend(episodes.block(8))
        service.poll(16 * (block + 1))
    assert service.drain(60)
    service.close()
    stats = check_counts(service)
    assert stats["dropped"] == 0
    return priorities(buffer)


def test_sync_scores_every_completed_clip_before_poll_returns():
    buffer, episodes, scorer = make_buffer(), Episodes(), GoodScorer()
    service = ScoringService(buffer, scorer, backend="sync")
    episodes.clips(buffer, 50)
    service.poll(100)
    table = buffer.clips.table()
    clips = buffer.clips.batch(table["clip_id"].tolist())
    np.testing.assert_array_equal(table["score"], expected_scores(clips.snapshots))
    assert check_counts(service)["scored"] == len(clips)


@pytest.mark.parametrize("capacity", [2048, 192])  # all of it, and a buffer that is overwritten several times
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_async_scores_give_the_same_priorities_slot_by_slot_as_sync(backend: str, capacity: int):
    reference = fill_and_score("sync", capacity)
    assert (reference > 0).mean() > 0.9
    np.testing.assert_array_equal(fill_and_score(backend, capacity), reference)


@pytest.mark.parametrize("backend", ["sync", "thread", "process"])
def test_a_scorer_can_be_waited_for(backend: str):
    service = ScoringService(make_buffer(), GoodScorer(), backend=backend)
    assert service.wait_until_ready(60)
    service.close()


def test_waiting_for_a_scorer_ends_when_it_is_given_up_or_time_is_up():
    broken = ScoringService(make_buffer(), BrokenSetupScorer("raise"), backend="process", max_restarts=0)
    assert not broken.wait_until_ready(60)
    broken.close()
    slow = ScoringService(make_buffer(), GoodScorer(), backend="process")
    assert not slow.wait_until_ready(0.0)
    slow.close()


def test_a_scorer_in_a_process_renders_the_frames_itself():
    buffer, episodes, renderer = make_buffer(), Episodes(), GreyRenderer()
    service = ScoringService(buffer, FrameScorer(), renderer, backend="process")
    episodes.clips(buffer, 20)
    assert service.drain(30)
    service.close()
    ids = buffer.clips.table()["clip_id"].tolist()
    np.testing.assert_array_equal(scores_of(buffer, ids), FrameScorer().score(buffer.clips.batch(ids, renderer)))


@pytest.mark.parametrize(
    ("policy", "survivors"), [("newest", slice(-6, None)), ("oldest", slice(0, 6)), ("random", None)]
)
def test_a_full_queue_drops_the_policys_last_choices(policy: str, survivors: slice | None):
    buffer, episodes, scorer = make_buffer(), Episodes(), GatedScorer()
    settings = {"backend": "thread", "max_waiting": 6, "batch_clips": 1, "max_in_flight": 1}
    service = ScoringService(buffer, scorer, policy=policy, **settings)
    episodes.clips(buffer, 1)
    arrivals = about_to_be_taken(buffer)
    while service.stats()["in_flight"] == 0:
        service.poll(0)  # until the thread is set up; the gate holds one clip from now on
    for step in range(1, 13):
        episodes.clips(buffer, 1)
        arrivals += about_to_be_taken(buffer)
        service.poll(step)
    stats = check_counts(service)
    assert (stats["waiting"], stats["in_flight"]) == (6, 1)
    assert stats["dropped"] == len(arrivals) - 7
    scorer.gate.set()
    assert service.drain(10)
    service.close()
    (held,), *others = scorer.seen
    arrivals.remove(held)
    scored = [clip_id for batch in others for clip_id in batch]
    if survivors is None:
        assert len(set(scored)) == 6
        assert set(scored) != set(arrivals[-6:])
        assert set(scored) != set(arrivals[:6])
    else:
        assert set(scored) == set(arrivals[survivors])
    assert check_counts(service)["scored"] == 7


def test_newest_clips_are_scored_first():
    buffer, episodes, scorer = make_buffer(), Episodes(), GoodScorer()
    service = ScoringService(buffer, scorer, backend="sync", batch_clips=4)
    episodes.clips(buffer, 12)
    ids = about_to_be_taken(buffer)[::-1]
    service.poll(0)
    assert [set(batch) for batch in scorer.seen] == [set(ids[at : at + 4]) for at in range(0, len(ids), 4)]


def test_at_most_two_batches_are_in_flight():
    buffer, episodes, scorer = make_buffer(), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread", batch_clips=4)
    episodes.clips(buffer, 40)
    while service.stats()["in_flight"] < 8:
        service.poll(0)
    for _ in range(20):
        service.poll(0)
    assert service.stats()["in_flight"] == 8
    scorer.gate.set()
    assert service.drain(10)
    service.close()


def test_clips_overwritten_while_they_wait_are_stale_and_never_shown():
    buffer, episodes, scorer = make_buffer(capacity=64), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread", batch_clips=2, max_in_flight=1)
    episodes.clips(buffer, 10)
    while service.stats()["in_flight"] == 0:
        service.poll(0)
    doomed = set(buffer.clips.table()["clip_id"].tolist())
    for step in range(1, 50):
        buffer.extend(episodes.block(4))
        service.poll(step)
    scorer.gate.set()
    assert service.drain(10)
    service.close()
    stats = check_counts(service)
    assert stats["stale"] >= 10
    shown_late = {clip_id for batch in scorer.seen[1:] for clip_id in batch}
    assert not doomed & shown_late


def test_a_score_for_clips_overwritten_meanwhile_is_stale():
    buffer, episodes, scorer = make_buffer(capacity=64), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread", batch_clips=64, max_waiting=1)
    episodes.clips(buffer, 1)
    while service.stats()["in_flight"] == 0:
        service.poll(0)
    shown = service.stats()["in_flight"]
    buffer.extend(episodes.block(32))
    scorer.gate.set()
    assert service.drain(10)
    service.close()
    stats = check_counts(service)
    assert stats["stale"] >= shown
    assert stats["scored"] == stats["emitted"] - stats["stale"] - stats["dropped"]


def test_clips_completed_and_overwritten_between_two_polls_are_stale():
    buffer, episodes, scorer = make_buffer(capacity=64), Episodes(), GoodScorer()
    service = ScoringService(buffer, scorer, backend="sync")
    for _ in range(20):
        buffer.extend(episodes.block(8))
    service.poll(0)
    stats = check_counts(service)
    assert stats["stale"] > 0
    assert stats["scored"] == buffer.clips.table()["clip_id"].size


def test_equal_clips_are_scored_once_within_a_batch_and_against_batches_in_flight():
    # Two environments live the same life of 6 steps, that is of two clips, over and over.
    buffer, episodes, scorer = make_buffer(), Episodes(contents=1, end=0.0, length=6), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread", cache=ScoreCache(), batch_clips=2)
    episodes.clips(buffer, 4)
    while service.stats()["in_flight"] < 4:
        service.poll(0)
    episodes.clips(buffer, 8)
    service.poll(1)
    assert check_counts(service)["in_flight"] == 12
    scorer.gate.set()
    assert service.drain(10)
    service.close()
    stats = check_counts(service)
    assert (stats["scored"], stats["cache_hits"]) == (12, 10)
    assert sum(map(len, scorer.seen)) == stats["shown"] == 2
    table = buffer.clips.table()
    clips = buffer.clips.batch(table["clip_id"].tolist())
    np.testing.assert_array_equal(table["score"], expected_scores(clips.snapshots))


def test_a_clip_scored_before_is_answered_from_the_cache_without_asking():
    cache = ScoreCache()
    for run in range(2):
        buffer, episodes, scorer = make_buffer(), Episodes(seed=5), GoodScorer()
        service = ScoringService(buffer, scorer, backend="sync", cache=cache)
        episodes.clips(buffer, 30)
        service.poll(0)
        stats = check_counts(service)
        assert stats["scored"] == stats["emitted"]
        assert not np.isnan(buffer.clips.table()["score"]).any()
        assert bool(scorer.seen) == (run == 0)
    assert stats["cache_hits"] == stats["emitted"]


def test_without_a_cache_equal_clips_are_scored_one_by_one():
    buffer, episodes, scorer = make_buffer(), Episodes(contents=1, end=0.0), GoodScorer()
    service = ScoringService(buffer, scorer, backend="sync")
    episodes.clips(buffer, 8)
    service.poll(0)
    assert sum(map(len, scorer.seen)) == 8


def test_a_control_changes_what_is_written_but_not_what_is_cached():
    buffer, episodes, cache, control = make_buffer(), Episodes(), ScoreCache(), Shuffled(memory=50)
    service = ScoringService(buffer, GoodScorer(), backend="sync", cache=cache, control=control)
    episodes.clips(buffer, 60)
    service.poll(0)
    table = buffer.clips.table()
    clips = buffer.clips.batch(table["clip_id"].tolist())
    clean = expected_scores(clips.snapshots)
    assert (table["score"] != clean).mean() > 0.5
    np.testing.assert_array_equal(cache.get_many(cache.keys(GoodScorer(), clips)), clean)
    assert service.stats()["control_remembered"] == 50


def test_delay_is_measured_in_env_steps_from_completion_to_the_written_score():
    buffer, episodes, scorer = make_buffer(), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread")
    episodes.clips(buffer, 4)
    while service.stats()["in_flight"] == 0:
        service.poll(1000)
    service.poll(1500)
    assert np.isnan(service.stats()["delay_env_steps_mean"])
    scorer.gate.set()
    while service.stats()["scored"] == 0:
        service.poll(1700)
    service.close()
    stats = service.stats()
    assert stats["delay_env_steps_mean"] == stats["delay_env_steps_p95"] == 700


def test_positives_are_counted_above_the_replay_terms_threshold():
    buffer, episodes = make_buffer(terms=[VLMTerm(threshold=0.8)]), Episodes()
    service = ScoringService(buffer, GoodScorer(), backend="sync")
    episodes.clips(buffer, 60)
    service.poll(0)
    score = buffer.clips.table()["score"]
    assert service.stats()["positives"] == (score > 0.8).sum()
    counts, edges = service.histogram()
    np.testing.assert_array_equal(counts, np.histogram(score, edges)[0])


def test_poll_returns_at_once_while_a_process_scores_slowly():
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, SlowScorer(1.0), backend="process")
    episodes.clips(buffer, 4)
    while service.stats()["in_flight"] == 0:
        service.poll(0)
    latest = service.stats()
    polls = 0
    while service.stats()["scored"] == 0:
        service.poll(0)
        polls += 1
    service.close()
    assert latest["scored"] == 0
    assert polls > 500  # a single one that waited would have taken the whole second
    check_counts(service)


@pytest.mark.parametrize("needs", ["frames", "observations"])
def test_a_scorer_that_needs_pictures_is_refused_without_a_renderer(needs: str):
    scorer = GoodScorer()
    scorer.needs = needs
    with pytest.raises(ValueError, match=f"scorer 'good' needs {needs}"):
        ScoringService(make_buffer(), scorer, backend="sync")


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ({"version": "1"}, r'needs a name: add name = "…" to it'),
        ({"name": "mine"}, r'needs a version: add version = "…" to it'),
        ({"name": "mine", "version": 2}, "its version is 2"),
        ({"name": "", "version": "1"}, "its name is ''"),
    ],
)
def test_a_scorer_without_name_or_version_is_told_what_to_add(attributes: dict[str, Any], complaint: str):
    kind = type("Nameless", (Scorer,), {"score": GoodScorer.score, "needs": "snapshots", **attributes})
    with pytest.raises(ScorerError, match=complaint) as caught:
        ScoringService(make_buffer(), kind())
    assert str(caught.value).startswith("scorer class ")
    assert "Nameless" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_buffer_without_clips_is_refused_naming_the_setting():
    with pytest.raises(ValueError, match="clip_length"):
        ScoringService(make_buffer(clip_length=None), GoodScorer(), backend="sync")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("backend", "gpu"),
        ("policy", "best"),
        ("max_waiting", 0),
        ("batch_clips", 0),
        ("max_in_flight", 0),
        ("timeout_s", 0),
        ("startup_timeout_s", float("nan")),
        ("max_restarts", -1),
        ("backoff_s", -1),
        ("threads", 0),
        ("seed", -1),
    ],
)
def test_an_impossible_setting_is_refused_by_its_name(setting: str, value: Any):
    with pytest.raises(ValueError, match=rf"scoring\.{setting}="):
        ScoringService(make_buffer(), GoodScorer(), **{"backend": "sync", setting: value})


@pytest.mark.parametrize(("settings", "seeds"), [({}, (0, 1)), ({"seed": 5}, (5, 6))])
def test_policy_audit_and_control_draw_by_the_seed(settings: dict[str, Any], seeds: tuple[int, int]):
    buffer, episodes, control = make_buffer(), Episodes(), Flipped(0.5)
    service = ScoringService(
        buffer,
        GoodScorer(),
        policy="random",
        audit_share=0.5,
        control=control,
        backend="sync",
        budget=BudgetConfig(total=1),
        **settings,
    )
    expected = Audit(0.5, 0.5, seeds[0]), RandomOrder(seeds[0]), Flipped(0.5, seeds[1])
    for part, other in zip((service.audit, service.queue.policy, control), expected, strict=True):
        assert part.state_dict() == other.state_dict()
    episodes.clips(buffer, 30)
    service.poll(0)
    service.close()
    resumed = ScoringService(
        buffer, GoodScorer(), policy="random", audit_share=0.5, control=Flipped(0.5), backend="sync", seed=77
    )
    resumed.load_state_dict(service.state_dict())
    for part, other in zip(
        (service.audit, service.queue.policy, control),
        (resumed.audit, resumed.queue.policy, resumed.control),
        strict=True,
    ):
        assert part.state_dict() == other.state_dict()


# Saving and resuming


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saves and loads a state as checkpoints do."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_sync(resume_at: int | None, policy: str) -> tuple[np.ndarray, dict[str, float]]:
    """Returns scores and counts after 20 blocks, with or without a save and resume twice in a row."""
    make = {"backend": "sync", "policy": policy, "batch_clips": 4}
    buffer, episodes = make_buffer(capacity=128), Episodes(seed=4)
    service = ScoringService(buffer, GoodScorer(), control=Shuffled(memory=20), **make)
    for block in range(20):
        if block == resume_at:
            for _ in range(2):
                states = through_a_file({"buffer": buffer.state_dict(), "scoring": service.state_dict()})
                service.close()
                buffer = make_buffer(capacity=128)
                buffer.load_state_dict(states["buffer"])
                service = ScoringService(buffer, GoodScorer(), control=Shuffled(memory=20, seed=9), **make)
                service.load_state_dict(states["scoring"])
        buffer.extend(episodes.block(6))
        service.poll(12 * block)
    stats = check_counts(service)
    return buffer.clips.table()["score"], {name: stats[name] for name in ("emitted", "scored", "stale", "positives")}


@pytest.mark.parametrize("policy", ["newest", "random"])
def test_a_resumed_sync_run_goes_on_exactly(policy: str):
    scores, counts = run_sync(None, policy)
    resumed_scores, resumed_counts = run_sync(11, policy)
    np.testing.assert_array_equal(resumed_scores, scores)
    assert resumed_counts == counts


def test_clips_in_flight_wait_again_in_a_resumed_run_and_get_their_scores():
    buffer, episodes, scorer = make_buffer(), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread", batch_clips=4, cache=ScoreCache())
    episodes.clips(buffer, 30)
    while service.stats()["in_flight"] < 8:
        service.poll(0)
    saved = check_counts(service)
    states = through_a_file({"buffer": buffer.state_dict(), "scoring": service.state_dict()})
    scorer.gate.set()
    service.close()

    buffer = make_buffer()
    buffer.load_state_dict(states["buffer"])
    resumed = ScoringService(buffer, GoodScorer(), backend="process", cache=ScoreCache())
    resumed.load_state_dict(states["scoring"])
    stats = check_counts(resumed)
    assert (stats["in_flight"], stats["waiting"]) == (0, saved["waiting"] + saved["in_flight"])
    assert resumed.drain(30)
    resumed.close()
    stats = check_counts(resumed)
    assert stats["scored"] == stats["emitted"] == saved["emitted"]
    assert not np.isnan(buffer.clips.table()["score"]).any()


def test_waiting_clips_whose_buffer_was_not_restored_count_as_stale():
    buffer, episodes, scorer = make_buffer(), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread")
    episodes.clips(buffer, 10)
    service.poll(0)
    state = service.state_dict()
    scorer.gate.set()
    service.close()
    resumed = ScoringService(make_buffer(), GoodScorer(), backend="sync")
    resumed.load_state_dict(state)
    stats = check_counts(resumed)
    assert stats["stale"] == stats["emitted"] > 0


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, GoodScorer(), backend="sync")
    episodes.clips(buffer, 5)
    service.poll(0)
    before = service.stats()["emitted"]
    state = service.state_dict()
    for key, value, message in (
        ("schema", 99, "schema 99"),
        ("policy", {"name": "random", "state": {}}, "policy random, not newest"),
        ("control", {"name": "shuffled", "state": {}}, "control shuffled, not None"),
    ):
        with pytest.raises(ValueError, match=message):
            service.load_state_dict({**state, key: value})
    assert check_counts(service)["emitted"] == before


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what was logged as a warning or worse."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "version", "warned"), [("good", "1", False), ("good", "2", True), ("better", "1", True)]
)
def test_another_scorer_may_go_on_but_the_mixture_is_warned_of_once(
    name: str, version: str, warned: bool, caplog: pytest.LogCaptureFixture
):
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, GoodScorer(), backend="sync")
    episodes.clips(buffer, 5)
    service.poll(0)
    other = GoodScorer()
    other.name, other.version = name, version
    resumed = ScoringService(buffer, other, backend="sync")
    resumed.load_state_dict(through_a_file(service.state_dict()))
    assert check_counts(resumed)["scored"] == service.stats()["scored"]
    warnings = warnings_in(caplog)
    assert len(warnings) == warned
    assert all(f"scorer {name!r} {version!r} goes on where 'good' '1' left off" in warning for warning in warnings)


def test_a_state_from_before_scorers_were_noted_is_read_without_a_warning(caplog: pytest.LogCaptureFixture):
    service = ScoringService(make_buffer(), GoodScorer(), backend="sync")
    state = service.state_dict()
    del state["scorer"]
    service.load_state_dict(state)
    assert not warnings_in(caplog)


def test_a_run_without_a_single_score_ends_with_one_loud_line(caplog: pytest.LogCaptureFixture):
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, TroubledScorer(Trouble("raise")), backend="sync")
    episodes.clips(buffer, 5)
    service.poll(0)
    caplog.clear()
    service.close()
    service.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "scorer 'troubled': NO CLIP WAS EVER SCORED" in record.getMessage()
    assert "uniform replay" in record.getMessage()


def test_a_run_that_its_scorer_ended_is_not_called_uniform_replay(caplog: pytest.LogCaptureFixture):
    class NotANumber(GoodScorer):
        def score(self, clips):
            return np.full(len(clips), np.nan)

    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, NotANumber(), backend="sync")
    episodes.clips(buffer, 5)
    with pytest.raises(ScorerError, match="nan"):
        service.poll(0)
    caplog.clear()
    service.close()
    assert not caplog.records


@pytest.mark.parametrize("clips", [0, 5])
def test_a_run_with_scores_or_without_clips_ends_quietly(clips: int, caplog: pytest.LogCaptureFixture):
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, GoodScorer(), backend="sync")
    episodes.clips(buffer, clips)
    service.poll(0)
    service.close()
    assert not warnings_in(caplog)


def test_close_may_be_repeated_and_puts_clips_in_flight_back():
    buffer, episodes, scorer = make_buffer(), Episodes(), GatedScorer()
    service = ScoringService(buffer, scorer, backend="thread", batch_clips=2)
    episodes.clips(buffer, 10)
    while service.stats()["in_flight"] == 0:
        service.poll(0)
    scorer.gate.set()
    service.close()
    service.close()
    service.poll(1)
    assert check_counts(service)["in_flight"] == 0
