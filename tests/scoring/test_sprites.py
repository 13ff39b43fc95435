from __future__ import annotations

import logging
import pickle
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from doorkey_clips import make_clips, recolour
from hypothesis import given, settings
from hypothesis import strategies as st
from minigrid.core.constants import COLORS
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Door, Floor, Goal, Key, Lava, Wall
from numpy.typing import NDArray

from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.grades import Grades
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.sprite_reader import find_tile_size, sprite_reader
from vlmrb.scoring.sprites import SpritesScorer

NOTHING, KEY, DOOR, GOAL = [], [True, False, False], [False, True, False], [False, False, True]
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # x, y of the agent's direction
COLOURS = list(COLORS)


class Pictures:
    """A renderer that shows given frames, whatever the snapshots."""

    name = "pictures"

    def __init__(self, frames: NDArray[np.uint8]) -> None:
        self.frames = frames

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        return self.frames

    def observe(self, snapshots: NDArray) -> NDArray:
        return snapshots


def show(*frames: NDArray, length: int | None = None) -> ClipBatch:
    """One clip of the given frames ``uint8[H, W, 3]``."""
    pictures = Pictures(np.stack(frames)[None].astype(np.uint8))
    return ClipBatch(np.zeros(1, np.int64), np.zeros((1, len(frames), 1)), np.array([length or len(frames)]), pictures)


def room(things=None, agent=(2, 2), facing=0, tile=8, size=5) -> NDArray[np.uint8]:
    """A walled room drawn by MiniGrid itself; ``things`` maps (x, y) to what lies there."""
    grid = Grid(size, size)
    grid.wall_rect(0, 0, size, size)
    for (x, y), thing in (things or {}).items():
        grid.set(x, y, thing)
    return grid.render(tile, agent, facing)


def seen(*frames: NDArray, length: int | None = None, **settings) -> list[bool]:
    events = SpritesScorer(**settings).events(show(*frames, length=length))[0]
    return events.tolist() if events.any() else NOTHING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "length", "tile"), [(5, 16, 8), (6, 32, 8), (6, 16, 9), (6, 16, 12), (8, 32, 8), (8, 16, 16), (16, 32, 8)]
)
def test_agrees_with_the_true_milestones_on_standard_looks(size, length, tile):
    clips = make_clips(size, length, GridRenderer(size, size, tile), env_steps=400, seed=tile)
    truth = MilestonesScorer().events(clips)
    assert len(clips) > 200
    assert (truth.sum(axis=0) > 10).all()  # each milestone is put to the test
    assert np.array_equal(SpritesScorer().events(clips), truth)
    assert np.array_equal(SpritesScorer(tile_size=tile).score(clips), MilestonesScorer().score(clips))


@pytest.mark.parametrize("colour", range(6))
def test_any_colour_of_keys_and_doors_is_recognised(colour):
    clips = recolour(make_clips(6, 16, GridRenderer(6, 6), env_steps=150), 6, colour)
    truth = MilestonesScorer().events(clips)
    assert truth.any(axis=0).all()
    assert np.array_equal(SpritesScorer().events(clips), truth)


def test_the_frame_size_asked_for_changes_no_answer():
    clips = make_clips(6, 16, GridRenderer(6, 6), env_steps=40, instances=8)
    assert clips.frames(130).shape[2] == 6 * 21
    assert np.array_equal(SpritesScorer(frame_size=130).score(clips), SpritesScorer().score(clips))


@pytest.mark.parametrize("visuals", ["misleading", "abstract"])
def test_sees_no_milestone_where_sprites_are_not_what_they_seem(visuals):
    clips = make_clips(6, 16, GridRenderer(6, 6, visuals=visuals), env_steps=200)
    truth = MilestonesScorer().score(clips)
    scores = SpritesScorer().score(clips)
    assert (truth > 0.5).mean() > 0.2
    assert not (scores > 0.5).any()


def test_reads_a_real_minigrid_episode_from_its_own_frames():
    env = gym.make("MiniGrid-DoorKey-5x5-v0", tile_size=16, highlight=False).unwrapped
    env.reset(seed=3)
    env.grid.wall_rect(0, 0, 5, 5)
    for cell in ((1, 1), (1, 2), (1, 3), (3, 1), (3, 2)):
        env.grid.set(*cell, None)
    env.grid.vert_wall(2, 0)
    env.grid.set(1, 2, Key("purple"))
    env.grid.set(2, 1, Door("purple", is_locked=True))
    env.agent_pos, env.agent_dir = (1, 1), 1
    left, right, forward, pickup, toggle = 0, 1, 2, 3, 5
    frames, expected = [env.get_frame(highlight=False, tile_size=16)], []
    for action, event in [
        (left, NOTHING),
        (right, NOTHING),
        (pickup, KEY),
        (left, NOTHING),
        (toggle, DOOR),
        (forward, NOTHING),
        (forward, NOTHING),
        (right, NOTHING),
        (forward, NOTHING),
        (forward, GOAL),
    ]:
        env.step(action)
        frames.append(env.get_frame(highlight=False, tile_size=16))
        expected.append(event)
    assert [seen(*pair) for pair in zip(frames[:-1], frames[1:], strict=True)] == expected
    assert seen(*frames) == [True, True, True]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    facing=st.integers(0, 3),
    colour=st.sampled_from(COLOURS),
    under=st.sampled_from([None, *(Floor(c) for c in COLOURS), *(Door(c, is_open=True) for c in COLOURS)]),
    tile=st.sampled_from([8, 11]),
    milestone=st.sampled_from(["key", "closed door", "locked door", "goal"]),
)
def test_a_milestone_in_any_direction_colour_and_tile_size(facing, colour, under, tile, milestone):
    dx, dy = AHEAD[facing]
    here, ahead = (2, 2), (2 + dx, 2 + dy)
    if milestone == "goal":
        goal = {here: under, ahead: Goal()}
        frames = room(goal, here, facing, tile), room(goal, ahead, facing, tile)
        assert seen(*frames) == GOAL
    else:
        before, after, event = {
            "key": (Key(colour), None, KEY),
            "closed door": (Door(colour), Door(colour, is_open=True), DOOR),
            "locked door": (Door(colour, is_locked=True), Door(colour, is_open=True), DOOR),
        }[milestone]
        frames = (room({here: under, ahead: thing}, here, facing, tile) for thing in (before, after))
        assert seen(*frames) == event


