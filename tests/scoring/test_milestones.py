from __future__ import annotations

import numpy as np
import pytest

from vlmrb.envs.grid import CLOSED, DOOR, EMPTY, GOAL, KEY, LOCKED, OPEN, YELLOW, GridLayout
from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.grades import Grades
from vlmrb.scoring.milestones import MilestonesScorer

LAYOUT = GridLayout(4, 4)
ALL, SUCCESS_ONLY = Grades(), Grades(success_only=True)


def state(door=LOCKED, holds=0, position=(1, 1), layout=LAYOUT):
    """A snapshot of a grid with a door at (2, 1) and a goal at (2, 2)."""
    snapshot = np.zeros(layout.size, np.uint8)
    view = layout.unpack(snapshot)
    view.grid[...] = (EMPTY, 0, 0)
    view.grid[2, 1] = (DOOR, YELLOW, door)
    view.grid[2, 2] = (GOAL, 1, 0)
    view.position[:] = position
    view.carried[0] = holds
    return snapshot


def clip(*states, length=None, renderer=None):
    return ClipBatch(np.zeros(1, np.int64), np.stack(states)[None], np.array([length or len(states)]), renderer)


@pytest.mark.parametrize(
    ("states", "score"),
    [
        pytest.param([state(), state()], 0.1, id="nothing"),
        pytest.param([state(), state(holds=KEY)], 0.7, id="key taken"),
        pytest.param([state(holds=KEY), state(holds=KEY)], 0.1, id="key held throughout"),
        pytest.param([state(holds=KEY), state()], 0.1, id="key dropped"),
        pytest.param([state(holds=KEY), state(), state(holds=KEY)], 0.7, id="key taken again"),
        pytest.param([state(), state(holds=6)], 0.1, id="ball taken"),
        pytest.param([state(), state(OPEN)], 0.85, id="locked door opened"),
        pytest.param([state(CLOSED), state(OPEN)], 0.85, id="closed door opened"),
        pytest.param([state(OPEN), state(OPEN)], 0.1, id="door open throughout"),
        pytest.param([state(OPEN), state(CLOSED)], 0.1, id="door shut"),
        pytest.param([state(LOCKED), state(CLOSED)], 0.1, id="door unlocked but shut"),
        pytest.param([state(), state(position=(2, 2))], 1.0, id="goal reached"),
        pytest.param([state(), state(holds=KEY), state(OPEN, KEY), state(OPEN, KEY, (2, 2))], 1.0, id="all three"),
    ],
)
def test_a_milestone_is_a_change_between_two_frames(states, score):
    assert MilestonesScorer().score(clip(*states)) == np.float32(score)


@pytest.mark.parametrize(
    ("grades", "scores"),
    [
        pytest.param(Grades(), [0.1, 0.7, 0.85, 1.0], id="default"),
        pytest.param(Grades(nothing=0, key=0.6, door=0.7, goal=0.8), [0.0, 0.6, 0.7, 0.8], id="own grades"),
        pytest.param(Grades(success_only=True), [0.1, 0.1, 0.1, 1.0], id="success only"),
    ],
)
def test_grades_decide_what_milestones_are_worth(grades, scores):
    clips = [clip(state(), after) for after in (state(), state(holds=KEY), state(OPEN), state(position=(2, 2)))]
    answers = [float(MilestonesScorer(grades).score(one)[0]) for one in clips]
    assert answers == pytest.approx(scores)


def test_frames_beyond_the_clips_length_do_not_count():
    frames = state(), state(), state(OPEN, KEY, (2, 2))
    assert MilestonesScorer().score(clip(*frames)) == np.float32(1.0)
    assert MilestonesScorer().score(clip(*frames, length=2)) == np.float32(0.1)


def test_a_grid_that_is_not_square_is_read_through_its_renderer():
    layout = GridLayout(3, 5)
    frames = state(layout=layout), state(position=(2, 2), layout=layout)
    assert MilestonesScorer().score(clip(*frames, renderer=GridRenderer(3, 5))) == np.float32(1.0)
    with pytest.raises(ValueError, match="50 elements are none of a square grid"):
        MilestonesScorer().score(clip(*frames))


def test_snapshots_of_other_environments_are_refused():
    with pytest.raises(ValueError, match="reads snapshots of MiniGrid"):
        MilestonesScorer().score(clip(np.zeros(25), np.zeros(25)))


def test_a_version_names_its_grades():
    assert MilestonesScorer(ALL).version != MilestonesScorer(SUCCESS_ONLY).version


@pytest.mark.parametrize(
    ("setting", "value"),
    [("nothing", 0.5), ("nothing", -0.1), ("key", 0.5), ("door", 1.1), ("goal", float("nan"))],
)
def test_a_grade_on_the_wrong_side_of_the_threshold_is_refused(setting, value):
    with pytest.raises(ValueError, match=rf"^grades\.{setting} must lie in [^\n]*$"):
        Grades(**{setting: value})
