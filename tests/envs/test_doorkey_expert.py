"""The scripted DoorKey player."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from numpy.typing import NDArray

from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.doorkey_expert import DoorKeyExpert, expert_actions
from vlmrb.envs.grid import DOOR, LOCKED, POSE_SIZE
from vlmrb.envs.grid_simulator import DONE, NUM_ACTIONS


def _play(simulator: DoorKeySimulator, most: int) -> NDArray[np.int64]:
    """Lets the expert play until every instance has ended; returns how many steps each took, −1 for failure."""
    expert = DoorKeyExpert(simulator.size)
    took = np.full(simulator.num_envs, -1)
    for step in range(1, most + 1):
        ended = simulator.step(expert.act(simulator.look()[1])).success
        took[ended & (took < 0)] = step
        if (took > 0).all():
            break
    return took


def _shortest(simulator: DoorKeySimulator) -> int:
    """Searches all action sequences of a single instance breadth first, states seen before left out."""
    start = simulator.look()[1]
    queue, seen, row = deque([(start, 0)]), {start.tobytes()}, np.array([0])
    while queue:
        state, depth = queue.popleft()
        for action in range(NUM_ACTIONS - 1):
            simulator.set_states(row, state, np.array([0]))
            step = simulator.step(np.array([action]))
            if step.success[0]:
                simulator.set_states(row, start, np.array([0]))
                return depth + 1
            if step.snapshot.tobytes() not in seen:
                seen.add(step.snapshot.tobytes())
                queue.append((step.snapshot, depth + 1))
    raise AssertionError("no way to the goal")


@pytest.mark.parametrize("size", [5, 6, 8, 16])
def test_every_level_is_solved_in_as_many_steps_as_the_expert_says(size: int) -> None:
    simulator = DoorKeySimulator(size, 100, seed=size)
    promised = DoorKeyExpert(size).steps_to_goal(simulator.look()[1])
    np.testing.assert_array_equal(_play(simulator, 10 * size), promised)
    assert (promised > 0).all()


@pytest.mark.parametrize("size", [5, 6])
def test_no_other_play_is_shorter(size: int) -> None:
    for seed in range(4):
        simulator = DoorKeySimulator(size, 1, seed=seed)
        assert _shortest(simulator) == DoorKeyExpert(size).steps_to_goal(simulator.look()[1])[0]


def test_whatever_random_play_leaves_behind_is_solved() -> None:
    simulator = DoorKeySimulator(5, 400, max_steps=10_000, seed=1)
    expert, rng = DoorKeyExpert(5), np.random.default_rng(0)
    for step in range(120):  # stretches of both, so that doors are shut again and keys dropped on either side
        state = simulator.look()[1]
        random = rng.choice(NUM_ACTIONS, 400, p=(0.1, 0.1, 0.25, 0.15, 0.2, 0.2, 0.0))
        ended = simulator.step(random if step % 24 > 8 else expert.act(state)).success
        simulator.restart(np.flatnonzero(ended))
    state = simulator.look()[1]
    promised = expert.steps_to_goal(state)
    cells = state[:, :-POSE_SIZE].reshape(400, 25, 3)
    shut_again = (cells[:, :, 0] == DOOR) & (cells[:, :, 2] == 1)
    dropped = (cells[:, :, 0] == 5).any(axis=1) & ~((cells[:, :, 0] == DOOR) & (cells[:, :, 2] == LOCKED)).any(axis=1)
    assert shut_again.any(axis=1).sum() > 10
    assert dropped.sum() > 10
    np.testing.assert_array_equal(_play(simulator, 200), promised)


def test_kept_plans_play_as_fresh_ones() -> None:
    simulator = DoorKeySimulator(6, 32, seed=3)
    expert, rng = DoorKeyExpert(6), np.random.default_rng(1)
    for _ in range(60):
        state = simulator.look()[1]
        action = expert.act(state)
        np.testing.assert_array_equal(action, expert_actions(state))
        ended = simulator.step(np.where(rng.random(32) < 0.3, rng.integers(0, NUM_ACTIONS, 32), action)).success
        simulator.restart(np.flatnonzero(ended))


def test_on_the_goal_it_stays() -> None:
    simulator = DoorKeySimulator(5, 1)
    while not simulator.step(expert_actions(simulator.look()[1])).success[0]:
        pass
    assert expert_actions(simulator.look()[1])[0] == DONE


def test_states_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="6x6 grid"):
        DoorKeyExpert(6).act(DoorKeySimulator(5, 1).look()[1])
    with pytest.raises(ValueError, match="5 or more"):
        DoorKeyExpert(4)
