"""What becomes of every transition on its way from the collector into the buffer.

Each test drives ``collector → extend → score → sample → update`` through the public classes.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from counting import Pipeline, World, check_rows, collect, identity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import TDTerm, VLMTerm

GAMMA = 0.9
SETUPS = {
    "num_envs": st.integers(1, 5),
    "length": st.integers(1, 7),
    "clip_length": st.integers(2, 7),
    "n_steps": st.sampled_from([1, 3]),
    "max_length": st.integers(1, 20),
    "capacity": st.integers(35, 90),
    "delay": st.integers(0, 6),
}


def make(capacity: int, clip_length: int | None, n_steps: int, **kwargs: object) -> VLMReplayBuffer:
    terms = [TDTerm()] if clip_length is None else [VLMTerm(), TDTerm()]
    return VLMReplayBuffer(
        capacity, batch_size=16, terms=terms, lam=0.5, clip_length=clip_length, n_steps=n_steps, gamma=GAMMA, **kwargs
    )


def rows_collected(world: World, num_envs: int, steps: int) -> list[list[tuple[int, int, int]]]:
    """Returns who every environment's rows are, in the order of time."""
    streams = []
    for e in range(num_envs):
        stream: list[tuple[int, int, int]] = []
        k = 0
        while len(stream) < steps:
            stream += [(e, k, t) for t in range(world.length(e, k))]
            k += 1
        streams.append(stream[:steps])
    return streams


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**SETUPS)
def test_every_row_is_stored_once_with_its_own_clip_score_success_and_return(
    num_envs, length, clip_length, n_steps, max_length, capacity, delay
):
    world = World(max_length)
    blocks = 24
    buffer = make(capacity, clip_length, n_steps)
    Pipeline(buffer, world, num_envs=num_envs, length=length, blocks=blocks, delay=delay).run()
    there = check_rows(buffer, world, GAMMA)
    # What is there are the rows written last: round robin over blocks, n − 1 steps late.
    held_back = n_steps - 1
    streams = rows_collected(world, num_envs, length * blocks)
    order, first = [], 0
    for block in range(blocks):
        stop = max(0, (block + 1) * length - held_back)
        for stream in streams:
            order += stream[first:stop]
        first = stop
    assert there == set(order[-capacity:])


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**SETUPS)
def test_every_transition_is_in_exactly_one_clip_and_both_its_states_are_visible_there(
    num_envs, length, clip_length, n_steps, max_length, capacity, delay
):
    world = World(max_length)
    blocks = 24
    buffer = make(capacity, clip_length, n_steps)
    pipeline = Pipeline(buffer, world, num_envs=num_envs, length=length, blocks=blocks, delay=delay).run()
    buffer.end_streams()  # cuts what is still open
    pipeline.after_extend()
    shown: list[tuple[int, int, int]] = []
    for frames in pipeline.emitted:
        assert 2 <= len(frames) <= clip_length
        e, k, t = frames[0].tolist()
        assert frames.tolist() == [[e, k, t + i] for i in range(len(frames))]  # consecutive, of one episode
        assert t % (clip_length - 1) == 0
        shown += [(e, k, t + i) for i in range(len(frames) - 1)]
    collected = [row for stream in rows_collected(world, num_envs, length * blocks) for row in stream]
    assert sorted(shown) == sorted(collected)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_clip_ends_with_its_episode_and_shows_the_terminal_state(n_steps):
    world = World(max_length=9)
    buffer = make(400, 6, n_steps)
    pipeline = Pipeline(buffer, world, blocks=20).run()
    full_or_last = [
        len(frames) == 6 or frames[-1, 2] == world.length(*frames[-1, :2].tolist()) for frames in pipeline.emitted
    ]
    assert all(full_or_last)
    shown = {tuple(frame) for frames in pipeline.emitted for frame in frames.tolist()}
    finished = {tuple(frames[-1, :2].tolist()) for frames in pipeline.emitted}
    ended = {(e, k) for e, k in finished if (e, k, world.length(e, k)) in shown}
    assert len(ended) > 20


