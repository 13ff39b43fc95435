"""Rows of episodes are found where brute force finds them: streams, overwriting, ends out of turn, resume."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrb.replay.episodes import EpisodeIndex


class Ring:
    """Writes rows as the buffer does, and remembers of each slot which row of which episode lies in it.

    Args:
        capacity: slots.
        seed: of lengths and ends.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity, self.rng = capacity, np.random.default_rng(seed)
        self.index = EpisodeIndex(capacity)
        self.slots: list[tuple[int, int] | None] = [None] * capacity  # episode, step
        self.cursor = self.episodes = 0
        self.running: list[tuple[int, int]] = []

    def write(self, num_envs: int, length: int, end_chance: float) -> None:
        if len(self.running) != num_envs:
            self.index.end()
            self.start(num_envs)
        done = self.rng.random((num_envs, length)) < end_chance
        slots = (self.cursor + np.arange(done.size).reshape(done.shape)) % self.capacity
        for env in range(num_envs):
            for step in range(length):
                self.slots[slots[env, step]] = self.running[env]
                episode, position = self.running[env]
                self.running[env] = (episode, position + 1)
                if done[env, step]:
                    self.running[env] = (self.episodes, 0)
                    self.episodes += 1
        self.cursor = (self.cursor + done.size) % self.capacity
        self.index.write(slots, done)

    def start(self, num_envs: int) -> None:
        self.running = [(self.episodes + env, 0) for env in range(num_envs)]
        self.episodes += num_envs

    def end(self) -> None:
        self.index.end()
        self.start(len(self.running))

    def check(self) -> None:
        """Asserts that every row's episode is what lies in the slots."""
        slots = np.array([slot for slot, row in enumerate(self.slots) if row is not None])
        assert self.index.size == len(slots)
        found = self.index.of(slots)
        for slot, env, time, first, last in zip(slots.tolist(), *(part.tolist() for part in found), strict=True):
            episode, step = self.slots[slot]
            steps = sorted(row[1] for row in self.slots if row is not None and row[0] == episode)
            assert (time - step + steps[0], time - step + steps[-1]) == (first, last)
            assert steps == list(range(steps[0], steps[-1] + 1))
            times = np.arange(first, last + 1)
            rows = [self.slots[at] for at in self.index.slots(np.full(len(times), env), times)]
            assert rows == [(episode, other) for other in steps]


BLOCK = st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.5, 1.0]))


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 40), st.integers(1, 5), st.lists(BLOCK, min_size=1, max_size=25), st.integers(0, 9))
def test_episodes_are_those_in_the_slots(
    capacity: int, num_envs: int, blocks: list[tuple[int, float]], seed: int
) -> None:
    ring = Ring(capacity, seed)
    for length, end_chance in blocks:
        ring.write(num_envs, max(1, min(length, capacity // num_envs)), end_chance)
        ring.check()


@pytest.mark.parametrize("seed", range(5))
def test_streams_may_be_ended_and_change_in_number(seed: int) -> None:
    ring = Ring(29, seed)
    for num_envs in (3, 1, 5, 5, 2):
        for length in (1, 4, 2, 5):
            ring.write(num_envs, length, 0.1)
            ring.check()
        ring.end()
        ring.check()


def test_one_block_may_fill_the_buffer_again_and_again() -> None:
    ring = Ring(12)
    for _ in range(4):
        ring.write(3, 4, 0.2)
        ring.check()


@pytest.mark.parametrize("rows", [8, 40])
def test_a_restored_index_goes_on_alike(rows: int) -> None:
    one = Ring(23)
    while one.index.written < rows:
        one.write(4, 2, 0.2)
    other = copy.copy(one)
    other.index, other.rng = EpisodeIndex(23), copy.deepcopy(one.rng)
    other.slots, other.running = list(one.slots), list(one.running)
    state = one.index.state_dict()
    for _ in range(9):
        one.write(4, 2, 0.2)  # what was saved must be a copy
    other.index.load_state_dict(state)
    for _ in range(9):
        other.check()
        other.write(4, 2, 0.2)
    assert other.slots == one.slots
    assert (other.index.of(np.arange(23))[3] == one.index.of(np.arange(23))[3]).all()


def test_it_forgets_everything() -> None:
    ring = Ring(10)
    ring.write(2, 4, 0.3)
    ring.index.clear()
    fresh = Ring(10)
    fresh.index = ring.index
    fresh.write(3, 2, 0.3)
    fresh.check()
