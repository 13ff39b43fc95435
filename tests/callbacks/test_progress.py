from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vlmrb.callbacks.pace import Pace
from vlmrb.callbacks.progress import ProgressBar


class Clock:
    """Stands in for `time` where it is read."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("vlmrb.callbacks.pace.time", clock)
    monkeypatch.setattr("vlmrb.callbacks.progress.time", clock)
    return clock


def module(**changes: Any) -> SimpleNamespace:
    settings = SimpleNamespace(total_env_steps=10_000)
    defaults = {"env_steps": 0, "training_config": settings, "scoring": None, "gauges": lambda: {"epsilon": 0.25}}
    return SimpleNamespace(**(defaults | changes))


def run(bar: ProgressBar, clock: Clock, agent: SimpleNamespace, batches: int, seconds: float) -> None:
    bar.on_train_start(SimpleNamespace(), agent)
    for number in range(batches):
        clock.now += seconds
        agent.env_steps += 100
        bar.on_train_batch_end(SimpleNamespace(), agent, None, SimpleNamespace(numel=lambda: 100), number)
    bar.on_train_epoch_end(SimpleNamespace(), agent)
    bar.on_train_end()


def test_pace_leaves_out_pauses(clock: Clock) -> None:
    rate = Pace()
    for number in range(9):
        clock.now += 60.0 if number == 4 else 0.1
        rate.tick(50)
    assert rate.env_steps_per_s == pytest.approx(500)


def test_pace_follows_the_latest_batches(clock: Clock) -> None:
    rate = Pace(batches=3)
    for seconds in (1.0, 1.0, 1.0, 1.0, 0.1, 0.1):
        clock.now += seconds
        rate.tick(10)
    assert rate.env_steps_per_s == pytest.approx(100)


def test_pace_is_unknown_before_the_first_batch() -> None:
    assert str(Pace().env_steps_per_s) == "nan"


def test_a_file_gets_a_line_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run(ProgressBar(line_s=30), clock, module(), batches=100, seconds=1.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0] == "3,000 of 10,000 env steps (30%), 00:30 gone, 01:10 to go: 100 steps/s, ε 0.25"
    assert lines[-1].startswith("10,000 of 10,000 env steps (100%), 01:40 gone, 00:00 to go")


def test_line_names_success_and_share_scored(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    agent = module(
        latest_evaluation=SimpleNamespace(success=0.5),
        scoring=SimpleNamespace(stats=lambda: {"share_scored": 0.987}),
    )
    run(ProgressBar(), clock, agent, batches=1, seconds=1.0)
    assert "success 0.50, 100 steps/s, scored 99%, ε 0.25" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "says"), [(0.354, "scored 99%, waiting for it 35%, ε"), (0.004, "scored 99%, ε")])
def test_line_says_that_training_waits_if_it_does(
    share: float, says: str, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = module(scoring=SimpleNamespace(stats=lambda: {"share_scored": 0.987, "throttled_share": share}))
    run(ProgressBar(), clock, agent, batches=1, seconds=1.0)
    assert says in capsys.readouterr().out


def test_resumed_run_counts_from_where_it_was(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run(ProgressBar(), clock, module(env_steps=9_000), batches=5, seconds=1.0)
    assert capsys.readouterr().out.startswith("9,500 of 10,000 env steps (95%), 00:05 gone, 00:05 to go")


def test_batch_beyond_the_budget_does_not_show_more_than_all(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    run(ProgressBar(), clock, module(env_steps=9_950), batches=1, seconds=1.0)
    assert capsys.readouterr().out.startswith("10,000 of 10,000 env steps (100%)")


def test_terminal_gets_a_bar_over_env_steps_refreshed_at_most_twice_a_second(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    run(ProgressBar(), clock, module(), batches=100, seconds=0.05)
    shown = [line for line in terminal.getvalue().split("\r") if "steps/s" in line]
    assert len(shown) <= 12  # 5 seconds, and the end
    assert "10.0k/10.0k env steps" in shown[-1]
    assert "2,000 steps/s, ε 0.25" in shown[-1]


def test_disabled_bar_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(line_s=0)
    bar.disable()
    run(bar, clock, module(), batches=3, seconds=1.0)
    assert capsys.readouterr().out == ""
