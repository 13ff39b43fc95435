"""Who plays while clips are collected: at random, by script, or an agent from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from vlmrb.envs.actions import uniform_actions
from vlmrb.envs.registry import find_family

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig

PolicyName = Literal["random", "scripted", "checkpoint"]

# Expert stretches hold slips, and random ones last long enough to lead somewhere else: the clips show all of it.
STRETCH = (8, 48)  # env steps, shortest and longest
SLIP = 0.1  # share of random actions while the expert plays


class Player(Protocol):
    """Chooses actions for a batch of instances."""

    def __call__(self, data: TensorDictBase) -> Tensor:
        """Returns the actions ``[n, …]`` for the tensordict ``[n]`` of their present states."""
        ...


MakePlayer = Callable[["SimulatorEnv", int], Player]
"""``(environments, seed) → player``; all that is random in its play comes from the seed."""


class RandomPlayer:
    """Draws actions uniformly, within their bounds.

    Args:
        env: the environments.
        seed: of the actions.
    """

    def __init__(self, env: SimulatorEnv, seed: int) -> None:
        self._spec = env.action_spec[0]
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, data: TensorDictBase) -> Tensor:
        """Returns ``int64[n]`` or ``float32[n, A]``."""
        return uniform_actions(self._spec, len(data), self._generator)


class ScriptedPlayer:
    """Lets an expert and chance take turns, each instance by itself.

    Args:
        env: the environments.
        seed: of turns and random actions.
        expert: snapshots ``[n, S]`` → the simulator's own actions ``[n, …]``.
        patience: how many times as long as chance's turns the expert's are.
    """

    def __init__(
        self,
        env: SimulatorEnv,
        seed: int,
        expert: Callable[[NDArray], NDArray],
        patience: int = 1,
    ) -> None:
        self._patience = patience
        self._random = RandomPlayer(env, seed)
        self._plan = lambda snapshots: env.renumber(expert(snapshots))
        self._rng = np.random.default_rng(seed)
        n = env.batch_size.numel()
        self._left = np.zeros(n, np.int64)  # env steps left of the present turn
        self._expert_plays = np.zeros(n, np.bool_)

    def __call__(self, data: TensorDictBase) -> Tensor:
        """Returns actions ``[n, …]``."""
        over = self._left == 0
        count = int(over.sum())
        self._expert_plays[over] = self._rng.random(count) < 0.5
        self._left[over] = self._rng.integers(STRETCH[0], STRETCH[1], count, endpoint=True)
        self._left[over & self._expert_plays] *= self._patience
        self._left -= 1
        by_expert = self._expert_plays & (self._rng.random(len(over)) >= SLIP)
        planned = torch.from_numpy(self._plan(data["snapshot"].numpy()))
        action = self._random(data)
        action[torch.from_numpy(by_expert)] = planned[torch.from_numpy(by_expert)].to(action.dtype)
        return action


class AgentPlayer:
    """Plays a trained agent.

    Args:
        module: an `OffPolicyModule`.
        epsilon: share of random actions, in [0, 1].
        seed: of these.
    """

    def __init__(self, module: OffPolicyModule, epsilon: float, seed: int) -> None:
        self._play = module.play
        self._epsilon = epsilon
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, data: TensorDictBase) -> Tensor:
        """Returns actions ``[n, …]``."""
        return self._play(data["observation"], self._epsilon, self._generator)


def make_player(policy: PolicyName, config: EnvConfig, ckpt: str | None = None, epsilon: float = 0.05) -> MakePlayer:
    """Returns what makes the players of a policy.

    Args:
        policy: who plays.
        config: the environment.
        ckpt: a checkpoint of `vlmrb fit` (``checkpoint`` only).
        epsilon: share of random actions in the agent's play.

    Raises:
        ValueError: the environment has no scripted player, the checkpoint is missing or of another environment, or the
            exploration rate is none.
    """
    require_epsilon(epsilon)
    if policy != "checkpoint" and ckpt is not None:
        raise ValueError(f"--ckpt {ckpt} goes with --policy checkpoint, not with {policy}")
    if policy == "random":
        return RandomPlayer
    if policy == "scripted":
        family = find_family(config.id)
        make_expert = getattr(family, "make_expert", None)
        patience = getattr(family, "EXPERT_PATIENCE", 1)
        if make_expert is None:
            raise ValueError(
                f"--policy scripted: nobody has written a player for {config.id} (its family has no make_expert); "
                "use random or checkpoint"
            )
        return lambda env, seed: ScriptedPlayer(env, seed, make_expert(config), patience)
    if ckpt is None:
        raise ValueError("--policy checkpoint needs --ckpt, such as runs/…/checkpoints/last.ckpt")
    from vlmrb.algorithms.base import OffPolicyModule

    module = OffPolicyModule.from_checkpoint(ckpt)
    if module.env.id != config.id:
        raise ValueError(f"--ckpt {ckpt} was trained on {module.env.id}, and the configuration names {config.id}")
    return lambda env, seed: AgentPlayer(module, epsilon, seed)


def require_epsilon(epsilon: float) -> None:
    """Refuses an exploration rate outside [0, 1].

    Raises:
        ValueError: naming it.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"--epsilon {epsilon} must lie in [0, 1]")
