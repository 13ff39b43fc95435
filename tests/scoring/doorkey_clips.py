"""Real DoorKey clips for the recognisers' tests: half of the agents stumble about, half follow the way to the goal."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.grid import DOOR, EMPTY, GOAL, KEY, OPEN, GridLayout
from vlmrb.envs.grid_simulator import DROP, FORWARD, LEFT, PICKUP, RIGHT, TOGGLE
from vlmrb.scoring.clips import ClipBatch, Renderer

AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # x, y


def make_clips(
    size: int, length: int, renderer: Renderer | None, *, env_steps: int = 300, instances: int = 16, seed: int = 0
) -> ClipBatch:
    """Plays DoorKey and cuts it into clips that share their boundary frames; short tails are padded."""
    rng = np.random.default_rng(seed)
    simulator = DoorKeySimulator(size, instances, max_steps=8 * size, seed=seed)
    runs = [[snapshot] for snapshot in simulator.look()[1]]
    clips: list[tuple[NDArray, int]] = []
    for _ in range(env_steps):
        states = simulator.look()[1]
        action = rng.choice([LEFT, RIGHT, FORWARD, FORWARD, PICKUP, DROP, TOGGLE], instances)
        for i in np.flatnonzero(rng.random(instances) < 0.8):
            if i % 2:
                action[i] = next_action(states[i], size)
        step = simulator.step(action)
        done = step.terminated | step.truncated
        for i, run in enumerate(runs):
            run.append(step.snapshot[i])
            if done[i] or len(run) == length:
                clips.append((np.stack(run + [run[-1]] * (length - len(run))), len(run)))
                runs[i] = [run[-1]]
        ended = np.flatnonzero(done)
        simulator.restart(ended)
        for i in ended:
            runs[i] = [simulator.look()[1][i]]
    snapshots = np.stack([clip for clip, _ in clips])
    return ClipBatch(np.arange(len(clips)), snapshots, np.array([count for _, count in clips]), renderer)


def next_action(snapshot: NDArray[np.uint8], size: int) -> int:
    """Returns the next step on the way to the key, the door or the goal, by breadth-first search over poses."""
    state = GridLayout(size, size).unpack(snapshot)
    kinds, states = state.grid[..., 0], state.grid[..., 2]
    shut = ((kinds == DOOR) & (states != OPEN)).any()
    target, act = (KEY, PICKUP) if state.carried[0] != KEY and shut else (DOOR, TOGGLE) if shut else (GOAL, FORWARD)
    start = (int(state.position[0]), int(state.position[1]), int(state.direction))
    queue, first = deque([start]), {start: -1}
    while queue:
        x, y, facing = pose = queue.popleft()
        ahead = x + AHEAD[facing][0], y + AHEAD[facing][1]
        if kinds[ahead] == target:
            return act if first[pose] < 0 else first[pose]
        free = kinds[ahead] == EMPTY or (kinds[ahead] == DOOR and states[ahead] == OPEN)
        moves = [(LEFT, (x, y, (facing - 1) % 4)), (RIGHT, (x, y, (facing + 1) % 4))]
        for action, reached in moves + ([(FORWARD, (*ahead, facing))] if free else []):
            if reached not in first:
                first[reached] = action if first[pose] < 0 else first[pose]
                queue.append(reached)
    return FORWARD  # the key lies where it cannot be reached


def recolour(clips: ClipBatch, size: int, colour: int) -> ClipBatch:
    """Gives keys and doors, carried ones included, another of MiniGrid's colours."""
    snapshots = clips.snapshots.copy()
    state = GridLayout(size, size).unpack(snapshots)
    things = np.isin(state.grid[..., 0], (KEY, DOOR))
    state.grid[..., 1][things] = colour
    state.carried[..., 1][state.carried[..., 0] == KEY] = colour
    return ClipBatch(clips.clip_ids, snapshots, clips.lengths, clips.renderer)
