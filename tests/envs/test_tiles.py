"""Frames from snapshots against MiniGrid's own frames."""

from __future__ import annotations

import pickle
from functools import cache

import gymnasium
import minigrid  # noqa: F401
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from minigrid.core.constants import COLOR_NAMES
from minigrid.core.world_object import Ball, Box, Door, Floor, Goal, Key, Lava, Wall
from minigrid.wrappers import FullyObsWrapper

from vlmrb.envs import grid
from vlmrb.envs.grid import GridLayout
from vlmrb.envs.tiles import GridRenderer

IDS = (
    "MiniGrid-DoorKey-6x6-v0",
    "MiniGrid-KeyCorridorS3R2-v0",
    "MiniGrid-MultiRoom-N4-S5-v1",
    "MiniGrid-LavaCrossingS9N2-v0",
    "MiniGrid-ObstructedMaze-1Dlhb-v0",
    "MiniGrid-Dynamic-Obstacles-6x6-v0",
    "MiniGrid-BlockedUnlockPickup-v0",
    "MiniGrid-GoToObject-8x8-N2-v0",
)
LOOKS = ("standard", "misleading", "abstract")


@cache
def _env(env_id: str) -> gymnasium.Env:
    return FullyObsWrapper(gymnasium.make(env_id, disable_env_checker=True))


@cache
def _renderer(width: int, height: int, visuals: str = "standard") -> GridRenderer:
    return GridRenderer(width, height, visuals=visuals)


@pytest.mark.slow
@given(
    env_id=st.sampled_from(IDS),
    seed=st.integers(0, 2**31 - 1),
    steps=st.integers(0, 40),
    tile=st.sampled_from((1, 2, 3, 5, 8, 11, 16)),
)
@settings(max_examples=60, deadline=None)
def test_frames_equal_minigrids_pixel_by_pixel(env_id: str, seed: int, steps: int, tile: int) -> None:
    env = _env(env_id)
    env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    world = env.unwrapped
    renderer = _renderer(world.width, world.height)
    snapshots, frames = [], []
    for _ in range(steps + 1):
        observation, _, terminated, truncated, _ = env.step(int(rng.integers(env.action_space.n)))
        snapshots.append(renderer.layout.take(world))
        frames.append(world.get_frame(highlight=False, tile_size=tile))
        np.testing.assert_array_equal(renderer.observe(snapshots[-1]), observation["image"])
        if terminated or truncated:
            env.reset()
    size = tile * max(world.width, world.height)
    np.testing.assert_array_equal(renderer.render(np.stack(snapshots), frame_size=size), np.stack(frames))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [8, 32])
def test_every_object_colour_state_and_agent_equals_minigrids(tile: int) -> None:
    env = gymnasium.make("MiniGrid-Empty-8x8-v0").unwrapped
    env.reset(seed=0)
    colours = COLOR_NAMES if tile == 8 else COLOR_NAMES[:2]  # MiniGrid draws large tiles slowly
    doors = [(False, True), (False, False), (True, False)]
    things = [Lava(), *(kind(c) for c in colours for kind in (Wall, Floor, Key, Ball, Box, Goal))]
    things += [Door(c, is_open, is_locked) for c in colours for is_open, is_locked in doors]
    renderer = GridRenderer(8, 8, tile)
    snapshots, frames = [], []
    for index, thing in enumerate(things):
        x, y = index % 6 + 1, index // 6 % 6 + 1
        env.grid.set(x, y, thing)
        env.agent_pos, env.agent_dir = (x, y) if index % 3 == 0 else (0, 0), index % 4
        snapshots.append(renderer.layout.take(env))
        frames.append(env.get_frame(highlight=False, tile_size=tile))
    np.testing.assert_array_equal(renderer.render(np.stack(snapshots)), np.stack(frames))


def _tile(visuals: str, kind: int, colour: int = grid.YELLOW, state: int = 0, agent: int | None = None) -> np.ndarray:
    """Draws one cell of a 3×3 world in the given look, ``uint8[16, 16, 3]``."""
    snapshot = np.zeros(GridLayout(3, 3).size, np.uint8)
    view = GridLayout(3, 3).unpack(snapshot)
    view.grid[:] = (grid.EMPTY, 0, 0)
    view.grid[1, 1] = (kind, colour, state)
    if agent is not None:
        view.position[:] = 1
        view.direction[...] = agent
    return _renderer(3, 3, visuals).render(snapshot, frame_size=48)[16:32, 16:32]


SPRITES = [(kind, 0) for kind in (grid.KEY, grid.BALL, grid.BOX, grid.GOAL, grid.FLOOR)]
SPRITES += [(grid.LAVA, 0), (grid.DOOR, grid.OPEN), (grid.DOOR, grid.CLOSED), (grid.DOOR, grid.LOCKED)]


def test_misleading_permutes_the_known_sprites_and_leaves_none_in_place() -> None:
    standard = {sprite: _tile("standard", sprite[0], state=sprite[1]).tobytes() for sprite in SPRITES}
    misleading = {sprite: _tile("misleading", sprite[0], state=sprite[1]).tobytes() for sprite in SPRITES}
    assert sorted(standard.values()) == sorted(misleading.values())
    assert all(standard[sprite] != misleading[sprite] for sprite in SPRITES)
    assert misleading[grid.KEY, 0] == standard[grid.BALL, 0]


