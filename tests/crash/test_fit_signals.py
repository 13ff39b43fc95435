"""`vlmrb fit` with a scoring process beside it, ended by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 120


class Fit:
    """A `vlmrb fit` in a process group of its own, whose descendants can be found by a mark in their environment."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self.mark = f"VLMRB_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        command = [sys.executable, "-m", "vlmrb.cli", "fit", "-c", "configs/minigrid/doorkey_6x6_dqn.yaml"]
        command += ["--env.id", "MiniGrid-DoorKey-5x5-v0", "--replay.capacity", "2048", "--run_dir", str(run_dir)]
        command += ["--env.num_envs", "32", "--training.frames_per_batch", "256", "--evaluation.episodes", "1"]
        command += ["--checkpoint.every_n_env_steps", "1024", *arguments]
        self.log = run_dir.with_name("log").open("a+")
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", name: value},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def last(self) -> Path:
        return self.run_dir / "checkpoints" / "last.ckpt"

    def saved_env_steps(self) -> int:
        return torch.load(self.last, weights_only=True)["vlmrb"]["env_steps"]

    def wait_for_a_checkpoint(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.last.exists():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def descendants(self) -> list[int]:
        """Returns the processes that carry the mark, the main one aside."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (OSError, ValueError):  # gone meanwhile, or no process
                continue
        return [pid for pid in found if pid != self.process.pid]

    def assert_nothing_is_left(self) -> None:
        """Python's own resource tracker notices a moment later that its process is gone."""
        deadline = time.monotonic() + 10
        while left := self.descendants():
            assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
            time.sleep(0.05)

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def close(self) -> None:
        for pid in [*self.descendants(), *([self.process.pid] if self.process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self.log.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Fit]:
    fit = Fit(tmp_path / "run", "--training.total_env_steps", "10240000")
    try:
        fit.wait_for_a_checkpoint()
        assert fit.descendants(), "the scorer has a process of its own"
        yield fit
    finally:
        fit.close()


@pytest.mark.slow
def test_sigterm_saves_exits_with_143_leaves_nothing_running_and_the_run_can_be_resumed(running: Fit) -> None:
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.exit_code() == 143, running.output()
    running.assert_nothing_is_left()
    total = running.saved_env_steps() + 1024
    resumed = Fit(running.run_dir, "--resume", "true", "--training.total_env_steps", str(total))
    try:
        assert resumed.exit_code() == 0, resumed.output()
        resumed.assert_nothing_is_left()
    finally:
        resumed.close()
    assert json.loads((running.run_dir / "summary.json").read_text())["env_steps"] == total
    assert len(list((running.run_dir / "checkpoints").iterdir())) == 3


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_saves_exits_with_130_and_leaves_nothing_running(running: Fit) -> None:
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.exit_code() == 130, running.output()
    running.assert_nothing_is_left()
    assert running.saved_env_steps() == json.loads((running.run_dir / "summary.json").read_text())["env_steps"]


@pytest.mark.slow
def test_nothing_is_left_running_after_a_kill(running: Fit) -> None:
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.exit_code() == -signal.SIGKILL
    running.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_training_that_waits_for_a_scorer_of_a_clip_in_two_minutes_ends_at_once(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    slow = ["-c", "configs/scorer/paced.yaml", "--scoring.scorer.init_args.clips_per_s", "0.01"]
    waits = ["--scoring.max_delay_env_steps", "1024", "--scoring.timeout_s", "10000", "--scoring.cache", "null"]
    fit = Fit(tmp_path / "run", "--training.total_env_steps", "1024000", *slow, *waits)
    try:
        fit.wait_for_a_checkpoint()  # at 1024 env steps; the first clips are overdue soon after
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # a few blocks take far less
            assert fit.process.poll() is None, fit.output()
            time.sleep(0.1)
        begin = time.monotonic()
        os.kill(fit.process.pid, number)
        assert fit.exit_code() == code, fit.output()
        assert time.monotonic() - begin < 60
        fit.assert_nothing_is_left()
        assert fit.saved_env_steps() <= 4096  # it did wait
    finally:
        fit.close()
