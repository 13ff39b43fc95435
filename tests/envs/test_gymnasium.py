"""Environments stepped by Gymnasium, here and in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import DependencyNotInstalled
from minigrid.wrappers import FullyObsWrapper

from vlmrb.envs import EnvConfig, make_env, make_renderer
from vlmrb.envs import workers as processes
from vlmrb.envs.grid import GridLayout
from vlmrb.envs.success import default_success


class Ramp(gymnasium.Env):
    """Walks up from 0 to 4 with action 1; the frame's brightness is the height. Actions are numbered from 1."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    observation_space = gymnasium.spaces.Box(0, 4, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=1)

    def __init__(self, render_mode: str | None = None, fail: bool = False, leave: bool = False) -> None:
        self.fail, self.leave = fail, leave

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.height = int(self.np_random.integers(2))
        return np.array([float(self.height)]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        if self.fail:
            raise RuntimeError("the ramp\nbroke")
        if self.leave:
            sys.exit(0)
        self.height += int(action == 2)
        top = self.height == 4
        return np.array([float(self.height)]), float(top), top, False, {"height": self.height}

    def render(self) -> np.ndarray:
        return np.full((20, 40, 3), 10 * self.height, np.uint8)


def reached_three(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
    return info["height"] == 3


def survived(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
    return truncated and not terminated


gymnasium.register("Ramp-v0", Ramp)
gymnasium.register("BrokenRamp-v0", Ramp, kwargs={"fail": True})
gymnasium.register("LeavingRamp-v0", Ramp, kwargs={"leave": True})


def _config(env_id: str = "Ramp-v0", **settings: Any) -> EnvConfig:
    return EnvConfig(id=f"{__name__}:{env_id}", **{"num_envs": 3, "frame_size": 16, **settings})


def test_steps_and_resets_are_those_of_a_plain_loop() -> None:
    env_id, seed, n, horizon = "MiniGrid-DistShift1-v0", 5, 3, 12
    env = make_env(EnvConfig(id=env_id, num_envs=n, max_steps=horizon), seed=seed)
    plain = [FullyObsWrapper(gymnasium.make(env_id, max_steps=horizon)) for _ in range(n)]
    seeds, actions = np.random.default_rng(seed), np.random.default_rng(0)
    seeds.integers(0, 2**31 - 1, n)  # the simulator is usable from the start; reset begins anew
    layout = GridLayout(9, 7)
    root = env.reset()
    images = [p.reset(seed=int(s))[0]["image"] for p, s in zip(plain, seeds.integers(0, 2**31 - 1, n), strict=True)]
    ended = {"terminated": 0, "truncated": 0}
    for _ in range(100):
        np.testing.assert_array_equal(root["observation"], np.stack(images))
        action = actions.integers(0, 7, n)
        step, root = env.step_and_maybe_reset(root.set("action", torch.from_numpy(action)))
        after = step["next"]
        for row, p in enumerate(plain):
            observation, reward, terminated, truncated, _ = p.step(int(action[row]))
            images[row] = observation["image"]
            np.testing.assert_array_equal(after["observation"][row], observation["image"])
            np.testing.assert_array_equal(after["snapshot"][row], layout.take(p.unwrapped))
            assert after["reward"][row].item() == np.float32(reward)
            assert (after["terminated"][row].item(), after["truncated"][row].item()) == (terminated, truncated)
            ended["terminated"] += terminated
            ended["truncated"] += truncated
        rows = np.flatnonzero(after["done"].numpy())
        for row, new_seed in zip(rows, seeds.integers(0, 2**31 - 1, len(rows)), strict=True):
            images[row] = plain[row].reset(seed=int(new_seed))[0]["image"]
    assert min(ended.values()) > 0


def test_horizon_of_plain_ids_is_the_configs() -> None:
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=2, max_steps=4, frame_size=8), seed=0)
    rollout = env.rollout(8, break_when_any_done=False)
    assert rollout["next", "truncated"][..., 0].tolist() == [[False, False, False, True] * 2] * 2


def test_snapshots_of_plain_ids_hold_the_frame_and_the_observation() -> None:
    config = _config()
    env, renderer = make_env(config, seed=0), make_renderer(config)
    rollout = env.rollout(10, break_when_any_done=False)
    snapshots = rollout["next", "snapshot"].numpy()
    frames = renderer.render(snapshots)
    assert frames.shape == (3, 10, 8, 16, 3)  # 20×40 scaled down to 16 pixels
    height = rollout["next", "observation"].numpy()
    assert height.dtype == np.float32
    np.testing.assert_array_equal(frames, np.broadcast_to(10 * height[..., None, None], frames.shape))
    np.testing.assert_array_equal(renderer.observe(snapshots), height)
    assert renderer.render(snapshots, frame_size=4).shape == (3, 10, 2, 4, 3)
    assert renderer.render(snapshots, frame_size=400).shape == frames.shape  # never scaled up
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(renderer)).render(snapshots), frames)


