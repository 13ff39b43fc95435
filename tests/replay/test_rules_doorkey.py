"""DoorKey's predicates, which read the agent's observation, against the state that it does not see."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.doorkey_expert import DoorKeyExpert
from vlmrb.envs.grid import AGENT, DOOR, EMPTY, GOAL, KEY, OPEN, WALL, GridLayout
from vlmrb.replay.rules.doorkey import FAMILY, GridStates
from vlmrb.replay.rules.schema import read_rules

AHEAD = [(1, 0), (0, 1), (-1, 0), (0, -1)]
HAND_WRITTEN = ("configs/rules/doorkey.json", "configs/rules/doorkey_wrong.json")


class Play(NamedTuple):
    """K transitions: observations ``[K, N, N, 3]``, snapshots ``[K, S]``, before and after."""

    size: int
    s: NDArray
    s2: NDArray
    before: NDArray
    after: NDArray
    steps: int


def played(size: int, steps: int) -> Play:
    """Plays expert and chance by turns, so that all there is to do is done; s' lies ``steps`` steps after s."""
    simulator, expert, rng = DoorKeySimulator(size, 24, seed=3), DoorKeyExpert(size), np.random.default_rng(0)
    observations, snapshots, ended = [], [], []
    observation, snapshot = simulator.look()
    for t in range(160):
        observations.append(observation)
        snapshots.append(snapshot)
        random = rng.random(24) < 0.3 + 0.6 * (t % 40 >= 25)
        step = simulator.step(np.where(random, rng.integers(0, 7, 24), expert.act(snapshot)))
        ended.append(step.terminated)
        observation, snapshot = step.observation, step.snapshot
        if step.terminated.any():  # its last state stands for itself; whoever plays goes on in a new level
            observations.append(observation)
            snapshots.append(snapshot)
            ended.append(np.ones(24, np.bool_))
            simulator.restart(np.flatnonzero(step.terminated))
            observation, snapshot = simulator.look()
    o, p, end = np.stack(observations), np.stack(snapshots), np.stack(ended)
    pairs = [
        (t, i)
        for t in range(len(o) - steps)
        for i in range(24)
        if not end[t : t + steps - 1, i].any() and not (end[t].all() and steps > 0)
    ]
    t, i = np.array(pairs).T
    return Play(size, o[t, i], o[t + steps, i], p[t, i], p[t + steps, i], steps)


class Truth:
    """What is so in one state, from its snapshot."""

    def __init__(self, size: int, snapshot: NDArray) -> None:
        state = GridLayout(size, size).unpack(snapshot)
        self.kinds = state.grid[..., 0].astype(int)
        self.at = tuple(int(value) for value in state.position)
        self.ahead = AHEAD[int(state.direction)]
        self.carries = int(state.carried[0]) == KEY
        self.door = self.where(DOOR)
        self.open = int(state.grid[self.door][2]) == OPEN
        self.goal = self.where(GOAL)
        self.key = None if self.carries else self.where(KEY)
        self.front = int(self.kinds[self.at[0] + self.ahead[0], self.at[1] + self.ahead[1]])
        self.past = self.at[0] > self.door[0]

    def where(self, kind: int) -> tuple[int, int]:
        ((x, y),) = np.argwhere(self.kinds == kind)
        return int(x), int(y)

    def distance(self, to: tuple[int, int] | None) -> int:
        return 0 if to is None else abs(self.at[0] - to[0]) + abs(self.at[1] - to[1])

    def faces(self, to: tuple[int, int] | None) -> bool:
        reach = range(1, len(self.kinds))
        return to is not None and any(
            (self.at[0] + k * self.ahead[0], self.at[1] + k * self.ahead[1]) == to for k in reach
        )

    def near(self, to: tuple[int, int] | None) -> float:
        longest = 2 * (len(self.kinds) - 3)  # from corner to corner inside the walls
        return min(1.0, (longest - self.distance(to)) / (longest - 1))


