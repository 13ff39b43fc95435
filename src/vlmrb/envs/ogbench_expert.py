"""OGBench's scripted policies as one player of whole tasks; it makes scripted clips, and no agent learns from it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.ogbench_layout import REACHED, Goal, OGBenchLayout, OGBenchState
from vlmrb.envs.ogbench_worlds import World, numpy_stream, open_env, without_gl

_CONTACT: Final = 17  # where the gripper's contact force lies in an observation
_JUMP: Final = 0.5  # radians: an arm that moves so far within a step begins a new episode
_ARM: Final = 6  # joints
_OPEN: Final = -0.16  # metres, of the drawer's slide
_AWAY: Final = 0.02  # metres from the drawer's front, on which a cube might come to rest
_IN_DRAWER: Final = -0.24  # metres: targets beyond this y lie in the closed drawer


class Subgoal(NamedTuple):
    """What one of upstream's policies can do.

    Attributes:
        kind: ``cube``, ``button``, ``drawer`` or ``window``.
        number: of the cube or the button.
        place: where to: x, y, z of a cube; (position,) of drawer or window; (state,) of a button.
    """

    kind: str
    number: int
    place: tuple[float, ...]


class OGBenchExpert:
    """Plays tasks of Scene, Cube and Puzzle, one subgoal after the other.

    What to do next is read off the state, so it may be taken over in the middle of anything. It does not solve every
    task from every state: cubes that lie in each other's way are not moved aside.

    Args:
        env_id: the environment.

    Raises:
        ValueError: upstream has no policies for this environment.
    """

    def __init__(self, env_id: str) -> None:
        self._world = World(open_env(env_id))
        self._layout = self._world.layout
        if self._layout.domain in ("maze", "ball"):
            raise ValueError(
                f"--policy scripted: OGBench has no scripted policy for {env_id}; use random or checkpoint"
            )
        with without_gl():
            from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle
            from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
            from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle
            from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle

        closed = {"gripper_always_closed": True} if self._layout.domain == "puzzle" else {}
        self._policies: dict[str, tuple[Any, dict[str, Any]]] = {
            "cube": (CubeMarkovOracle, {}),
            "button": (ButtonMarkovOracle, closed),
            "drawer": (DrawerMarkovOracle, {}),
            "window": (WindowMarkovOracle, {}),
        }
        self._stream = np.random.RandomState(0)  # of the places to which upstream's policies withdraw
        self._running: dict[int, tuple[Subgoal, Any]] = {}
        self._arms: dict[int, NDArray[np.float64]] = {}

    def act(self, snapshots: NDArray[np.float64]) -> NDArray[np.float32]:
        """Chooses actions; hand instance i's state in at row i each time.

        Args:
            snapshots: ``float64[n, S]``.

        Returns:
            ``float32[n, 5]`` in [−1, 1]; zeros where nothing is left to do.
        """
        return np.stack([self._act(row, snapshot) for row, snapshot in enumerate(snapshots)])

    def _act(self, row: int, snapshot: NDArray[np.float64]) -> NDArray[np.float32]:
        state = self._layout.unpack(snapshot)
        arm = state.qpos[:_ARM]
        if row in self._arms and np.abs(arm - self._arms[row]).max() > _JUMP:
            self._running.pop(row, None)
        self._arms[row] = arm
        self._world.show(snapshot)
        if row not in self._running or self._running[row][1].done:
            self._running.pop(row, None)
            subgoal = next_subgoal(self._layout, state)
            if subgoal is None:
                return np.zeros(5, np.float32)
            make, settings = self._policies[subgoal.kind]
            policy = make(env=self._world.env, **settings)
            with numpy_stream(self._stream):
                policy.reset(None, None)
            self._running[row] = (subgoal, policy)
        subgoal, policy = self._running[row]
        return np.asarray(policy.select_action(None, self._info(subgoal, state)), np.float32)

    def _info(self, subgoal: Subgoal, state: OGBenchState) -> dict[str, Any]:
        """Returns what upstream's policies read: the state that is shown, and what is wanted."""
        world, base = self._world, self._world.base
        info = base.compute_ob_info()
        info["proprio/gripper_contact"] = state.observation[_CONTACT : _CONTACT + 1]  # does not follow from the state
        place = np.array(subgoal.place)
        if subgoal.kind == "cube":
            return info | {
                "privileged/target_block": subgoal.number,
                "privileged/target_block_pos": place,
                "privileged/target_block_yaw": np.zeros(1),
            }
        if subgoal.kind == "button":
            return info | {
                "privileged/target_button": subgoal.number,
                "privileged/target_button_state": int(place[0]),
                "privileged/target_button_top_pos": world.data.site_xpos[base._button_site_ids[subgoal.number]].copy(),
            }
        target = world.model.site(f"{subgoal.kind}_handle_center_target")
        target.pos[1 if subgoal.kind == "drawer" else 0] = place[0]
        world.forward()
        return info | {f"privileged/target_{subgoal.kind}_handle_pos": world.data.site_xpos[target.id].copy()}