@pytest.mark.parametrize(("env_id", "size"), [("CliffWalking-v1", 48), ("FrozenLake-v1", 16), ("Taxi-v4", 500)])
def test_discrete_observations_become_one_hot(env_id: str, size: int) -> None:
    env = make_env(EnvConfig(id=env_id, num_envs=2, frame_size=8), seed=0)
    observation = env.rollout(3)["observation"]
    assert observation.shape[-1] == size
    assert (observation.sum(-1) == 1).all()


def test_success_is_read_from_info_or_else_from_the_reward_at_termination() -> None:
    assert default_success({"success": True}, 0.0, False, False)
    assert not default_success({"is_success": 0}, 1.0, True, False)
    assert default_success({}, 0.5, True, False)
    assert not default_success({}, 0.5, False, False)
    assert not default_success({}, 0.0, True, False)
    assert not default_success({}, 0.5, False, True)
    assert default_success({"is_success": np.float32(1)}, 0.0, False, False)
    for value in ("no", np.array([True]), np.nan, 0.5, None):
        with pytest.raises(ValueError, match=r'info\["success"\] must be a bool, 0 or 1, got'):
            default_success({"success": value}, 1.0, True, False)
    rollout = make_env(_config(), seed=0).rollout(30, break_when_any_done=False)["next"]
    assert (rollout["success"] == (rollout["observation"] == 4)).all()
    assert rollout["success"].any()


def test_success_can_be_the_users_own_function() -> None:
    config = _config(success=f"{__name__}:reached_three")
    rollout = make_env(config, seed=0).rollout(30, break_when_any_done=False)["next"]
    assert (rollout["success"] == (rollout["observation"] == 3)).all()
    assert rollout["success"].any()


def test_survival_to_the_horizon_can_be_success() -> None:
    config = EnvConfig(id="CartPole-v1", num_envs=4, max_steps=15, frame_size=8, success=f"{__name__}:survived")
    torch.manual_seed(0)
    after = make_env(config, seed=0).rollout(60, break_when_any_done=False)["next"]
    assert (after["success"] == after["truncated"] & ~after["terminated"]).all()
    assert 0 < after["success"].sum() < after["done"].sum()


@pytest.mark.parametrize("driver", [None, "offscreen"])
def test_pygame_is_told_that_there_is_no_screen_unless_the_user_says_otherwise(driver: str | None) -> None:
    code = (
        "import os\n"
        "from vlmrb.envs import EnvConfig, make_renderer\n"
        "config = EnvConfig('CartPole-v1')\n"
        "before = os.environ.get('SDL_VIDEODRIVER')\n"
        "make_renderer(config)\n"
        "print(before, os.environ['SDL_VIDEODRIVER'])"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XDG_RUNTIME_DIR", "SDL_VIDEODRIVER")
    }
    if driver is not None:
        environment["SDL_VIDEODRIVER"] = driver
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == f"{driver} {driver or 'dummy'}"
    if driver is None:
        assert "XDG_RUNTIME_DIR" not in result.stderr


def test_a_missing_success_function_is_named() -> None:
    with pytest.raises(ValueError, match="env.success '.*:nowhere' cannot be imported"):
        make_env(_config(success=f"{__name__}:nowhere"), seed=0)