def test_short_clips_are_padded_by_repeating_their_last_frame():
    world = World(max_length=3)
    buffer = make(64, 8, 1)
    for block in collect(2, 4, world, 2):
        buffer.extend(block)
    clips = buffer.clips.batch(buffer.clips.take_completed())
    assert clips.snapshots.shape[1:] == (8, 4)
    for frames, length in zip(identity(clips), clips.lengths.tolist(), strict=True):
        assert (frames[length:] == frames[length - 1]).all()
        assert len({tuple(frame) for frame in frames[:length].tolist()}) == length


@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_outcome_of_an_episode_reaches_all_its_living_rows_when_its_last_row_is_written(n_steps):
    world = World(max_length=15)
    buffer = make(97, 5, n_steps)
    pipeline = Pipeline(buffer, world, num_envs=3, length=4, blocks=60)
    for _ in range(60):
        pipeline.run(1)
        rows, success = buffer[:]["observation"].tolist() if len(buffer) else [], buffer.columns["episode_success"]
        newest: dict[tuple[int, int], int] = {}
        for e, k, t in rows:
            newest[e, k] = max(t, newest.get((e, k), 0))
        for i, (e, k, _) in enumerate(rows):
            ended = newest[e, k] == world.length(e, k) - 1
            assert success[i].item() == (world.outcome(e, k) if ended else -1)


def test_a_buffer_without_clips_needs_no_snapshots_and_still_follows_episodes():
    world = World(max_length=8)
    buffer = make(60, None, 3)
    for block in collect(3, 4, world, 20):
        buffer.extend(block.exclude("snapshot", ("next", "snapshot")))
    check_rows(buffer, world, GAMMA)
    assert buffer.clips is None
    assert set(buffer.columns["episode_success"].tolist()) == {0, 1, -1}


def test_rows_of_a_single_environment_may_come_without_the_environment_dimension():
    world = World(max_length=8)
    buffer = make(60, 4, 1)
    for block in collect(1, 6, world, 9):
        buffer.extend(block[0])
    assert len(check_rows(buffer, world, GAMMA)) == 54


def test_the_caller_may_reuse_the_blocks_memory():
    world = World(max_length=8)
    buffer = make(120, 4, 3)
    for block in collect(2, 4, world, 12):
        buffer.extend(block)
        for leaf in block.values(True, True):
            leaf.zero_()
    check_rows(buffer, world, GAMMA)


def test_what_the_learner_does_not_need_is_dropped():
    buffer = make(60, 4, 3)
    for block in collect(2, 4, World(8), 3):
        buffer.extend(block)
    assert sorted(map(str, buffer.sample().keys(True, True))) == sorted(
        map(
            str,
            ["observation", "action", "index", "index_generation", "steps_to_next_obs"]
            + [("next", key) for key in ("observation", "reward", "done", "terminated")],
        )
    )


class TestNStepTargetsByHand:
    """γ = 0.9, n = 3, an episode of four steps with reward 1 at its end, and V = 10 in every state.

    The target of row t is R + γ^m · V · (1 − terminated), m = steps to the stored next state. At termination rows 1, 2
    and 3 reach the end: 0.9² = 0.81, 0.9, 1, and none bootstraps (leaving ``terminated`` of row t alone would give
    row 1 0.81 + 0.9³ · 10 = 8.1). Row 0 sees three zeros and bootstraps from state 3: 0.9³ · 10 = 7.29.
    At truncation the last state is still worth 10: row 1: 0.81 + 0.9³ · 10 = 8.1; row 2: 0.9 + 0.9² · 10 = 9; row 3:
    1 + 0.9 · 10 = 10.
    """

    @pytest.mark.parametrize(
        ("terminates", "targets"), [(True, [7.29, 0.81, 0.9, 1.0]), (False, [7.29, 8.1, 9.0, 10.0])]
    )
    def test_targets(self, terminates, targets):
        world = World(max_length=4)
        world.length = lambda e, k: 4 + 0 * e
        world.terminates = lambda e, k: (e >= 0) == terminates
        world.reward = lambda e, k, t: (t == 3) * 1.0
        buffer = make(64, 4, 3)
        for block in collect(2, 3, world, 6):
            buffer.extend(block)
        rows = buffer[:]
        bootstrap = 0.9 ** rows["steps_to_next_obs"] * 10 * ~rows["next", "terminated"].squeeze(-1)
        target = rows["next", "reward"].squeeze(-1) + bootstrap
        expected = torch.tensor(targets)[rows["observation"][:, 2]]
        assert len(rows) == 32
        torch.testing.assert_close(target, expected)


