"""One evaluation for everything: the callback during training, `vlmrb evaluate`, and every replay scheme alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.envs import EnvConfig, make_env, make_renderer


@dataclass(frozen=True)
class EvaluationResult:
    """What a number of whole episodes gave.

    Attributes:
        successes: ``bool[episodes]``.
        returns: undiscounted, ``float32[episodes]``.
        lengths: env steps, ``int64[episodes]``.
        video: frames of the first episode, ``uint8[T, H, W, 3]``; ``None`` unless asked for.
    """

    successes: Tensor
    returns: Tensor
    lengths: Tensor
    video: NDArray | None = None

    @property
    def success(self) -> float:
        """Share of episodes that reached the goal, in [0, 1]."""
        return float(self.successes.float().mean())

    @property
    def mean_return(self) -> float:
        """Mean undiscounted return."""
        return float(self.returns.mean())

    @property
    def mean_length(self) -> float:
        """Mean episode length in env steps."""
        return float(self.lengths.float().mean())


@torch.no_grad()
def evaluate(
    module: OffPolicyModule,
    env: EnvConfig,
    *,
    episodes: int,
    seed: int,
    epsilon: float | None = None,
    video: bool = False,
    frame_size: int | None = None,
) -> EvaluationResult:
    """Plays whole episodes, all at once, one environment instance per episode.

    Everything random is seeded by ``seed`` and apart from training, so the same policy gives the same result and an
    evaluation leaves the training run's random states alone.

    Args:
        module: acts through ``module.play``.
        env: which environment.
        episodes: number of episodes, at least 1.
        seed: of levels and exploration.
        epsilon: share of random actions; ``None`` is the algorithm's ``evaluation_epsilon``.
        video: also render the first episode.
        frame_size: pixels of the video's frames; ``None`` is the environment's default.

    Raises:
        ValueError: no episode was asked for, or one does not end.
    """
    if episodes < 1:
        raise ValueError(f"evaluation.episodes={episodes} must be at least 1")
    if epsilon is None:
        epsilon = module.evaluation_epsilon
    # One instance per episode: with fewer, quick failures would be played more often than slow ones.
    batch = make_env(env, num_envs=episodes, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    returns, lengths = torch.zeros(episodes), torch.zeros(episodes, dtype=torch.int64)
    successes, playing = torch.zeros(episodes, dtype=torch.bool), torch.ones(episodes, dtype=torch.bool)
    snapshots: list[Tensor] = []
    try:
        data: TensorDictBase = batch.reset()
        while playing.any():
            if video and playing[0]:
                snapshots.append(data["snapshot"][0].clone())
            data.set("action", module.play(data["observation"], epsilon, generator))
            step, data = batch.step_and_maybe_reset(data)
            after = step["next"]
            returns += after["reward"].reshape(-1) * playing
            lengths += playing
            successes |= after["success"].reshape(-1) & playing
            if video and playing[0] and after["done"][0]:
                snapshots.append(after["snapshot"][0].clone())
            playing &= ~after["done"].reshape(-1)
            if playing.any():
                env.check_length(int(lengths.max()))
    finally:
        batch.close()
    frames = make_renderer(env).render(torch.stack(snapshots).numpy(), frame_size) if video else None
    return EvaluationResult(successes, returns, lengths, frames)
