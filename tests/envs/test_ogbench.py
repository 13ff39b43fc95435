"""OGBench environments: upstream's dynamics, resets that follow from their seed, states that go on exactly."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ogbench
import pytest
import torch
import yaml
from torchrl.envs.utils import check_env_specs

from vlmrb import algorithms
from vlmrb.envs import EnvConfig, make_env, make_goals, make_renderer
from vlmrb.envs.batch import SimulatorEnv
from vlmrb.envs.ogbench_worlds import World, open_env
from vlmrb.settings import load_env

CONFIGS = Path(__file__).parents[2] / "configs" / "ogbench"

SCENE = "scene-play-singletask-task3-v0"
POINT = "pointmaze-medium-navigate-singletask-v0"  # opens in a moment
FAMILIES = [SCENE, "cube-double-play-singletask-v0", "puzzle-3x3-play-singletask-v0", POINT, "antsoccer-arena-v0"]

pytestmark = pytest.mark.slow  # importing dm_control and compiling meshes takes seconds


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _env(env_id: str = SCENE, seed: int = 0, **settings: Any) -> SimulatorEnv:
    return make_env(EnvConfig(id=env_id, **{"num_envs": 2, **settings}), seed=seed)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_specs_and_keys_are_those_of_the_contract(env_id: str) -> None:
    env = _env(env_id)
    check_env_specs(env)
    root = env.reset()
    flags = {"success", "done", "terminated", "truncated"}
    assert set(root.keys()) == {"observation", "snapshot", *flags}
    after = env.step(env.rand_action(root))["next"]
    assert set(after.keys()) == {"observation", "snapshot", "reward", *flags}
    assert root["observation"].dtype == after["reward"].dtype == root["action"].dtype == torch.float32
    assert root["snapshot"].dtype == torch.float64
    layout = env.simulator._groups[0]._instances[0].world.layout
    np.testing.assert_array_equal(layout.observe(root["snapshot"].numpy()), root["observation"])
    env.close()


def test_scene_has_the_papers_shapes_and_upstreams_horizon() -> None:
    env = _env()
    assert env.observation_spec["observation"].shape == (2, 40)
    assert env.action_spec.shape == (2, 5)
    world = env.simulator._groups[0]._instances[0].world
    assert world._limit._max_episode_steps == 750
    assert (world.layout.num_qpos, world.layout.num_targets, world.layout.num_buttons) == (25, 3, 2)
    assert world.layout.size == 25 + 3 + 2 + 1 + 40


def test_both_spellings_of_an_id_are_one_environment() -> None:
    dataset, plain = _env(SCENE, seed=5), _env("scene-singletask-task3-v0", seed=5)
    torch.manual_seed(0)
    first = dataset.rollout(4)
    torch.manual_seed(0)
    assert (first == plain.rollout(4)).all()


@pytest.mark.parametrize(("task", "reward"), list(enumerate([-2, -2, -4, -2, -2], start=1)))
def test_reward_counts_what_is_not_yet_as_the_task_wants_it(task: int, reward: int) -> None:
    env = _env(f"scene-singletask-task{task}-v0", num_envs=1)
    root = env.reset()
    after = env.step(root.set("action", torch.zeros(1, 5)))["next"]
    assert after["reward"].item() == reward
    assert not after["success"].any()


def _put_into_goal(world: World) -> None:
    base, goal = world.base, world.layout.goals[world.base.cur_task_id - 1]
    at = world.layout.cubes[0]
    world.data.qpos[at : at + 3] = world.data.mocap_pos[0]
    world.data.qpos[world.layout.drawer], world.data.qpos[world.layout.window] = goal.drawer, goal.window
    world.data.qvel[:] = 0
    base._cur_button_states = np.array(goal.buttons)
    base._apply_button_states()


def test_a_goal_state_forced_by_hand_is_a_success_one_step_later_than_its_reward() -> None:
    """Upstream's reward looks at the state that the step leaves; its success is what the step before found there."""
    world = World(open_env(SCENE))
    still = np.zeros(5, np.float32)
    _put_into_goal(world)
    _, reward, terminated, _, info = world.env.step(still)
    assert (reward, bool(info["success"]), terminated) == (0.0, False, False)  # nobody has looked for success yet
    _, reward, terminated, _, info = world.env.step(still)
    assert (reward, bool(info["success"]), bool(terminated)) == (0.0, True, True)


def test_success_ends_the_episode_with_the_step_that_leaves_the_goal_state() -> None:
    env = _env(num_envs=1)
    root = env.reset()
    world = env.simulator._groups[0]._instances[0].world
    _put_into_goal(world)
    still = torch.zeros(1, 5)
    first = env.step(root.set("action", still))["next"]
    step, after = env.step_and_maybe_reset(env.current().set("action", still))
    last = step["next"]
    assert not first["done"].any()
    assert last["success"].all()
    assert last["terminated"].all()
    assert last["reward"].item() == 0
    pair = np.stack([first["snapshot"][0], last["snapshot"][0]])
    cube = world.layout.unpack(pair).qpos[:, world.layout.cubes[0] :][:, :3]
    assert np.linalg.norm(cube - world.layout.unpack(pair).targets, axis=1).max() < 0.04  # `next` is the last state
    assert (after["observation"] != last["observation"]).any()  # and the next root a new episode's first
    assert not after["done"].any()


