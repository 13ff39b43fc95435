"""OGBench's environments with state observations: Scene, Cube, Puzzle and the mazes, single-task or goal-conditioned.

Rewards, ends and success are upstream's. In the single-task ids they are computed *before* the action, from the state
that the step leaves: the step after the one that reaches the goal has reward 0, ``success`` and ``terminated``.
docs/environments/ogbench.md tells the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gymnasium
import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.gymnasium import GymnasiumSimulator
from vlmrb.envs.instance import Instance, action_space
from vlmrb.envs.ogbench_worlds import World, open_env
from vlmrb.envs.simulator import Spaces

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.envs.ogbench_layout import OGBenchLayout
    from vlmrb.scoring.clips import Renderer

_NAME = re.compile(
    r"(visual-)?((cube|puzzle|powderworld|pointmaze|antmaze|humanoidmaze|antsoccer)-\w+|scene)(-\w+)*-v\d+"
)
_BODY = re.compile(r"(point|ant|humanoid)maze-")
EXPERT_PATIENCE: Final = 6  # of the scripted player, times 8 to 48 env steps a turn: tasks take it 140 to 450
TAKES: Final = ("render_quality",)  # a setting that other families do not know
_INSTALL: Final = "pip install 'ogbench>=1.2.2'"


class OGBenchInstance(Instance):
    """One OGBench environment; its snapshot is its state, so no frame is drawn while stepping."""

    def _make(self) -> gymnasium.Env:
        self.world = World(open_env(_plain(self.config.id), self.config.max_steps))
        return self.world.env

    def _spaces(self) -> Spaces:
        layout = self.world.layout
        return Spaces(
            (layout.num_observation,), np.float32, layout.size, action_space(self.env, self.config.id), np.float64
        )

    def look(self) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Returns the present observation ``float32[O]`` and snapshot ``float64[S]``."""
        observation = self._observe()
        return observation, self.world.snapshot(observation)

    def save(self) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Takes all that the running episode's future depends on: numbers ``float64[K]``, and random generators."""
        numbers, generators = self.world.save()
        return np.concatenate((numbers, self._observe())), generators

    def restore(self, numbers: NDArray[np.float64], generators: dict[str, Any]) -> None:
        """Goes on where ``save`` was called, exactly."""
        count = self.world.layout.num_observation
        self.world.restore(numbers[:-count], generators)
        self._observation = numbers[-count:]


