"""Evaluates during training, all replay schemes alike, and writes the run's summary at its end."""

from __future__ import annotations

import json
import logging
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from vlmrb.callbacks.config import EvaluationConfig
from vlmrb.evaluation import evaluate
from vlmrb.loggers import CSVTable
from vlmrb.media import write_video

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule

log = logging.getLogger(__name__)
THRESHOLDS = (0.5, 0.8, 0.9)
VIDEO_SIZE = 192  # pixels
LAST = 3  # evaluations that a run is summed up by


class Evaluated(NamedTuple):
    """What one evaluation found.

    Attributes:
        env_steps: when.
        success: share of episodes that reached the goal, in [0, 1].
        mean_return: undiscounted; NaN in what a run of an earlier version has saved, and so is the next.
        mean_length: env steps of an episode.
    """

    env_steps: int
    success: float
    mean_return: float = math.nan
    mean_length: float = math.nan


class EvaluationCallback(Callback):
    """Evaluates at step 0, every so many env steps, and at the end; writes ``evaluations.csv`` and ``summary.json``.

    Args:
        **settings: see `EvaluationConfig`.

    Attributes:
        config: the settings.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = EvaluationConfig(**settings)
        self.history: list[Evaluated] = []
        self.seconds = 0.0  # spent training before the last interruption
        self._next = 0
        self._next_video = 0
        self._started = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the history and the wall time, so that a resumed run's summary covers all of it."""
        return {
            "history": [list(row) for row in self.history],
            "next": self._next,
            "next_video": self._next_video,
            "seconds": self._elapsed(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up an interrupted run's history."""
        self.history = [Evaluated(*row) for row in state_dict["history"]]
        self._next = state_dict["next"]
        self._next_video = state_dict["next_video"]
        self.seconds = state_dict["seconds"]

    def _elapsed(self) -> float:
        return self.seconds + (time.perf_counter() - self._started if self._started else 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluates the untrained policy, unless the run is a resumed one."""
        self._table = CSVTable(Path(trainer.default_root_dir) / "evaluations.csv")
        self._started = time.perf_counter()
        if not self.history:
            self._table.truncate_after("env_step", -1)
            self._evaluate(trainer, pl_module)
        self._resumed = bool(pl_module.env_steps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Drops what an interrupted run wrote after its checkpoint, now that nothing can refuse the resume any more."""
        if self._resumed:
            self._resumed = False
            self._table.truncate_after("env_step", pl_module.env_steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluates when it is due."""
        if pl_module.env_steps >= self._next:
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluates the final policy and writes the summary."""
        finished = pl_module.env_steps >= pl_module.training_config.total_env_steps
        if finished and self.history[-1].env_steps < pl_module.env_steps:
            self._evaluate(trainer, pl_module)
        summary = self.summary(pl_module)
        path = Path(trainer.default_root_dir) / "summary.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(summary, indent=2) + "\n")
        temporary.replace(path)  # never half a summary

    def _evaluate(self, trainer: Trainer, pl_module: OffPolicyModule) -> None:
        step = pl_module.env_steps
        final = step >= pl_module.training_config.total_env_steps
        video = self.config.video_every_n_env_steps is not None and (final or step >= self._next_video)
        result = evaluate(
            pl_module,
            pl_module.env,
            episodes=self.config.episodes,
            seed=self.config.seed,
            epsilon=self.config.epsilon,
            video=video,
            frame_size=VIDEO_SIZE,
        )
        self.history.append(Evaluated(step, result.success, result.mean_return, result.mean_length))
        self._next = (step // self.config.every_n_env_steps + 1) * self.config.every_n_env_steps
        pl_module.latest_evaluation = result
        metrics = {
            "eval/success": result.success,
            "eval/return": result.mean_return,
            "eval/episode_length": result.mean_length,
        }
        self._table.append({"env_step": step, **metrics, "time/wall_s": round(self._elapsed(), 3)})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        if result.video is not None and self.config.video_every_n_env_steps is not None:
            self._next_video = (step // self.config.video_every_n_env_steps + 1) * self.config.video_every_n_env_steps
            write_video(trainer, "evaluation", result.video, step)

    def summary(self, pl_module: OffPolicyModule) -> dict[str, Any]:
        """Returns the run's summary as plain values.

        ``success``, ``return`` (undiscounted reward) and ``episode_length`` (env steps) are means of the last three
        evaluations, ``env_steps_to`` the env steps at the first evaluation that reached each threshold (``null``:
        never).
        """
        last = self.history[-LAST:]
        returns = [row.mean_return for row in self.history]
        scoring = pl_module.scoring.stats() if pl_module.scoring is not None else {}
        return {
            "success": _mean(row.success for row in last),
            "best_success": max(row.success for row in self.history),
            "return": _mean(row.mean_return for row in last),
            "best_return": max(filter(math.isfinite, returns), default=None),
            "episode_length": _mean(row.mean_length for row in last),
            "env_steps": pl_module.env_steps,
            "grad_steps": pl_module.grad_steps,
            "env_steps_to": {
                str(threshold): next((row.env_steps for row in self.history if row.success >= threshold), None)
                for threshold in THRESHOLDS
            },
            "history": [[row.env_steps, row.success] for row in self.history],
            "wall_s": round(self._elapsed(), 1),
            "finished": pl_module.env_steps >= pl_module.training_config.total_env_steps,
            "seed": pl_module.seed,
            "env": pl_module.env.id,
            "algorithm": type(pl_module).__name__,
            "evaluation": {
                "episodes": self.config.episodes,
                "epsilon": pl_module.evaluation_epsilon if self.config.epsilon is None else self.config.epsilon,
                "seed": self.config.seed,
            },
            "scoring": {key: value for key, value in scoring.items() if math.isfinite(value)},
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("vlmrb", "torch", "torchrl", "tensordict", "lightning")},
            },
            "command": shlex.join(sys.argv),
        }


def in_short(summary: Mapping[str, Any]) -> str:
    """Returns what a summary says of the agent, in one line."""
    parts = [f"success {summary['success']:.2f} (best {summary['best_success']:.2f})"]
    if summary["return"] is not None:
        parts.append(f"return {summary['return']:.3g} (best {summary['best_return']:.3g})")
        parts.append(f"{summary['episode_length']:.0f} env steps an episode")
    return f"after {summary['env_steps']:,} env steps: {', '.join(parts)}; means of the last {LAST} evaluations"


def _mean(values: Iterable[float]) -> float | None:
    """Returns the mean of what is finite; ``None`` if nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
