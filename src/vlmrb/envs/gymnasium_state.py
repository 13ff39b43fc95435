"""Snapshots of Gymnasium environments whose states a user can take and put back: nothing is drawn while stepping."""

from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.errors import FAILURES, reason
from vlmrb.envs.instance import Instance, shrink
from vlmrb.envs.simulator import Spaces

if TYPE_CHECKING:
    import gymnasium

    from vlmrb.envs.config import EnvConfig

_TRIAL_STEPS: Final = 20  # random actions, at most, until the frame differs from the one that a state should bring back


class StateAccess(Protocol):
    """What ``env.state`` names: a module, class or object with these two functions."""

    def get_state(self, env: gymnasium.Env) -> NDArray:
        """Returns all that the frame is drawn from, as an array of the same shape and dtype every time."""
        ...

    def set_state(self, env: gymnasium.Env, state: NDArray) -> None:
        """Puts an environment of the same id into that state, so that ``env.render()`` draws it."""
        ...


def state_access(path: str) -> StateAccess:
    """Imports what ``env.state`` names, ``package.module`` or ``package.module:name``.

    Raises:
        ValueError: it cannot be imported, or lacks one of the two functions.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        found = getattr(found, name) if name else found
    except FAILURES as error:
        raise ValueError(f"env.state {path!r} cannot be imported: {reason(error)}") from error
    lacks = [needed for needed in ("get_state", "set_state") if not callable(getattr(found, needed, None))]
    if lacks:
        raise ValueError(f"env.state {path!r} has no function {' and no '.join(lacks)}(env, …)")
    return cast(StateAccess, found)


class StateInstance(Instance):
    """A Gymnasium environment whose snapshot is its state, the observation's bytes behind it.

    Args:
        config: which environment; ``config.state`` is set.
    """

    def __init__(self, config: EnvConfig) -> None:
        assert config.state is not None
        self._access = state_access(config.state)
        super().__init__(config)

    def _spaces(self) -> Spaces:
        state = self._state().copy()  # it may be the environment's own memory
        self.state_shape, self.state_dtype = state.shape, state.dtype
        frame = self._frame()
        self._put(state.copy())
        if not np.array_equal(frame, self._frame()):
            raise ValueError(f"env.state {self.config.state!r}: a state put back where it was taken changes the frame")
        if self._leave(frame):
            self._put(state.copy())
            if not np.array_equal(frame, self._frame()):
                raise ValueError(
                    f"env.state {self.config.state!r}: a state put back after some steps does not bring back its frame"
                )
        self._begin(0)
        return self._sized_spaces(state.nbytes)

    def _leave(self, frame: NDArray[np.uint8]) -> bool:
        """Acts at random until the frame is another; says whether that came about."""
        space = copy.deepcopy(self.env.action_space)  # the environment's own may be what it draws from
        space.seed(0)
        for number in range(_TRIAL_STEPS):
            _, terminated, truncated, _ = self._advance(space.sample())
            if not np.array_equal(frame, self._frame()):
                return True
            if terminated or truncated:
                self._begin(number + 1)
        return False

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns the present observation and snapshot ``uint8[S]``."""
        state = self._state()
        if (state.shape, state.dtype) != (self.state_shape, self.state_dtype):
            raise ValueError(
                f"env.state {self.config.state!r}: states must be alike, got {state.dtype}{list(state.shape)} after "
                f"{self.state_dtype}{list(self.state_shape)}"
            )
        observation = self._observe()
        return observation, np.concatenate([part.reshape(-1).view(np.uint8) for part in (state, observation)])

    def draw(self, snapshot: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the frame of a snapshot ``uint8[S]``, at the environment's own size; moves this instance there."""
        size = int(np.prod(self.state_shape)) * self.state_dtype.itemsize
        self._put(snapshot[:size].copy().view(self.state_dtype).reshape(self.state_shape))
        return self._render()

    def _state(self) -> NDArray:
        try:
            state = np.ascontiguousarray(self._access.get_state(self.env))
        except FAILURES as error:
            raise ValueError(f"env.state {self.config.state!r}: get_state failed: {reason(error)}") from error
        if state.dtype.hasobject:
            raise ValueError(f"env.state {self.config.state!r}: get_state must return an array of numbers, got objects")
        return state

    def _put(self, state: NDArray) -> None:
        try:
            self._access.set_state(self.env, state)
        except FAILURES as error:
            raise ValueError(f"env.state {self.config.state!r}: set_state failed: {reason(error)}") from error


class StateRenderer:
    """Draws snapshots with an instance of its own, opened where the first frame is drawn.

    Args:
        config: the environment.
    """

    def __init__(self, config: EnvConfig) -> None:
        self.name = f"{config.id}-{config.state}-v1"
        self._config = config
        self._instance: StateInstance | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_instance": None}

    def _open(self) -> StateInstance:
        if self._instance is None:
            self._instance = StateInstance(self._config)
        return self._instance

    def render(self, snapshots: NDArray[np.uint8], frame_size: int | None = None) -> NDArray[np.uint8]:
        """Returns the frames ``uint8[..., H, W, 3]``, H and W at most ``frame_size`` (``None``: ``env.frame_size``)."""
        instance = self._open()
        flat = snapshots.reshape(-1, snapshots.shape[-1])
        unique, where = np.unique(flat, axis=0, return_inverse=True)
        drawn = np.stack([instance.draw(snapshot) for snapshot in unique])
        frames = shrink(drawn, frame_size or self._config.frame_size)[where.reshape(-1)]
        return frames.reshape(*snapshots.shape[:-1], *frames.shape[1:])

    def observe(self, snapshots: NDArray[np.uint8]) -> NDArray:
        """Returns the observations ``[..., *observation_shape]``."""
        spaces = self._open().spaces
        size = int(np.prod(spaces.observation_shape)) * np.dtype(spaces.observation_dtype).itemsize
        stored = np.ascontiguousarray(snapshots[..., -size:])
        return stored.view(spaces.observation_dtype).reshape(*snapshots.shape[:-1], *spaces.observation_shape)