def test_the_horizon_truncates_with_the_true_last_state() -> None:
    env = _env(POINT, max_steps=3)
    root = env.reset()
    for number in range(1, 7):
        step, root = env.step_and_maybe_reset(env.rand_action(root))
        assert step["next", "truncated"].all() == (number % 3 == 0)
        moved = (step["next", "observation"] - step["observation"]).abs().max()
        assert moved < 0.3  # a new episode would begin elsewhere
        assert (root["observation"] == step["next", "observation"]).all() == (number % 3 != 0)


@pytest.mark.parametrize("env_id", [SCENE, "antmaze-teleport-navigate-v0"])
def test_episodes_follow_from_the_seed_alone(env_id: str) -> None:
    rollouts = []
    for nuisance in (1, 2):
        np.random.seed(nuisance)
        world = World(open_env(env_id))
        world.env.reset(seed=nuisance)
        world.env.step(world.env.action_space.sample())
        before = np.random.get_state()[1].copy()
        seen = [world.env.reset(seed=7)[0]]
        shape = world.env.action_space.shape
        actions = np.random.default_rng(0).uniform(-1, 1, (10, *shape)).astype(np.float32)
        seen += [world.env.step(action)[0] for action in actions]
        np.testing.assert_array_equal(np.random.get_state()[1], before)  # others' random numbers stay theirs
        rollouts.append(np.stack(seen))
    np.testing.assert_array_equal(*rollouts)


def test_dynamics_are_upstreams() -> None:
    """The same state and actions give the same observations, rewards and ends in the untouched environment."""
    world = World(open_env(SCENE))
    theirs = ogbench.make_env_and_datasets(SCENE, env_only=True)
    theirs.reset(seed=0)
    state, base = world.env.unwrapped.data, theirs.unwrapped
    physics = np.empty(world._mujoco.mj_stateSize(base.model, world._everything))
    world._mujoco.mj_getState(world.model, state, physics, world._everything)
    world._mujoco.mj_setState(base.model, base.data, physics, world._everything)
    world.forward()
    world._mujoco.mj_forward(base.model, base.data)
    for action in np.random.default_rng(1).uniform(-1, 1, (30, 5)).astype(np.float32):
        ours, there = world.env.step(action), theirs.step(action)
        np.testing.assert_array_equal(ours[0], there[0])
        assert ours[1:4] == there[1:4]


@pytest.mark.parametrize("env_id", [*FAMILIES, "antmaze-teleport-navigate-v0"])
def test_a_saved_state_goes_on_exactly(env_id: str) -> None:
    env, other = _env(env_id, seed=3, max_steps=12), _env(env_id, seed=4, max_steps=12)
    torch.manual_seed(0)
    env.rollout(8, break_when_any_done=False)
    file = io.BytesIO()
    torch.save(copy.deepcopy(env.state_dict()), file)
    file.seek(0)
    other.rollout(3)
    other.load_state_dict(torch.load(file, weights_only=True))
    root, root_other = env.current(), other.current()
    assert (root == root_other).all()
    for _ in range(12):  # across the horizon, and so into episodes whose seeds are yet to be drawn
        action = env.rand_action(root)["action"]
        step, root = env.step_and_maybe_reset(root.set("action", action))
        step_other, root_other = other.step_and_maybe_reset(root_other.set("action", action))
        assert (step == step_other).all()
        assert (root.exclude("action") == root_other.exclude("action")).all()
    assert env.exact_resume


def test_states_of_another_environment_are_refused() -> None:
    env = _env(SCENE)
    with pytest.raises(ValueError, match="numbers is none of this environment"):
        env.load_state_dict(_env("cube-single-play-singletask-v0").state_dict())
    with pytest.raises(ValueError, match=r"keep env.id and env.num_envs when resuming"):
        env.load_state_dict(_env(SCENE, num_envs=1).state_dict())


