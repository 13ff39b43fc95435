"""What DQN and IQN make of a chain, and what replay makes of it when success is rare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer, seed_everything

from vlmrb.algorithms import DQN, IQN, TrainingConfig
from vlmrb.algorithms.value_based import ValueBased
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.evaluation import evaluate
from vlmrb.replay.config import ReplayConfig, VLMConfig
from vlmrb.scoring.milestones import MilestonesScorer

pytestmark = pytest.mark.slow


def success(
    folder: Path,
    algorithm: type[ValueBased],
    length: int,
    env_steps: int,
    replay_ratio: float,
    batch_size: int,
    *,
    guided: bool,
    seed: int,
    **model: Any,
) -> float:
    """Trains on a chain and returns the success of greedy play."""
    seed_everything(seed, verbose=False)
    replay = (
        ReplayConfig(env_steps, batch_size, clip_length=length + 1, lam_max=0.5, warmup_fraction=0.0, vlm=VLMConfig())
        if guided
        else ReplayConfig(env_steps, batch_size, clip_length=None, lam_max=0.0, vlm=None)
    )
    training = TrainingConfig(env_steps, 1_280, 640, replay_ratio, gamma=0.95)
    env = EnvConfig(f"chain:Chain-{length}-v0", num_envs=64)
    module = algorithm(env, training, replay, seed, hidden_sizes=[32], **model)
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[ScoringCallback(MilestonesScorer(), backend="sync")] if guided else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module)
    return evaluate(module, env, episodes=1, seed=0, epsilon=0.0).success


@pytest.mark.parametrize("algorithm", [DQN, IQN])
def test_a_short_chain_is_learnt(tmp_path: Path, algorithm: type[ValueBased]) -> None:
    settings: dict[str, Any] = {"target_update_interval": 25, "learning_rate": 1e-3}
    assert success(tmp_path, algorithm, 6, 9_600, 0.1, 32, guided=False, seed=0, **settings) == 1.0


def test_where_success_is_rare_uniform_replay_mostly_fails_and_guided_replay_does_not(tmp_path: Path) -> None:
    # Random play all the way, so that both learn from equally rare successes: each attempt has a chance of 2^-13.
    settings: dict[str, Any] = {"target_update_interval": 8, "learning_rate": 3e-3, "epsilon_end": 1.0}

    def successes(guided: bool) -> float:
        return sum(
            success(tmp_path, DQN, 13, 256_000, 0.003, 32, guided=guided, seed=seed, **settings) for seed in range(5)
        )

    assert successes(guided=False) <= 2  # of 5; one in the run that chose the budget
    assert successes(guided=True) >= 4  # five in that run
