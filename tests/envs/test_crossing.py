"""Crossings as arrays against MiniGrid's own."""

from __future__ import annotations

import numpy as np
import pytest
from minigrid.envs.crossing import CrossingEnv
from minigrid.wrappers import FullyObsWrapper
from tests.envs.minigrid_beside import Beside, assert_alike

from vlmrb.envs import EnvConfig, grid, make_env
from vlmrb.envs.crossing import CrossingSimulator, Variant

VARIANTS = [Variant(True, 9, 1), Variant(True, 9, 3), Variant(False, 9, 2), Variant(True, 11, 5), Variant(True, 5, 2)]


def _theirs(variant: Variant, max_steps: int | None = None) -> CrossingEnv:
    obstacle = "lava" if variant.lava else "wall"
    return CrossingEnv(variant.size, variant.num_crossings, obstacle, max_steps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_state_reward_and_flag_equals_minigrids(variant: Variant) -> None:
    rng = np.random.default_rng(variant.size)
    count, max_steps = 4, 40
    theirs = [FullyObsWrapper(_theirs(variant, max_steps)) for _ in range(count)]
    for row, env in enumerate(theirs):
        env.reset(seed=row)
    both = Beside(theirs, CrossingSimulator(variant, count, max_steps))
    seen = {"success": 0, "burnt": 0, "truncated": 0}
    for step in range(500):
        if step % 7 == 0:  # random play hardly ever gets past the first river
            for env in theirs:
                world = env.unwrapped
                world.agent_pos, world.agent_dir = (variant.size - 2, variant.size - 3), 1  # above the goal
                if world.grid.get(*world.agent_pos) is not None:
                    world.agent_pos = (1, 1)
            both.copy()
        got = both.step(rng.choice(7, count, p=(0.1, 0.1, 0.6, 0.05, 0.05, 0.05, 0.05)), rng)
        seen["success"] += int(got.success.sum())
        seen["burnt"] += int((got.terminated & ~got.success).sum())
        seen["truncated"] += int(got.truncated.sum())
    if not variant.lava:
        assert seen.pop("burnt") == 0
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_levels_are_distributed_as_minigrids(variant: Variant) -> None:
    count = 3000
    ours = CrossingSimulator(variant, count, seed=1)
    env = _theirs(variant)
    theirs = np.empty((count, ours.layout.size), np.uint8)
    for row in range(count):
        env.reset(seed=row)
        theirs[row] = ours.layout.take(env)
    features = [_features(ours.layout.unpack(snapshots)) for snapshots in (ours.look()[1], theirs)]
    assert_alike(*features)
    np.testing.assert_array_equal(*(np.unique(feature["walls and lava"]) for feature in features))


def _features(state: grid.MiniGridState) -> dict[str, np.ndarray]:
    kinds = state.grid[..., 0].astype(np.int64)
    free = kinds[:, 1:-1, 1:-1] == grid.EMPTY
    size = kinds.shape[1]
    columns, rows = free.sum(axis=2), free.sum(axis=1)
    return {
        "pose": (state.position[:, 0] * size + state.position[:, 1]) * 4 + state.direction,
        "walls and lava": (~free).sum(axis=(1, 2)),
        "open cells of the middle column": free[:, size // 2 - 1] @ (1 << np.arange(size - 2)),
        "open cells of the second row": free[:, :, 1] @ (1 << np.arange(size - 2)),
        "columns with a river": (columns[:, 1::2] < rows[:, :1]) @ (1 << np.arange(len(columns[0, 1::2]))),
        "a cell": kinds[:, 2, size - 3] * 16 + kinds[:, size - 3, 2],
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_level_can_be_solved(variant: Variant) -> None:
    ours = CrossingSimulator(variant, 300, seed=2)
    kinds = ours.layout.unpack(ours.look()[1]).grid[..., 0]
    passable = (kinds == grid.EMPTY) | (kinds == grid.GOAL)
    reached = np.zeros_like(passable)
    reached[:, 1, 1] = True
    for _ in range(variant.size**2):
        for axis, shift in ((1, 1), (1, -1), (2, 1), (2, -1)):
            reached |= np.roll(reached, shift, axis) & passable
    assert reached[kinds == grid.GOAL].all()


def test_the_first_of_these_families_to_claim_an_id_is_the_fast_one() -> None:
    env = make_env(EnvConfig(id="MiniGrid-LavaCrossingS9N1-v0", num_envs=3), seed=0)
    assert isinstance(env.simulator, CrossingSimulator)
    assert env.simulator.max_steps == 4 * 81


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("MiniGrid-LavaCrossingS8N1-v0", "an odd number of cells"),
        ("MiniGrid-LavaCrossingS9N7-v0", "hold 1 to 6 rivers"),
        ("MiniGrid-SimpleCrossingS9N0-v0", "hold 1 to 6 rivers"),
    ],
)
def test_an_id_without_levels_is_refused(env_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvConfig(id=env_id)