NOT_CALLABLE = 3


def unsure(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> Any:
    return "no"


def lost(info: dict[str, Any], reward: float, terminated: bool, truncated: bool) -> bool:
    return info["goal"]


@pytest.mark.parametrize(
    ("success", "message"),
    [
        (":unsure", "env.success ':unsure' cannot be imported: ValueError"),
        (f"{__name__}:NOT_CALLABLE", "env.success '.*:NOT_CALLABLE' is no function, but int 3"),
        (f"{__name__}:unsure", "env.success '.*:unsure' must return a bool, got str 'no'"),
        (f"{__name__}:lost", "env.success '.*:lost' failed: KeyError: 'goal'"),
    ],
)
def test_a_success_function_that_does_not_do_its_job_is_named(success: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_env(_config(success=success), seed=0).rollout(2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [("BrokenRamp-v0", "RuntimeError: the ramp broke"), ("LeavingRamp-v0", "SystemExit: 0")],
)
def test_a_step_that_fails_or_ends_the_process_is_named(env_id: str, message: str) -> None:
    env = make_env(_config(env_id), seed=0)
    with pytest.raises(RuntimeError, match=f"^env.id '.*:{env_id}': its step failed: {message}$") as caught:
        env.rollout(2)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("method", "message"),
    [("__init__", "cannot be made"), ("reset", "its reset failed"), ("render", "cannot draw frames")],
)
def test_an_environment_that_fails_at_the_start_is_named(
    method: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("map")

    monkeypatch.setattr(Ramp, method, fail)
    with pytest.raises(
        (ValueError, RuntimeError), match=f"^env.id '.*Ramp-v0'.* {message}: KeyError: 'map'$"
    ) as caught:
        make_env(_config(), seed=0)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_missing_drawing_library_is_one_readable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(self: Ramp) -> np.ndarray:
        raise DependencyNotInstalled('pygame is not installed, run `pip install "gymnasium[classic-control]"`')

    monkeypatch.setattr(Ramp, "render", render)
    with pytest.raises(ValueError, match="Ramp-v0' cannot draw frames: pygame is not installed, run `pip install"):
        make_env(_config(), seed=0)


def test_frames_that_are_no_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ramp, "render", lambda self: None)
    with pytest.raises(ValueError, match="draws no rgb_array frames"):
        make_env(_config(), seed=0)
    monkeypatch.setattr(Ramp, "render", lambda self: np.zeros((20, 40, 3), np.float32))
    with pytest.raises(ValueError, match=r"Ramp-v0' must draw frames uint8\[H, W, 3\], got float32\[20, 40, 3\]"):
        make_env(_config(), seed=0)


def test_frames_and_observations_that_change_their_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Ramp, "render", lambda self: np.zeros((20, 40 + self.height, 3), np.uint8))
        env = make_env(_config(num_envs=1), seed=0)
        with pytest.raises(ValueError, match=r"Ramp-v0' must draw frames of one size, got \[20, 4\d, 3\] after \[20"):
            env.rollout(30, break_when_any_done=False)
    step = Ramp.step
    monkeypatch.setattr(Ramp, "step", lambda self, action: (np.zeros(2), *step(self, action)[1:]))
    env = make_env(_config(), seed=0)
    with pytest.raises(ValueError, match=r"Ramp-v0': observations must be alike, got \[2\] after \[1\]"):
        env.rollout(2)


@pytest.mark.parametrize(
    "space",
    [gymnasium.spaces.Box(0, 3, (2,), np.int64), gymnasium.spaces.Box(0, 1, (0,)), gymnasium.spaces.Box(0, 1, ())],
)
def test_boxes_of_integers_and_of_nothing_are_refused(space: gymnasium.Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ramp, "action_space", space)
    with pytest.raises(
        ValueError, match="^env.id '.*Ramp-v0': actions must be Discrete or a one-dimensional Box of at least"
    ):
        make_env(_config(), seed=0)


