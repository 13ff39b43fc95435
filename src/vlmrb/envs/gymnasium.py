"""Environments that Gymnasium steps, one instance at a time; and the family of plain ids with ``rgb_array`` frames.

A plain Gymnasium state cannot be drawn again later, so its snapshot *is* the frame, scaled down to ``frame_size``, with
the observation's bytes behind it: 3·frame_size² bytes for each state held, against some hundred for a grid world. Keep
``frame_size`` small, or name functions that take and put back states (``env.state``, `gymnasium_state`).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray
from PIL import Image

from vlmrb.envs.simulator import Spaces, Step
from vlmrb.envs.workers import Group, LocalGroup, RemoteGroup

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer

logger = logging.getLogger(__name__)

SuccessTest = Callable[[dict[str, Any], float, bool, bool], bool]
"""``(info, reward, terminated, truncated) → bool``, after every step; an episode succeeds if one of its steps does."""

_SCHEMA: Final = 1
_SEEDS: Final = 2**31 - 1  # what every Gymnasium environment takes as a seed


def default_success(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
    """Says whether the goal was reached: as ``info`` has it, else by a positive reward at termination."""
    for key in ("success", "is_success"):
        if key in info:
            return bool(info[key])
    return terminated and reward > 0


def _success_test(path: str | None) -> SuccessTest:
    if path is None:
        return default_success
    module, _, name = path.rpartition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"env.success {path!r} cannot be imported: {error}") from error


class Instance:
    """One Gymnasium environment and what is taken off it after each step; families override what they do better.

    Args:
        config: which environment.

    Raises:
        ValueError: it cannot be made, or has observations, actions or frames that cannot be used here.
    """

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self._success = _success_test(config.success)
        try:
            self.env = self._make()
            self._observation, _ = self.env.reset(seed=0)
            self.spaces = self._spaces()
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"env.id {config.id!r} cannot be made: {error}") from error
        action = self.env.action_space
        self._first_action = int(action.start) if isinstance(action, spaces.Discrete) else None

    def _make(self) -> gymnasium.Env:
        # Frames go to arrays, never to a screen; without one, pygame's SDL complains on stderr at every start.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        config = self.config
        try:
            env = gymnasium.make(
                config.id, render_mode="rgb_array", max_episode_steps=config.max_steps, **(config.kwargs or {})
            )
        except TypeError as error:
            raise ValueError(f"env.kwargs {config.kwargs} do not fit {config.id!r}: {error}") from error
        for wrapper in config.wrappers or []:
            env = _wrap(env, wrapper)
        return env

    def _spaces(self) -> Spaces:
        return self._sized_spaces(self._frame().size)

    def _sized_spaces(self, size: int) -> Spaces:
        """Returns the spaces, where ``size`` bytes of a snapshot are not the observation's."""
        observation = self._observe()
        pixels = observation.dtype == np.uint8 and observation.ndim in (3, 4)
        snapshot_size = size + observation.nbytes
        return Spaces(observation.shape, observation.dtype, snapshot_size, action_space(self.env), pixels=pixels)

    def reset(self, seed: int) -> None:
        """Begins a new episode."""
        self._observation, _ = self.env.reset(seed=seed)

    def step(self, action: NDArray) -> tuple[float, bool, bool, bool]:
        """Moves on.

        Args:
            action: ``int64[]`` or ``float32[A]``.

        Returns:
            Reward, whether the goal was reached, terminated, truncated.
        """
        native: Any = action if self._first_action is None else int(action) + self._first_action
        self._observation, reward, terminated, truncated, info = self.env.step(native)
        value, ended, cut = _scalar(reward), bool(terminated), bool(truncated)
        return value, bool(self._success(info, value, ended, cut)), ended, cut

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns the present observation and snapshot ``[S]``."""
        observation = self._observe()
        return observation, np.concatenate((self._frame().reshape(-1), observation.reshape(-1).view(np.uint8)))

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def _observe(self) -> NDArray:
        """Returns what the agent sees: images as they are, all else ``float32``, categories one-hot."""
        space = self.env.observation_space
        if isinstance(space, spaces.Box):
            return np.ascontiguousarray(self._observation, np.uint8 if space.dtype == np.uint8 else np.float32)
        if not space.is_np_flattenable:
            raise ValueError(f"env.id {self.config.id!r}: observations of {space} cannot be made an array")
        return np.asarray(spaces.utils.flatten(space, self._observation), np.float32)

    def _frame(self) -> NDArray[np.uint8]:
        """Returns the frame ``uint8[H, W, 3]``, its longer side at most ``frame_size`` pixels."""
        return shrink(self._render()[None], self.config.frame_size)[0]

    def _render(self) -> NDArray[np.uint8]:
        """Returns the frame ``uint8[H, W, 3]`` as the environment draws it."""
        try:
            frame: Any = self.env.render()
        except DependencyNotInstalled as error:
            raise ValueError(f"env.id {self.config.id!r} cannot draw frames: {error}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"env.id {self.config.id!r} draws no rgb_array frames [H, W, 3]")
        return frame


def _wrap(env: gymnasium.Env, wrapper: str | dict[str, Any]) -> gymnasium.Env:
    """Puts one of ``env.wrappers`` around an environment."""
    path, arguments = (
        (wrapper, {}) if isinstance(wrapper, str) else (wrapper["class_path"], wrapper.get("init_args", {}))
    )
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(env, **arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"env.wrappers: {path} cannot be put around {env}: {error}") from error


def action_space(env: gymnasium.Env) -> int | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the number of discrete actions, or the bounds of a continuous one.

    Raises:
        ValueError: the actions are neither.
    """
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.low.astype(np.float32), space.high.astype(np.float32)
    raise ValueError(f"actions must be Discrete or a one-dimensional Box, got {space}")


