"""Which module is responsible for which environment id.

A *family* is a module (or any object) with the functions of :class:`Family`. The built-in ones are files beside this
one; yours becomes known with ``vlmrb.envs.register(sys.modules[__name__])`` and is imported by naming it in the id,
``id: my_package.my_module:MyWorld``.
"""

from __future__ import annotations

import difflib
import importlib
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torchrl.envs import EnvBase

    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer


class Goals(Protocol):
    """Reads, writes and judges the goals of observations that hold them, for hindsight (``replay.her``).

    Its ``repr`` must tell it from other goals: a saved buffer is resumed only with those it was filled with.
    """

    def achieved(self, observation: NDArray) -> NDArray:
        """Returns the goals that states ``[K, …]`` achieve, ``[K, G]``; whatever goals they were asked for."""
        ...

    def place(self, observation: NDArray, goal: NDArray) -> NDArray:
        """Returns observations ``[K, …]`` that ask for goals ``[K, G]``, and are as they were in all else."""
        ...

    def judge(self, observation: NDArray) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Judges steps by the next observations ``[K, …]`` that they led to and the goals in them.

        Returns:
            Reward ``float32[K]``, and which of them end the episode, ``bool[K]``, as the environment itself has it.
        """
        ...


class Family(Protocol):
    """What a family file offers.

    It may also name in ``TAKES`` those of the settings ``kwargs``, ``wrappers``, ``state`` and ``render_quality`` that
    it heeds; families that do not are given none but the defaults. One whose snapshots are frames may also offer
    ``make_env_without_frames``, with the arguments of ``make_env``, for whoever draws none of them. One whose
    observations hold a goal may offer ``make_goals(config) -> Goals``, which refuses with a ValueError those ids that
    have none.
    """

    def claims(self, env_id: str) -> bool:
        """Says whether the id (without a leading ``module:``) belongs to this family."""
        ...

    def check(self, config: EnvConfig) -> None:
        """Refuses settings that make no sense for this family.

        Raises:
            ValueError: naming the setting in one line.
        """
        ...

    def make_env(self, config: EnvConfig, num_envs: int, seed: int) -> EnvBase:
        """Makes ``num_envs`` instances as one TorchRL environment of batch size ``[num_envs]``."""
        ...

    def make_renderer(self, config: EnvConfig) -> Renderer:
        """Makes what draws this environment's snapshots."""
        ...


# Asked in this order; the last takes whatever Gymnasium knows.
_BUILT_IN = (
    "vlmrb.envs.doorkey",
    "vlmrb.envs.crossing",
    "vlmrb.envs.point_reach",
    "vlmrb.envs.minigrid",
    "vlmrb.envs.ogbench",
    "vlmrb.envs.gymnasium",
)
_registered: list[Family] = []


def register(family: Family) -> None:
    """Makes a family known; it is asked before those registered earlier and before the built-in ones."""
    if family not in _registered:
        _registered.insert(0, family)


def find_family(env_id: str) -> Family:
    """Returns the family that claims an id.

    Args:
        env_id: ``Id`` or ``package.module:Id``; the module is imported first.

    Raises:
        ValueError: the module cannot be imported, or nothing claims the id.
    """
    module, _, name = env_id.rpartition(":")
    if not name:
        raise ValueError(
            f"env.id {env_id!r} names no environment: set it to a MiniGrid id such as MiniGrid-DoorKey-6x6-v0, to one "
            "of OGBench's such as scene-play-singletask-task3-v0, to any Gymnasium id such as CartPole-v1, or to "
            "package.module:Id for one that your module registers"
        )
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(f"env.id {env_id!r}: cannot import {module!r} ({error})") from error
    built_in = (cast(Family, importlib.import_module(path)) for path in _BUILT_IN)  # lazy: the later are heavier
    for family in chain(_registered, built_in):
        if family.claims(name):
            return family
    raise ValueError(f"env.id {env_id!r} is unknown{_suggestion(name)}")


def _suggestion(name: str) -> str:
    import gymnasium

    known = [*gymnasium.registry, *(f"MiniGrid-DoorKey-{n}x{n}-v0" for n in (5, 6, 8, 12, 16))]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""


def make_env(config: EnvConfig, num_envs: int | None = None, seed: int = 0, *, frames: bool = True) -> EnvBase:
    """Makes the environments as one TorchRL ``EnvBase`` of batch size ``[num_envs]``.

    Args:
        config: which environment.
        num_envs: instances; ``None`` takes ``config.num_envs`` (evaluation asks for its own number).
        seed: of the level generator; two environments with equal settings and seed go through equal levels.
        frames: whether snapshots will be drawn; without, a family that keeps frames draws none while stepping, and its
            snapshots are of no use.

    Raises:
        ValueError: ``num_envs`` is below 1.
    """
    count = config.num_envs if num_envs is None else num_envs
    if count < 1:
        raise ValueError(f"num_envs must be at least 1, got {count}")
    family = find_family(config.id)
    make = family.make_env if frames else getattr(family, "make_env_without_frames", family.make_env)
    return make(config, count, seed)


def make_goals(config: EnvConfig) -> Goals:
    """Makes what exchanges the goals of an environment's observations.

    Raises:
        ValueError: nobody can; names the setting.
    """
    make = getattr(find_family(config.id), "make_goals", None)
    if make is None:
        raise ValueError(
            f"replay.her exchanges goals, and observations of env.id {config.id!r} hold none that could be exchanged: "
            "set replay.her to null, or take PointReach-N-v0 or one of OGBench's goal-conditioned mazes"
        )
    return make(config)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the picklable renderer that draws the snapshots of ``make_env(config)``."""
    return find_family(config.id).make_renderer(config)
