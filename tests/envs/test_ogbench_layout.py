"""Milestones and subgoals read off OGBench's snapshots; nothing here needs MuJoCo."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vlmrb.envs.ogbench_expert import Subgoal, next_subgoal, solve_lights
from vlmrb.envs.ogbench_layout import Goal, OGBenchLayout
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.grades import Grades
from vlmrb.scoring.milestones import MilestonesScorer, milestone_names

# qpos is a cube's x, y, z, then drawer and window; task 1 wants all open, task 2 the cube in the closed drawer.
SCENE = OGBenchLayout(
    "scene", 5, 3, 2, 1, cubes=(0,), drawer=3, window=4, goals=(Goal((1, 1), -0.16, 0.2), Goal((1, 0), 0.0, 0.0))
)
PUZZLE = OGBenchLayout("puzzle", 1, 0, 9, 1, goals=(Goal((1,) * 9),))
MAZE = OGBenchLayout("maze", 2, 2, 0, 2, tolerance=0.5)
TARGET, INSIDE = (0.4, 0.15, 0.02), (0.33, -0.356, 0.066)


class Explains:
    """A renderer as far as the milestones scorer needs one."""

    def __init__(self, layout: OGBenchLayout) -> None:
        self.layout = layout


def scene(
    cube: tuple[float, float, float] = (0.4, -0.05, 0.02),
    drawer: float = 0.0,
    window: float = 0.0,
    buttons: tuple[int, int] = (0, 0),
    task: int = 1,
) -> NDArray[np.float64]:
    target = TARGET if task == 1 else INSIDE
    return np.array([*cube, drawer, window, *target, *buttons, task, 0.5])


def events(*states: NDArray[np.float64], layout: OGBenchLayout = SCENE) -> list[str]:
    happened = layout.events(np.stack(states)).any(axis=0)
    return [name for name, seen in zip(layout.milestones, happened, strict=True) if seen]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([scene(), scene()], [], id="nothing"),
        pytest.param([scene(), scene((0.4, -0.05, 0.1))], ["lifted"], id="lifted"),
        pytest.param([scene((0.4, -0.05, 0.1)), scene()], [], id="put down elsewhere"),
        pytest.param([scene((0.4, 0.15, 0.07)), scene((0.4, 0.15, 0.02))], ["placed"], id="placed"),
        pytest.param([scene((0.4, 0.15, 0.02)), scene((0.4, 0.16, 0.02))], [], id="lay there already"),
        pytest.param([scene(), scene(drawer=-0.13)], ["drawer"], id="drawer opened"),
        pytest.param([scene(), scene(drawer=-0.1)], [], id="drawer half open"),
        pytest.param([scene(drawer=-0.16), scene()], [], id="drawer closed against the task"),
        pytest.param([scene(drawer=-0.16, task=2), scene(task=2)], ["drawer"], id="drawer closed as the task wants"),
        pytest.param([scene(), scene(window=0.2)], ["window"], id="window opened"),
        pytest.param([scene(), scene(buttons=(0, 1))], ["button"], id="button pressed"),
        pytest.param([scene(buttons=(1, 1)), scene(buttons=(0, 1))], [], id="button pressed against the task"),
        pytest.param(
            [scene(TARGET, -0.16, 0.1, (1, 1)), scene(TARGET, -0.16, 0.2, (1, 1))], ["window", "goal"], id="goal"
        ),
        pytest.param([scene(TARGET, -0.16, 0.2, (1, 1)), scene(TARGET, -0.16, 0.2, (1, 1))], [], id="goal held"),
    ],
)
def test_a_milestone_is_a_change_towards_the_task(states: list[NDArray[np.float64]], expected: list[str]) -> None:
    assert events(*states) == expected


def test_mazes_and_puzzles_have_milestones_of_their_own() -> None:
    def maze(x: float) -> NDArray[np.float64]:
        return np.array([x, 0, 4.0, 0, 1, 0, 0])

    def puzzle(lit: int) -> NDArray[np.float64]:
        return np.array([0.0, *(np.arange(9) < lit), 1, 0])

    assert events(maze(3.4), maze(3.6), layout=MAZE) == ["goal"]
    assert events(maze(3.6), maze(3.7), layout=MAZE) == []
    assert events(puzzle(3), puzzle(4), layout=PUZZLE) == ["button"]
    assert events(puzzle(4), puzzle(3), layout=PUZZLE) == []
    assert events(puzzle(8), puzzle(9), layout=PUZZLE) == ["button", "goal"]


def test_events_keep_leading_axes_and_snapshots_of_others_are_refused() -> None:
    clips = np.stack([[scene(), scene(drawer=-0.16), scene()], [scene()] * 3])
    assert SCENE.events(clips).shape == (2, 2, 6)
    assert SCENE.observe(clips).tolist() == [[[0.5]] * 3] * 2
    with pytest.raises(ValueError, match=r"snapshots of 5 elements are none of this environment \(12\)"):
        SCENE.unpack(np.zeros(5))


def test_the_milestones_scorer_grades_them_within_the_clips_length() -> None:
    opened = [scene(), scene(), scene(drawer=-0.16)]
    done = [scene(TARGET, 0.0, 0.2, (1, 1)), *[scene(TARGET, -0.16, 0.2, (1, 1))] * 2]
    snapshots, renderer = np.stack([opened, opened, done, [scene()] * 3]), Explains(SCENE)
    clips = ClipBatch(np.arange(4), snapshots, np.array([3, 2, 3, 3]), renderer)
    assert milestone_names(renderer) == SCENE.milestones
    np.testing.assert_array_equal(MilestonesScorer().score(clips), np.float32([0.7, 0.1, 1.0, 0.1]))
    strict = MilestonesScorer(Grades(success_only=True))
    np.testing.assert_array_equal(strict.score(clips), np.float32([0.1, 0.1, 1.0, 0.1]))


@pytest.mark.parametrize(
    ("state", "kind", "number", "place"),
    [
        pytest.param(scene(), "cube", 0, TARGET, id="the cube first"),
        pytest.param(scene(TARGET), "button", 0, (1.0,), id="unlock the drawer"),
        pytest.param(scene(TARGET, buttons=(1, 0)), "drawer", 0, (-0.16,), id="open the drawer"),
        pytest.param(scene(TARGET, -0.16, buttons=(1, 0)), "button", 1, (1.0,), id="unlock the window"),
        pytest.param(scene(TARGET, -0.16, 0.0, (1, 1)), "window", 0, (0.2,), id="open the window"),
        pytest.param(scene(TARGET, -0.16, 0.2, (1, 0)), "button", 1, (1.0,), id="buttons last"),
        pytest.param(scene(task=2), "button", 0, (1.0,), id="the drawer is locked"),
        pytest.param(scene(task=2, buttons=(1, 0)), "drawer", 0, (-0.16,), id="the drawer is closed"),
        pytest.param(scene(task=2, drawer=-0.16, buttons=(1, 0)), "cube", 0, (0.33, -0.216, 0.066), id="lay it in"),
        pytest.param(
            scene((0.33, -0.21, 0.066), -0.16, 0.0, (1, 0), 2), "drawer", 0, (0.0,), id="close the drawer on it"
        ),
        pytest.param(scene(INSIDE, 0.0, 0.0, (0, 0), 2), "button", 0, (1.0,), id="then the buttons"),
    ],
)
def test_the_next_subgoal_follows_from_the_state(
    state: NDArray[np.float64], kind: str, number: int, place: tuple[float, ...]
) -> None:
    subgoal = next_subgoal(SCENE, SCENE.unpack(state))
    assert subgoal is not None
    assert (subgoal.kind, subgoal.number) == (kind, number)
    assert subgoal.place == pytest.approx(place)


def test_nothing_is_left_to_do_at_the_goal() -> None:
    assert next_subgoal(SCENE, SCENE.unpack(scene(TARGET, -0.16, 0.2, (1, 1)))) is None
    solved = np.array([0.0, *[1] * 9, 1, 0])
    assert next_subgoal(PUZZLE, PUZZLE.unpack(solved)) is None
    assert next_subgoal(PUZZLE, PUZZLE.unpack(np.array([0.0] * 10 + [1, 0]))) == Subgoal("button", 0, (1.0,))


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (4, 4), (4, 5), (4, 6)])
def test_presses_solve_every_solvable_puzzle(rows: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        wrong = np.zeros((rows, columns), np.bool_)
        press(wrong, rng.random((rows, columns)) < 0.5)
        press(wrong, solve_lights(wrong.reshape(-1)).reshape(rows, columns))
        assert not wrong.any()


def press(lights: NDArray[np.bool_], buttons: NDArray[np.bool_]) -> None:
    for x, y in np.argwhere(buttons):
        for dx, dy in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            if 0 <= x + dx < lights.shape[0] and 0 <= y + dy < lights.shape[1]:
                lights[x + dx, y + dy] ^= True


def test_an_unsolvable_puzzle_is_left_alone() -> None:
    corner = np.zeros(16, np.bool_)
    corner[0] = True  # no presses change one corner of 4 × 4 alone
    assert not solve_lights(corner).any()
