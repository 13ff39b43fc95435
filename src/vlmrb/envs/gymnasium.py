"""Environments that Gymnasium steps, one instance at a time; and the family of plain ids with ``rgb_array`` frames.

A plain Gymnasium state cannot be drawn again later, so its snapshot *is* the frame, scaled down to ``frame_size``, with
the observation's bytes behind it: 3·frame_size² bytes for each state held, against some hundred for a grid world. Keep
``frame_size`` small, or name functions that take and put back states (``env.state``, `gymnasium_state`). Where nobody
looks, as in an evaluation without a video, nothing is drawn (`make_env_without_frames`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import gymnasium
import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.instance import Instance, shrink
from vlmrb.envs.simulator import Spaces, Step
from vlmrb.envs.workers import Group, LocalGroup, RemoteGroup

if TYPE_CHECKING:
    from vlmrb.envs.batch import SimulatorEnv
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.clips import Renderer

logger = logging.getLogger(__name__)

TAKES: Final = ("kwargs", "wrappers", "state")  # settings that few families know

_SCHEMA: Final = 1
_SEEDS: Final = 2**31 - 1  # what every Gymnasium environment takes as a seed
_ROWS: Final = 100_000  # for which the memory of frames is told
_COSTS_TOLD: set[tuple[str, int]] = set()  # ids and frame sizes of this process


class GymnasiumSimulator:
    """Instances stepped one by one, in this process or spread over worker processes.

    Gymnasium states cannot be saved, so after ``load_state_dict`` every instance begins a new episode; only the stream
    of seeds goes on where it was.

    Args:
        make: makes an instance of a configuration; picklable if there are workers.
        config: the environment, and its worker processes.
        num_envs: n.
        seed: of the stream of reset seeds.
    """

    exact_resume = False

    def __init__(self, make: Callable[[EnvConfig], Instance], config: EnvConfig, num_envs: int, seed: int = 0) -> None:
        self.config = config
        self.num_envs = num_envs
        self._groups: list[Group]
        make_one = functools.partial(make, config)
        if workers := min(config.workers, num_envs):
            parts = np.array_split(np.arange(num_envs), workers)
            self._groups = [
                RemoteGroup(
                    make_one,
                    len(part),
                    f"env.id {config.id!r}: environment worker {number} of {workers}",
                    config.worker_timeout_s,
                )
                for number, part in enumerate(parts, 1)
            ]
        else:
            self._groups = [LocalGroup(make_one, num_envs)]
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
            group.begin_close()
        for group in self._groups:
            group.close()

    def _parts(self) -> list[tuple[Group, int, int]]:
        return list(zip(self._groups, self._bounds[:-1], self._bounds[1:], strict=True))


class FrameSimulator(GymnasiumSimulator):
    """Instances of which each state is drawn; says what that costs before the first step in this process."""

    def step(self, action: NDArray) -> Step:
        """Moves every instance on; ``action`` is ``int64[n]`` or ``float32[n, A]``."""
        drawn = self.config.id, self.config.frame_size
        if drawn not in _COSTS_TOLD:
            _COSTS_TOLD.add(drawn)
            self._tell_costs()
        return super().step(action)

    def _tell_costs(self) -> None:
        seconds: float = self._groups[0].call("first", "time_frame").result()
        size = self.spaces.snapshot_size
        logger.info(
            "env.id %s: its states cannot be drawn again, so the frame of every env step is kept: drawing one takes "
            "%.2f ms, which leaves at most %s env steps/s to a process, and a state takes %.1f kB, %.2f GB for 100,000 "
            "rows of replay.capacity; a smaller env.frame_size saves memory, env.workers share the time, env.state "
            "saves both",
            self.config.id,
            1e3 * seconds,
            f"{1 / max(seconds, 1e-9):,.0f}",
            size / 1e3,
            size * _ROWS / 1e9,
        )


class FramelessInstance(Instance):
    """A Gymnasium environment that nobody looks at: it is never drawn, and its snapshot is the observation's bytes."""

    def _spaces(self) -> Spaces:
        return self._sized_spaces(0)

    def look(self) -> tuple[NDArray, NDArray[np.uint8]]:
        """Returns the present observation and its bytes ``uint8[S]``."""
        observation = self._observe()
        return observation, observation.reshape(-1).view(np.uint8)


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

    simulator = FrameSimulator if config.state is None else GymnasiumSimulator
    return SimulatorEnv(simulator(_instance_class(config), config, num_envs, seed), config.actions)


def make_env_without_frames(config: EnvConfig, num_envs: int, seed: int) -> SimulatorEnv:
    """Makes the same batch for whoever draws none of its snapshots: no frame is drawn, whatever ``env.state`` says."""
    from vlmrb.envs.batch import SimulatorEnv

    return SimulatorEnv(GymnasiumSimulator(FramelessInstance, config, num_envs, seed), config.actions)


def make_renderer(config: EnvConfig) -> Renderer:
    """Makes the renderer of snapshots; opens one instance to learn the size of frames, or to try ``env.state``."""
    instance = _instance_class(config)(config)
    try:
        if config.state is not None:
            from vlmrb.envs.gymnasium_state import StateRenderer

            return StateRenderer(config)
        observation, frame = instance._observe(), instance._frame()
        return FrameRenderer(config.id, frame.shape, observation.shape, observation.dtype.str)
    finally:
        instance.close()