def test_observations_and_actions_that_are_no_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ramp, "action_space", gymnasium.spaces.MultiBinary(2))
    with pytest.raises(ValueError, match="actions must be Discrete or a one-dimensional Box"):
        make_env(_config(), seed=0)
    monkeypatch.setattr(Ramp, "observation_space", gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2)))
    with pytest.raises(ValueError, match="cannot be made an array"):
        make_env(_config(), seed=0)


def test_workers_do_exactly_what_one_process_does_and_leave_nothing_behind() -> None:
    rollouts = []
    for workers in (0, 2):
        env = make_env(EnvConfig(id="MiniGrid-DistShift1-v0", num_envs=3, max_steps=9, workers=workers), seed=3)
        torch.manual_seed(0)
        rollouts.append(env.rollout(40, break_when_any_done=False))
        env.close()
        env.close()
    assert (rollouts[0] == rollouts[1]).all()
    assert rollouts[0]["next", "done"].sum() > 9
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_what_fails_in_a_worker_is_raised_here() -> None:
    env = make_env(_config("BrokenRamp-v0", workers=1), seed=0)
    one_line = (
        r"^RuntimeError: env.id '.*BrokenRamp-v0': its step failed: .*the ramp broke \(in an environment worker\)$"
    )
    with pytest.raises(RuntimeError, match=one_line) as caught:
        env.rollout(2)
    assert "Traceback" in str(caught.value.__cause__)
    env.simulator._groups[0]._process.kill()
    with pytest.raises(
        RuntimeError, match="^env.id '.*Ramp-v0': environment worker 1 of [13] died; run with env.workers: 0"
    ):
        env.rollout(2)
    env.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_workers_that_are_left_in_the_middle_of_a_step_end_quietly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_CLOSE_TIMEOUT_S", 60.0)  # they end by themselves, however busy the machine
    env = make_env(_config(workers=3), seed=0)
    first, *others = env.simulator._groups
    first._process.kill()
    first._process.join()
    for group in others:
        group.call("look")
        assert group._pipe.poll(10)  # the answer is there, and nobody reads it
    with pytest.raises(
        RuntimeError, match="^env.id '.*Ramp-v0': environment worker 1 of [13] died; run with env.workers: 0"
    ):
        env.rollout(2)
    env.close()
    assert [group._process.exitcode for group in others] == [0, 0]
    assert "Traceback" not in capfd.readouterr().err


def test_lists_of_a_configuration_reach_wrappers_as_tuples() -> None:
    wrapper = {"class_path": "gymnasium.wrappers.ReshapeObservation", "init_args": {"shape": [2, 2]}}
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=1, frame_size=16, wrappers=[wrapper]), seed=0)
    assert env.reset()["observation"].shape == (1, 2, 2)


def test_wrappers_and_arguments_of_make_come_from_the_configuration() -> None:
    config = EnvConfig(
        id="CartPole-v1",
        num_envs=1,
        frame_size=16,
        kwargs={"sutton_barto_reward": True},
        wrappers=[
            "gymnasium.wrappers.NormalizeObservation",
            {"class_path": "gymnasium.wrappers.TimeAwareObservation", "init_args": {"normalize_time": False}},
        ],
    )
    env = make_env(config, seed=0)
    root = env.reset()
    assert root["observation"].shape == (1, 5)
    step = env.step(root.set("action", torch.zeros(1, dtype=torch.int64)))["next"]
    assert step["observation"][0, 4] == 1  # the time
    assert step["reward"].item() == 0  # of Sutton and Barto: −1 in the end, else 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"wrappers": ["gymnasium.wrappers.NoSuchThing"]},
            "env.wrappers: gymnasium.wrappers.NoSuchThing cannot",
        ),
        ({"wrappers": ["builtins.str"]}, "env.wrappers: builtins.str must give a gymnasium.Env, got str"),
        ({"wrappers": [{"class_path": 5}]}, "env.wrappers holds class paths or"),
        ({"wrappers": [5]}, "env.wrappers holds class paths or"),
        ({"kwargs": {"colour": 3}}, "env.kwargs {'colour': 3} do not fit 'CartPole-v1'"),
    ],
)
def test_what_cannot_be_made_of_the_configuration_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_env(EnvConfig(id="CartPole-v1", num_envs=1, **settings), seed=0)