class TestRefusals:
    def test_rows_that_do_not_continue_the_last_ones(self):
        world = World(max_length=50)
        blocks = list(collect(3, 4, world, 3))
        buffer = make(60, 4, 1)
        buffer.extend(blocks[0])
        with pytest.raises(ValueError, match=r"environments \[0, 1, 2\] do not continue.*end_streams"):
            buffer.extend(blocks[2])
        buffer.extend(blocks[1])  # nothing had changed
        check_rows(buffer, world, GAMMA)

    def test_one_step_of_many_environments_mistaken_for_many_steps_of_one(self):
        block = next(collect(6, 4, World(50), 1))
        with pytest.raises(ValueError, match="do not continue"):
            make(60, 4, 1).extend(block[:, 0])

    def test_another_number_of_environments(self):
        buffer = make(60, 4, 1)
        buffer.extend(next(collect(3, 4, World(50), 1)))
        with pytest.raises(ValueError, match="3 environments as before, got 2"):
            buffer.extend(next(collect(2, 4, World(50), 1)))

    def test_a_block_larger_than_the_buffer(self):
        with pytest.raises(ValueError, match="64 rows does not fit into a buffer of capacity=60"):
            make(60, 4, 1).extend(next(collect(8, 8, World(50), 1)))

    def test_rows_without_snapshots(self):
        block = next(collect(3, 4, World(50), 1))
        with pytest.raises(ValueError, match="clips need 'snapshot'"):
            make(60, 4, 1).extend(block.exclude("snapshot"))

    def test_rows_without_a_key_that_is_kept(self):
        block = next(collect(3, 4, World(50), 1))
        with pytest.raises(ValueError, match=r"the rows lack \['action'\]"):
            make(60, 4, 1).extend(block.exclude("action"))

    @pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
    def test_a_block_without_rows(self, shape):
        block = next(collect(3, 4, World(50), 1))
        with pytest.raises(ValueError, match=r"block of shape \[\d, \d\] holds no rows"):
            make(60, 4, 1).extend(block[: shape[0], : shape[1]])

    def test_more_rows_held_back_than_the_buffer_holds(self):
        block = next(collect(5, 2, World(50), 1))
        with pytest.raises(ValueError, match=r"n_steps=13 rows of each of 5 environments does not fit .* capacity=60"):
            make(60, 4, 13).extend(block)

    @pytest.mark.parametrize("n_steps", [1, 3])
    @pytest.mark.parametrize("which", ["first", "later"])
    @pytest.mark.parametrize(
        ("key", "change", "message"),
        [
            ("done", lambda leaf: leaf.float(), r"next.done: expected bool\[1\] in each row, got float32\[1\]"),
            ("done", lambda leaf: leaf.expand(3, 4, 2), r"next.done: expected bool\[1\] .* got bool\[2\]"),
            ("success", lambda leaf: leaf.expand(3, 4, 2), r"next.success: expected .* got bool\[2\]"),
            ("success", lambda leaf: leaf.float(), r"next.success: expected .* got float32\[1\]"),
            ("terminated", lambda leaf: leaf.float(), r"next.terminated: expected bool.* got float32\[1\]"),
            ("reward", lambda leaf: leaf.expand(3, 4, 2), r"next.reward: expected .* got float32\[2\]"),
            ("reward", lambda leaf: leaf.long(), r"next.reward: expected .* got int64\[1\]"),
            ("reward", lambda leaf: leaf / 0, r"next.reward: 12 of 12 values are not finite"),
            ("snapshot", lambda leaf: leaf.double(), r"snapshot: expected int32\[4\] .* got float64\[4\]"),
            ("snapshot", lambda leaf: leaf[..., :3], r"snapshot: expected int32\[4\] .* got int32\[3\]"),
            ("observation", lambda leaf: leaf[..., :2], r"observation: expected int64\[3\] .* got int64\[2\]"),
            ("observation", lambda leaf: leaf.int(), r"observation: expected int64\[3\] .* got int32\[3\]"),
        ],
    )
    def test_keys_of_a_wrong_shape_or_dtype_and_rewards_that_are_not_finite(self, n_steps, which, key, change, message):
        self.refuse(n_steps, which, message, lambda block: block.set(("next", key), change(block["next", key]).clone()))

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("key", ["observation", ("next", "observation")])
    def test_stored_values_that_are_not_finite(self, key, bad):
        blocks = list(collect(3, 4, World(50), 2))
        for block in blocks:
            for place in ("observation", ("next", "observation")):
                block[place] = block[place].float()
        buffer = make(60, 4, 1)
        buffer.extend(blocks[0])
        wrong = blocks[1].clone()
        wrong[key][1, 2, :2] = bad
        name = key if isinstance(key, str) else ".".join(key)
        with pytest.raises(ValueError, match=f"^{name}: 2 of 36 values are not finite$"):
            buffer.extend(wrong)
        buffer.extend(blocks[1])  # nothing had changed
        assert len(buffer) == 24

    def test_values_that_are_not_finite_where_nothing_learns_from_them(self):
        block = next(collect(3, 4, World(50), 1))
        for place in ("snapshot", ("next", "snapshot")):
            block[place] = block[place].float().index_fill(-1, torch.tensor([0]), torch.nan)
        buffer = make(60, 4, 1)
        buffer.extend(block)  # frames are drawn from snapshots, which are kept with the clips and not with the rows
        assert len(buffer) == 12

    @pytest.mark.parametrize("n_steps", [1, 3])
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda block: block.set("action", block["action"].float()), r"action: expected int64\[\] .* float32\[\]"),
            (
                lambda block: block.set("action", block["action"][..., None]),
                r"action: expected int64\[\] .* int64\[1\]",
            ),
            (lambda block: block.set("snapshot", block["snapshot"].long()), r"snapshot: expected int32\[4\] .* int64"),
            (lambda block: block["next"].pop("success"), "'success'.* had and these lack"),
            (lambda block: block.pop("action"), r"the rows lack \['action'\]"),
            (lambda block: block.pop("next"), r"the rows lack .*'observation'.*'done'"),
        ],
    )
    def test_keys_that_change_or_vanish(self, n_steps, change, message):
        self.refuse(n_steps, "later", message, change)

    @pytest.mark.parametrize("which", ["first", "later"])
    def test_gaps_within_a_block(self, which):
        def change(block):
            block["observation"][1, 1:] += 100

        self.refuse(1, which, r"environments \[1\] do not continue", change)

    @pytest.mark.parametrize("n_steps", [1, 8])  # with rows in the storage; with all rows still held back
    def test_keys_that_changed_while_the_run_was_saved(self, n_steps):
        first, second = collect(3, 4, World(50), 2)
        buffer, restored = make(60, 4, n_steps), make(60, 4, n_steps)
        buffer.extend(first)
        restored.load_state_dict(buffer.state_dict())
        for key in ("snapshot", "action", ("next", "reward")):
            wrong = second.clone()
            wrong[key] = wrong[key].short()
            with pytest.raises(ValueError, match="expected .* got int16"):
                restored.extend(wrong)
        restored.extend(second)
        restored.end_streams()
        assert len(restored) == 24

    @staticmethod
    def refuse(n_steps, which, message, change):
        """Asserts that a changed block is refused, that this changes nothing, and that the right one is still taken."""
        world = World(50)
        buffer = make(30, 4, n_steps)  # the third block wraps
        blocks = list(collect(3, 4, world, 4))
        at = 0 if which == "first" else 3
        for block in blocks[:at]:
            buffer.extend(block)
        wrong = blocks[at].clone()
        change(wrong)
        before = copy.deepcopy(buffer.state_dict())
        with pytest.raises(ValueError, match=message):
            buffer.extend(wrong)
        torch.testing.assert_close(leaves(buffer.state_dict()), leaves(before), rtol=0, atol=0, equal_nan=True)
        for block in blocks[at:]:
            buffer.extend(block)
        check_rows(buffer, world, GAMMA)


