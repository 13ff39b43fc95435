"""One evaluation for everything: the callback during training, `vlmrb evaluate`, and every replay scheme alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.envs import EnvConfig, make_env, make_renderer

log = logging.getLogger(__name__)

VIDEO_FRAMES: Final = 1_001  # 1,000 env steps, two minutes; of a longer episode, every other frame, every fourth, …


@dataclass(frozen=True)
class EvaluationResult:
    """What a number of whole episodes gave.

    Attributes:
        successes: ``bool[episodes]``.
        returns: undiscounted, ``float32[episodes]``.
        lengths: env steps, ``int64[episodes]``.
        video: frames of the first episode, ``uint8[T, H, W, 3]``, evenly thinned out to at most `VIDEO_FRAMES` but with
            its first and last; ``None`` unless asked for.
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


class Film:
    """Snapshots of one episode, evenly thinned out so that no more are held than a video shows.

    Args:
        most: frames, 3 or more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Tensor] = []
        self._seen = 0
        self.every = 1
        """Distance of two frames in env steps; that to the last one may be shorter."""

    def add(self, snapshot: Tensor) -> None:
        """Takes the snapshot ``[S]`` of the next state, of which a copy may be kept."""
        if self._seen % self.every == 0 and len(self._kept) == self._most - 1:  # one place is the last state's
            self._kept, self.every = self._kept[::2], 2 * self.every
        if self._seen % self.every == 0:
            self._kept.append(snapshot.clone())
        self._seen += 1

    def end(self, snapshot: Tensor) -> Tensor:
        """Takes the last state's snapshot ``[S]``, and returns those kept, ``[T, S]``, T at most ``most``."""
        return torch.stack([*self._kept, snapshot])


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
    batch = make_env(env, num_envs=episodes, seed=seed, frames=video)
    generator = torch.Generator().manual_seed(seed)
    returns, lengths = torch.zeros(episodes), torch.zeros(episodes, dtype=torch.int64)
    successes, playing = torch.zeros(episodes, dtype=torch.bool), torch.ones(episodes, dtype=torch.bool)
    film, snapshots = Film(VIDEO_FRAMES), torch.empty(0)
    try:
        data: TensorDictBase = batch.reset()
        while playing.any():
            if video and playing[0]:
                film.add(data["snapshot"][0])
            data.set("action", module.play(data["observation"], epsilon, generator))
            step, data = batch.step_and_maybe_reset(data)
            after = step["next"]
            returns += after["reward"].reshape(-1) * playing
            lengths += playing
            successes |= after["success"].reshape(-1) & playing
            if video and playing[0] and after["done"][0]:
                snapshots = film.end(after["snapshot"][0])
            playing &= ~after["done"].reshape(-1)
            if playing.any():
                env.check_length(int(lengths.max()))
    finally:
        batch.close()
    frames = make_renderer(env).render(snapshots.numpy(), frame_size) if video else None
    if video and film.every > 1:
        log.info(
            "the video shows one of %d frames, as its episode of %s env steps has more than %s",
            film.every,
            f"{int(lengths[0]):,}",
            f"{VIDEO_FRAMES - 1:,}",
        )
    return EvaluationResult(successes, returns, lengths, frames)