def test_a_goal_of_any_colour_but_the_agents_own_red_is_seen():
    for colour in COLOURS:
        goal = {(3, 2): Goal(colour)}
        assert seen(room(goal), room(goal, (3, 2))) == (NOTHING if colour == "red" else GOAL)


def test_dropping_a_key_or_shutting_a_door_is_no_milestone():
    assert seen(room(), room({(3, 2): Key("blue")})) == NOTHING
    assert seen(room({(3, 2): Door("blue", is_open=True)}), room({(3, 2): Door("blue")})) == NOTHING


def test_a_key_taken_up_again_counts_each_time():
    with_key, without = room({(3, 2): Key("red")}), room()
    assert seen(without, with_key, without) == KEY


def test_a_key_that_vanishes_from_where_the_agent_does_not_look_is_no_milestone():
    assert seen(room({(3, 2): Key("red")}, facing=1), room(facing=1)) == NOTHING
    assert seen(room({(1, 1): Key("red")}), room()) == NOTHING


@pytest.mark.parametrize("thing", [Ball("yellow"), Box("yellow"), Lava(), Wall("yellow"), Floor("yellow")])
def test_other_things_that_vanish_are_no_milestone(thing):
    assert seen(room({(3, 2): thing}), room()) == NOTHING


def test_a_clip_that_opens_on_the_goal_shows_nobody_reaching_it():
    goal = {(3, 2): Goal()}
    assert seen(room(goal, (3, 2)), room(goal, (3, 2), facing=1)) == NOTHING


def test_frames_beyond_the_clips_length_do_not_count():
    frames = room({(3, 2): Key("red")}), room({(3, 2): Key("red")}), room()
    assert seen(*frames) == KEY
    assert seen(*frames, length=2) == NOTHING


def test_one_wrong_pixel_makes_a_sprite_unknown():
    before, after = room({(3, 2): Key("red")}), room()
    for y, x in np.argwhere(before != after)[:, :2]:
        spoiled = before.copy()
        spoiled[y, x, 2] ^= 1
        assert seen(spoiled, after) == NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("tile", [8, 9, 10, 16, 24, 32])
@pytest.mark.parametrize("size", [5, 6, 8])
def test_the_tile_size_is_found_in_the_frame(size, tile):
    assert find_tile_size(room(size=size, tile=tile), 8) == tile


def test_tiles_too_small_to_read_are_reported_once_and_count_as_nothing(caplog):
    scorer = SpritesScorer()
    clips = show(room({(3, 2): Key("red")}, tile=4, size=16), room(tile=4, size=16))
    with caplog.at_level(logging.WARNING):
        scores = [scorer.score(clips).tolist() for _ in range(3)]
    assert scores == [[pytest.approx(0.1)]] * 3
    assert scorer.unrecognised == 3
    assert [record.getMessage() for record in caplog.records] == [
        "sprites scorer: no MiniGrid floor of 8 or more pixels a tile in frames of pictures (64 x 64 pixels); "
        "such clips count as showing nothing"
    ]


def test_noise_shows_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3))
    assert seen(*noise) == NOTHING
    assert seen(*noise, tile_size=8) == NOTHING


def test_refuses_tiles_below_eight_pixels():
    with pytest.raises(ValueError, match="from 8 pixels on, got tile_size=7"):
        SpritesScorer(tile_size=7)


def test_refuses_frames_that_do_not_divide_into_tiles():
    with pytest.raises(ValueError, match="40 x 40 pixels do not divide into tiles of 9"):
        seen(room(), room(), tile_size=9)


def test_a_clips_score_is_the_grade_of_its_best_milestone():
    clips = show(room({(3, 2): Key("red")}), room(), room({(3, 2): Goal()}), room({(3, 2): Goal()}, (3, 2)))
    assert SpritesScorer().score(clips) == np.float32(1.0)
    assert SpritesScorer(Grades(goal=0.9)).score(clips) == np.float32(0.9)


def test_every_setting_that_may_change_an_answer_is_part_of_the_version():
    assert len({s.version for s in (SpritesScorer(), SpritesScorer(Grades(key=0.8)), SpritesScorer(tile_size=9))}) == 3


def test_survives_being_sent_to_another_process():
    scorer = pickle.loads(pickle.dumps(SpritesScorer(tile_size=8)))
    scorer.setup()
    assert scorer.score(show(room({(3, 2): Key("red")}), room())) == np.float32(0.7)


def test_importing_the_scorer_loads_neither_minigrid_nor_torch():
    code = (
        "import sys, vlmrb.scoring.sprites; print([m for m in ('torch', 'minigrid', 'gymnasium') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("tile", [*range(8, 21), 24, 28, 32])
def test_sprites_can_be_told_apart_at_every_tile_size(tile):
    sprite_reader(tile)  # raises if they cannot
    assert seen(room({(3, 2): Key("grey")}, tile=tile), room(tile=tile)) == KEY
