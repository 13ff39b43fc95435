"""OGBench environments whose resets follow from their seed and whose states can be taken, drawn again and restored.

MuJoCo is loaded when one is opened, and never with OpenGL.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from vlmrb.envs.ogbench_layout import Goal, OGBenchLayout

_XY: Final = 2


@contextmanager
def without_gl() -> Iterator[None]:
    """Keeps MuJoCo, if it is imported inside, from loading OpenGL.

    Mesa in the learner's process crashes it when torch imports Triton later; only drawing processes may load it.
    """
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disabled"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = before


@contextmanager
def numpy_stream(generator: np.random.RandomState) -> Iterator[None]:
    """Lets what draws from NumPy's global generator draw from this one."""
    before = np.random.get_state()
    np.random.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(np.random.get_state())
        np.random.set_state(before)


class GoalInSight(gymnasium.ObservationWrapper):
    """Appends x and y of the goal to a maze's observations, which do not tell it upstream.

    Args:
        env: around a goal-conditioned maze.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._base: Any = env.unwrapped
        upstreams: Any = env.observation_space
        self.observation_space = Box(-np.inf, np.inf, (upstreams.shape[0] + _XY,), upstreams.dtype)

    def observation(self, observation: NDArray) -> NDArray[np.float64]:
        """Returns ``float64[O + 2]`` of upstream's ``float64[O]``."""
        return np.concatenate((observation, np.asarray(self._base.cur_goal_xy, np.float64)))


class SeededResets(gymnasium.Wrapper):
    """Makes everything random follow from the seed of ``reset``.

    Upstream a reset takes a few random actions from a space that nobody seeds, and draws task, start and goal of some
    environments from NumPy's global generator, so that equal seeds do not give equal episodes.

    Args:
        env: around an environment of ``_copy``.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.stream = np.random.RandomState(0)
        self.draws_in_steps = getattr(env.unwrapped, "_teleport_info", None) is not None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode; ``seed`` decides all of it."""
        self.unwrapped.action_space.seed(seed)
        self.stream.seed(seed)
        with numpy_stream(self.stream):
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Moves on."""
        if not self.draws_in_steps:
            return self.env.step(action)
        with numpy_stream(self.stream):
            return self.env.step(action)


def open_env(env_id: str, max_steps: int | None = None) -> SeededResets:
    """Makes an OGBench environment, in a few hundredths of a second from the second one of an id on.

    Args:
        env_id: Gymnasium's id, ``scene-singletask-task3-v0``, or one with a dataset's name in it,
            ``scene-play-singletask-task3-v0``.
        max_steps: horizon in env steps; ``None`` is upstream's.

    Raises:
        gymnasium.error.Error: nothing of this name exists.
        ModuleNotFoundError: OGBench is not installed.
    """
    template, usual = _template(env_id)
    env: gymnasium.Env = TimeLimit(_copy(template), max_steps or usual)
    if hasattr(template, "cur_goal_xy") and template._reward_task_id is None:
        env = GoalInSight(env)
    return SeededResets(env)


@lru_cache(maxsize=4)
def _template(env_id: str) -> tuple[Any, int]:
    """Makes an environment to copy from: compiling its meshes takes more than a second.

    Returns:
        The environment, and its usual horizon in env steps.
    """
    logging.getLogger("absl").setLevel(logging.WARNING)  # dm_control announces MuJoCo's version
    with without_gl():
        import ogbench

        if env_id in gymnasium.registry:
            env = gymnasium.make(env_id, disable_env_checker=True)
        else:
            env = ogbench.make_env_and_datasets(env_id, env_only=True, disable_env_checker=True)
    assert env.spec is not None
    assert env.spec.max_episode_steps is not None
    base: Any = env.unwrapped
    kind = type(base)
    if isinstance(getattr(kind, "action_space", None), property):  # makes a new space, with a new generator, each time
        base.__class__ = type(kind.__name__, (kind,), {"action_space": property(lambda self: self._own_action_space)})
        base._own_action_space = Box(-1, 1, (5,), np.float32)
    with numpy_stream(np.random.RandomState(0)):
        base.reset(seed=0)
    return base, env.spec.max_episode_steps


def _copy(template: Any) -> Any:
    """Copies an environment: what an episode changes is the copy's own, the rest is shared."""
    import mujoco

    base = object.__new__(type(template))
    base.__dict__.update(template.__dict__)
    space = "_own_action_space" if hasattr(template, "_own_action_space") else "action_space"
    setattr(base, space, copy.deepcopy(getattr(template, space)))
    model, data = ("_model", "_data") if hasattr(template, "_model") else ("model", "data")
    setattr(base, model, copy.copy(template.model))
    setattr(base, data, mujoco.MjData(base.model))
    base._np_random = None
    return base


