"""A point that must reach a goal in a square: continuous actions, sparse reward, quick on a laptop.

``PointReach-N-v0`` is a square N of the point's longest steps wide; the larger N, the rarer a goal is found by chance.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.simulator import Spaces, Step

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer

GOAL_RADIUS: Final = 1.0  # all lengths are in the longest step along an axis
POINT_RADIUS: Final = 0.5
FRAME_SIZE: Final = 64  # pixels
FLOOR, GOAL, POINT = ((235, 235, 235), (60, 180, 75), (200, 30, 30))  # RGB

_NAME = re.compile(r"PointReach-(\d+)-v0")
_SCHEMA: Final = 1


class PointReachSimulator:
    """``n`` squares, each with a point and a goal at least half a side away from where the point begins.

    A snapshot is x and y of the point and x and y of the goal, ``float32[4]`` in [0, side]. An episode terminates when
    the point is within `GOAL_RADIUS` of the goal, with the only reward there is, 1.

    Args:
        side: edge of the square in longest steps, at least 4.
        num_envs: n.
        max_steps: horizon in env steps; ``None`` is 5 · side.
        seed: of points and goals.
    """

    exact_resume = True

    def __init__(self, side: int, num_envs: int, max_steps: int | None = None, seed: int = 0) -> None:
        self.side = side
        self.num_envs = num_envs
        self.max_steps = 5 * side if max_steps is None else max_steps
        bound = np.ones(2, np.float32)
        self.spaces = Spaces((4,), np.float32, 4, (-bound, bound), np.float32)
        self._state = np.zeros((num_envs, 4), np.float32)
        self._steps = np.zeros(num_envs, np.int64)
        self.seed(seed)
        self.restart(np.arange(num_envs))

    def seed(self, seed: int) -> None:
        """Seeds the generator of episodes to come."""
        self._rng = np.random.default_rng(seed)

    def step(self, action: NDArray[np.float32]) -> Step:
        """Moves every point by ``action``, ``float32[n, 2]``, clipped to [-1, 1]; the square's edges stop it."""
        self._steps += 1
        self._state[:, :2] = (self._state[:, :2] + np.clip(action, -1, 1)).clip(0, self.side)
        success = distance(self._state) <= GOAL_RADIUS
        observation, snapshot = self.look()
        truncated = self._steps >= self.max_steps
        return Step(observation, snapshot, success.astype(np.float32), success, success.copy(), truncated)

    def look(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns fresh arrays of observations ``float32[n, 4]`` in [-1, 1] and snapshots ``float32[n, 4]``."""
        return observe(self._state, self.side), self._state.copy()

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Begins new episodes in the given instances, ``int64[k]``: uniform pairs that are far enough apart."""
        self._steps[rows] = 0
        while len(rows):
            self._state[rows] = self._rng.uniform(0, self.side, (len(rows), 4))
            rows = rows[distance(self._state[rows]) < self.side / 2]

    def state_dict(self) -> dict[str, Any]:
        """Returns states, step counts and the generator: all that the future depends on besides actions."""
        return {
            "schema": _SCHEMA,
            "snapshots": self._state.copy(),
            "steps": self._steps.copy(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned, exactly.

        Raises:
            ValueError: other schema or number of instances.
        """
        if state.get("schema") != _SCHEMA:
            raise ValueError(f"this PointReach state has schema {state.get('schema')}, this version reads {_SCHEMA}")
        if state["snapshots"].shape != self._state.shape:
            raise ValueError(
                f"this PointReach state is of {len(state['snapshots'])} instances, but the settings ask for "
                f"{self.num_envs}: keep env.num_envs when resuming"
            )
        self._state[:] = state["snapshots"]
        self._steps[:] = state["steps"]
        self._rng.bit_generator.state = state["rng"]

    def close(self) -> None:
        """Nothing to let go of."""


def distance(snapshots: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns how far the point is from the goal, ``[..., 4]`` → ``float32[...]``."""
    return np.hypot(*np.moveaxis(snapshots[..., :2] - snapshots[..., 2:], -1, 0))


def observe(snapshots: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Returns what the agent sees: the snapshots ``[..., 4]``, scaled to [-1, 1]."""
    return snapshots * np.float32(2 / side) - 1


@dataclass(frozen=True)
class PointReachGoals:
    """Exchanges goals, which are places as the agent sees them, ``float32[K, 2]`` in [-1, 1].

    Attributes:
        side: edge of the square in longest steps.
    """

    side: int

    def achieved(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns where the point is, ``float32[K, 4]`` → ``float32[K, 2]``."""
        return observation[..., :2]

    def place(self, observation: NDArray[np.float32], goal: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns observations ``float32[K, 4]`` with their goals at ``float32[K, 2]``."""
        return np.concatenate((observation[..., :2], goal), axis=-1)

    def judge(self, observation: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Returns reward and termination of the steps that led to ``float32[K, 4]``."""
        reached = distance(observation) * np.float32(self.side / 2) <= GOAL_RADIUS
        return reached.astype(np.float32), reached


@dataclass(frozen=True)
class PointReachLayout:
    """Finds milestones in snapshots: the point comes within half of the shortest way, side / 4, and to the goal.

    Attributes:
        side: edge of the square in longest steps.
    """

    side: int
    milestones: ClassVar[tuple[str, ...]] = ("half way", "goal")

    def events(self, snapshots: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Returns which milestones happen between the frames of clips ``[..., L, 4]``: ``bool[..., L − 1, 2]``."""
        within = distance(snapshots)[..., None] <= np.array([self.side / 4, GOAL_RADIUS])
        return ~within[..., :-1, :] & within[..., 1:, :]


class PointReachRenderer:
    """Draws the square from above: a green disc, the goal, and a red dot, the point; x to the right, y downwards.

    Args:
        side: edge of the square in longest steps.
    """

    def __init__(self, side: int) -> None:
        self.side = side
        self.name = f"point_reach-{side}-v1"
        self.layout = PointReachLayout(side)

    def render(self, snapshots: NDArray[np.float32], frame_size: int | None = None) -> NDArray[np.uint8]:
        """Returns ``uint8[..., F, F, 3]`` of snapshots ``[..., 4]``, where F is ``frame_size`` or 64 pixels."""
        size = frame_size or FRAME_SIZE
        scale = size / self.side  # pixels in a step
        centres = np.arange(size, dtype=np.float32) + np.float32(0.5)
        frames = np.full((*snapshots.shape[:-1], size, size, 3), FLOOR, np.uint8)
        for place, radius, color in ((2, GOAL_RADIUS, GOAL), (0, POINT_RADIUS, POINT)):
            x, y = (snapshots[..., place + axis, None] * np.float32(scale) for axis in (0, 1))
            across, down = np.square(centres - x), np.square(centres - y)
            reach = max(radius * scale, 1.0)  # never too small to be seen
            frames[down[..., :, None] + across[..., None, :] <= reach**2] = color
        return frames

    def observe(self, snapshots: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns what the agent saw, ``float32[..., 4]``."""
        return observe(snapshots, self.side)


def _side(env_id: str) -> int:
    match = _NAME.fullmatch(env_id.rpartition(":")[2])
    if match is None:
        raise ValueError(f"env.id {env_id!r} is no PointReach of the form PointReach-N-v0")
    return int(match[1])


def claims(env_id: str) -> bool:
    """Says whether the id is a PointReach, of any size."""
    return _NAME.fullmatch(env_id) is not None


def check(config: EnvConfig) -> None:
    """Refuses squares in which the goal is everywhere, and worker processes.

    Raises:
        ValueError: naming the setting.
    """
    if _side(config.id) < 4:
        raise ValueError(f"env.id {config.id!r}: PointReach needs a side of at least 4 steps")
    if config.workers:
        raise ValueError(f"env.workers = {config.workers}: PointReach is stepped as one batch of arrays, leave it at 0")


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes a batch of squares."""
    from vlmrb.envs.batch import SimulatorEnv

    return SimulatorEnv(PointReachSimulator(_side(config.id), num_envs, config.max_steps, seed), config.actions)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of PointReach snapshots."""
    return PointReachRenderer(_side(config.id))


def make_goals(config: EnvConfig) -> PointReachGoals:
    """Makes what exchanges PointReach's goals."""
    return PointReachGoals(_side(config.id))


def make_expert(config: EnvConfig) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Makes the player of scripted clips, who goes straight ahead: snapshots ``float32[n, 4]`` → ``float32[n, 2]``."""
    return lambda snapshots: np.clip(snapshots[..., 2:] - snapshots[..., :2], -1, 1)
