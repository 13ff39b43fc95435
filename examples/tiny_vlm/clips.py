"""Seeded DoorKey clips with privileged labels: random, fumbling and expert play, cut as the replay buffer cuts it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.doorkey_expert import DoorKeyExpert
from vlmrb.envs.grid import DOOR, KEY, OPEN, POSE_SIZE
from vlmrb.envs.grid_simulator import DROP, FORWARD, LEFT, NUM_ACTIONS, PICKUP, RIGHT, TOGGLE
from vlmrb.envs.tiles import GridRenderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.milestones import MilestonesScorer

SIZE = 8  # cells
FRAME_SIZE = 64  # pixels
LENGTH = 32  # frames
FLAGS = 3  # key in hand, door open, agent on the goal

_ENVS = 128
_STEPS = 400
_STRETCH = (8, 64)  # env steps for which an instance is played in one manner

# Chances of the seven actions under each manner of play. The expert's are its own, mixed with these where it fumbles.
_EVEN = np.full(NUM_ACTIONS, 1 / NUM_ACTIONS)
_BUSY = np.zeros(NUM_ACTIONS)
_BUSY[[LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE]] = (0.1, 0.1, 0.3, 0.2, 0.1, 0.2)
_WALK = np.zeros(NUM_ACTIONS)
_WALK[[LEFT, RIGHT, FORWARD]] = (0.2, 0.2, 0.6)
_STUCK = np.zeros(NUM_ACTIONS)
_STUCK[[LEFT, RIGHT, FORWARD]] = (0.05, 0.05, 0.9)
# Each with the expert's share of the actions while the door is shut, and once it is open: those who lose interest then
# make clips in which a door opens and nothing else happens.
_MANNERS = [
    (_EVEN, 0.0, 0.0),
    (_BUSY, 0.0, 0.0),
    (_WALK, 0.0, 0.0),
    (_STUCK, 0.0, 0.0),
    (_EVEN, 1.0, 1.0),
    (_EVEN, 0.7, 0.7),
    (_BUSY, 0.9, 0.0),
    (_WALK, 0.9, 0.0),
]
_MANNER_CHANCES = np.array([0.2, 0.15, 0.1, 0.05, 0.15, 0.15, 0.1, 0.1])


@dataclass(frozen=True)
class ClipSet:
    """Clips with their labels.

    Attributes:
        snapshots: ``uint8[N, L, S]``; a clip shorter than L repeats its last frame.
        lengths: ``int64[N]``, real frames, 2 to L.
        events: ``bool[N, 3]``, key picked up, door opened, goal reached inside the clip.
    """

    snapshots: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    events: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def labels(self) -> NDArray[np.bool_]:
        """``bool[N]``, whether any milestone happens inside the clip."""
        return self.events.any(axis=1)

    def select(self, rows: NDArray) -> ClipSet:
        """Returns the clips at ``rows``, indices or a mask."""
        return ClipSet(self.snapshots[rows], self.lengths[rows], self.events[rows])

    def batch(self) -> ClipBatch:
        """Returns the clips as a scorer is handed them."""
        return ClipBatch(np.arange(len(self)), self.snapshots, self.lengths, RENDERER)


RENDERER = GridRenderer(SIZE, SIZE, FRAME_SIZE // SIZE)


def labelled(snapshots: NDArray[np.uint8], lengths: NDArray[np.int64]) -> ClipSet:
    """Labels clips by what the simulator's states say happens in them."""
    events = MilestonesScorer().events(ClipBatch(np.arange(len(lengths)), snapshots, lengths, RENDERER))
    return ClipSet(snapshots, lengths, events)


def reversed_in_time(clips: ClipSet) -> ClipSet:
    """Plays clips backwards (their real frames), and labels them anew."""
    frames = np.arange(clips.snapshots.shape[1])
    backwards = np.maximum(clips.lengths[:, None] - 1 - frames, 0)  # [N, L]
    return labelled(np.take_along_axis(clips.snapshots, backwards[..., None], axis=1), clips.lengths)


