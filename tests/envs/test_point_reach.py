from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from vlmrb.calibration.policies import make_player
from vlmrb.envs import EnvConfig, make_env, make_goals, make_renderer
from vlmrb.envs.point_reach import GOAL, POINT, PointReachSimulator, distance
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.milestones import MilestonesScorer

CONFIG = EnvConfig("PointReach-10-v0", num_envs=6)


def place(simulator: PointReachSimulator, snapshots: list[list[float]]) -> None:
    state = simulator.state_dict()
    simulator.load_state_dict({**state, "snapshots": np.array(snapshots, np.float32)})


def test_specs_and_keys_are_those_of_every_environment() -> None:
    env = make_env(CONFIG, seed=1)
    check_env_specs(env)
    assert env.action_spec.space.low.tolist() == [[-1.0, -1.0]] * 6


def test_steps_rewards_and_ends_are_as_derived_by_hand() -> None:
    simulator = PointReachSimulator(10, 4, max_steps=2)
    place(simulator, [[5, 5, 8, 5], [5, 5, 6.5, 5], [0.5, 9.5, 9, 0], [5, 5, 6.9, 6.9]])
    step = simulator.step(np.array([[1, 0], [0.5, 0], [-3, 0.25], [1, 1]], np.float32))
    # (6, 5) is 2 away, (5.5, 5) exactly 1; the third is clipped to −1 and stopped by the edge; (6, 6) is 1.27 away.
    np.testing.assert_allclose(step.snapshot[:, :2], [[6, 5], [5.5, 5], [0, 9.75], [6, 6]])
    assert step.success.tolist() == step.terminated.tolist() == [False, True, False, False]
    assert step.reward.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert not step.truncated.any()
    np.testing.assert_allclose(step.observation[0], [0.2, 0.0, 0.6, 0.0], atol=1e-6)
    assert simulator.step(np.zeros((4, 2), np.float32)).truncated.all()


def test_goals_are_at_least_half_a_side_away_and_lie_anywhere() -> None:
    simulator = PointReachSimulator(10, 2_000, seed=0)
    _, snapshots = simulator.look()
    assert (distance(snapshots) >= 5).all()
    assert (snapshots.min(0) < 0.5).all()
    assert (snapshots.max(0) > 9.5).all()


def test_frames_show_goal_and_point_where_they_are() -> None:
    renderer = pickle.loads(pickle.dumps(make_renderer(CONFIG)))
    frames = renderer.render(np.array([[[2.5, 7.5, 8, 2]], [[8, 2, 8, 2]]], np.float32), 40)  # 4 pixels a step
    assert (frames.shape, frames.dtype) == ((2, 1, 40, 40, 3), np.uint8)
    assert tuple(frames[0, 0, 30, 10]) == POINT
    assert tuple(frames[0, 0, 8, 32]) == GOAL
    green = (frames[0, 0] == GOAL).all(-1)
    rows, columns = np.nonzero(green)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (4, 11, 28, 35)  # radius 4 around (32, 8)
    assert tuple(frames[1, 0, 8, 32]) == POINT  # the point is drawn over the goal
    assert renderer.render(np.zeros((4,), np.float32)).shape == (64, 64, 3)
    small = renderer.render(np.array([5.0, 5.0, 1.0, 1.0], np.float32), 8)
    assert (small == POINT).all(-1).any()


def test_it_resumes_exactly_and_equal_seeds_give_equal_episodes() -> None:
    def play(env: object, start: object) -> torch.Tensor:
        torch.manual_seed(0)
        return env.rollout(80, break_when_any_done=False, auto_reset=False, tensordict=start)["next", "snapshot"]  # type: ignore[attr-defined]

    first, second, third = make_env(CONFIG, seed=1), make_env(CONFIG, seed=1), make_env(CONFIG, seed=2)
    assert torch.equal(play(first, first.reset()), play(second, second.reset()))
    third.load_state_dict(first.state_dict())
    assert torch.equal(play(first, first.current()), play(third, third.current()))