class OGBenchSimulator(GymnasiumSimulator):
    """OGBench instances, stepped one by one, here or in worker processes; their states can be saved."""

    exact_resume = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the stream of reset seeds, and every instance's state."""
        nothing: tuple[Any, ...] = ()
        pending = [group.call("each", "save", [nothing] * group.num_envs) for group in self._groups]
        numbers, generators = zip(*(saved for group in pending for saved in group.result()), strict=True)
        states = {"states": np.stack(numbers), "generators": {str(row): g for row, g in enumerate(generators)}}
        return super().state_dict() | states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with every episode, exactly.

        Raises:
            ValueError: other schema, number of instances or environment.
        """
        super().load_state_dict(state)
        saved = [(numbers, state["generators"][str(row)]) for row, numbers in enumerate(state["states"])]
        pending = [group.call("each", "restore", saved[a:b]) for group, a, b in self._parts()]
        for group in pending:
            group.result()
        self._rng.bit_generator.state = state["rng"]  # as it was before new episodes drew their seeds


@dataclass(frozen=True)
class MazeGoals:
    """Exchanges the goals of goal-conditioned mazes.

    Observations begin with the agent's x and y and end with its goal's, in metres.

    Attributes:
        tolerance: how near to the goal the agent must come, in metres.
    """

    tolerance: float

    def achieved(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns where the agent is, ``float32[K, O]`` → ``float32[K, 2]``."""
        return observation[..., :2]

    def place(self, observation: NDArray[np.float32], goal: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns observations ``float32[K, O]`` with their goals at ``float32[K, 2]``."""
        return np.concatenate((observation[..., :-2], goal), axis=-1)

    def judge(self, observation: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Returns reward, 1 at the goal and 0 elsewhere, and termination of the steps that led to ``float32[K, O]``."""
        reached = np.hypot(*np.moveaxis(observation[..., :2] - observation[..., -2:], -1, 0)) <= self.tolerance
        return reached.astype(np.float32), reached


def claims(env_id: str) -> bool:
    """Says whether the id looks like one of OGBench's."""
    return _NAME.fullmatch(env_id) is not None


def check(config: EnvConfig) -> None:
    """Refuses ids that do not exist or have pixels as observations, and settings that these environments lack.

    Raises:
        ValueError: naming the setting.
    """
    env_id = _plain(config.id)
    if env_id.startswith(("visual-", "powderworld-")):
        raise ValueError(
            f"env.id {config.id!r} has pixels as observations; agents here learn from states: choose an id without "
            "visual- or powderworld-"
        )
    try:
        import ogbench  # noqa: F401  (registers its ids)
    except ModuleNotFoundError as error:
        raise ValueError(f"env.id {config.id!r} is one of OGBench's: {_INSTALL} ({error})") from error
    if not {env_id, _without_dataset(env_id)} & set(gymnasium.registry):
        raise ValueError(
            f"env.id {config.id!r} is unknown to OGBench; ids look like scene-play-singletask-task3-v0, "
            "cube-single-play-singletask-v0 or, as Gymnasium has them, scene-singletask-task3-v0"
        )
    if config.visuals != "standard":
        raise ValueError(f"env.visuals {config.visuals!r} exists for MiniGrid ids only, not for {config.id!r}")
    if config.actions is not None:
        raise ValueError(f"env.actions chooses among discrete actions, and {config.id!r} has continuous ones")


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes a batch of OGBench instances."""
    from vlmrb.envs.batch import SimulatorEnv

    return SimulatorEnv(OGBenchSimulator(OGBenchInstance, config, num_envs, seed))


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of this id's snapshots; it draws in a process of its own."""
    from vlmrb.envs.ogbench_renderer import OGBenchRenderer

    return OGBenchRenderer(_plain(config.id), _layout(_plain(config.id)), config.frame_size, config.render_quality)


def make_goals(config: EnvConfig) -> MazeGoals:
    """Makes what exchanges the goals of goal-conditioned mazes.

    Raises:
        ValueError: this id's observations hold no goal, or do not tell what was achieved.
    """
    env_id = _plain(config.id)
    body = _BODY.match(env_id)
    if body is None or "singletask" in env_id or "teleport" in env_id:
        raise ValueError(
            "replay.her exchanges goals that observations hold, and of OGBench's only those of pointmaze-, antmaze- "
            f"and humanoidmaze-ids without singletask and teleport do: env.id {config.id!r} is none of them"
        )
    return MazeGoals(1.0 if body[1] == "point" else 0.5)


def make_expert(config: EnvConfig) -> Callable[[NDArray[np.float64]], NDArray[np.float32]]:
    """Makes the player of scripted clips: snapshots ``float64[n, S]`` → actions ``float32[n, 5]``.

    Raises:
        ValueError: OGBench has no scripted policy for this id.
    """
    from vlmrb.envs.ogbench_expert import OGBenchExpert

    return OGBenchExpert(_plain(config.id)).act


@functools.lru_cache(maxsize=8)
def _layout(env_id: str) -> OGBenchLayout:
    world = World(open_env(env_id))
    try:
        return world.layout
    finally:
        world.close()


def _plain(env_id: str) -> str:
    return env_id.rpartition(":")[2]


def _without_dataset(env_id: str) -> str:
    """Returns Gymnasium's id for one with a dataset's name in it, as upstream reads it."""
    parts = env_id.split("-")
    if "singletask" in parts:
        at = parts.index("singletask")
        return "-".join(parts[: max(at - 1, 0)] + parts[at:])
    return "-".join(parts[: -3 if "oraclerep" in parts else -2] + parts[-1:])