def shrink(frames: NDArray[np.uint8], frame_size: int) -> NDArray[np.uint8]:
    """Scales frames down, never up.

    Args:
        frames: ``uint8[B, H, W, 3]``.
        frame_size: upper bound of height and width in pixels.
    """
    height, width = frames.shape[1:3]
    longest = max(height, width)
    if longest <= frame_size:
        return frames
    size = (max(1, width * frame_size // longest), max(1, height * frame_size // longest))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames])


def _scalar(reward: SupportsFloat | NDArray) -> float:
    return float(np.asarray(reward).reshape(()))


class GymnasiumSimulator:
    """Instances stepped one by one, in this process or spread over worker processes.

    Gymnasium states cannot be saved, so after ``load_state_dict`` every instance begins a new episode; only the stream
    of seeds goes on where it was.

    Args:
        make: makes an instance; picklable if there are workers.
        num_envs: n.
        workers: processes; 0 steps all instances here.
        seed: of the stream of reset seeds.
    """

    exact_resume = False

    def __init__(self, make: Callable[[], Instance], num_envs: int, workers: int = 0, seed: int = 0) -> None:
        self.num_envs = num_envs
        self._groups: list[Group]
        if workers:
            self._groups = [RemoteGroup(make, len(part)) for part in np.array_split(np.arange(num_envs), workers)]
        else:
            self._groups = [LocalGroup(make, num_envs)]
        self._bounds = np.cumsum([0, *(group.num_envs for group in self._groups)])
        self.spaces: Spaces = self._groups[0].call("describe").result()
        self.seed(seed)
        self.restart(np.arange(num_envs))

    def seed(self, seed: int) -> None:
        """Seeds the stream from which each new episode takes its seed."""
        self._rng = np.random.default_rng(seed)

    def step(self, action: NDArray) -> Step:
        """Moves every instance on; ``action`` is ``int64[n]`` or ``float32[n, A]``."""
        pending = [group.call("step", action[a:b]) for group, a, b in self._parts()]
        steps = [group.result() for group in pending]
        return steps[0] if len(steps) == 1 else Step(*map(np.concatenate, zip(*steps, strict=True)))

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Begins new episodes in the given instances, ``int64[k]``."""
        seeds = self._rng.integers(0, _SEEDS, len(rows))
        pending = []
        for group, a, b in self._parts():
            mine = (rows >= a) & (rows < b)
            if mine.any():
                pending.append(group.call("reset", rows[mine] - a, seeds[mine]))
        for group in pending:
            group.result()

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns fresh arrays of the current observations ``[n, …]`` and snapshots ``[n, S]``."""
        pending = [group.call("look") for group in self._groups]
        looks = [group.result() for group in pending]
        return np.concatenate([o for o, _ in looks]), np.concatenate([s for _, s in looks])

    def state_dict(self) -> dict[str, Any]:
        """Returns the stream of reset seeds; there is no more that could be saved."""
        return {"schema": _SCHEMA, "num_envs": self.num_envs, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the stream of seeds and begins a new episode in every instance.

        Raises:
            ValueError: other schema or number of instances.
        """
        if state.get("schema") != _SCHEMA or state.get("num_envs") != self.num_envs:
            raise ValueError(
                f"this state (schema {state.get('schema')}, {state.get('num_envs')} instances) does not belong to "
                f"{self.num_envs} Gymnasium instances of schema {_SCHEMA}: keep env.id and env.num_envs when resuming"
            )
        self._rng.bit_generator.state = state["rng"]
        self.restart(np.arange(self.num_envs))

    def close(self) -> None:
        """Closes every instance and ends the workers; a second call does nothing."""
        for group in self._groups:
            group.close()

    def _parts(self) -> list[tuple[Group, int, int]]:
        return list(zip(self._groups, self._bounds[:-1], self._bounds[1:], strict=True))


class FrameRenderer:
    """Gives back the frame that a snapshot holds.

    Args:
        name: of the environment.
        frame_shape: (H, W, 3) of the stored frames.
        observation_shape: of one observation.
        observation_dtype: its NumPy type.
    """

    def __init__(
        self,
        name: str,
        frame_shape: tuple[int, ...],
        observation_shape: tuple[int, ...],
        observation_dtype: str,
    ) -> None:
        self.name = f"{name}-{frame_shape[0]}x{frame_shape[1]}-v1"
        self._frame_shape = frame_shape
        self._frame_bytes = int(np.prod(frame_shape))
        self._observation_shape = observation_shape
        self._observation_dtype = np.dtype(observation_dtype)

    def render(self, snapshots: NDArray[np.uint8], frame_size: int | None = None) -> NDArray[np.uint8]:
        """Returns the frames ``uint8[..., H, W, 3]``, scaled down where ``frame_size`` pixels are less than stored."""
        frames = snapshots[..., : self._frame_bytes].reshape(-1, *self._frame_shape)
        frames = frames if frame_size is None else shrink(frames, frame_size)
        return frames.reshape(*snapshots.shape[:-1], *frames.shape[1:])

    def observe(self, snapshots: NDArray[np.uint8]) -> NDArray:
        """Returns the observations ``[..., *observation_shape]``."""
        stored = np.ascontiguousarray(snapshots[..., self._frame_bytes :])
        return stored.view(self._observation_dtype).reshape(*snapshots.shape[:-1], *self._observation_shape)


def claims(env_id: str) -> bool:
    """Says whether Gymnasium knows the id."""
    return env_id in gymnasium.registry


def check(config: EnvConfig) -> None:
    """Refuses looks that only grid worlds have.

    Raises:
        ValueError: naming the setting.
    """
    if config.visuals != "standard":
        raise ValueError(f"env.visuals {config.visuals!r} exists for MiniGrid ids only, not for {config.id!r}")


def _instance_class(config: EnvConfig) -> type[Instance]:
    if config.state is None:
        return Instance
    from vlmrb.envs.gymnasium_state import StateInstance

    return StateInstance


def make_env(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes a batch of Gymnasium instances."""
    from vlmrb.envs.batch import SimulatorEnv

    make = functools.partial(_instance_class(config), config)
    return SimulatorEnv(GymnasiumSimulator(make, num_envs, min(config.workers, num_envs), seed), config.actions)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of snapshots; opens one instance to learn the size of frames, or to try ``env.state``."""
    instance = _instance_class(config)(config)
    try:
        if config.state is not None:
            from vlmrb.envs.gymnasium_state import StateRenderer

            return StateRenderer(config)
        observation = instance.look()[0]
        started = time.perf_counter()
        frame = instance._frame()
        logger.info(
            "env.id %s: each stored step holds its frame, %.1f kB, and drawing it took %.1f ms; a smaller "
            "env.frame_size saves memory, env.state both",
            config.id,
            frame.size / 1e3,
            1e3 * (time.perf_counter() - started),
        )
        return FrameRenderer(config.id, frame.shape, observation.shape, observation.dtype.str)
    finally:
        instance.close()