class World:
    """An open environment whose states can be taken, shown and restored.

    Args:
        env: of ``open_env``; is reset.
    """

    def __init__(self, env: SeededResets) -> None:
        import mujoco

        self._mujoco = mujoco
        self.env = env
        self.base: Any = env.unwrapped
        self._limit = _find(env, TimeLimit)
        observation, _ = env.reset(seed=0)
        self._maze = hasattr(self.base, "cur_goal_xy")
        self.layout = self._lay_out(np.asarray(observation).size)

    @property
    def model(self) -> Any:
        """MuJoCo's model."""
        return self.base.model

    @property
    def data(self) -> Any:
        """MuJoCo's state."""
        return self.base.data

    @property
    def camera(self) -> Any:
        """Upstream's camera for observers: in front of the table, or above the maze."""
        return self.base.custom_camera if self._maze else "front"

    @property
    def scene_option(self) -> Any:
        """What of the scene is drawn; ``None`` is MuJoCo's default."""
        return None if self._maze else self.base._scene_option

    def snapshot(self, observation: NDArray) -> NDArray[np.float64]:
        """Takes the present state, ``float64[S]``.

        Args:
            observation: ``float32[O]``, what the agent sees of it.
        """
        return np.concatenate((self.data.qpos, *self._extras(), observation))

    def show(self, snapshot: NDArray[np.float64]) -> None:
        """Puts the environment into a state so that it can be drawn; velocities are 0, the episode is lost.

        Args:
            snapshot: ``float64[S]``.
        """
        state = self.layout.unpack(snapshot)
        self.data.qpos[:], self.data.qvel[:] = state.qpos, 0.0
        self._apply(state.targets, state.buttons, float(state.task))
        if not self._maze:  # colours follow from what is where
            self.base.pre_step()
            self.forward()
            self.base.post_step()
        self.forward()

    def forward(self) -> None:
        """Lets everything that follows from the state follow."""
        self._mujoco.mj_forward(self.model, self.data)

    def save(self) -> tuple[NDArray[np.float64], dict[str, Any]]:
        """Takes all that the running episode's future depends on.

        Returns:
            A vector ``float64[K]``, and the generators as ints, strings and dictionaries.
        """
        physics = np.empty(self._mujoco.mj_stateSize(self.model, self._everything))
        self._mujoco.mj_getState(self.model, self.data, physics, self._everything)
        # Upstream acts on sites and contact forces as the last physics step left them, not as the state implies them.
        left = (self.data.site_xpos.ravel(), self.data.site_xmat.ravel(), self.data.cfrc_ext.ravel())
        flags = (float(self._limit._elapsed_steps), float(getattr(self.base, "_success", False)))
        generators = {"env": self.base.np_random.bit_generator.state}
        if self.env.draws_in_steps:
            kind, key, *rest = self.env.stream.get_state()
            generators["stream"] = [kind, np.asarray(key).tolist(), *rest]
        return np.concatenate((physics, *left, *self._extras(), flags)), generators

    def restore(self, vector: NDArray[np.float64], generators: dict[str, Any]) -> None:
        """Goes on where ``save`` was called, exactly.

        Args:
            vector: ``float64[K]``.
            generators: as saved.

        Raises:
            ValueError: the state belongs to another environment.
        """
        sizes = [self._mujoco.mj_stateSize(self.model, self._everything)]
        sizes += [self.data.site_xpos.size, self.data.site_xmat.size, self.data.cfrc_ext.size]
        sizes += [self.layout.num_targets, self.layout.num_buttons, 1, 2]
        if len(vector) != sum(sizes):
            raise ValueError(f"a state of {len(vector)} numbers is none of this environment ({sum(sizes)})")
        physics, xpos, xmat, forces, targets, buttons, task, flags = np.split(vector, np.cumsum(sizes)[:-1])
        self.env.reset(seed=0)  # lets wrappers take steps, and sets up what an episode needs
        self._mujoco.mj_setState(self.model, self.data, physics, self._everything)
        self._apply(targets, buttons, float(task[0]))
        self._mujoco.mj_forward(self.model, self.data)
        self._mujoco.mj_setState(self.model, self.data, physics, self._everything)
        self.data.site_xpos[:] = xpos.reshape(self.data.site_xpos.shape)
        self.data.site_xmat[:] = xmat.reshape(self.data.site_xmat.shape)
        self.data.cfrc_ext[:] = forces.reshape(self.data.cfrc_ext.shape)
        self._limit._elapsed_steps = int(flags[0])
        self.base._success = bool(flags[1])
        self.base.np_random.bit_generator.state = generators["env"]
        if self.env.draws_in_steps:
            self.env.stream.set_state(tuple(generators["stream"]))

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    @property
    def _everything(self) -> int:
        return int(self._mujoco.mjtState.mjSTATE_INTEGRATION)

    def _extras(self) -> tuple[NDArray, NDArray, list[float]]:
        """Returns targets, buttons and task, as they lie in a snapshot."""
        if self._maze:
            return np.asarray(self.base.cur_goal_xy, np.float64), np.empty(0), [float(self.base.cur_task_id)]
        buttons = np.asarray(getattr(self.base, "_cur_button_states", ()), np.float64)
        return self.data.mocap_pos.ravel(), buttons, [float(self.base.cur_task_id)]

    def _apply(self, targets: NDArray, buttons: NDArray, task: float) -> None:
        """Sets what is no part of MuJoCo's state: targets, buttons with their locks and colours, and the task."""
        base = self.base
        base.cur_task_id = int(task)
        base.cur_task_info = base.task_infos[base.cur_task_id - 1]
        if self._maze:
            base.set_goal(goal_xy=targets)
            return
        self.data.mocap_pos[:] = targets.reshape(self.data.mocap_pos.shape)
        if not self.layout.num_buttons:
            return
        goal = self.layout.goals[base.cur_task_id - 1]
        base._target_button_states = np.array(goal.buttons)
        if self.layout.drawer is not None:
            base._target_drawer_pos = self.model.site("drawer_handle_center_target").pos[1] = goal.drawer
            base._target_window_pos = self.model.site("window_handle_center_target").pos[0] = goal.window
        base._cur_button_states = buttons.astype(np.int64)
        base._apply_button_states()

    def _lay_out(self, num_observation: int) -> OGBenchLayout:
        base, model = self.base, self.model
        if self._maze:
            ball = hasattr(base, "set_agent_ball_xy")
            mover = model.nq - 7 if ball else 0
            return OGBenchLayout(
                "ball" if ball else "maze", model.nq, _XY, 0, num_observation, mover=mover, tolerance=base._goal_tol
            )
        buttons = len(getattr(base, "_cur_button_states", ()))
        cubes = tuple(
            int(model.joint(f"object_joint_{cube}").qposadr[0]) for cube in range(getattr(base, "_num_cubes", 0))
        )
        is_scene = buttons > 0 and bool(cubes)
        return OGBenchLayout(
            domain="scene" if is_scene else "puzzle" if buttons else "cube",
            num_qpos=model.nq,
            num_targets=self.data.mocap_pos.size,
            num_buttons=buttons,
            num_observation=num_observation,
            cubes=cubes,
            drawer=int(model.joint("drawer_slide").qposadr[0]) if is_scene else None,
            window=int(model.joint("window_slide").qposadr[0]) if is_scene else None,
            goals=tuple(_goal(task) for task in base.task_infos),
        )


def _goal(task: dict[str, Any]) -> Goal:
    wanted = task.get("goal", {})
    buttons = wanted.get("button_states", task.get("goal_button_states", ()))
    return Goal(tuple(int(b) for b in buttons), wanted.get("drawer_pos", 0.0), wanted.get("window_pos", 0.0))


def _find(env: gymnasium.Env, kind: type[Any]) -> Any:
    while not isinstance(env, kind):
        assert isinstance(env, gymnasium.Wrapper)
        env = env.env
    return env
