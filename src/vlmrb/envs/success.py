"""Whether a step of a Gymnasium environment reached the goal."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmrb.envs.errors import FAILURES, reason

if TYPE_CHECKING:
    from vlmrb.envs.config import EnvConfig


def default_success(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
    """Says whether the goal was reached: as ``info`` has it, else by a positive reward at termination.

    Raises:
        ValueError: ``info["success"]`` or ``info["is_success"]`` is neither a bool nor 0 or 1.
    """
    for key in ("success", "is_success"):
        if key in info:
            value = info[key]
            if isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating) and value in (0, 1):
                return bool(value)
            raise ValueError(f'info["{key}"] must be a bool, 0 or 1, got {_shown(value)}')
    return terminated and reward > 0


class SuccessTest:
    """``(info, reward, terminated, truncated) → bool``, called after every step.

    Args:
        config: which environment, and ``config.success``: ``package.module:function``, or ``None`` for
            :func:`default_success`.

    Raises:
        ValueError: the function cannot be imported or called.
    """

    def __init__(self, config: EnvConfig) -> None:
        if config.success is None:
            self._what = f"env.id {config.id!r}: reading success"
            self._function: Callable[[dict[str, Any], float, bool, bool], bool] = default_success
        else:
            self._what = f"env.success {config.success!r}"
            self._function = _imported(config.success)

    def __call__(self, info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
        """Says whether this step reached the goal.

        Raises:
            ValueError: the function failed, or what it returned is no bool.
        """
        try:
            outcome = self._function(info, reward, terminated, truncated)
        except FAILURES as error:
            raise ValueError(f"{self._what} failed: {reason(error)}") from error
        if not isinstance(outcome, bool | np.bool_):
            raise ValueError(f"{self._what} must return a bool, got {_shown(outcome)}")
        return bool(outcome)


def _imported(path: str) -> Callable[..., bool]:
    module, _, name = path.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except FAILURES as error:
        raise ValueError(f"env.success {path!r} cannot be imported: {reason(error)}") from error
    if not callable(found):
        raise ValueError(f"env.success {path!r} is no function, but {_shown(found)}")
    return found


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {' '.join(reprlib.repr(value).split())}"
