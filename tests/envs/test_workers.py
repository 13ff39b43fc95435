"""Worker processes that hang or are stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from vlmrb.envs import EnvConfig, make_env, workers
from vlmrb.envs.batch import SimulatorEnv

ENV_ID = "tests.envs.odd_worlds:Counting-v0"


def _env(num_envs: int = 2, *, workers: int = 2, worker_timeout_s: float | None = 2.0, **kwargs: Any) -> SimulatorEnv:
    config = EnvConfig(ENV_ID, num_envs=num_envs, workers=workers, worker_timeout_s=worker_timeout_s, kwargs=kwargs)
    env = make_env(config)
    assert isinstance(env, SimulatorEnv)
    return env


def _processes(env: SimulatorEnv) -> list[Any]:
    return [group._process for group in env.simulator._groups]


@pytest.mark.slow
def test_a_stopped_worker_ends_the_run_with_its_name_and_leaves_nothing_behind() -> None:
    env = _env()
    env.rollout(3)
    _, second = _processes(env)
    os.kill(second.pid, signal.SIGSTOP)
    begin = time.monotonic()
    message = (
        rf"^env.id '{ENV_ID}': environment worker 2 of 2 \(process {second.pid}\) gave no answer within 2 s and was "
        r"killed: it hangs, or env.worker_timeout_s = 2 is too short \(null waits for ever\)$"
    )
    with pytest.raises(RuntimeError, match=message):
        env.rollout(3)
    env.close()
    assert 2.0 <= time.monotonic() - begin < 60.0
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_an_environment_that_never_answers_is_ended() -> None:
    env = _env(num_envs=1, workers=1, hang_at=3)
    env.rollout(2)
    with pytest.raises(RuntimeError, match=r"environment worker 1 of 1 .* gave no answer within 2 s"):
        env.rollout(3)
    env.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_worker_that_stops_in_the_middle_of_an_answer_is_ended() -> None:
    env = _env(num_envs=1, workers=1, size=2_000_000)  # 8 MB: far more than a pipe holds
    (group,) = env.simulator._groups
    group.call("look")
    assert group._pipe.poll(120.0)
    os.kill(group._process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="gave no answer within 2 s"):
        group.result()
    env.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_worker_that_takes_nothing_any_more_is_ended() -> None:
    env = _env(num_envs=1, workers=1)
    (group,) = env.simulator._groups
    os.kill(group._process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="gave no answer within 2 s"):
        group.call("step", torch.zeros(8_000_000).numpy())
    env.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_closing_does_not_wait_for_stopped_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_CLOSE_TIMEOUT_S", 0.5)
    env = _env(worker_timeout_s=None)
    for process in _processes(env):
        os.kill(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    env.close()
    assert time.monotonic() - begin < 60.0
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("worker_timeout_s", [None, 60.0])
def test_a_pause_shorter_than_the_time_out_is_waited_for(worker_timeout_s: float | None) -> None:
    env = _env(num_envs=1, workers=1, worker_timeout_s=worker_timeout_s)
    (process,) = _processes(env)
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()
    begin = time.monotonic()
    assert env.rollout(2)["next", "observation"].reshape(-1).tolist() == [1.0, 2.0]
    assert time.monotonic() - begin >= 0.5
    env.close()


@pytest.mark.slow
def test_the_first_answer_has_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    env = _env(num_envs=1, workers=1, worker_timeout_s=0.5, start_s=1.0)  # slower than the time-out
    env.close()
    monkeypatch.setattr(workers, "_START_S", 1.0)
    with pytest.raises(RuntimeError, match=r"within 1 s and was killed.* env.worker_timeout_s = 0.5 is too short"):
        _env(num_envs=1, workers=1, worker_timeout_s=0.5, start_s=600.0)


@pytest.mark.slow
def test_a_stopped_worker_does_not_keep_python_from_ending() -> None:
    code = (
        "import os, signal\n"
        "from vlmrb.envs import EnvConfig, make_env\n"
        "if __name__ == '__main__':\n"
        f"    env = make_env(EnvConfig('{ENV_ID}', num_envs=1, workers=1))\n"
        "    pid = env.simulator._groups[0]._process.pid\n"
        "    os.kill(pid, signal.SIGSTOP)\n"
        "    print(pid)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.stdout), 0)