def leaves(state: object) -> list[torch.Tensor]:
    """Returns the tensors in a nest of dicts and lists, everything else as the bytes of its repr."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=str) for leaf in leaves(state[key])]
    if isinstance(state, list | tuple):
        return [leaf for item in state for leaf in leaves(item)]
    return [torch.tensor(list(repr(state).encode()))]


class TestEndStreams:
    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_rows_held_back_are_stored_as_truncated_ones_and_bootstrap(self, n_steps):
        world = World(max_length=50)
        world.length = lambda e, k: 50 + 0 * e
        buffer = make(60, 4, n_steps)
        for block in collect(2, 4, world, 2):
            buffer.extend(block)
        slots = buffer.end_streams()
        assert len(slots) == (0 if n_steps == 1 else 4)
        rows = buffer[:]
        assert len(rows) == 16
        assert not rows["next", "terminated"].any()
        ends = rows["next", "observation"][:, 2]
        assert ends.max() == 8
        if n_steps > 1:
            last = rows["observation"][:, 2] >= 6
            assert (ends[last] == 8).all()
            assert rows["next", "done"][last].all()
            assert (rows["steps_to_next_obs"][last] == 8 - rows["observation"][last, 2]).all()

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_other_episodes_may_follow(self, n_steps):
        world = World(max_length=50)
        buffer = make(60, 4, n_steps)
        for _ in range(2):
            for block in collect(2, 4, world, 3):  # begins with fresh episodes each time
                buffer.extend(block)
            buffer.end_streams()
        ids = buffer.clips.take_completed()
        assert buffer.clips.batch(ids).lengths.sum() - len(ids) == 2 * 2 * 12
        assert len(buffer) == 48

    def test_does_nothing_before_the_first_block(self):
        assert len(make(60, 4, 3).end_streams()) == 0


@pytest.mark.slow
def test_overwritten_clips_are_forgotten_and_their_memory_is_used_again():
    world = World(max_length=20)
    buffer = make(100, 5, 3)
    pipeline = Pipeline(buffer, world, num_envs=4, length=5, blocks=300, delay=2)
    sizes = []
    for _ in range(30):
        pipeline.run(10)
        sizes.append((len(buffer.clips), buffer.clips.nbytes))
    assert max(kept for kept, _ in sizes) <= 100 + 4
    assert len(set(sizes[10:])) > 1  # it breathes,
    assert max(size for _, size in sizes[20:]) <= 1.5 * max(size for _, size in sizes[:20])  # but does not grow
    assert buffer.clips.emitted > 1000
    alive = {clip_id for clip_id in range(buffer.clips.next_id) if buffer.clips.contains(clip_id)}
    assert alive >= set(buffer.columns["clip_id"].tolist())


def test_numbers_of_clips_add_up():
    buffer = make(60, 5, 3)
    pipeline = Pipeline(buffer, World(12), blocks=60, delay=30).run()
    stats = buffer.stats()
    assert stats["clips_emitted"] == len(pipeline.emitted)
    open_clips = stats["clips"] - len(buffer.clips.table()["clip_id"])
    assert 0 <= open_clips <= 2 * 4  # at most one per environment, and one closed but waiting for slots
    assert stats["clips_expired"] == stats["clips_emitted"] - len(buffer.clips.table()["clip_id"])  # none was in time
    assert np.isnan(buffer.clips.table()["score"]).all()
