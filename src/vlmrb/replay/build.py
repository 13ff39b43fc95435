"""From the settings to the buffer."""

from __future__ import annotations

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.similarity import SimilaritySelector


def build_buffer(
    config: ReplayConfig, *, gamma: float, total_env_steps: int, learning_starts: int = 0, seed: int = 0
) -> VLMReplayBuffer:
    """Builds the buffer that a config describes.

    Args:
        config: the settings.
        gamma: discount factor of the n-step returns.
        total_env_steps: the run's budget in env steps, over which λ and β are scheduled.
        learning_starts: env steps before the first gradient step.
        seed: of the sampling generator.

    Returns:
        An empty buffer whose λ and β follow `VLMReplayBuffer.set_env_steps`.
    """
    aer = config.aer
    selector = None
    if aer is not None:
        selector = SimilaritySelector(aer.schedule(total_env_steps, learning_starts), aer.similarity)
    return VLMReplayBuffer(
        config.capacity,
        batch_size=config.batch_size,
        terms=config.terms(),
        lam=config.lam_schedule(total_env_steps, learning_starts),
        beta=config.beta_schedule(total_env_steps, learning_starts),
        clip_length=config.clip_length,
        n_steps=config.n_steps,
        gamma=gamma,
        max_draws_per_positive=config.max_draws_per_positive,
        stratified=config.stratified,
        selector=selector,
        storage=config.storage,
        memory_limit_gib=config.memory_limit_gib,
        scratch_dir=config.scratch_dir,
        seed=seed,
    )
