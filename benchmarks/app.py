"""Runs the application for the benchmarks: a whole Lightning fit, timed from its first gradient step on."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, Trainer, seed_everything

from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.replay.config import ReplayConfig

NUM_ENVS, CAPACITY, LEARNING_STARTS = 32, 100_000, 2_048


@dataclass(frozen=True)
class Fit:
    """What a timed fit gave.

    Attributes:
        rate: env steps per second from the first gradient step to the last batch.
        cpu_rate: env steps per second of this process's own CPU time meanwhile: what others do on the machine, and
            waiting, do not count.
        scoring: the scoring service's last statistics, empty without one.
    """

    rate: float
    cpu_rate: float
    scoring: dict[str, Any]


class Stopwatch(Callback):
    """Times a fit from the first gradient step to the last batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Starts the clock once there is a gradient step, and reads it ever after."""
        now, cpu = time.perf_counter(), time.process_time()
        if not pl_module.grad_steps:
            self.start, self.start_cpu, self.start_env_steps = now, cpu, pl_module.env_steps
        done = pl_module.env_steps - self.start_env_steps
        self.rate = done / max(now - self.start, 1e-9)
        self.cpu_rate = done / max(cpu - self.start_cpu, 1e-9)
        self.scoring = pl_module.scoring.stats() if self.due(pl_module) else {}

    @staticmethod
    def due(pl_module: Any) -> bool:
        """Says whether this is the last batch of a run that scores."""
        last = pl_module.env_steps >= pl_module.training_config.total_env_steps
        return pl_module.scoring is not None and last


def prepare() -> None:
    """One torch thread, and no words but the benchmark's."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torchrl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def fit(
    size: int, training: TrainingConfig, replay: ReplayConfig, scoring: ScoringCallback | None = None, seed: int = 0
) -> Fit:
    """Trains DQN on DoorKey without evaluation, logging or checkpoints.

    Args:
        size: DoorKey's N.
        training: budgets and schedules.
        replay: the replay scheme.
        scoring: the scoring callback, or ``None``.
        seed: of everything.
    """
    seed_everything(seed, verbose=False)
    env = EnvConfig(f"MiniGrid-DoorKey-{size}x{size}-v0", num_envs=NUM_ENVS)
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[stopwatch, *([] if scoring is None else [scoring])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(DQN(env, training, replay, seed))
    return Fit(stopwatch.rate, stopwatch.cpu_rate, stopwatch.scoring)
