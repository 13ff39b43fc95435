"""Information that comes late reaches the rows it is about, or nobody.

Every test drives ``collector → extend → score → sample → update``, with the answers held back for a while.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting import Pipeline, World, check_rows, collect
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import AgeTerm, PriorityTerm, TDTerm, VLMTerm, compose


def make(capacity: int = 70, **kwargs) -> VLMReplayBuffer:
    kwargs = {"terms": [VLMTerm(), TDTerm()], "lam": 0.5, "clip_length": 4, "n_steps": 3, "gamma": 0.9} | kwargs
    return VLMReplayBuffer(capacity, batch_size=min(32, capacity), **kwargs)


def arrays(buffer: VLMReplayBuffer) -> dict[str, np.ndarray]:
    return {name: column.numpy() for name, column in buffer.columns.items()}


@pytest.mark.slow
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    delay=st.integers(0, 12),
    capacity=st.integers(40, 120),
    n_steps=st.sampled_from([1, 3]),
    clip_length=st.integers(2, 9),
)
def test_late_scores_and_errors_never_reach_another_record(delay, capacity, n_steps, clip_length):
    world = World(11)
    # |δ| says whose it is, and is no value that a new row could start with.
    buffer = make(capacity, n_steps=n_steps, clip_length=clip_length)
    who = lambda e, k, t: 2.0 + e + 4 * k + 4096 * t  # noqa: E731
    pipeline = Pipeline(buffer, world, num_envs=4, length=5, blocks=40, delay=delay, abs_td_error=who)
    for _ in range(8):
        pipeline.run(5)
        check_rows(buffer, world, 0.9)  # scores and outcomes belong to their rows
        known = buffer.state_dict()["known"]["td_error"].numpy()
        rows, td_error = buffer[:]["observation"].numpy(), buffer.columns["td_error"][: len(buffer)].numpy()
        assert (td_error[known] == who(*rows[known].T)).all()
        np.testing.assert_array_equal(
            buffer.sampler.priorities(len(buffer)),
            compose(buffer.terms, arrays(buffer), np.arange(len(buffer))),
        )
    stats = buffer.stats()
    if delay > 10 and capacity < 60:
        assert stats["stale/td_error"] > 0
    if delay == 0:
        assert stats["stale/td_error"] == 0


def test_every_score_is_either_written_or_counted_as_stale():
    buffer = make(70, clip_length=4)
    results = []
    write_scores = buffer.write_scores
    buffer.write_scores = lambda *args, **kwargs: results.append(write_scores(*args, **kwargs))
    pipeline = Pipeline(buffer, World(11), num_envs=4, length=5, blocks=60, delay=3).run()
    written, stale = np.sum(results, axis=0)
    assert written > 0
    assert stale > 0
    waiting = sum(len(ids) for _, ids, _ in pipeline._clips)
    assert written + stale + waiting == len(pipeline.emitted)


def test_a_clip_is_scored_as_long_as_one_of_its_rows_lives():
    world = World(50)
    world.length = lambda e, k: 50 + 0 * e
    buffer = make(20, clip_length=9, n_steps=1, terms=[VLMTerm()])
    blocks = collect(1, 4, world, 8)
    for _ in range(2):
        buffer.extend(next(blocks)[0])
    (clip,) = buffer.clips.take_completed()
    for _ in range(4):
        buffer.extend(next(blocks)[0])
    # 24 rows came, 20 fit: half of the clip's eight rows are gone.
    assert buffer.clips.contains(clip)
    assert buffer.write_scores([clip], [0.9]) == (1, 0)
    assert buffer.stats()["scored_rows"] == 4
    assert buffer.sampler.positives == 4
    buffer.extend(next(blocks)[0])
    assert not buffer.clips.contains(clip)
    assert buffer.write_scores([clip], [0.9]) == (0, 1)
    assert buffer.stats()["scored_rows"] == 0
    assert buffer.sampler.positives == 0


def test_a_clip_can_be_scored_anew():
    buffer = make()
    Pipeline(buffer, World(11), blocks=20).run()
    clip = int(buffer.clips.table()["clip_id"][-1])
    rows = buffer.clips.rows_of([clip]).slots
    for score in (1.0, 0.2):
        assert buffer.write_scores([clip], [score]) == (1, 0)
        assert (buffer.columns["score"][rows] == np.float32(score)).all()
        assert ((buffer.sampler.priorities(70)[rows] > 0) == (score > 0.5)).all()
    assert buffer.clips.table()["score"][-1] == np.float32(0.2)


@pytest.mark.parametrize("to_ids", [torch.tensor, np.array, tuple])
def test_clip_ids_may_come_as_any_kind_of_vector(to_ids):
    buffer = make()
    Pipeline(buffer, World(11), blocks=20).run()
    ids = buffer.clips.table()["clip_id"].tolist()
    assert buffer.write_scores(to_ids(ids), np.full(len(ids), 0.75)) == (len(ids), 0)
    assert (buffer.clips.table()["score"] == 0.75).all()


@pytest.fixture
def running() -> VLMReplayBuffer:
    buffer = make()
    Pipeline(buffer, World(11), blocks=20).run()
    return buffer


def fingerprint(buffer: VLMReplayBuffer) -> list:
    columns = [array.copy() for _, array in sorted(arrays(buffer).items())]
    return [*columns, buffer.sampler.priorities(buffer.capacity), np.array(sorted(buffer.stats().items()), dtype=str)]


class TestRefusals:
    """A refused write names its source, and changes nothing."""

    @pytest.fixture(autouse=True)
    def _nothing_changes(self, running):
        before = fingerprint(running)
        yield
        for old, new in zip(before, fingerprint(running), strict=True):
            np.testing.assert_array_equal(old, new)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_scores_that_are_not_finite(self, running, bad):
        ids = running.clips.table()["clip_id"][-2:].tolist()
        with pytest.raises(ValueError, match=r"my scorer: 1 of 2 values for 'score' are not finite"):
            running.write_scores(ids, [0.5, bad], source="my scorer")

    @pytest.mark.parametrize("bad", [-0.01, 1.01])
    def test_scores_outside_0_and_1(self, running, bad):
        ids = running.clips.table()["clip_id"][-2:].tolist()
        with pytest.raises(ValueError, match=rf"my scorer: value {bad} for 'score' is outside \[0.0, 1.0\]"):
            running.write_scores(ids, [0.5, bad], source="my scorer")

    def test_another_number_of_scores_than_clips(self, running):
        ids = running.clips.table()["clip_id"][-2:].tolist()
        with pytest.raises(ValueError, match=r"my scorer: expected 2 values for 'score', got shape \[2, 1\]"):
            running.write_scores(ids, [[0.5], [0.6]], source="my scorer")

    @pytest.mark.parametrize("clip_id", [-1, 10**6])
    def test_clips_that_never_were(self, running, clip_id):
        with pytest.raises(ValueError, match="my scorer.*never handed out"):
            running.write_scores([clip_id], [0.5], source="my scorer")

    @pytest.mark.parametrize("n_steps", [1, 3])
    def test_clips_that_are_still_open(self, n_steps):
        buffer = make(n_steps=n_steps)
        buffer.extend(next(collect(2, 5, World(50), 1)))
        done = buffer.clips.take_completed()
        waiting = [clip for clip in range(buffer.clips.next_id) if clip not in done]
        assert waiting
        before = fingerprint(buffer)
        for clip in waiting:
            with pytest.raises(ValueError, match=rf"my scorer: clips \[{clip}\] were never handed out.*not complete"):
                buffer.write_scores([*done, clip], [0.9] * (len(done) + 1), source="my scorer")
        for old, new in zip(before, fingerprint(buffer), strict=True):
            np.testing.assert_array_equal(old, new)

    @pytest.mark.parametrize("to_ids", [torch.tensor, np.array, list])
    def test_clip_ids_that_are_no_integers(self, running, to_ids):
        with pytest.raises(ValueError, match="my scorer: clip_ids must be integers, got float"):
            running.write_scores(to_ids([1.0, 2.0]), [0.5, 0.5], source="my scorer")

    def test_slots_and_generations_that_are_no_integers(self, running):
        with pytest.raises(ValueError, match="me: index must be integers, got float64"):
            running.write_column("td_error", [0.5], [1], [1.0], source="me")
        with pytest.raises(ValueError, match="me: generation must be integers, got <U1"):
            running.write_column("td_error", [0], ["1"], [1.0], source="me")

    @pytest.mark.parametrize("bad", ["1.0", None, 1j])
    def test_values_that_are_no_numbers(self, running, bad):
        with pytest.raises(ValueError, match="me: values for 'td_error' must be numbers, got"):
            running.write_column("td_error", [0], [1], [bad], source="me")

    def test_half_a_success(self, running):
        with pytest.raises(ValueError, match="me: value 0.5 for 'episode_success' is not a whole number"):
            running.write_column("episode_success", [0, 1], [1, 1], [1.0, 0.5], source="me")

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
    def test_impossible_errors(self, running, bad):
        batch = TensorDict({"index": torch.arange(3), "index_generation": torch.zeros(3, dtype=torch.int64)}, [3])
        with pytest.raises(ValueError, match="update_td_error: .*'td_error'"):
            running.update_td_error(batch, torch.tensor([0.1, bad, 0.2]))

    @pytest.mark.parametrize("name", ["clip_id", "env_step", "scored", "no_such_column"])
    def test_columns_that_are_fixed_or_unknown(self, running, name):
        with pytest.raises(ValueError, match=rf"me: column '{name}' cannot be written late; those that can: \['score'"):
            running.write_column(name, [0], [0], [1], source="me")

    def test_vectors_of_different_lengths(self, running):
        with pytest.raises(ValueError, match=r"me: index and generation must be two vectors of one length"):
            running.write_column("td_error", [0, 1], [0], [1.0, 1.0], source="me")

    def test_a_bare_priority(self, running):
        with pytest.raises(TypeError, match="priorities are composed from columns"):
            running.update_priority(torch.tensor([0]), torch.tensor([1.0]))


class TestStaleness:
    def test_slots_overwritten_since_are_dropped_and_counted(self, running):
        index = np.arange(70)
        generation = running.writer.generations_of(torch.arange(70)).numpy()
        generation[::2] -= 1
        assert running.write_column("td_error", index, generation, np.full(70, 5.0), source="me") == (35, 35)
        assert (running.columns["td_error"][1::2] == 5).all()
        assert not (running.columns["td_error"][::2] == 5).any()

    def test_generation_minus_1_is_never_alive(self):
        buffer = make()
        buffer.extend(next(collect(2, 5, World(11), 1)))
        never_written = 69
        assert buffer.writer.generations_of(torch.tensor([never_written])).item() == -1
        assert buffer.write_column("td_error", [never_written, -1], [-1, -1], [1.0, 1.0], source="me") == (0, 2)
        assert buffer.sampler.priorities(70)[never_written] == 0

    @pytest.mark.parametrize("slot", [-1, -70, 70, 10**9])
    def test_slots_outside_the_buffer_are_never_alive(self, running, slot):
        before = running.columns["td_error"].clone()
        generation = int(running.writer.generations_of(torch.tensor([slot % 70])).item())
        assert running.write_column("td_error", [slot], [generation], [9.0], source="me") == (0, 1)
        assert torch.equal(before, running.columns["td_error"])

    def test_of_a_slot_that_occurs_twice_the_last_value_counts(self, running):
        generation = int(running.writer.generations_of(torch.tensor([3])).item())
        running.write_column("td_error", [3, 3, 3], [generation] * 3, [1.0, 7.0, 2.0], source="me")
        assert running.columns["td_error"][3] == 2.0
        running.write_scores([int(running.columns["clip_id"][3])], [1.0])
        assert running.sampler.priorities(70)[3] == 2.0

    def test_generations_are_those_of_the_writer(self, running):
        batch = running.sample()
        assert torch.equal(batch["index_generation"], running.writer.generations_of(batch["index"]))

    def test_emptying_the_buffer_makes_everything_stale(self, running):
        batch = running.sample()
        clip = int(running.clips.table()["clip_id"][-1])
        running.empty()
        assert len(running) == 0
        assert running.sampler.positives == 0
        for block in collect(4, 5, World(11), 4):
            running.extend(block)
        assert running.update_td_error(batch, torch.ones(32)) == (0, 32)
        assert running.write_scores([clip], [1.0]) == (0, 1)
        check_rows(running, World(11), 0.9)


class TestTDErrorOfNewRows:
    def test_is_the_largest_that_any_living_row_has(self):
        world = World(50)
        buffer = make(40, terms=[TDTerm()], clip_length=None, n_steps=1)
        blocks = collect(2, 5, world, 30)
        first = buffer.extend(next(blocks))
        assert (buffer.columns["td_error"][first] == 1.0).all()  # none is known
        assert (buffer.sampler.priorities(40)[first] == 1.0).all()
        batch = buffer.sample()
        largest = 0.5 + batch["index"].max().item()
        buffer.update_td_error(batch, 0.5 + batch["index"].double())
        for _ in range(3):
            assert (buffer.columns["td_error"][buffer.extend(next(blocks))] == largest).all()
        # The row that had it is overwritten by this block, and what new rows were given does not count as known.
        slots = buffer.extend(next(blocks))
        assert first.tolist() == slots.tolist()
        assert (buffer.columns["td_error"][slots] == 1.0).all()

    def test_falls_when_the_largest_is_measured_again(self):
        buffer = make(40, terms=[TDTerm()], clip_length=None, n_steps=1)
        blocks = collect(2, 5, World(50), 30)
        buffer.extend(next(blocks))
        for largest in (9.0, 0.25):
            seen: set[int] = set()
            while len(seen) < len(buffer):
                batch = buffer.sample()
                seen |= set(batch["index"].tolist())
                buffer.update_td_error(batch, torch.full((32,), largest))
            assert (buffer.columns["td_error"][buffer.extend(next(blocks))] == largest).all()


def test_torchrls_own_name_for_the_update_goes_the_same_way(running):
    running.update_tensordict_priority(running.sample().set("td_error", torch.full((32, 1), 3.5)))
    assert (running.columns["td_error"] == 3.5).sum() > 10
    assert running.stats()["written/td_error"] == 21 * 32


def test_writes_from_an_accelerators_dtypes_are_taken(running):
    batch = running.sample()
    assert running.update_td_error(batch, torch.full((32,), 0.5, dtype=torch.bfloat16, requires_grad=True)) == (32, 0)
    clip = int(running.clips.table()["clip_id"][-1])
    assert running.write_scores([clip], torch.tensor([0.75], dtype=torch.bfloat16)) == (1, 0)
    assert running.clips.table()["score"][-1] == 0.75


class Novelty(PriorityTerm):
    """A scheme of somebody else's: one class, one column."""

    name = "novelty"
    column = "novelty"
    initial = 0.25

    def log_priority(self, values):
        return np.log(values)


