"""Sharing a machine with the learner: the duty cycle, the priority, and the GPU's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odd_scorers import (
    BusyScorer,
    GoodScorer,
    LargeScorer,
    MultiplyingScorer,
    NicenessScorer,
    RefusingScorer,
    SlowScorer,
)
from replay_tools import Episodes, check_counts, make_buffer

from vlmrb.scoring.backends import Answer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.gpu import GIB, require_gpu_memory
from vlmrb.scoring.process import ProcessBackend
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.worker import AUTOGROUP, NICENESS

pytestmark = pytest.mark.slow

CLIPS = ClipBatch(np.arange(2), np.zeros((2, 4, 3), np.uint8), np.array([4, 3]))


@pytest.fixture
def start() -> Iterator[Callable[..., ProcessBackend]]:
    """Starts process back-ends, waits until they are ready, and stops them when the test ends."""
    started: list[ProcessBackend] = []

    def start(scorer: Scorer, **settings: Any) -> ProcessBackend:
        backend = ProcessBackend(scorer, None, ScoringConfig(**settings))
        started.append(backend)
        wait_for(lambda: backend.collect() or backend.accepting)
        return backend

    yield start
    for backend in started:
        backend.close()


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
    return value


def run_batches(backend: ProcessBackend, count: int) -> tuple[list[Answer], float]:
    """Keeps two batches in flight; returns the answers and the seconds from the first to the last one."""
    answers: list[Answer] = []
    begin = submitted = 0
    while len(answers) < count:
        while submitted < count and submitted - len(answers) < 2:
            backend.submit(submitted, CLIPS)
            submitted += 1
        answers += wait_for(backend.collect)
        begin = begin or time.monotonic()
    return answers, time.monotonic() - begin


# Duty cycle


@pytest.mark.parametrize("duty_cycle", [0.2, 0.5])
def test_the_process_computes_for_no_more_than_its_share_of_the_time(
    start: Callable[..., ProcessBackend], duty_cycle: float
):
    answers, seconds = run_batches(start(SlowScorer(0.05), duty_cycle=duty_cycle), 6)
    assert all(found.scores is not None for found in answers)
    busy_s = [found.busy_s for found in answers]
    assert min(busy_s) >= 0.05
    assert seconds > 0.95 * (sum(busy_s[1:]) + sum(busy_s[:-1]) * (1 / duty_cycle - 1))


def test_without_a_limit_nobody_rests(start: Callable[..., ProcessBackend]):
    answers, seconds = run_batches(start(SlowScorer(0.05)), 10)
    assert sum(found.busy_s for found in answers[1:]) / seconds > 0.7


def test_resting_is_not_taken_for_hanging(start: Callable[..., ProcessBackend]):
    backend = start(SlowScorer(0.1), duty_cycle=0.1, timeout_s=0.6)  # rests for 0.9 s
    answers, seconds = run_batches(backend, 3)
    assert [found.error for found in answers] == ["", "", ""]
    assert seconds > 2 * 0.9
    backend.submit(3, CLIPS)  # none was in flight, and the rest goes on
    (found,) = wait_for(backend.collect)
    assert found.scores is not None
    assert backend.restarts == 0


def test_a_scorer_that_hangs_after_a_rest_is_noticed_all_the_same(start: Callable[..., ProcessBackend]):
    backend = start(SlowScorer(3600), duty_cycle=0.5, timeout_s=0.3)
    backend.submit(0, CLIPS)
    (found,) = wait_for(backend.collect, timeout_s=10)
    assert found.error == "did not answer within 0.3 s"


@pytest.mark.parametrize("waiting", [0, 1])
def test_closing_does_not_wait_for_a_rest(start: Callable[..., ProcessBackend], waiting: int):
    backend = start(SlowScorer(0.1), duty_cycle=0.001)  # rests for 100 s
    run_batches(backend, 1)
    for ticket in range(waiting):
        backend.submit(1 + ticket, CLIPS)
    begin = time.monotonic()
    backend.close()
    assert time.monotonic() - begin < 1.5


@pytest.mark.gpu
def test_a_duty_cycle_leaves_most_of_a_shared_gpu_to_the_learner(start: Callable[..., ProcessBackend]):
    """Products of matrices per second beside a scorer that does nothing else, with a tenth of the time or all."""
    matrix = torch.randn(8192, 8192, device="cuda")

    def products_per_s(**settings: Any) -> float:
        backend = start(MultiplyingScorer(), **settings)
        answered = submitted = count = 0
        begin = time.monotonic()
        while (seconds := time.monotonic() - begin) < 8:
            if submitted - answered < 2:
                backend.submit(submitted, CLIPS)
                submitted += 1
            answered += len(backend.collect())
            matrix @ matrix
            torch.cuda.synchronize()
            count += 1
        backend.close()
        return count / seconds

    assert products_per_s(duty_cycle=0.1) > 1.3 * products_per_s()


# Priority


def test_a_process_of_low_priority_is_set_up_at_the_usual_one_and_nice_with_all_its_threads_afterwards(
    start: Callable[..., ProcessBackend],
):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    backend = start(NicenessScorer(), low_priority=True)
    backend.submit(0, CLIPS)
    (found,) = wait_for(backend.collect)
    nice = min(own + NICENESS, 19)
    assert found.report == {"set_up": own, "thread": nice, "child": nice}


def test_a_process_of_low_priority_is_nice_once_set_up(start: Callable[..., ProcessBackend]):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    polite, usual = start(GoodScorer(), low_priority=True), start(GoodScorer())
    assert os.getpriority(os.PRIO_PROCESS, polite.pid) == min(own + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, usual.pid) == own
    if AUTOGROUP.exists():
        assert Path(f"/proc/{polite.pid}/autogroup").read_text().endswith(f" nice {NICENESS}\n")
        assert Path(f"/proc/{usual.pid}/autogroup").read_text().endswith(" nice 0\n")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be assigned on this system")
def test_a_process_of_low_priority_leaves_the_core_to_whoever_wants_it(start: Callable[..., ProcessBackend]):
    """On one core with a learner that computes all the time, its share is far below a half."""
    core = min(os.sched_getaffinity(0))
    backend = start(BusyScorer(core, seconds=2.0), low_priority=True)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        backend.submit(0, CLIPS)
        begin, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - begin < 1.8:
            pass
        ours = time.process_time() - cpu
    finally:
        os.sched_setaffinity(0, before)
    (found,) = wait_for(backend.collect)
    theirs = float(found.report["cpu_s"])
    assert theirs < 0.4 * ours


# Settings


@pytest.mark.parametrize("duty_cycle", [0.0, -1.0, 1.5, float("nan")])
def test_an_impossible_share_is_refused(duty_cycle: float):
    with pytest.raises(ValueError, match=r"scoring\.duty_cycle=.* must lie in \(0, 1\]"):
        ScoringConfig(duty_cycle=duty_cycle)


@pytest.mark.parametrize("backend", ["thread", "sync"])
@pytest.mark.parametrize("setting", [{"duty_cycle": 0.5}, {"low_priority": True}])
def test_settings_of_the_scoring_process_are_refused_without_one(backend: Any, setting: dict[str, Any]):
    (name,) = setting
    with pytest.raises(ValueError, match=rf"scoring\.{name}=.* needs a scoring process.*scoring\.backend is {backend}"):
        ScoringConfig(backend=backend, **setting)


# A scorer that refuses to be set up, for lack of memory or otherwise


def gpu_of(monkeypatch: pytest.MonkeyPatch, free_gib: float, total_gib: float = 16.0) -> list[Any]:
    asked: list[Any] = []

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        asked.append(device)
        return int(free_gib * GIB), int(total_gib * GIB)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Small Card")
    return asked


def test_a_scorer_larger_than_the_free_memory_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch):
    gpu_of(monkeypatch, free_gib=3.5)
    scorer = LargeScorer(7 * GIB)
    for backend in ("sync", "thread"):
        with pytest.raises(ScorerError, match=r"'large' needs 7\.0 GiB of GPU memory, but 3\.5 of 16\.0 GiB are free"):
            settle(scorer, backend)
    assert scorer.setups == 0


def test_a_scorer_that_fits_says_nothing_or_is_elsewhere_is_set_up(monkeypatch: pytest.MonkeyPatch):
    asked = gpu_of(monkeypatch, free_gib=3.5)
    require_gpu_memory(LargeScorer(3 * GIB))
    require_gpu_memory(LargeScorer(3 * GIB, device="cuda:1"))
    assert asked == ["cuda", "cuda:1"]
    require_gpu_memory(LargeScorer(7 * GIB, device="cpu"))
    require_gpu_memory(LargeScorer(None))
    require_gpu_memory(GoodScorer())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_gpu_memory(LargeScorer(7 * GIB))
    assert len(asked) == 2


@pytest.mark.gpu
def test_the_free_memory_of_a_real_gpu_decides():
    free, total = torch.cuda.mem_get_info()
    require_gpu_memory(LargeScorer(free // 2))
    with pytest.raises(ScorerError, match=torch.cuda.get_device_name()):
        require_gpu_memory(LargeScorer(total + 1))
    with pytest.raises(ScorerError, match="of GPU memory"):
        settle(LargeScorer(total + 1), "process")


def settle(scorer: Scorer, backend: str) -> None:
    """Polls a service until its scorer has scored something or ends the run."""
    buffer, episodes = make_buffer(), Episodes()
    service = ScoringService(buffer, scorer, backend=backend)
    try:
        episodes.clips(buffer, 5)
        assert service.drain(30)
    finally:
        service.close()
        check_counts(service)


@pytest.mark.parametrize("backend", ["sync", "thread", "process"])
def test_a_refusal_ends_the_run_in_one_line_wherever_the_scorer_runs(backend: str):
    begin = time.monotonic()
    with pytest.raises(ScorerError, match=r"^scorer 'refusing' has no weights$"):
        settle(RefusingScorer(), backend)
    assert time.monotonic() - begin < 20  # not tried again and again


def test_a_refusal_after_a_restart_costs_scores_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    buffer, episodes = make_buffer(), Episodes()
    scorer = RefusingScorer(str(tmp_path / "setups"))  # the first set-up works, and the process dies at its first batch
    service = ScoringService(buffer, scorer, backend="process", max_restarts=1, backoff_s=0.01)
    episodes.clips(buffer, 5)
    assert service.drain(60)
    service.close()
    assert check_counts(service)["dropped"] == buffer.clips.emitted
    assert "GIVEN UP: it could not be set up (scorer 'refusing' has no weights)" in caplog.text