EXPECTED: dict[str, Any] = {
    "carries_key": lambda s, t: s.carries,
    "door_open": lambda s, t: s.open,
    "past_door": lambda s, t: s.past,
    "key_in_front": lambda s, t: s.front == KEY,
    "door_in_front": lambda s, t: s.front == DOOR,
    "goal_in_front": lambda s, t: s.front == GOAL,
    "wall_in_front": lambda s, t: s.front == WALL,
    "free_in_front": lambda s, t: s.front == EMPTY,
    "facing_key": lambda s, t: s.faces(s.key),
    "facing_door": lambda s, t: s.faces(s.door),
    "facing_goal": lambda s, t: s.faces(s.goal),
    "near_key": lambda s, t: 0.0 if s.carries else s.near(s.key),
    "near_door": lambda s, t: s.near(s.door),
    "near_goal": lambda s, t: s.near(s.goal),
    "picks_up": lambda s, t: not s.carries and t.carries,
    "drops": lambda s, t: s.carries and not t.carries,
    "opens_door": lambda s, t: not s.open and t.open,
    "closes_door": lambda s, t: s.open and not t.open,
    "toggles": lambda s, t: s.open != t.open,
    "passes_door": lambda s, t: not s.past and t.past,
    "leaves_room": lambda s, t: s.past and not t.past,
    "reaches_goal": lambda s, t: t.at == t.goal,
    "moves_forward": lambda s, t: sum((b - a) * d for a, b, d in zip(s.at, t.at, s.ahead, strict=True)) > 0,
    "turns": lambda s, t: s.ahead != t.ahead,
    "stays": lambda s, t: (s.at, s.ahead) == (t.at, t.ahead),
    "approaches_key": lambda s, t: not s.carries and not t.carries and t.distance(t.key) < s.distance(s.key),
    "approaches_door": lambda s, t: t.distance(t.door) < s.distance(s.door),
    "approaches_goal": lambda s, t: t.distance(t.goal) < s.distance(s.goal),
}


@pytest.fixture(scope="module", params=[(5, 1), (8, 1), (6, 3)], ids=["5x5", "8x8", "6x6, 3 steps"])
def play(request: pytest.FixtureRequest) -> tuple[Play, list[tuple[Truth, Truth]]]:
    found = played(*request.param)
    return found, [(Truth(found.size, a), Truth(found.size, b)) for a, b in zip(found.before, found.after, strict=True)]


def test_every_predicate_is_checked_here() -> None:
    assert set(EXPECTED) == set(FAMILY.predicates)


@pytest.mark.parametrize("name", EXPECTED)
def test_it_says_what_the_state_says(name: str, play: tuple[Play, list[tuple[Truth, Truth]]]) -> None:
    rows, truths = play
    found = FAMILY.truth(name, GridStates(rows.s), np.zeros(len(rows.s), np.int64), GridStates(rows.s2))
    expected = [float(EXPECTED[name](s, t)) for s, t in truths]
    assert found == pytest.approx(expected)
    assert 0 < np.mean(expected) < 1  # both are seen


@pytest.mark.parametrize(("name", "kind"), [("near_key", KEY), ("near_goal", GOAL)])
@pytest.mark.parametrize(
    ("at", "nearness"), [((1, 1), 0.0), ((2, 1), 0.2), ((3, 3), 0.8), ((3, 4), 1.0), ((4, 3), 1.0)]
)
def test_nearness_goes_from_0_in_the_opposite_corner_to_1_one_step_away(
    name: str, kind: int, at: tuple[int, int], nearness: float
) -> None:
    grid = np.zeros((1, 6, 6, 3), np.uint8)
    grid[..., 0] = WALL
    grid[:, 1:5, 1:5, 0] = EMPTY
    grid[0, 4, 4, 0], grid[0, *at, 0] = kind, AGENT
    states = GridStates(grid)
    assert FAMILY.truth(name, states, np.zeros(1, np.int64), states) == pytest.approx([nearness])


@pytest.mark.parametrize("file", HAND_WRITTEN)
def test_every_rule_that_comes_with_the_program_is_seen(
    file: str, play: tuple[Play, list[tuple[Truth, Truth]]]
) -> None:
    rows, _ = play
    body, whole = read_rules(file).truths(rows.s, np.zeros(len(rows.s), np.int64), rows.s2)
    assert (whole.sum(axis=0) > 0).all()
    assert (body.sum(axis=0) > whole.sum(axis=0)).all()


def test_the_control_weighs_what_the_rules_weigh() -> None:
    right, wrong = (sorted(rule.confidence for rule in read_rules(file).rules) for file in HAND_WRITTEN)
    assert right == wrong


@pytest.mark.parametrize("observation", [np.zeros((2, 4), np.float32), np.zeros((2, 6, 6, 3), np.float32)])
def test_other_observations_are_refused(observation: NDArray) -> None:
    with pytest.raises(ValueError, match=r"read symbolic grids uint8\[K, W, H, 3\], got float32\[2, "):
        GridStates(observation)