def test_a_new_priority_scheme_is_one_term_with_a_column_of_its_own():
    buffer = make(50, terms=[Novelty()], clip_length=None)
    for block in collect(2, 5, World(11), 8):
        buffer.extend(block)
    assert (buffer.sampler.priorities(50) == 0.25).all()
    batch = buffer.sample()
    buffer.write_column("novelty", batch["index"], batch["index_generation"], np.full(32, 8.0), source="counter")
    assert np.allclose(buffer.sampler.priorities(50)[batch["index"].numpy()], 8.0)
    assert buffer.stats()["written/novelty"] == 32


def test_a_value_of_which_a_term_makes_no_priority_is_refused_with_no_warning_and_changes_nothing(recwarn):
    buffer = make(50, terms=[Novelty()], clip_length=None)
    for block in collect(2, 5, World(11), 8):
        buffer.extend(block)
    batch = buffer.sample()
    before = fingerprint(buffer)
    with pytest.raises(ValueError, match="counter: priority term 'novelty' gave a priority that is not finite"):
        buffer.write_column("novelty", batch["index"], batch["index_generation"], np.full(32, -1.0), source="counter")
    for old, new in zip(before, fingerprint(buffer), strict=True):
        np.testing.assert_array_equal(old, new)
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


class TestFreshness:
    def test_priorities_fall_with_age(self):
        buffer = make(60, terms=[AgeTerm(20.0)], clip_length=None, lam=1.0)
        for block in collect(4, 5, World(11), 20):
            buffer.extend(block)
        age = buffer.env_steps - buffer.columns["env_step"].numpy()
        p = buffer.sampler.priorities(60)
        np.testing.assert_allclose(p / p.max(), np.exp(-age / 20), rtol=1e-12)

    def test_moving_the_origin_before_it_overflows_changes_no_distribution(self):
        world = World(11)
        buffer = make(60, terms=[AgeTerm(0.5), TDTerm()], clip_length=None, lam=1.0)
        origins = set()
        for block in collect(2, 5, world, 60):  # 600 env steps are 1200 τ: e^1200 would overflow
            buffer.extend(block)
            origins.add(buffer.terms[0].origin)
            if not len(buffer):
                continue
            age = buffer.env_steps - buffer.columns["env_step"][: len(buffer)].numpy()
            p = buffer.sampler.priorities(len(buffer))
            np.testing.assert_allclose(p / p.max(), np.exp(-age / 0.5), rtol=1e-9)
        assert len(origins) > 3
