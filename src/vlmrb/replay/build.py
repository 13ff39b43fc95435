"""From the settings to the buffer."""

from __future__ import annotations

from vlmrb.envs.registry import Goals
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.hindsight import HindsightTransform
from vlmrb.replay.score_reward import ScoreRewardTransform
from vlmrb.replay.similarity import SimilaritySelector


def build_buffer(
    config: ReplayConfig,
    *,
    gamma: float,
    total_env_steps: int,
    learning_starts: int = 0,
    seed: int = 0,
    goals: Goals | None = None,
) -> VLMReplayBuffer:
    """Builds the buffer that a config describes.

    Args:
        config: the settings.
        gamma: discount factor of the n-step returns.
        total_env_steps: the run's budget in env steps, over which λ and β are scheduled.
        learning_starts: env steps before the first gradient step.
        seed: of the sampling generator.
        goals: of the environment, which hindsight exchanges.

    Returns:
        An empty buffer whose λ and β follow `VLMReplayBuffer.set_env_steps`.

    Raises:
        ValueError: the config asks for hindsight, and there are no goals.
    """
    her, reward = config.her, config.score_reward
    hindsight = None
    if her is not None:
        if goals is None:
            raise ValueError("replay.her exchanges goals: build_buffer needs those of the environment, envs.make_goals")
        hindsight = HindsightTransform(goals, her.share, her.strategy, seed + 3)
    aer = config.aer
    selector = None
    if aer is not None:
        selector = SimilaritySelector(aer.schedule(total_env_steps, learning_starts), aer.similarity)
    return VLMReplayBuffer(
        config.capacity,
        batch_size=config.batch_size,
        terms=config.terms(seed + 4),
        lam=config.lam_schedule(total_env_steps, learning_starts),
        beta=config.beta_schedule(total_env_steps, learning_starts),
        clip_length=config.clip_length,
        n_steps=config.n_steps,
        gamma=gamma,
        max_draws_per_positive=config.max_draws_per_positive,
        stratified=config.stratified,
        selector=selector,
        score_reward=None if reward is None else ScoreRewardTransform(reward.weight, reward.mode, reward.threshold),
        hindsight=hindsight,
        storage=config.storage,
        memory_limit_gib=config.memory_limit_gib,
        scratch_dir=config.scratch_dir,
        seed=seed,
    )
