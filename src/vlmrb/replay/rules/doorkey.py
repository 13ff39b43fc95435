"""Predicates of DoorKey, read off the agent's own observation: the symbolic grid with the agent in it.

The observation does not show what the agent carries. A level has one key, though, and nothing hides it but the agent's
hand, so a grid without a key is that of an agent that carries it; in the same way a door that does not show is open,
with the agent in it, and a goal that does not show has been reached.

No predicate reads the action: what it did shows in the states, whatever ``env.actions`` calls it, and however many
steps lie between s and s'. Distances are those of a walk without walls.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.grid import AGENT, DOOR, EMPTY, GOAL, KEY, OPEN, WALL
from vlmrb.replay.rules.predicates import PredicateFamily

_AHEAD: Final = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])  # right, down, left, up

Truth = NDArray[np.bool_]


class Things(NamedTuple):
    """Where one kind of thing is.

    Attributes:
        at: ``int64[K, 2]``, x and y; of no use where it does not show.
        shows: ``bool[K]``.
    """

    at: NDArray[np.int64]
    shows: Truth


class GridStates:
    """Facts about K states, each found when it is asked for.

    Args:
        observation: ``uint8[K, W, H, 3]``.

    Raises:
        ValueError: it is something else.
    """

    def __init__(self, observation: NDArray[np.uint8]) -> None:
        if observation.ndim != 4 or observation.shape[3] != 3 or observation.dtype != np.uint8:
            raise ValueError(
                "the predicates of doorkey read symbolic grids uint8[K, W, H, 3], "
                f"got {observation.dtype}{list(observation.shape)}"
            )
        self._cells = observation
        self._rows = np.arange(len(observation))
        self.farthest = max(sum(observation.shape[1:3]) - 6, 2)  # steps from corner to corner inside the border walls

    def _find(self, kind: int) -> Things:
        kinds = self._cells[..., 0].reshape(len(self._cells), -1)
        cell = (kinds == kind).argmax(axis=1)
        at = np.stack(np.divmod(cell, self._cells.shape[2]), axis=1)
        return Things(at, kinds[self._rows, cell] == kind)

    @cached_property
    def agent(self) -> NDArray[np.int64]:
        """``int64[K, 2]``, x and y."""
        return self._find(AGENT).at

    @cached_property
    def ahead(self) -> NDArray[np.int64]:
        """``int64[K, 2]``, the step that the agent would take."""
        x, y = self.agent.T
        return _AHEAD[self._cells[self._rows, x, y, 2]]

    @cached_property
    def in_front(self) -> NDArray[np.uint8]:
        """``uint8[K]``, what lies in the cell before the agent."""
        x, y = (self.agent + self.ahead).T
        return self._cells[self._rows, x, y, 0]

    @cached_property
    def key(self) -> Things:
        """The key; it does not show while it is carried."""
        return self._find(KEY)

    @cached_property
    def door(self) -> Things:
        """The door; it does not show while the agent stands in it."""
        return self._find(DOOR)

    @cached_property
    def goal(self) -> Things:
        """The goal; it does not show when the agent stands on it."""
        return self._find(GOAL)

    @cached_property
    def open(self) -> Truth:
        """``bool[K]``, whether the door is."""
        x, y = self.door.at.T
        return ~self.door.shows | (self._cells[self._rows, x, y, 2] == OPEN)

    @cached_property
    def past_door(self) -> Truth:
        """``bool[K]``, whether the agent is in the room of the goal."""
        return self.door.shows & (self.agent[:, 0] > self.door.at[:, 0])

    def distance(self, things: Things) -> NDArray[np.int64]:
        """Returns ``int64[K]``, steps from the agent; 0 where the thing does not show."""
        return np.where(things.shows, np.abs(self.agent - things.at).sum(axis=1), 0)

    def faces(self, things: Things) -> Truth:
        """Returns ``bool[K]``, whether the thing lies straight ahead, at any distance."""
        offset = things.at - self.agent
        along = (offset * self.ahead).sum(axis=1)
        return things.shows & (along > 0) & (np.abs(offset).sum(axis=1) == along)


FAMILY = PredicateFamily(
    "doorkey",
    r"MiniGrid-DoorKey-(\d+)x\1-v0",
    """
    A square grid world of two rooms, divided by a wall with one locked door. The agent and a key start in the left
    room, the goal lies in the right one. The agent turns, moves forward, picks up and drops the key, and opens and
    closes the door, which is locked until the agent opens it with the key in hand. Only reaching the goal is rewarded.
    s is the state before the transition, s' the state after it.
    """,
    GridStates,
)

# What holds in s


@FAMILY.predicate
def carries_key(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent carries the key in s."""
    return ~s.key.shows


