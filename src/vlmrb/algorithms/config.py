"""Budgets and schedules that all algorithms share; what belongs to one of them is an argument of its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrb.ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, require

if TYPE_CHECKING:
    from vlmrb.replay.config import ReplayConfig


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and how much to learn from each env step.

    Attributes:
        total_env_steps: env steps in all, a multiple of ``frames_per_batch``.
        learning_starts: env steps before the first gradient step. Higher → a more varied first batch, a later start.
        frames_per_batch: env steps collected between two rounds of gradient steps, a multiple of ``env.num_envs``.
            Higher → less overhead per step, an older policy when acting.
        replay_ratio: gradient steps per env step; fractions carry over. Higher → more learning per env step, slower
            wall clock, more over-fitting to early experience.
        gamma: discount factor per env step.
        compile: compile the loss of DQN or IQN with `torch.compile`; pays off only on long runs (it takes up to a
            minute).
    """

    total_env_steps: int = 240_000
    learning_starts: int = 2_048
    frames_per_batch: int = 320
    replay_ratio: float = 0.125
    gamma: float = 0.95
    compile: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that cannot work, naming them."""
        budget = {"total_env_steps": self.total_env_steps, "frames_per_batch": self.frames_per_batch}
        require(AT_LEAST_ONE, "training", **budget)
        require(NOT_NEGATIVE, "training", learning_starts=self.learning_starts)
        require(POSITIVE, "training", replay_ratio=self.replay_ratio)
        require(SHARE, "training", gamma=self.gamma)
        if self.total_env_steps % self.frames_per_batch:
            blocks = max(1, round(self.total_env_steps / self.frames_per_batch))
            raise ValueError(
                f"training.total_env_steps={self.total_env_steps} must be a multiple of "
                f"training.frames_per_batch={self.frames_per_batch}; the nearest is {blocks * self.frames_per_batch}"
            )


def require_fitting(training: TrainingConfig, replay: ReplayConfig, num_envs: int) -> None:
    """Refuses settings of several sections that do not go together.

    Args:
        training: budgets and schedules.
        replay: the replay buffer.
        num_envs: instances of the training environment.

    Raises:
        ValueError: naming the settings.
    """
    if training.frames_per_batch % num_envs:
        raise ValueError(
            f"training.frames_per_batch={training.frames_per_batch} must be a multiple of env.num_envs={num_envs}"
        )
    if replay.capacity < training.frames_per_batch:
        raise ValueError(
            f"replay.capacity={replay.capacity} is smaller than one block of "
            f"training.frames_per_batch={training.frames_per_batch} rows"
        )
    if replay.n_steps * num_envs > replay.capacity:
        raise ValueError(
            f"replay.n_steps={replay.n_steps} rows of each of env.num_envs={num_envs} environments do not fit into "
            f"replay.capacity={replay.capacity}"
        )
