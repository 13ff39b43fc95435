"""DoorKey as arrays against MiniGrid's own DoorKey."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from minigrid.core.world_object import Door, Goal, Key
from minigrid.envs.doorkey import DoorKeyEnv
from minigrid.wrappers import FullyObsWrapper
from tests.envs.minigrid_beside import Beside, assert_alike

from vlmrb.envs import grid
from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.grid_simulator import NUM_ACTIONS

SIZES = (5, 6, 8, 12, 16)


def _face(env: DoorKeyEnv, kind: type, rng: np.random.Generator) -> None:
    """Puts the agent in front of an object of this kind, from whatever side is free."""
    for index in rng.permutation(env.width * env.height):
        x, y = divmod(int(index), env.height)
        if not isinstance(env.grid.get(x, y), kind):
            continue
        for direction in rng.permutation(4):
            dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][direction]
            here = (x - dx, y - dy)
            if env.grid.get(*here) is None:
                env.agent_pos, env.agent_dir = here, int(direction)
                return


@pytest.mark.parametrize("size", SIZES)
def test_every_state_reward_and_flag_equals_minigrids(size: int) -> None:
    rng = np.random.default_rng(size)
    count, max_steps = 4, 60
    theirs = [FullyObsWrapper(DoorKeyEnv(size=size, max_steps=max_steps)) for _ in range(count)]
    for row, env in enumerate(theirs):
        env.reset(seed=row)
    ours = DoorKeySimulator(size, count, max_steps)
    both = Beside(theirs, ours)
    seen = {"picked up": 0, "dropped": 0, "unlocked": 0, "closed": 0, "opened again": 0, "success": 0, "truncated": 0}
    for step in range(600):
        if step % 5 == 0:  # random play would hardly ever meet the door of a large level
            kind = (Key, Door, Goal)[rng.integers(3)]
            for env in theirs:
                _face(env.unwrapped, kind, rng)
            both.copy()
        before = both.snapshots()
        # Each action, the useful ones more often.
        got = both.step(rng.choice(NUM_ACTIONS, count, p=(0.1, 0.1, 0.25, 0.2, 0.1, 0.2, 0.05)), rng)
        for row in range(count):
            _count(seen, ours.layout, before[row], got.snapshot[row])
        seen["success"] += int(got.terminated.sum())
        seen["truncated"] += int(got.truncated.sum())
    assert min(seen.values()) > 0, seen


def _count(seen: dict[str, int], layout: grid.GridLayout, before: np.ndarray, after: np.ndarray) -> None:
    was, now = layout.unpack(before), layout.unpack(after)
    seen["picked up"] += int(now.carried[0] > was.carried[0])
    seen["dropped"] += int(now.carried[0] < was.carried[0])
    doors = [state.grid[..., 2][state.grid[..., 0] == grid.DOOR] for state in (was, now)]
    seen["unlocked"] += int((doors[0] == grid.LOCKED).any() and (doors[1] == grid.OPEN).any())
    seen["opened again"] += int((doors[0] == grid.CLOSED).any() and (doors[1] == grid.OPEN).any())
    seen["closed"] += int((doors[0] == grid.OPEN).any() and (doors[1] == grid.CLOSED).any())


def test_goal_on_the_last_step_is_both_terminated_and_truncated() -> None:
    env = DoorKeyEnv(size=6, max_steps=10)
    env.reset(seed=0)
    _face(env, Goal, np.random.default_rng(0))
    ours = DoorKeySimulator(6, 1, max_steps=10)
    ours.set_states(np.array([0]), ours.layout.take(env)[None], np.array([9]))
    env.step_count = 9
    _, reward, terminated, truncated, _ = env.step(2)
    got = ours.step(np.array([2]))
    assert (terminated, truncated) == (True, True)
    assert (got.terminated[0], got.truncated[0], got.success[0]) == (True, True, True)
    assert got.reward[0] == np.float32(reward) == np.float32(0.1)  # 1 − 0.9·10/10


@pytest.mark.parametrize("size", [5, 6, 8])
def test_levels_are_distributed_as_minigrids(size: int) -> None:
    count = 2000
    ours = DoorKeySimulator(size, count, seed=1)
    env = gymnasium.make(f"MiniGrid-DoorKey-{size}x{size}-v0").unwrapped
    theirs = np.empty((count, ours.layout.size), np.uint8)
    for row in range(count):
        env.reset(seed=row)
        theirs[row] = ours.layout.take(env)
    assert_alike(*(_features(ours.layout.unpack(snapshots)) for snapshots in (ours.look()[1], theirs)))


def _features(state: grid.MiniGridState) -> dict[str, np.ndarray]:
    size = state.grid.shape[1]
    kinds = state.grid[..., 0].reshape(len(state.grid), -1)
    place = {name: (kinds == kind).argmax(axis=1) for name, kind in (("door", grid.DOOR), ("key", grid.KEY))}
    agent = state.position[:, 0].astype(int) * size + state.position[:, 1]
    return {
        **place,
        "agent": agent,
        "direction": state.direction,
        "order and wall": np.sign(agent - place["key"]) * 10 + place["door"] // size,
        "walls": (kinds == grid.WALL).sum(axis=1),
    }


def test_restart_leaves_the_other_levels_alone() -> None:
    ours = DoorKeySimulator(8, 6, seed=3)
    for _ in range(30):
        ours.step(np.arange(6) % 3)
    before = ours.look()[1]
    ours.restart(np.array([1, 4]))
    after = ours.look()[1]
    kept = [0, 2, 3, 5]
    np.testing.assert_array_equal(after[kept], before[kept])
    assert (after[[1, 4]] != before[[1, 4]]).any(axis=1).all()


def test_equal_seeds_give_equal_levels_and_others_do_not() -> None:
    first, second, other = (DoorKeySimulator(8, 16, seed=seed).look()[1] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_action_out_of_range_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="actions are 0 to 6"):
        DoorKeySimulator(5, 2).step(np.array([0, bad]))


def test_codes_are_minigrids() -> None:
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

    for table in (OBJECT_TO_IDX, COLOR_TO_IDX, STATE_TO_IDX):
        for name, code in table.items():
            assert getattr(grid, name.upper()) == code


def test_steps_return_arrays_that_later_steps_do_not_touch() -> None:
    ours = DoorKeySimulator(6, 4, seed=0)
    first = ours.step(np.full(4, 1))
    kept = [field.copy() for field in first]
    ours.step(np.full(4, 2))
    ours.restart(np.arange(4))
    for field, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(field, copy)
