"""Collection waits for the scorer while it must, and never longer."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from odd_scorers import GatedScorer, GoodScorer, SlowScorer, Trouble, TroubledScorer
from replay_tools import Episodes, check_counts, make_buffer

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.scoring import throttle as throttle_module
from vlmrb.scoring.admission import AdmissionQueue
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.meter import Counts
from vlmrb.scoring.policy import NewestFirst
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService

BOUND = 64  # env steps


class World:
    """A service, and training that only collects: blocks of 16 env steps."""

    def __init__(self, scorer: Scorer, capacity: int = 8192, **settings: Any) -> None:
        settings = {"backend": "thread", "batch_clips": 2, "max_delay_env_steps": BOUND} | settings
        self.buffer: VLMReplayBuffer = make_buffer(capacity)
        self.service = ScoringService(self.buffer, scorer, **settings)
        self.episodes = Episodes()
        self.env_steps = 0

    def collect(self, blocks: int, stop: Any = lambda: False) -> None:
        for _ in range(blocks):
            self.env_steps += 16
            self.buffer.extend(self.episodes.block(8))
            self.service.poll(self.env_steps)
            self.service.keep_up(stop)

    def oldest_age(self) -> int:
        return self.env_steps - min((c.completed[0] for c in self.service.queue.overdue(10**9)), default=10**9)


def test_no_score_is_later_than_the_bound_and_one_block_and_none_is_missing() -> None:
    world = World(SlowScorer(0.004))
    for _ in range(60):
        world.collect(1)
        assert world.oldest_age() <= BOUND
    stats = check_counts(world.service)
    world.service.close()
    assert stats["dropped"] == stats["stale"] == 0
    assert stats["delay_env_steps_p95"] <= BOUND + 16
    assert max(world.service.meter._delays) <= BOUND + 16
    assert stats["throttled_s"] > 0.1
    assert 0 < stats["throttled_share"] <= 1


def test_a_quick_scorer_is_not_waited_for() -> None:
    world = World(GoodScorer(), backend="sync")
    world.collect(40)
    stats = check_counts(world.service)
    assert stats["share_scored"] == 1
    assert stats["throttled_s"] < 0.1


def test_without_the_setting_nothing_waits_and_nothing_is_said_of_it() -> None:
    world = World(GatedScorer(), max_delay_env_steps=None)
    world.collect(40)
    assert world.oldest_age() > BOUND
    assert "throttled_s" not in world.service.stats()
    world.service.scorer.gate.set()
    world.service.close()


def test_the_time_waited_is_measured() -> None:
    scorer = GatedScorer()
    world = World(scorer)
    assert world.service.wait_until_ready(30)
    world.collect(BOUND // 16)
    threading.Timer(0.3, scorer.gate.set).start()
    begin = time.monotonic()
    world.collect(3)
    waited = time.monotonic() - begin
    assert waited >= 0.25
    stats = world.service.stats()
    assert stats["throttled_s"] == pytest.approx(waited, abs=0.15)
    assert 0.1 < stats["throttled_share"] <= 1
    resumed = World(scorer)
    resumed.service.throttle.load_state_dict(world.service.state_dict()["throttle"])
    assert resumed.service.stats()["throttled_s"] == stats["throttled_s"]
    assert resumed.service.stats()["throttled_share"] == pytest.approx(stats["throttled_share"], rel=0.1)
    world.service.close()
    resumed.service.close()


def test_what_lies_beyond_the_budget_is_dropped_at_the_bound_and_not_waited_for() -> None:
    world = World(GoodScorer(), budget=BudgetConfig(clips_per_env_step=0.1), backend="sync", policy="oldest")
    for _ in range(100):
        world.collect(1)
        assert world.oldest_age() <= BOUND
    stats = check_counts(world.service)
    assert stats["dropped"] > 50
    assert stats["budget_share"] == pytest.approx(1.0, abs=0.05)
    assert stats["throttled_s"] < 0.2
    assert max(world.service.meter._delays) <= BOUND + 16


def test_later_clips_that_look_the_same_are_not_dropped_with_one_that_is_overdue() -> None:
    counts = Counts()
    queue = AdmissionQueue(NewestFirst(), None, lambda clip_id: True, counts)
    for clip_id, (key, completed) in enumerate([(b"a", 10), (b"b", 10), (b"a", 30), (b"c", 40), (b"a", 5), (b"b", 11)]):
        queue.add(key, clip_id, completed)
    (handed_over,) = queue.choose(1)
    assert handed_over.key == b"c"
    queue.drop_overdue(before=30)
    assert [(content.key, content.clip_ids, content.completed) for content in queue.waiting.values()] == [
        (b"a", [2], [30])
    ]
    assert counts.dropped == 4
    assert len(queue) == 2
    assert queue.overdue(30) == []
    assert [content.key for content in queue.overdue(31)] == [b"a"]


def test_within_the_budget_a_slow_scorer_is_waited_for() -> None:
    world = World(SlowScorer(0.01), budget=BudgetConfig(clips_per_env_step=0.15))
    world.collect(60)
    stats = check_counts(world.service)
    world.service.close()
    assert stats["budget_used"] >= stats["budget_allowed"] - 20
    assert stats["throttled_s"] > 0.1
    assert max(world.service.meter._delays) <= BOUND + 16


@pytest.mark.parametrize("kind", ["raise", "exit"])
def test_a_scorer_that_always_fails_does_not_block(kind: str) -> None:
    world = World(TroubledScorer(Trouble(kind)))
    world.collect(30)
    stats = check_counts(world.service)
    world.service.close()
    assert stats["scored"] == 0
    assert stats["dropped"] > 0


def test_a_thread_that_is_gone_does_not_block() -> None:
    world = World(TroubledScorer(Trouble("interrupt")))
    world.collect(30)
    assert world.service.stats()["waiting"] == 0
    world.service.close()


@pytest.mark.slow
def test_a_process_that_dies_again_and_again_does_not_block() -> None:
    world = World(TroubledScorer(Trouble("die")), backend="process", max_restarts=1, backoff_s=0.1)
    world.collect(20)
    assert world.service._given_up
    assert check_counts(world.service)["waiting"] == 0
    world.service.close()


def test_a_scorer_that_hangs_is_waited_for_only_so_long_and_again_once_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += 5.0
        time.sleep(0.001)

    clock.sleep = sleep
    monkeypatch.setattr(throttle_module, "time", clock)
    scorer = GatedScorer()
    world = World(scorer, timeout_s=30.0)
    assert world.service.wait_until_ready(30)
    with caplog.at_level(logging.WARNING):
        world.collect(20)
    assert [record.message for record in caplog.records if "has not been heard of for 65 s" in record.message]
    assert len(caplog.records) == 1
    assert clock.now == 65.0
    scorer.gate.set()
    while world.service.queue:
        world.service.poll(world.env_steps)
    scorer.gate.clear()
    with caplog.at_level(logging.WARNING):
        world.collect(20)
    assert clock.now == 130.0
    scorer.gate.set()
    world.service.close()


def test_a_signal_ends_the_wait_and_drops_nothing() -> None:
    scorer = GatedScorer()
    world = World(scorer)
    assert world.service.wait_until_ready(30)
    asked: list[int] = []
    world.collect(12, stop=lambda: bool(asked.append(0)) or len(asked) % 3 == 0)
    assert len(asked) == 3 * (12 - BOUND // 16 - 1)
    stats = check_counts(world.service)
    assert stats["dropped"] == 0
    assert stats["waiting"] + stats["in_flight"] == stats["emitted"]
    scorer.gate.set()
    world.service.close()


def test_a_queue_that_is_bounded_and_a_buffer_that_forgets_do_not_block() -> None:
    world = World(SlowScorer(0.005), capacity=128, max_waiting=4, policy="random")
    world.collect(60)
    assert check_counts(world.service)["dropped"] > 0
    world.service.close()