def next_subgoal(layout: OGBenchLayout, state: OGBenchState) -> Subgoal | None:
    """Says what to do next towards a task's goal, ``None`` if it is reached (or cannot be).

    A locked drawer or window is unlocked before it is moved, the drawer is opened before a cube goes in, cubes come
    before the drawer and the window, lower targets before higher ones, and buttons last.

    Args:
        layout: of the environment.
        state: one, without leading axes.
    """
    goal = layout.goals[int(state.task) - 1]
    if layout.domain == "puzzle":
        wrong = state.buttons.astype(np.int64) != np.array(goal.buttons)
        presses = np.flatnonzero(solve_lights(wrong))
        return Subgoal("button", int(presses[0]), (float(1 - state.buttons[presses[0]]),)) if len(presses) else None
    targets = state.targets.reshape(-1, 3)
    for cube in np.argsort(targets[:, 2], kind="stable").tolist():
        at = layout.cubes[cube]
        if np.linalg.norm(state.qpos[at : at + 3] - targets[cube]) > REACHED:
            if layout.domain == "scene" and targets[cube, 1] < _IN_DRAWER:
                return _into_drawer(layout, state, cube) or _slide(layout, state, goal)
            return Subgoal("cube", cube, tuple(targets[cube].tolist()))
    return None if layout.domain == "cube" else _slide(layout, state, goal)


def _into_drawer(layout: OGBenchLayout, state: OGBenchState, cube: int) -> Subgoal | None:
    """Opens the drawer and lays a cube into it; ``None`` if it lies there, for the drawer to take along."""
    assert layout.drawer is not None
    at, slide = layout.cubes[cube], float(state.qpos[layout.drawer])
    target = state.targets[3 * cube : 3 * cube + 3]
    carried = state.qpos[at : at + 3] + (0.0, slide, 0.0)  # where it will be once the drawer is closed
    if np.linalg.norm(carried - target) <= REACHED:
        return None
    if abs(slide - _OPEN) > REACHED:
        return _unlocked(state, 0, Subgoal("drawer", 0, (_OPEN,)))
    return Subgoal("cube", cube, tuple((target - (0.0, _OPEN + _AWAY, 0.0)).tolist()))


def _slide(layout: OGBenchLayout, state: OGBenchState, goal: Goal) -> Subgoal | None:
    """Brings drawer, window and buttons to where the task wants them."""
    assert layout.drawer is not None
    assert layout.window is not None
    if abs(state.qpos[layout.drawer] - goal.drawer) > REACHED:
        return _unlocked(state, 0, Subgoal("drawer", 0, (goal.drawer,)))
    if abs(state.qpos[layout.window] - goal.window) > REACHED:
        return _unlocked(state, 1, Subgoal("window", 0, (goal.window,)))
    for button, wanted in enumerate(goal.buttons):
        if state.buttons[button] != wanted:
            return Subgoal("button", button, (float(wanted),))
    return None


def _unlocked(state: OGBenchState, button: int, then: Subgoal) -> Subgoal:
    return then if state.buttons[button] else Subgoal("button", button, (1.0,))


def solve_lights(wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Says which buttons to press so that exactly the given ones change: each press flips itself and its neighbours.

    Args:
        wrong: ``bool[rows · columns]`` of a puzzle of 9, 16, 20 or 24 buttons.

    Returns:
        ``bool[rows · columns]``, all false if nothing is to be done or no presses do it.
    """
    count = len(wrong)
    rows = 3 if count == 9 else 4
    columns = count // rows
    x, y = np.divmod(np.arange(count), columns)
    flips = np.abs(x[:, None] - x) + np.abs(y[:, None] - y) <= 1
    system = np.concatenate((flips, wrong[:, None]), axis=1).astype(np.uint8)  # Gaussian elimination modulo 2
    pivots: list[int] = []
    for column in range(count):
        row = len(pivots)
        below = np.flatnonzero(system[row:, column])
        if not len(below):
            continue
        system[[row, row + below[0]]] = system[[row + below[0], row]]
        others = np.flatnonzero(system[:, column])
        system[others[others != row]] ^= system[row]
        pivots.append(column)
    presses = np.zeros(count, np.bool_)
    if not system[len(pivots) :, -1].any():
        presses[pivots] = system[: len(pivots), -1]
    return presses