def test_abstract_tiles_are_all_different_and_resemble_no_sprite() -> None:
    contents = [(*sprite, colour) for sprite in SPRITES for colour in range(6) if sprite[0] != grid.LAVA]
    contents += [(grid.LAVA, 0, grid.RED), (grid.WALL, 0, grid.GREY)]
    abstract = {_tile("abstract", kind, colour, state).tobytes() for kind, state, colour in contents}
    standard = {_tile("standard", kind, colour, state).tobytes() for kind, state, colour in contents}
    assert len(abstract) == len(contents)
    assert not abstract & standard


@pytest.mark.parametrize("visuals", LOOKS)
def test_the_agent_looks_the_same_in_every_look(visuals: str) -> None:
    for direction in range(4):
        standard = _tile("standard", grid.EMPTY, 0, agent=direction)
        np.testing.assert_array_equal(_tile(visuals, grid.EMPTY, 0, agent=direction), standard)
        # On top of something, too, the pixels that the agent fills are the agent's alone.
        red = (standard == (255, 0, 0)).all(axis=2)
        on_goal = _tile(visuals, grid.GOAL, grid.GREEN, agent=direction)
        assert red.sum() > 20
        np.testing.assert_array_equal(on_goal[red], standard[red])


def test_textures_do_not_leak_into_minigrids_own_frames() -> None:
    env = gymnasium.make("MiniGrid-DoorKey-5x5-v0").unwrapped
    env.reset(seed=0)
    renderer = GridRenderer(5, 5, 7, "abstract")
    texture = renderer.render(renderer.layout.take(env))
    own = env.get_frame(highlight=False, tile_size=7)
    assert (texture != own).any()
    np.testing.assert_array_equal(GridRenderer(5, 5, 7).render(renderer.layout.take(env)), own)


@pytest.mark.parametrize("visuals", LOOKS)
def test_a_pickled_renderer_draws_the_same_and_carries_no_tiles(visuals: str) -> None:
    env = _env("MiniGrid-DoorKey-6x6-v0")
    env.reset(seed=3)
    renderer = GridRenderer(6, 6, 8, visuals)
    snapshot = renderer.layout.take(env.unwrapped)
    frame = renderer.render(snapshot)
    sent = pickle.dumps(renderer)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received.name == renderer.name
    np.testing.assert_array_equal(received.render(snapshot), frame)


def test_names_tell_looks_sizes_and_tiles_apart() -> None:
    renderers = [GridRenderer(w, h, t, v) for w, h in ((5, 6), (6, 5)) for t in (8, 16) for v in LOOKS]
    assert len({renderer.name for renderer in renderers}) == len(renderers)


def test_frames_keep_leading_axes_and_stay_within_the_frame_size() -> None:
    snapshots = np.zeros((2, 3, GridLayout(7, 4).size), np.uint8)
    renderer = GridRenderer(7, 4, 8)
    assert renderer.render(snapshots).shape == (2, 3, 32, 56, 3)
    assert renderer.render(snapshots, frame_size=48).shape == (2, 3, 24, 42, 3)  # 6 pixels a tile
    assert renderer.render(snapshots[:, :0]).shape == (2, 0, 32, 56, 3)
    assert renderer.observe(snapshots).shape == (2, 3, 7, 4, 3)


def test_many_frames_drawn_at_once_equal_those_drawn_alone() -> None:
    env = _env("MiniGrid-MultiRoom-N4-S5-v1")
    renderer = _renderer(25, 25)
    snapshots = []
    for seed in range(40):
        env.reset(seed=seed)
        snapshots.append(renderer.layout.take(env.unwrapped))
    together = renderer.render(np.stack(snapshots), frame_size=250)
    for snapshot, frame in zip(snapshots, together, strict=True):
        np.testing.assert_array_equal(renderer.render(snapshot, frame_size=250), frame)


def test_what_cannot_be_drawn_is_refused() -> None:
    renderer = GridRenderer(6, 6)
    with pytest.raises(ValueError, match="6x6 grid needs frames of 6 pixels or more"):
        renderer.render(np.zeros((1, 113), np.uint8), frame_size=5)
    with pytest.raises(ValueError, match=r"uint8\[\.\.\., 113\], got uint8\[\.\.\., 80\]"):
        renderer.render(np.zeros((1, 80), np.uint8))
    with pytest.raises(ValueError, match="tile_size"):
        GridRenderer(6, 6, 0)
    with pytest.raises(ValueError, match="visuals"):
        GridRenderer(6, 6, visuals="pretty")


def test_what_lies_under_the_agent_and_what_it_carries_are_in_the_snapshot_only() -> None:
    env = _env("MiniGrid-DoorKey-6x6-v0")
    env.reset(seed=0)
    world = env.unwrapped
    layout = GridLayout(6, 6)
    world.agent_pos = (4, 4)
    world.carrying = Key("yellow")
    state = layout.unpack(layout.take(world))
    assert tuple(state.grid[4, 4]) == (grid.GOAL, grid.GREEN, 0)
    assert tuple(state.carried) == (grid.KEY, grid.YELLOW)
    assert tuple(state.position) == (4, 4)
    assert layout.observe(layout.take(world))[4, 4, 0] == grid.AGENT
