"""Trains in child processes that save after every batch, kills each at a random moment, and looks at what is left.

Run by test_kill.py in a process of its own: it forks, which a process with threads must not.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.callbacks.checkpoint_files import LAST, read_reference, read_sidecar, verify_sidecar
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.envs import EnvConfig
from vlmrb.replay.config import ReplayConfig


def train(run_dir: Path) -> int:
    """Goes on from the last checkpoint, if there is one, until killed; returns the exit code after SIGTERM."""
    module = DQN(
        EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=4),
        TrainingConfig(total_env_steps=10**6, learning_starts=64, frames_per_batch=32),
        ReplayConfig(capacity=256, batch_size=16, clip_length=8, n_steps=3, vlm=None, lam_max=0.0),
        hidden_sizes=(64,),
    )
    callback = ReplayCheckpoint(every_n_env_steps=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        default_root_dir=run_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    last = run_dir / "checkpoints" / LAST
    trainer.fit(module, ckpt_path=str(last) if last.exists() else None)
    return callback.exit_code


def start(run_dir: Path) -> int:
    """Forks a training process; returns its id once it has saved something."""
    last = run_dir / "checkpoints" / LAST
    before = last.stat().st_mtime_ns if last.exists() else 0
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = train(run_dir)
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while not last.exists() or last.stat().st_mtime_ns == before:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise SystemExit("training ended by itself")
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise SystemExit("nothing was saved in time")
        time.sleep(0.002)
    return pid


def env_steps_of_last(folder: Path) -> int:
    """Loads the pair that last.ckpt names and returns its env steps."""
    content = torch.load(folder / LAST, weights_only=True)
    reference = read_reference(folder / LAST)
    assert reference is not None
    replay = read_sidecar(verify_sidecar(folder, reference))
    assert replay["env_steps"] == replay["buffer"]["env_steps"] == content["vlmrb"]["env_steps"]
    return replay["env_steps"]


def main(run_dir: Path, kills: int) -> None:
    """Kills so many times; every pair must load, be at least as new as the one before, and be gone on from."""
    moments = random.Random(0)
    folder, reached = run_dir / "checkpoints", 0
    for _ in range(kills):
        pid = start(run_dir)
        time.sleep(moments.uniform(0.0, 0.4))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        env_steps = env_steps_of_last(folder)
        assert env_steps > reached, (env_steps, reached)
        reached = env_steps
        sys.stdout.write(f"{env_steps} {sorted(path.name for path in folder.iterdir())}\n")
    pid = start(run_dir)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 143, status
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) == 3, left  # last.ckpt and one pair: what the kills left lying about is gone
    assert env_steps_of_last(folder) > reached


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
