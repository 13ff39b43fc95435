"""One Gymnasium environment, and what is taken off it after each step."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray
from PIL import Image

from vlmrb.envs.errors import FAILURES, reason
from vlmrb.envs.simulator import Spaces
from vlmrb.envs.success import SuccessTest

if TYPE_CHECKING:
    from vlmrb.envs.config import EnvConfig

_TIMED_FRAMES: Final = 16
_TIMING_S: Final = 1.0  # after which no further frame is timed


class Instance:
    """One Gymnasium environment and what is taken off it after each step; families override what they do better.

    Args:
        config: which environment.

    Raises:
        ValueError: it cannot be made, or has observations, actions or frames that cannot be used here.
        RuntimeError: it failed.
    """

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self._success = SuccessTest(config)
        self._observation_shape: tuple[int, ...] | None = None
        self._frame_shape: tuple[int, ...] | None = None
        self._drawn: NDArray[np.uint8] | None = None  # the present state's frame, flat
        try:
            self.env = self._make()
            self._begin(0)
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
        except gymnasium.error.Error:
            raise
        except FAILURES as error:
            raise ValueError(f"env.id {config.id!r} cannot be made: {reason(error)}") from error
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
        return Spaces(
            observation.shape, observation.dtype, snapshot_size, action_space(self.env, self.config.id), pixels=pixels
        )

    def reset(self, seed: int) -> None:
        """Begins a new episode.

        Raises:
            RuntimeError: the environment failed.
        """
        self._begin(seed)

    def _begin(self, seed: int) -> None:
        self._drawn = None
        try:
            self._observation, _ = self.env.reset(seed=seed)
        except FAILURES as error:
            raise RuntimeError(f"env.id {self.config.id!r}: its reset failed: {reason(error)}") from error

    def step(self, action: NDArray) -> tuple[float, bool, bool, bool]:
        """Moves on.

        Args:
            action: ``int64[]`` or ``float32[A]``.

        Returns:
            Reward, whether the goal was reached, terminated, truncated.

        Raises:
            RuntimeError: the environment failed, or tried to end the process.
            ValueError: ``env.success`` failed or gave no bool.
        """
        native: Any = action if self._first_action is None else int(action) + self._first_action
        reward, terminated, truncated, info = self._advance(native)
        return reward, self._success(info, reward, terminated, truncated), terminated, truncated

    def _advance(self, native: Any) -> tuple[float, bool, bool, dict[str, Any]]:
        self._drawn = None
        try:
            self._observation, reward, terminated, truncated, info = self.env.step(native)
            return _scalar(reward), bool(terminated), bool(truncated), info
        except FAILURES as error:
            raise RuntimeError(f"env.id {self.config.id!r}: its step failed: {reason(error)}") from error

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns the present observation and snapshot ``[S]``; the same state is not drawn twice."""
        observation = self._observe()
        if self._drawn is None:
            self._drawn = self._frame().reshape(-1)
        return observation, np.concatenate((self._drawn, observation.reshape(-1).view(np.uint8)))

    def time_frame(self) -> float:
        """Returns the seconds that a frame of the present state takes: the median of a few."""
        seconds: list[float] = []
        while len(seconds) < _TIMED_FRAMES and sum(seconds) < _TIMING_S:
            started = time.perf_counter()
            self._frame()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def _observe(self) -> NDArray:
        """Returns what the agent sees: images as they are, all else ``float32``, categories one-hot."""
        try:
            observation = self._as_array()
        except FAILURES as error:
            raise ValueError(
                f"env.id {self.config.id!r}: an observation cannot be made an array: {reason(error)}"
            ) from error
        if self._observation_shape is None:
            self._observation_shape = observation.shape
        elif observation.shape != self._observation_shape:
            raise ValueError(
                f"env.id {self.config.id!r}: observations must be alike, got {list(observation.shape)} after "
                f"{list(self._observation_shape)}"
            )
        return observation

    def _as_array(self) -> NDArray:
        space = self.env.observation_space
        if isinstance(space, spaces.Box):
            return np.ascontiguousarray(self._observation, np.uint8 if space.dtype == np.uint8 else np.float32)
        if not space.is_np_flattenable:
            raise ValueError(f"of {space}, whose size is not fixed")
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
        except FAILURES as error:
            raise RuntimeError(f"env.id {self.config.id!r} cannot draw frames: {reason(error)}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"env.id {self.config.id!r} draws no rgb_array frames [H, W, 3]")
        if frame.dtype != np.uint8 or not frame.size:
            raise ValueError(
                f"env.id {self.config.id!r} must draw frames uint8[H, W, 3], got {frame.dtype}{list(frame.shape)}"
            )
        if self._frame_shape is None:
            self._frame_shape = frame.shape
        elif frame.shape != self._frame_shape:
            raise ValueError(
                f"env.id {self.config.id!r} must draw frames of one size, got {list(frame.shape)} after "
                f"{list(self._frame_shape)}"
            )
        return frame


def _wrap(env: gymnasium.Env, wrapper: str | dict[str, Any]) -> gymnasium.Env:
    """Puts one of ``env.wrappers`` around an environment."""
    path, arguments = (
        (wrapper, {}) if isinstance(wrapper, str) else (wrapper["class_path"], wrapper.get("init_args", {}))
    )
    # YAML has no tuples, and Gymnasium's wrappers insist on them.
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
    module, _, name = path.rpartition(".")
    try:
        wrapped = getattr(importlib.import_module(module), name)(env, **arguments)
    except FAILURES as error:
        raise ValueError(f"env.wrappers: {path} cannot be put around {env}: {reason(error)}") from error
    if not isinstance(wrapped, gymnasium.Env):
        raise ValueError(f"env.wrappers: {path} must give a gymnasium.Env, got {type(wrapped).__name__}")
    return wrapped


def action_space(env: gymnasium.Env, env_id: str) -> int | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the number of discrete actions, or the bounds of a continuous one.

    Raises:
        ValueError: the actions are neither, or the bounds, or the distance between two, are not finite.
    """
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if not (isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0] and space.dtype.kind == "f"):
        raise ValueError(
            f"env.id {env_id!r}: actions must be Discrete or a one-dimensional Box of at least one float, got {space}"
        )
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(high - low).all():
            raise ValueError(
                f"env.id {env_id!r}: its actions have no finite bounds, got {space}: name some in env.wrappers, such "
                "as {class_path: vlmrb.envs.wrappers.BoundAction, init_args: {low: -1.0, high: 1.0}}, outside of any "
                "gymnasium.wrappers.ClipAction, which declares infinite ones"
            )
    return low, high


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
