"""The token buckets against brute force, and the service that keeps within them."""

from __future__ import annotations

import logging
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from odd_scorers import GoodScorer, GreyRenderer, Trouble, TroubledScorer
from replay_tools import Episodes, check_counts, make_buffer

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.scoring import service as service_module
from vlmrb.scoring.beforehand import score_beforehand
from vlmrb.scoring.budget import Budget, BudgetConfig, allowed
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.student.config import StudentConfig


class Reference:
    """The same in exact arithmetic, token by token."""

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self.tokens = {name: Fraction(config.initial_burst) for name in ("clips_per_s", "clips_per_env_step")}
        self.used = 0
        self.seconds, self.env_steps = None, 0

    def advance(self, now: Fraction, env_steps: int) -> None:
        passed = {"clips_per_s": 0 if self.seconds is None else now - self.seconds}
        passed["clips_per_env_step"] = env_steps - self.env_steps
        self.seconds, self.env_steps = now, env_steps
        for name in self.tokens:
            if (rate := getattr(self.config, name)) is not None:
                gained = Fraction(rate).limit_denominator(1000) * passed[name]
                self.tokens[name] += max(0, min(gained, self.config.burst - self.tokens[name]))

    @property
    def available(self) -> int:
        rates = [name for name in self.tokens if getattr(self.config, name) is not None]
        limits = [int(self.tokens[name]) for name in rates]
        return min(limits + ([] if self.config.total is None else [self.config.total - self.used]))

    def spend(self, clips: int) -> None:
        self.used += clips
        for name in self.tokens:
            self.tokens[name] -= clips


CONFIGS = [
    BudgetConfig(clips_per_s=2.5, burst=7),
    BudgetConfig(clips_per_env_step=0.03, initial_burst=40, burst=5),
    BudgetConfig(clips_per_s=0.7, clips_per_env_step=0.02, total=150, initial_burst=3, burst=20),
    BudgetConfig(total=30),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_it_allows_what_brute_force_allows_and_a_resumed_one_the_same(config: BudgetConfig, seed: int) -> None:
    rng, budget, reference = np.random.default_rng(seed), Budget(config), Reference(config)
    now, offset, env_steps = Fraction(1000), Fraction(0), 0
    for _ in range(300):
        now += Fraction(int(rng.integers(0, 64)), 8)
        env_steps += 32 * int(rng.integers(0, 4))
        if rng.random() < 0.1:  # stopped, and resumed on another machine
            resumed = Budget(config)
            resumed.load_state_dict(budget.state_dict())
            assert (resumed.available, resumed.stats()) == (budget.available, budget.stats())
            budget, offset = resumed, Fraction(int(rng.integers(-500, 500)))
            reference.seconds = None  # the time in between does not count
        budget.advance(float(now + offset), env_steps)
        reference.advance(now, env_steps)
        assert budget.available == reference.available
        spent = int(rng.integers(0, reference.available + 1))
        budget.spend(spent)
        reference.spend(spent)
    assert budget.used == reference.used > 20


def test_no_more_than_the_allowance_is_used_in_any_stretch() -> None:
    config, rng = BudgetConfig(clips_per_env_step=0.05, initial_burst=50, burst=20), np.random.default_rng(0)
    budget, used = Budget(config), [0]
    for block in range(500):
        budget.advance(0.0, 32 * (block + 1))
        if rng.random() < 0.3:
            budget.spend(budget.available)
        used.append(budget.used)
    for begin in range(0, 500, 7):
        for end in range(begin, 501, 5):
            bound = (50 if begin == 0 else 20) + 0.05 * 32 * (end - begin)
            late = begin >= 60  # the initial burst is spent by then
            assert used[end] - used[begin] <= (bound if begin == 0 or late else bound + 50) + 1e-6
    assert used[-1] <= allowed(config, 0.0, 500 * 32)


def test_its_figures_are_use_against_allowance_what_was_lost_included() -> None:
    budget = Budget(BudgetConfig(clips_per_env_step=0.5, initial_burst=10, burst=20))
    budget.advance(5.0, 100)
    assert budget.available == 20
    budget.spend(15)
    assert budget.stats() == {"budget_used": 15, "budget_allowed": 60.0, "budget_share": 0.25}


def test_the_strictest_counts_over_a_run() -> None:
    config = BudgetConfig(clips_per_s=10, clips_per_env_step=0.02, total=5000, initial_burst=100)
    assert config.clips_per_s_over(100_000, 1000.0) == pytest.approx((10 * 100 + 100) / 100)
    assert config.clips_per_s_over(100_000, 100.0) == pytest.approx((0.02 * 100_000 + 100) / 1000)
    assert config.clips_per_s_over(1_000_000, 100.0) == pytest.approx(5000 / 10_000)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "scoring.budget limits nothing"),
        ({"clips_per_s": 0.0}, "scoring.budget.clips_per_s=0.0 must be positive"),
        ({"clips_per_env_step": -1.0}, "scoring.budget.clips_per_env_step=-1.0 must be positive"),
        ({"total": 0}, "scoring.budget.total=0 must be at least 1"),
        ({"total": 5, "burst": 0}, "scoring.budget.burst=0 must be at least 1"),
        ({"total": 5, "initial_burst": -1}, "scoring.budget.initial_burst=-1 must be finite and not negative"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"scoring\.budget") as raised:
        BudgetConfig(**settings)
    assert says in str(raised.value)


def test_an_allowance_that_could_not_be_saved_up_is_refused() -> None:
    config = BudgetConfig(clips_per_env_step=0.5)
    config.require_for(128)
    with pytest.raises(ValueError, match=r"allows 160 clips in each block of training\.frames_per_batch=320"):
        config.require_for(320)


