"""A wrapper for ``env.wrappers`` that Gymnasium lacks."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike


class BoundAction(gymnasium.ActionWrapper):
    """Says between which bounds actions lie, and hands them on as they are.

    Random play and the networks of SAC and TD3 need finite bounds. Gymnasium's ``RescaleAction`` refuses spaces without
    any, and its ``ClipAction`` clips but declares infinite ones.

    Args:
        env: its actions are a Box.
        low: lowest value of each component, or one for all.
        high: highest.

    Raises:
        TypeError: the actions are no Box.
        ValueError: a bound is not finite, lies outside the environment's own, or is not below the other.
    """

    def __init__(self, env: gymnasium.Env, low: ArrayLike, high: ArrayLike) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, spaces.Box):
            raise TypeError(f"BoundAction needs Box actions, got {space}")
        lows, highs = (np.broadcast_to(np.asarray(bound, space.dtype), space.shape) for bound in (low, high))
        if not (np.isfinite(lows) & np.isfinite(highs) & (lows < highs)).all():
            raise ValueError(f"BoundAction needs finite bounds, low below high, got low={low!r} and high={high!r}")
        if not ((lows >= space.low) & (highs <= space.high)).all():
            raise ValueError(f"BoundAction: low={low!r} and high={high!r} reach beyond {space}")
        self.action_space = spaces.Box(lows, highs, dtype=space.dtype.type)

    def action(self, action: Any) -> Any:
        """Returns the action unchanged."""
        return action
