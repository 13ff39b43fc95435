"""What a snapshot of an OGBench environment holds, and which milestones can be read off it. Knows nothing of MuJoCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Domain = Literal["scene", "cube", "puzzle", "maze", "ball"]

REACHED: Final = 0.04  # metres: upstream's tolerance for cubes, drawer and window
LIFTED: Final = 0.08  # metres: between the heights at which cubes rest on the table, in the drawer and on each other

_MILESTONES: Final[dict[Domain, tuple[str, ...]]] = {
    "scene": ("lifted", "placed", "button", "drawer", "window", "goal"),
    "cube": ("lifted", "placed", "goal"),
    "puzzle": ("button", "goal"),
    "maze": ("goal",),
    "ball": ("goal",),
}


class Goal(NamedTuple):
    """What a task asks for besides the cubes' targets, which a snapshot holds itself.

    Attributes:
        buttons: wanted states, 0 or 1 each.
        drawer: wanted position of the drawer's slide in metres (0 closed, −0.16 open).
        window: wanted position of the window's slide in metres (0 closed, 0.2 open).
    """

    buttons: tuple[int, ...] = ()
    drawer: float = 0.0
    window: float = 0.0


class OGBenchState(NamedTuple):
    """Parts of snapshots, each with the snapshots' leading axes.

    Attributes:
        qpos: ``float64[..., Q]``, MuJoCo's generalised positions.
        targets: ``float64[..., T]``, x, y, z of each cube's target; x, y of the goal in mazes.
        buttons: ``float64[..., B]``, 0 or 1.
        task: ``float64[...]``, number of the task, from 1 on.
        observation: ``float64[..., O]``, what the agent saw, exactly representable as float32.
    """

    qpos: NDArray[np.float64]
    targets: NDArray[np.float64]
    buttons: NDArray[np.float64]
    task: NDArray[np.float64]
    observation: NDArray[np.float64]


@dataclass(frozen=True)
class OGBenchLayout:
    """Where things lie in a snapshot ``float64[S]``: positions, targets, buttons, task and observation, in this order.

    That is all a frame depends on, float64 as MuJoCo has it, so that the frame is the same to the last pixel.
    Velocities move no pixel and are left out; the agent's observation, part of which (contact forces) does not follow
    from positions, is kept as it was.

    Attributes:
        domain: kind of environment.
        num_qpos: Q.
        num_targets: T.
        num_buttons: B.
        num_observation: O.
        cubes: where each cube's x lies in ``qpos``; y and z follow.
        drawer: where the drawer's slide lies in ``qpos``; ``None`` without one.
        window: where the window's slide lies in ``qpos``; ``None`` without one.
        goals: what each task asks for.
        mover: where x of what must reach the goal lies in ``qpos`` (mazes).
        tolerance: how near to the goal it must be in metres (mazes).
    """

    domain: Domain
    num_qpos: int
    num_targets: int
    num_buttons: int
    num_observation: int
    cubes: tuple[int, ...] = ()
    drawer: int | None = None
    window: int | None = None
    goals: tuple[Goal, ...] = ()
    mover: int = 0
    tolerance: float = 0.0

    @property
    def size(self) -> int:
        """S, elements of a snapshot."""
        return self.num_qpos + self.num_targets + self.num_buttons + 1 + self.num_observation

    def unpack(self, snapshots: NDArray) -> OGBenchState:
        """Takes snapshots ``float64[..., S]`` apart.

        Raises:
            ValueError: they are of another environment.
        """
        if snapshots.shape[-1] != self.size:
            raise ValueError(f"snapshots of {snapshots.shape[-1]} elements are none of this environment ({self.size})")
        ends = np.cumsum([self.num_qpos, self.num_targets, self.num_buttons, 1])
        qpos, targets, buttons, task, observation = np.split(snapshots, ends, axis=-1)
        return OGBenchState(qpos, targets, buttons, task[..., 0], observation)

    def observe(self, snapshots: NDArray) -> NDArray[np.float32]:
        """Returns what the agent saw: ``float32[..., O]``."""
        return self.unpack(snapshots).observation.astype(np.float32)

    @property
    def milestones(self) -> tuple[str, ...]:
        """Names of the milestones that :meth:`events` finds; the last is the goal."""
        return _MILESTONES[self.domain]

    def events(self, snapshots: NDArray) -> NDArray[np.bool_]:
        """Finds what happens between consecutive states.

        ``lifted``: a cube rises above 8 cm. ``placed``: a cube comes within 4 cm of its target. ``button``: more
        buttons are as the task wants them than before. ``drawer``, ``window``: it comes within 4 cm of where the task
        wants it. ``goal``: all of the task's conditions hold, and did not before.

        Args:
            snapshots: ``float64[..., L, S]``.

        Returns:
            ``bool[..., L − 1, M]``, one column per name in :attr:`milestones`.
        """
        state = self.unpack(snapshots)
        if self.domain in ("maze", "ball"):
            away = state.qpos[..., self.mover : self.mover + 2] - state.targets
            return _becomes(np.linalg.norm(away, axis=-1) <= self.tolerance)[..., None]
        found: dict[str, NDArray[np.bool_]] = {}
        reached = np.ones(state.task.shape, np.bool_)
        if self.cubes:
            cubes = np.stack([state.qpos[..., at : at + 3] for at in self.cubes], axis=-2)  # [..., L, C, 3]
            targets = state.targets.reshape(*state.task.shape, len(self.cubes), 3)
            placed = np.linalg.norm(cubes - targets, axis=-1) <= REACHED
            found["lifted"] = _becomes(cubes[..., 2] > LIFTED, each=True)
            found["placed"] = _becomes(placed, each=True)
            reached &= placed.all(axis=-1)
        row = state.task.astype(np.int64) - 1
        if self.num_buttons:
            right = state.buttons == np.array([goal.buttons for goal in self.goals])[row]
            count = right.sum(axis=-1)
            found["button"] = count[..., 1:] > count[..., :-1]
            reached &= right.all(axis=-1)
        for name, at in (("drawer", self.drawer), ("window", self.window)):
            if at is not None:
                wanted = np.array([getattr(goal, name) for goal in self.goals])[row]
                there = np.abs(state.qpos[..., at] - wanted) <= REACHED
                found[name] = _becomes(there)
                reached &= there
        found["goal"] = _becomes(reached)
        return np.stack([found[name] for name in self.milestones], axis=-1)


def _becomes(holds: NDArray[np.bool_], each: bool = False) -> NDArray[np.bool_]:
    """Says where a condition ``bool[..., L]`` begins to hold; with ``each`` one of several, ``bool[..., L, C]``."""
    if each:
        return np.asarray((~holds[..., :-1, :] & holds[..., 1:, :]).any(axis=-1))
    return ~holds[..., :-1] & holds[..., 1:]