def test_workers_do_exactly_what_one_process_does() -> None:
    rollouts, states = [], []
    for workers in (0, 1):
        env = _env(POINT, seed=2, workers=workers, max_steps=5)
        torch.manual_seed(1)
        rollouts.append(env.rollout(8, break_when_any_done=False))
        states.append(env.state_dict())
        env.load_state_dict(states[0])
        env.close()
    assert (rollouts[0] == rollouts[1]).all()
    assert (states[0]["states"] == states[1]["states"]).all()
    assert states[0]["generators"] == states[1]["generators"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "scene-play-singletask-task9-v0"}, "is unknown to OGBench; ids look like"),
        ({"id": "visual-scene-play-singletask-task3-v0"}, "has pixels as observations"),
        ({"id": "powderworld-easy-play-v0"}, "has pixels as observations"),
        ({"id": SCENE, "visuals": "abstract"}, "env.visuals 'abstract' exists for MiniGrid ids only"),
        ({"id": SCENE, "actions": [0, 1]}, "env.actions chooses among discrete actions"),
        ({"id": SCENE, "render_quality": "best"}, "env.render_quality must be fast, shadows or full, got 'best'"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        EnvConfig(**settings)
    assert "\n" not in str(error.value)


def test_gymnasiums_own_ids_stay_gymnasiums() -> None:
    config = EnvConfig(id="CartPole-v1", num_envs=1, frame_size=8)
    assert make_env(config).simulator.spaces.snapshot_dtype == np.uint8
    assert "CartPole-v1" in gymnasium.registry


def test_stepping_and_making_a_renderer_loads_no_opengl() -> None:
    code = (
        "from vlmrb.envs import EnvConfig, make_env, make_renderer\n"
        f"config = EnvConfig(id='{SCENE}', num_envs=1)\n"
        "make_env(config).rollout(3); make_renderer(config)\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libmujoco' in maps\n"
        "print([name for name in ('libEGL', 'libOSMesa', 'libGL.so', 'swrast', 'gallium') if name in maps])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_renderer_tells_what_the_agent_saw() -> None:
    env, renderer = _env(POINT), make_renderer(EnvConfig(id=POINT))
    rollout = env.rollout(3)
    seen = renderer.observe(rollout["snapshot"].numpy())
    np.testing.assert_array_equal(seen, rollout["observation"])
    with pytest.raises(ValueError, match="are none of this environment"):
        renderer.observe(np.zeros((2, 3)))


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
@pytest.mark.parametrize("task", [3, 4, 5])
@pytest.mark.parametrize("size", ["", "_small"])
def test_the_shipped_configurations_hold(task: int, algorithm: str, size: str) -> None:
    file = CONFIGS / f"scene_{task}_{algorithm}{size}.yaml"
    assert load_env([str(file)]).id == f"scene-play-singletask-task{task}-v0"
    settings = yaml.safe_load(file.read_text())
    model = settings["model"]
    made = getattr(algorithms, algorithm.upper())(
        EnvConfig(**settings["env"]), algorithms.TrainingConfig(**settings["training"]), **model["init_args"]
    )
    assert model["class_path"] == f"vlmrb.algorithms.{algorithm.upper()}"
    if not size:  # the paper's
        assert made.hidden_sizes == [512, 512, 512]
        assert made.layer_norm
        assert made.critic_learning_rate == 3e-4
        assert made.actor_learning_rate == {"sac": 1e-3, "td3": 3e-4}[algorithm]
        assert made.training_config.total_env_steps == 1_000_000
        assert settings["replay"]["clip_length"] == 32


GOALS = ["pointmaze-medium-navigate-v0", "antmaze-medium-v0", "humanoidmaze-medium-navigate-v0"]


@pytest.mark.parametrize("env_id", GOALS)
def test_mazes_with_goals_show_them_and_judge_by_them(env_id: str) -> None:
    world, goals = World(open_env(env_id)), make_goals(EnvConfig(id=env_id))
    theirs = ogbench.make_env_and_datasets(env_id.replace("medium-v0", "medium-navigate-v0"), env_only=True)
    assert world.env.observation_space.shape[0] == theirs.observation_space.shape[0] + 2
    wanted, ends = set(), []
    for seed in range(4):
        before, _ = world.env.reset(seed=seed)
        np.testing.assert_array_equal(before[-2:], world.base.cur_goal_xy)
        np.testing.assert_array_equal(before[:2], world.base.get_xy())
        wanted.add(tuple(before[-2:]))
        for distance in (3.0, 1.3, 0.7, 0.3):
            world.base.set_xy(before[-2:] - np.array([distance, 0.0]))
            observation, reward, terminated, _, _ = world.env.step(np.zeros(world.env.action_space.shape, np.float32))
            judged = goals.judge(observation[None].astype(np.float32))
            assert (judged[0].item(), judged[1].item()) == (reward, terminated)
            ends.append(terminated)
            other = goals.place(observation[None], np.array([[1.0, 2.0]]))
            np.testing.assert_array_equal(other[0], [*observation[:-2], 1.0, 2.0])
            np.testing.assert_array_equal(goals.achieved(other)[0], world.base.get_xy())
    assert len(wanted) == 4
    assert 4 <= sum(ends) < len(ends)


@pytest.mark.parametrize("env_id", [SCENE, POINT, "antmaze-teleport-navigate-v0", "antsoccer-arena-v0"])
def test_goals_that_cannot_be_exchanged_are_refused(env_id: str) -> None:
    with pytest.raises(ValueError, match=rf"replay\.her .*{env_id}' is none of them") as error:
        make_goals(EnvConfig(id=env_id))
    assert "\n" not in str(error.value)