def test_a_state_of_other_settings_is_refused() -> None:
    state = PointReachSimulator(10, 3).state_dict()
    with pytest.raises(ValueError, match=r"of 3 instances.*env\.num_envs"):
        PointReachSimulator(10, 4).load_state_dict(state)
    with pytest.raises(ValueError, match="schema 0"):
        PointReachSimulator(10, 3).load_state_dict({**state, "schema": 0})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "PointReach-3-v0"}, "at least 4 steps"),
        ({"id": "PointReach-10-v0", "workers": 2}, "env.workers = 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EnvConfig(**settings)  # type: ignore[arg-type]


def test_chance_rarely_and_the_expert_always_reaches_the_goal() -> None:
    def successes(policy: str) -> float:
        config = EnvConfig("PointReach-20-v0", num_envs=200)
        env = make_env(config, seed=0)
        player = make_player(policy, config)(env, 0) if policy == "random" else None  # type: ignore[arg-type]
        from vlmrb.envs.point_reach import make_expert

        expert = make_expert(config)
        data, reached = env.reset(), torch.zeros(200, dtype=torch.bool)
        playing = torch.ones(200, dtype=torch.bool)
        for _ in range(100):
            action = player(data) if player else torch.from_numpy(expert(data["snapshot"].numpy()))
            step, data = env.step_and_maybe_reset(data.set("action", action))
            reached |= step["next", "success"].squeeze(-1) & playing
            playing &= ~step["next", "done"].squeeze(-1)
        return float(reached.float().mean())

    assert 0.0 < successes("random") < 0.3
    assert successes("expert") == 1.0


def test_milestones_are_half_of_the_way_and_the_goal() -> None:
    # Distances to the goal at (0, 0) of a square of 10: half of the shortest way is 2.5, the goal 1.
    def clip(*distances: float) -> list[list[float]]:
        return [[away, 0.0, 0.0, 0.0] for away in distances]

    snapshots = np.array(
        [clip(6, 5, 4), clip(3, 2.4, 2), clip(2, 1.5, 0.9), clip(6, 2, 0.5), clip(2, 2, 3)], np.float32
    )
    batch = ClipBatch(np.arange(5), snapshots, np.array([3, 3, 3, 2, 3]), make_renderer(CONFIG))
    scorer = MilestonesScorer()
    nothing, step, goal = scorer.grades.nothing, scorer.grades.step, scorer.grades.goal
    np.testing.assert_allclose(scorer.score(batch), [nothing, step, goal, step, nothing])  # the fourth ends in padding


def test_goals_are_judged_as_the_simulator_judges_them() -> None:
    env, goals = make_env(EnvConfig("PointReach-4-v0", num_envs=32), seed=3), make_goals(EnvConfig("PointReach-4-v0"))
    torch.manual_seed(0)
    after = env.rollout(200, break_when_any_done=False)["next"]
    seen = after["observation"].flatten(0, 1).numpy()
    reward, terminated = goals.judge(seen)
    assert 20 < reward.sum() < 2_000
    np.testing.assert_array_equal(reward, after["reward"].flatten().numpy())
    np.testing.assert_array_equal(terminated, after["terminated"].flatten().numpy())
    assert (reward.dtype, terminated.dtype) == (np.float32, np.bool_)


def test_a_goal_is_exchanged_and_nothing_else() -> None:
    goals, renderer = make_goals(CONFIG), make_renderer(CONFIG)
    seen = renderer.observe(np.array([[1, 2, 8, 9], [5, 5, 0, 0]], np.float32))
    there = renderer.observe(np.array([[3, 4, 0, 0], [5, 5.9, 0, 0]], np.float32))
    moved = goals.place(seen, goals.achieved(there))
    np.testing.assert_array_equal(moved, renderer.observe(np.array([[1, 2, 3, 4], [5, 5, 5, 5.9]], np.float32)))
    assert goals.judge(moved)[1].tolist() == [False, True]
    assert goals.judge(goals.place(there, goals.achieved(there)))[0].tolist() == [1.0, 1.0]