# In the service


def make_service(scorer: GoodScorer | None = None, **settings: Any) -> tuple[ScoringService, Episodes]:
    settings = {"backend": "sync", "batch_clips": 4} | settings
    return ScoringService(make_buffer(), scorer or GoodScorer(), **settings), Episodes()


def buffer_of(service: ScoringService) -> VLMReplayBuffer:
    return service._delivery._buffer


def extend(service: ScoringService, episodes: Episodes, steps: int) -> None:
    buffer_of(service).extend(episodes.block(steps))


def test_the_scorer_is_shown_no_more_than_the_budget_and_the_rest_waits() -> None:
    scorer = GoodScorer()
    service, episodes = make_service(scorer, budget=BudgetConfig(clips_per_env_step=0.1, initial_burst=5))
    for block in range(1, 51):
        extend(service, episodes, 8)
        service.poll(16 * block)
        assert sum(map(len, scorer.seen)) == service.budget.used == 5 + int(1.6 * block + 1e-9)
    stats = check_counts(service)
    assert stats["scored"] == stats["budget_used"] == stats["shown"] == 85
    assert stats["waiting"] > 0
    assert stats["budget_share"] == pytest.approx(1.0)


def test_what_the_cache_knows_costs_nothing() -> None:
    cache = ScoreCache()
    service, _ = make_service(cache=cache)
    extend(service, Episodes(contents=1, end=0.0, length=9), 40)
    service.poll(80)
    scorer = GoodScorer()
    again, _ = make_service(scorer, cache=cache, budget=BudgetConfig(total=1))
    extend(again, Episodes(contents=1, end=0.0, length=9), 40)
    again.poll(80)
    stats = check_counts(again)
    assert stats["cache_hits"] == stats["scored"] == stats["emitted"] > 10
    assert (stats["budget_used"], stats["shown"], scorer.seen) == (0, 0, [])


def test_a_second_try_costs_again() -> None:
    service, episodes = make_service(TroubledScorer(Trouble("raise")), budget=BudgetConfig(total=100), batch_clips=1)
    episodes.clips(buffer_of(service), 3)
    service.poll(10)
    stats = check_counts(service)
    assert stats["dropped"] == stats["emitted"] >= 3
    assert stats["budget_used"] == 2 * stats["emitted"]


def test_a_spent_total_is_said_once_and_nothing_more_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    scorer = GoodScorer()
    service, episodes = make_service(scorer, budget=BudgetConfig(total=7))
    with caplog.at_level(logging.WARNING):
        for block in range(1, 11):
            extend(service, episodes, 8)
            service.poll(16 * block)
    assert sum(map(len, scorer.seen)) == 7
    assert [record.message for record in caplog.records if "total=7 clips is spent at" in record.message]
    assert len(caplog.records) == 1


def test_wall_time_counts_from_the_first_poll_and_not_while_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=50.0, sleep=lambda seconds: None)
    monkeypatch.setattr(service_module, "time", clock)
    settings = {"budget": BudgetConfig(clips_per_s=2.0), "cache": None}
    service, episodes = make_service(**settings)
    used = []
    for second in (0.0, 1.0, 1.25, 1.5, 4.0):
        extend(service, episodes, 16)
        clock.now = 50.0 + second
        service.poll(16)
        used.append(service.budget.used)
    assert used == [0, 2, 2, 3, 8]
    clock.now = 9000.0
    resumed = ScoringService(buffer_of(service), GoodScorer(), backend="sync", **settings)
    resumed.load_state_dict(service.state_dict())
    resumed.poll(16)
    assert resumed.budget.used == 8
    clock.now = 9000.5
    resumed.poll(16)
    assert resumed.budget.used == 9


def test_draining_does_not_wait_for_what_is_not_allowed() -> None:
    service, episodes = make_service(budget=BudgetConfig(clips_per_env_step=0.1, initial_burst=3), backend="thread")
    episodes.clips(buffer_of(service), 10)
    assert service.wait_until_ready(30)
    assert not service.drain(3600)
    service.close()
    assert check_counts(service)["scored"] == 3


def test_draining_waits_for_a_student_that_needs_no_budget() -> None:
    buffer = make_buffer()
    settings = {"budget": BudgetConfig(clips_per_env_step=0.1), "student": StudentConfig(), "backend": "thread"}
    service = ScoringService(buffer, GoodScorer(), GreyRenderer(), **settings)
    Episodes().clips(buffer, 10)
    assert not service.drain(60)
    service.close()
    stats = service.stats()
    assert stats["student_waiting"] == 0
    assert stats["student_to_scorer"] == stats["waiting"] == stats["emitted"]


def test_clips_are_taken_in_some_at_a_time_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    service, episodes = make_service(budget=BudgetConfig(clips_per_env_step=0.1, initial_burst=9), max_waiting=20)
    sizes = []
    look = service.reception.look
    monkeypatch.setattr(service.reception, "look", lambda ids: sizes.append(len(ids)) or look(ids))
    monkeypatch.setattr(service_module, "ADMIT_CLIPS", 25)
    episodes.clips(buffer_of(service), 100)
    assert sum(score_beforehand(service, 3600)) == 0
    assert sum(sizes) == service.stats()["emitted"]
    assert max(sizes) == 25


def test_prefilled_clips_are_scored_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    service, episodes = make_service(budget=BudgetConfig(clips_per_env_step=0.1, initial_burst=9), max_waiting=20)
    episodes.clips(buffer_of(service), 60)
    assert sum(score_beforehand(service, 3600)) == 0
    assert "has no budget left: training starts before all clips are scored" in caplog.text
    stats = check_counts(service)
    assert (stats["scored"], stats["waiting"]) == (9, 20)