def play(rng: np.random.Generator) -> ClipSet:
    """Plays some hundred steps of many levels and cuts all of it into clips, some 1,600."""
    simulator = DoorKeySimulator(SIZE, _ENVS, max_steps=_STEPS, seed=int(rng.integers(2**31)))
    expert = DoorKeyExpert(SIZE)
    manner = np.zeros(_ENVS, np.int64)
    left = np.zeros(_ENVS, np.int64)
    chances = np.stack([table for table, *_ in _MANNERS]).cumsum(axis=1)
    skill = np.array([skills for _, *skills in _MANNERS])  # [manners, 2]
    episodes: list[list[NDArray]] = [[state] for state in simulator.look()[1]]
    ended: list[list[NDArray]] = []
    for _ in range(_STEPS):
        new = left == 0
        manner[new] = rng.choice(len(_MANNERS), new.sum(), p=_MANNER_CHANCES)
        left[new] = rng.integers(*_STRETCH, new.sum())
        left -= 1
        action = (rng.random(_ENVS)[:, None] > chances[manner]).sum(axis=1).clip(max=NUM_ACTIONS - 1)
        state = simulator.look()[1]
        is_open = flags(state)[:, 1].astype(np.int64)
        action = np.where(rng.random(_ENVS) < skill[manner, is_open], expert.act(state), action)
        step = simulator.step(action)
        for episode, state in zip(episodes, step.snapshot, strict=True):
            episode.append(state)
        over = np.flatnonzero(step.success)
        ended += [episodes[row] for row in over]
        simulator.restart(over)
        for row, state in zip(over, simulator.look()[1][over], strict=True):
            episodes[row] = [state]
    return _cut([np.stack(episode) for episode in ended + episodes], rng)


def _cut(episodes: list[NDArray[np.uint8]], rng: np.random.Generator) -> ClipSet:
    snapshots, lengths = [], []
    for episode in episodes:
        # Half of the episodes are cut from their first frame on, as the replay buffer does, the rest from anywhere.
        start = int(rng.integers(LENGTH)) if rng.random() < 0.5 else 0
        while start + 1 < len(episode):  # the last frame of a clip is the first one of the next
            last = min(start + LENGTH, len(episode)) - 1
            snapshots.append(episode[np.minimum(start + np.arange(LENGTH), last)])
            lengths.append(last - start + 1)
            start = last
    return labelled(np.stack(snapshots), np.array(lengths))


def make_clips(count: int, seed: int, *, balanced: bool = True, backwards: float = 0.0) -> ClipSet:
    """Makes clips, half of them positive (a few more with ``backwards``, where some are so either way).

    Args:
        count: N, even.
        seed: of everything.
        balanced: draws rare kinds of clips (by which milestones happen, or by where in the task nothing does) as often
            as common ones; else as they come.
        backwards: share of the negatives that are positives played backwards, which hold the same frames in another
            order.
    """
    rng = np.random.default_rng(seed)
    one_of = 8 if balanced else 2  # of a pool, the less is taken the more of it can be of rare kinds
    half, behind = count // 2, round(backwards * count / 2)
    need = {True: half + behind, False: half - behind}
    kept: dict[bool, list[ClipSet]] = {True: [], False: []}
    while any(sum(map(len, kept[label])) < need[label] for label in kept):
        pool = play(rng)
        for label in kept:
            part = pool.select(pool.labels == label)
            take = min(len(part) // one_of, need[label] - sum(map(len, kept[label])))
            if take > 0:
                kept[label].append(part.select(rng.choice(len(part), take, replace=False, p=_weights(part, balanced))))
    positives, negatives = (_join(kept[label]) for label in (True, False))
    turned = reversed_in_time(positives.select(np.arange(half, half + behind)))
    together = _join([positives.select(np.arange(half)), negatives, turned])
    return together.select(rng.permutation(len(together)))


def _weights(clips: ClipSet, balanced: bool) -> NDArray[np.float64]:
    if not balanced:
        return np.full(len(clips), 1 / len(clips))
    kinds = clips.events @ (1, 2, 4) * 4 + flags(clips.snapshots[:, 0])[:, :2] @ (1, 2)
    _, kind, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    weights = 1 / np.maximum(counts, len(clips) / 100)[kind]
    return weights / weights.sum()


def _join(parts: list[ClipSet]) -> ClipSet:
    return ClipSet(*(np.concatenate([getattr(part, name) for part in parts]) for name in ClipSet.__annotations__))


def flags(snapshots: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Returns what single frames show, ``bool[..., 3]``: key in hand (and so on no floor), door open, on the goal."""
    state = RENDERER.unpack(snapshots)
    cells = snapshots[..., :-POSE_SIZE].reshape(*snapshots.shape[:-1], SIZE * SIZE, 3)
    carries = state.carried[..., 0] == KEY
    is_open = ((cells[..., 0] == DOOR) & (cells[..., 2] == OPEN)).any(axis=-1)
    arrived = (state.position == SIZE - 2).all(axis=-1)
    return np.stack([carries, is_open, arrived], axis=-1)
