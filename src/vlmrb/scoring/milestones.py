"""The privileged baseline: milestones read off the simulator's state, which a VLM never sees (method, section 8)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.grid import DOOR as DOOR_OBJECT
from vlmrb.envs.grid import GOAL as GOAL_OBJECT
from vlmrb.envs.grid import KEY as KEY_OBJECT
from vlmrb.envs.grid import OPEN, POSE_SIZE, GridLayout
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.grades import Grades
from vlmrb.scoring.scorer import Scorer


def milestone_names(renderer: Renderer | None) -> tuple[str, ...]:
    """Returns the names of the milestones that can be read off an environment's snapshots, none if nobody knows how.

    They are MiniGrid's, or those that the renderer's ``layout`` names (see `vlmrb.envs.ogbench_layout`); the last one
    is the goal.
    """
    layout = getattr(renderer, "layout", None)
    return ("key", "door", "goal") if isinstance(layout, GridLayout) else tuple(getattr(layout, "milestones", ()))


class MilestonesScorer(Scorer):
    """Grades clips by what happens in the simulator's states: is a VLM needed at all?

    In MiniGrid that is a key taken, a door opened, the goal reached; in OGBench a cube lifted or placed, a button,
    drawer or window brought to where the task wants it, the goal reached.

    Args:
        grades: what each milestone is worth; ``grades.success_only`` makes it a plain success label.
    """

    name = "milestones"
    needs = "snapshots"
    every_frame = True

    def __init__(self, grades: Grades | None = None) -> None:
        self.grades = grades or Grades()
        self.version = f"1:{self.grades.version}"

    def objection(self, clips: ClipBatch) -> str | None:
        """Objects to environments whose milestones nobody has written down; see `milestone_names`."""
        if milestone_names(clips.renderer):
            return None
        return (
            "it reads milestones off the states of MiniGrid, OGBench and PointReach, or of an environment whose "
            "renderer names its own, and this one's names none"
        )

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        """Grades clips.

        Args:
            clips: B clips with snapshots of MiniGrid, or of another environment whose renderer explains them.

        Returns:
            ``float32[B]`` in [0, 1], above 0.5 where a milestone happens.

        Raises:
            ValueError: nobody knows how to read the snapshots.
        """
        events = self.events(clips)
        return self.grades.score(events) if _own_layout(clips) is None else self.grades.score_steps(events)

    def events(self, clips: ClipBatch) -> NDArray[np.bool_]:
        """Returns which milestones happen: ``bool[B, M]``, as ``milestone_names`` names them."""
        if (own := _own_layout(clips)) is not None:
            happens = own.events(clips.snapshots)  # [B, L − 1, M]
            within = np.arange(1, clips.snapshots.shape[1]) < clips.lengths[:, None]
            return (happens & within[..., None]).any(axis=1)
        layout = getattr(clips.renderer, "layout", None) or _square(clips.snapshots.shape[-1])
        state = layout.unpack(clips.snapshots)
        holds_key = state.carried[..., 0] == KEY_OBJECT  # [B, L]
        is_door = state.grid[..., 0] == DOOR_OBJECT  # [B, L, W, H]
        is_open = state.grid[..., 2] == OPEN
        x, y = state.position[..., 0].astype(np.int64), state.position[..., 1].astype(np.int64)
        clip, frame = np.indices(x.shape, sparse=True)
        on_goal = state.grid[clip, frame, x, y, 0] == GOAL_OBJECT  # [B, L]

        within = np.arange(1, x.shape[1]) < clips.lengths[:, None]  # [B, L − 1]; a frame beyond the clip is padding
        opened = (is_door[:, :-1] & ~is_open[:, :-1] & is_door[:, 1:] & is_open[:, 1:]).any(axis=(2, 3))
        return np.stack(
            [
                (~holds_key[:, :-1] & holds_key[:, 1:] & within).any(axis=1),
                (opened & within).any(axis=1),
                (~on_goal[:, :-1] & on_goal[:, 1:] & within).any(axis=1),
            ],
            axis=1,
        )


def _own_layout(clips: ClipBatch) -> Any:
    """Returns the layout that finds milestones by itself, if the clips' renderer has one."""
    layout = getattr(clips.renderer, "layout", None)
    return layout if hasattr(layout, "milestones") else None


def _square(size: int) -> GridLayout:
    """Takes snapshots that come without their renderer for those of a square grid.

    Raises:
        ValueError: no square grid has snapshots of ``size`` elements.
    """
    side = math.isqrt(max(size - POSE_SIZE, 0) // 3)
    layout = GridLayout(side, side)
    if side == 0 or layout.size != size:
        raise ValueError(
            f"the milestones scorer reads snapshots of MiniGrid; {size} elements are none of a square grid, and no "
            "renderer came along that explains them"
        )
    return layout