@FAMILY.predicate
def door_open(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The door is open in s."""
    return s.open


@FAMILY.predicate
def past_door(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent is in the right room, that of the goal, in s."""
    return s.past_door


@FAMILY.predicate
def key_in_front(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The key lies in the cell in front of the agent in s."""
    return s.in_front == KEY


@FAMILY.predicate
def door_in_front(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The door is the cell in front of the agent in s."""
    return s.in_front == DOOR


@FAMILY.predicate
def goal_in_front(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The goal is the cell in front of the agent in s."""
    return s.in_front == GOAL


@FAMILY.predicate
def wall_in_front(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The cell in front of the agent is a wall in s."""
    return s.in_front == WALL


@FAMILY.predicate
def free_in_front(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The cell in front of the agent is empty in s."""
    return s.in_front == EMPTY


@FAMILY.predicate
def facing_key(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The key lies straight ahead of the agent in s, at any distance."""
    return s.faces(s.key)


@FAMILY.predicate
def facing_door(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The door lies straight ahead of the agent in s, at any distance."""
    return s.faces(s.door)


@FAMILY.predicate
def facing_goal(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The goal lies straight ahead of the agent in s, at any distance; there may be a wall between them."""
    return s.faces(s.goal)


@FAMILY.predicate
def near_key(s: GridStates, a: NDArray, s2: GridStates) -> NDArray[np.float64]:
    """How near the agent is to the lying key in s: 1 one step away, 0 from corner to corner; 0 while it is carried."""
    return s.key.shows * _nearness(s, s.key)


@FAMILY.predicate
def near_door(s: GridStates, a: NDArray, s2: GridStates) -> NDArray[np.float64]:
    """How near the agent is to the door in s: 1 in it or one step away, less with each step more, as for the goal."""
    return _nearness(s, s.door)


@FAMILY.predicate
def near_goal(s: GridStates, a: NDArray, s2: GridStates) -> NDArray[np.float64]:
    """How near the agent is to the goal in s: 1 on it or one step away, falling to 0 in the opposite corner."""
    return _nearness(s, s.goal)


# What happens between s and s'


@FAMILY.predicate
def picks_up(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent takes the key: it lies in s and is carried in s'."""
    return s.key.shows & ~s2.key.shows


@FAMILY.predicate
def drops(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent drops the key: it is carried in s and lies in s'."""
    return ~s.key.shows & s2.key.shows


@FAMILY.predicate
def opens_door(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The door is opened: closed or locked in s, open in s'."""
    return ~s.open & s2.open


@FAMILY.predicate
def closes_door(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The door is closed: open in s and not in s'."""
    return s.open & ~s2.open


@FAMILY.predicate
def toggles(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The door is opened or closed between s and s'."""
    return s.open ^ s2.open


@FAMILY.predicate
def passes_door(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent gets into the right room, that of the goal, between s and s'."""
    return ~s.past_door & s2.past_door


@FAMILY.predicate
def leaves_room(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent leaves the right room, that of the goal, between s and s'."""
    return s.past_door & ~s2.past_door


@FAMILY.predicate
def reaches_goal(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent stands on the goal in s'."""
    return ~s2.goal.shows


@FAMILY.predicate
def moves_forward(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """In s' the agent is further on in the direction in which it faces in s."""
    return ((s2.agent - s.agent) * s.ahead).sum(axis=1) > 0


@FAMILY.predicate
def turns(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent faces another direction in s' than in s."""
    return (s.ahead != s2.ahead).any(axis=1)


@FAMILY.predicate
def stays(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent has the same place and direction in s' as in s."""
    return (s.agent == s2.agent).all(axis=1) & ~turns(s, a, s2)


@FAMILY.predicate
def approaches_key(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent is nearer to the lying key in s' than in s."""
    return s2.key.shows & (s2.distance(s2.key) < s.distance(s.key))


@FAMILY.predicate
def approaches_door(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent is nearer to the door in s' than in s."""
    return s2.distance(s2.door) < s.distance(s.door)


@FAMILY.predicate
def approaches_goal(s: GridStates, a: NDArray, s2: GridStates) -> Truth:
    """The agent is nearer to the goal in s' than in s."""
    return s2.distance(s2.goal) < s.distance(s.goal)


def _nearness(s: GridStates, things: Things) -> NDArray[np.float64]:
    """Returns 1 within one step, falling linearly to 0 at the longest way inside the walls, ``float64[K]``."""
    return np.clip(1 - (s.distance(things) - 1) / (s.farthest - 1), 0, 1)
