"""The contract of `MixtureSampler`, line by line (see its docstring), on buffers that a collector filled and wrapped.

Scores arrive late and |δ| comes back from samples: priorities are what the pipeline made of them, not written by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting import Pipeline, World, collect
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy import stats

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.sampler import MixtureSampler
from vlmrb.replay.terms import AgeTerm, TDTerm, VLMTerm

TINY = 1e-7  # p-values below this fail a test: once in ten million runs by chance
# Whole pipelines are the examples: few of them, and none is worth shrinking.
slow_data = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def filled(
    terms, *, lam=0.5, capacity=83, seed=0, blocks=30, score=None, abs_td_error=None, **kwargs
) -> VLMReplayBuffer:
    """Returns a wrapped buffer of 3-step returns from four interleaved environments, with one clip per row or two."""
    buffer = VLMReplayBuffer(
        capacity, batch_size=32, terms=terms, lam=lam, clip_length=3, n_steps=3, gamma=0.9, seed=seed, **kwargs
    )
    Pipeline(
        buffer, World(7), num_envs=4, length=5, blocks=blocks, delay=2, score=score, abs_td_error=abs_td_error
    ).run()
    assert buffer.write_count > 2 * capacity
    return buffer


def draw(buffer: VLMReplayBuffer, batches: int, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns how often each slot was drawn by either part, and the numbers of prioritised draws."""
    prioritized, uniform = (np.zeros(len(buffer), np.int64) for _ in range(2))
    counts = []
    for _ in range(batches):
        index = buffer.sample(batch_size)["index"].numpy()
        count = buffer.sampler.last_prioritized
        np.add.at(prioritized, index[:count], 1)
        np.add.at(uniform, index[count:], 1)
        counts.append(count)
    return prioritized, uniform, np.array(counts)


def priorities_from_columns(buffer: VLMReplayBuffer, alpha: float, threshold: float | None) -> np.ndarray:
    """Composes the priorities by the paper's formula from the columns, written down anew."""
    columns = buffer.columns[: len(buffer)]
    score, td_error = columns["score"].double().numpy(), columns["td_error"].numpy()
    p_vlm = np.where(np.isnan(score), 0.0, score if threshold is None else score > threshold)
    return p_vlm * td_error**alpha


@slow_data
@given(
    lam=st.floats(0.05, 0.95),
    alpha=st.sampled_from([0.3, 0.6, 1.0, 2.0]),
    threshold=st.sampled_from([None, 0.25, 0.5]),
    capacity=st.integers(61, 140),
    seed=st.integers(0, 2**31),
)
def test_prioritised_draws_follow_p_and_uniform_draws_the_rows_and_their_number_is_lam_b(
    lam, alpha, threshold, capacity, seed
):
    rng = np.random.default_rng(seed)
    scale = rng.gamma(0.5, size=(4, 200, 8)) + 1e-3
    buffer = filled(
        [VLMTerm(threshold), TDTerm(alpha)],
        lam=lam,
        capacity=capacity,
        seed=seed,
        abs_td_error=lambda e, k, t: scale[e, k, t],
    )
    p = priorities_from_columns(buffer, alpha, threshold)
    np.testing.assert_allclose(buffer.sampler.priorities(len(buffer)), p, rtol=1e-12)
    batch_size = 257
    prioritized, uniform, counts = draw(buffer, 160, batch_size)
    assert set(counts) <= {int(lam * batch_size), int(lam * batch_size) + 1}
    spread = 6 * np.sqrt(0.25 * len(counts))
    assert abs(counts.sum() - lam * batch_size * len(counts)) <= spread  # unbiased rounding
    assert not prioritized[p == 0].any()
    share = p[p > 0] / p.sum()
    merged = _merge(prioritized[p > 0], share * prioritized.sum())
    assert stats.chisquare(*merged).pvalue > TINY
    assert stats.chisquare(uniform).pvalue > TINY


def _merge(observed: np.ndarray, expected: np.ndarray, least: float = 8.0) -> tuple[np.ndarray, np.ndarray]:
    """Merges the cells of smallest expectation until each expects ``least`` draws, as χ² needs."""
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    starts, total = [0], 0.0
    for i, value in enumerate(expected):
        if total >= least:
            starts.append(i)
            total = 0.0
        total += value
    if total < least and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)


def test_lam_0_is_uniform_replay():
    buffer = filled([VLMTerm(), TDTerm()], lam=0.0)
    prioritized, uniform, _ = draw(buffer, 300, 256)
    assert not prioritized.any()
    assert stats.chisquare(uniform).pvalue > TINY
    assert buffer.sampler.fallbacks == 0  # not a fall-back: it is what was asked for


def test_equal_priorities_are_uniform_replay():
    buffer = filled([VLMTerm(0.5, unscored=1.0)], lam=1.0, score=lambda e, k, c: np.full(len(e), 0.9))
    prioritized, _, _ = draw(buffer, 300, 256)
    assert stats.chisquare(prioritized).pvalue > TINY


def test_no_terms_are_uniform_replay():
    buffer = filled([], lam=1.0)
    prioritized, _, _ = draw(buffer, 300, 256)
    assert stats.chisquare(prioritized).pvalue > TINY


@pytest.mark.parametrize("scale", [1e-9, 3.7, 1e12])
def test_scaling_all_priorities_changes_no_draw(scale):
    def indices(factor: float) -> torch.Tensor:
        buffer = filled([TDTerm()], lam=1.0, abs_td_error=lambda e, k, t: factor * (0.25 + (e + 3 * k + 5 * t) % 8))
        # The first, invented |δ| of 1.0 has no scale; go on until every row has been drawn and measured.
        known = torch.zeros(len(buffer), dtype=torch.bool)
        while not known.all():
            batch = buffer.sample()
            known[batch["index"]] = True
            e, k, t = batch["observation"].T
            buffer.update_td_error(batch, factor * (0.25 + (e + 3 * k + 5 * t) % 8).double())
            if buffer.stats()["written/td_error"] > 10**6:
                break
        buffer.sampler._rng.manual_seed(5)
        return torch.stack([buffer.sample()["index"] for _ in range(20)])

    power_of_two = 2.0 ** round(np.log2(scale))  # exact in floating point, so that draws are equal to the last one
    assert torch.equal(indices(1.0), indices(power_of_two))


def test_while_nothing_is_positive_batches_are_uniform_and_counted():
    buffer = filled([VLMTerm()], lam=0.7, score=lambda e, k, c: np.full(len(e), 0.5))  # 0.5 is not above 0.5
    before = buffer.sampler.fallbacks
    prioritized, uniform, counts = draw(buffer, 200, 256)
    assert not counts.any()
    assert not prioritized.any()
    assert stats.chisquare(uniform).pvalue > TINY
    assert buffer.stats()["uniform_fallbacks"] == before + 200
    assert before > 0


def test_the_prioritised_part_comes_back_with_the_first_positive():
    buffer = filled([VLMTerm()], lam=0.5, score=lambda e, k, c: np.zeros(len(e)))
    alive = buffer.clips.table()
    newest = int(alive["clip_id"][-1])
    rows = buffer.clips.rows_of([newest]).slots
    assert buffer.write_scores([newest], [0.51]) == (1, 0)
    index = buffer.sample(200)["index"].numpy()
    assert buffer.sampler.last_prioritized == 100
    assert set(index[:100]) == set(rows)


def test_a_row_of_zero_priority_is_never_drawn_by_the_prioritised_part():
    # Adjacent priorities from 1e-12 to 1e12 and a third of exact zeros: what rounding in prefix sums stumbles over.
    rng = np.random.default_rng(3)
    table = 10.0 ** rng.uniform(-12, 12, size=(4, 200, 8)) * (rng.random((4, 200, 8)) > 0.33)
    buffer = filled([TDTerm()], lam=1.0, capacity=101, abs_td_error=lambda e, k, t: table[e, k, t])
    for _ in range(300):
        index = buffer.sample(512)["index"]
        assert (buffer.sampler.priorities(len(buffer))[index.numpy()] > 0).all()


@pytest.mark.parametrize("capacity", [64, 65, 83, 127, 128, 129])
def test_the_first_and_the_last_row_can_be_drawn_whatever_the_size(capacity):
    buffer = filled([TDTerm()], lam=1.0, capacity=capacity)
    for slot in (0, capacity - 1):
        # Only this row has a positive |δ|, all written back through a sample.
        seen = torch.zeros(capacity, dtype=torch.bool)
        buffer.sampler.lam = 0.0
        while not seen.all():
            batch = buffer.sample()
            seen[batch["index"]] = True
            buffer.update_td_error(batch, (batch["index"] == slot).double())
        buffer.sampler.lam = 1.0
        assert buffer.sampler.positives == 1
        assert (buffer.sample()["index"] == slot).all()


@pytest.mark.parametrize("stratified", [False, True])
def test_a_batch_has_no_more_prioritised_draws_than_rows(stratified, monkeypatch):
    sampler = MixtureSampler(64, lam=1.0, stratified=stratified)
    sampler.set_priorities(np.arange(64), np.ones(64))
    largest = 1 - 2**-53  # what the generator can give: 128 and that much are 129 in float64
    monkeypatch.setattr(sampler, "_uniform", lambda count: np.full(count, largest))
    assert len(sampler.draw(64, 128)) == sampler.last_prioritized == 128


def test_rows_not_written_yet_are_never_drawn():
    buffer = VLMReplayBuffer(1000, batch_size=32, terms=[TDTerm()], lam=0.5, n_steps=3)
    for block in collect(4, 5, World(7), 3):
        buffer.extend(block)
        if len(buffer):
            assert buffer.sample(2000)["index"].max() == len(buffer) - 1


class TestImportanceWeights:
    @slow_data
    @given(lam=st.floats(0.1, 1.0), beta=st.floats(0.0, 1.0), seed=st.integers(0, 1000))
    def test_are_of_the_mixture_and_divided_by_the_largest_of_the_batch(self, lam, beta, seed):
        buffer = filled([TDTerm(0.6, 1e-6)], lam=lam, beta=beta, seed=seed, blocks=12)
        batch = buffer.sample()
        p = buffer.sampler.priorities(len(buffer))
        q = lam * p / p.sum() + (1 - lam) / len(p)
        weight = (len(p) * q[batch["index"].numpy()]) ** -beta
        np.testing.assert_allclose(batch["priority_weight"].numpy(), weight / weight.max(), rtol=1e-5)
        assert batch["priority_weight"].dtype == torch.float32

    def test_undo_the_bias_of_sampling(self):
        # E_q[w · x] ∝ mean(x) at β = 1: the weighted mean over many draws is the plain mean over rows.
        buffer = filled([TDTerm()], lam=0.8, beta=1.0)
        p = buffer.sampler.priorities(len(buffer))
        x = p + np.random.default_rng(0).normal(size=len(p))
        q = 0.8 * p / p.sum() + 0.2 / len(p)
        index = np.concatenate([buffer.sample(500)["index"].numpy() for _ in range(400)])
        weighted = x[index] / (len(p) * q[index])
        assert abs(weighted.mean() - x.mean()) < 6 * weighted.std() / np.sqrt(len(index))
        assert abs(x[index].mean() - x.mean()) > 6 * x[index].std() / np.sqrt(len(index))  # without them it is biased

    def test_are_one_where_nothing_is_positive(self):
        buffer = filled([VLMTerm()], lam=1.0, beta=1.0, score=lambda e, k, c: np.zeros(len(e)))
        assert (buffer.sample()["priority_weight"] == 1).all()

    def test_are_absent_unless_wanted(self):
        assert "priority_weight" not in filled([TDTerm()]).sample()


class TestCapOnDrawsPerPositive:
    def test_bounds_what_a_single_clip_can_take(self):
        buffer = filled([VLMTerm()], lam=0.5, max_draws_per_positive=3.0, score=lambda e, k, c: np.zeros(len(e)))
        ids = buffer.clips.table()["clip_id"][-4:].tolist()
        buffer.write_scores(ids, [1.0] * 4)
        positives = buffer.sampler.positives
        assert 4 <= positives <= 8
        prioritized, _, counts = draw(buffer, 200, 128)
        assert (counts == 3 * positives).all()
        assert stats.chisquare(prioritized[prioritized > 0]).pvalue > TINY

    def test_does_nothing_once_there_are_many(self):
        buffer = filled([VLMTerm(0.0)], lam=0.5, max_draws_per_positive=3.0)
        assert draw(buffer, 20, 64)[2].tolist() == [32] * 20


class TestPositivesAreCounted:
    @pytest.mark.parametrize("terms", [[VLMTerm()], [VLMTerm(0.3), TDTerm()], [TDTerm()], [VLMTerm(), AgeTerm(40.0)]])
    def test_at_every_step(self, terms):
        table = np.random.default_rng(0).random((4, 200, 8)).round(1) * (np.arange(8) % 2)
        buffer = VLMReplayBuffer(61, batch_size=32, terms=terms, lam=0.5, clip_length=3, n_steps=3)
        pipeline = Pipeline(buffer, World(7), blocks=50, delay=3, abs_td_error=lambda e, k, t: table[e, k, t])
        for _ in range(50):
            pipeline.run(1)
            assert buffer.sampler.positives == np.count_nonzero(buffer.sampler.priorities(61))


class TestSamplerAlone:
    """What a buffer never does to its sampler."""

    @pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
    def test_refuses_impossible_priorities_and_keeps_the_tree(self, bad):
        sampler = MixtureSampler(5, lam=1.0)
        sampler.set_priorities(np.arange(5), np.ones(5))
        with pytest.raises(ValueError, match="finite and not negative"):
            sampler.set_priorities(np.arange(2), np.array([0.0, bad]))
        assert sampler.total == 5.0

    @pytest.mark.parametrize(
        ("name", "value"), [("lam", 1.5), ("lam", -0.1), ("beta", 1.01), ("beta", np.nan), ("lam", np.nan)]
    )
    def test_refuses_weights_outside_0_and_1(self, name, value):
        with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\]"):
            setattr(MixtureSampler(5), name, value)

    def test_refuses_an_exponent_of_its_own(self):
        with pytest.raises(ValueError, match="set the exponent of a priority term"):
            MixtureSampler(5).alpha = 0.6

    @pytest.mark.parametrize("slot", [-1, 5, 8, 10**9])
    def test_refuses_slots_outside_its_tree_and_changes_nothing(self, slot):
        sampler = MixtureSampler(5)  # the tree itself has eight leaves, and no checks
        sampler.set_priorities(np.arange(5), np.ones(5))
        with pytest.raises(IndexError, match=rf"slots from .*{slot}.* not all within \[0, 5\)"):
            sampler.set_priorities(np.array([2, slot]), np.array([3.0, 3.0]))
        with pytest.raises(IndexError, match="not all within"):
            sampler.update_priority(torch.tensor([slot]), torch.tensor([3.0]))
        assert sampler.priorities(5).tolist() == [1.0] * 5
        assert sampler.total == sampler.positives == 5

    def test_refuses_another_number_of_priorities_than_slots(self):
        with pytest.raises(ValueError, match=r"one priority per slot, got \[3\] for \[2\]"):
            MixtureSampler(5).set_priorities(np.arange(2), np.ones(3))

    @pytest.mark.parametrize("batch_size", [0, -1])
    def test_refuses_batches_without_rows(self, batch_size):
        with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 1"):
            filled([TDTerm()], blocks=40).sample(batch_size)

    def test_refuses_to_draw_from_nothing(self):
        with pytest.raises(RuntimeError, match="empty"):
            MixtureSampler(5).draw(0, 3)
        with pytest.raises(RuntimeError, match="empty"):
            VLMReplayBuffer(5, batch_size=1).sample()

    def test_speaks_torchrl(self):
        sampler = MixtureSampler(4, lam=1.0)
        sampler.update_priority(torch.tensor([1, 3]), torch.tensor([2.0, 6.0]))
        sampler.update_priority(2, 0.0)
        assert sampler.priorities(4).tolist() == [0, 2, 0, 6]
        sampler.mark_update(torch.tensor([0]))  # TorchRL calls it at every write; priorities are the buffer's business
        assert sampler.priorities(4).tolist() == [0, 2, 0, 6]
        assert repr(sampler) == "MixtureSampler(lam=1.0, beta=None, positives=2)"

    def test_saved_and_loaded_it_draws_the_same(self, tmp_path):
        first, second = MixtureSampler(100, lam=0.6, beta=0.4), MixtureSampler(100)
        first.set_priorities(np.arange(100), np.random.default_rng(0).gamma(0.1, size=100))
        first.fallbacks = 3
        first.dumps(tmp_path / "sampler")
        second.loads(tmp_path / "sampler")
        for sampler in (first, second):
            sampler._rng = torch.Generator().manual_seed(1)
        assert second.fallbacks == 3
        assert second.total == first.total  # inner sums, to the last bit
        assert (first.draw(100, 5000) == second.draw(100, 5000)).all()
        with pytest.raises(ValueError, match="100 slots, this one 99"):
            MixtureSampler(99).loads(tmp_path / "sampler")

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 1000, 2**17 + 1])
    def test_prefix_search_agrees_with_cumulative_sums(self, size):
        rng = np.random.default_rng(size)
        sampler = MixtureSampler(size, lam=1.0)
        p = rng.integers(0, 5, size).astype(float)  # integers: sums are exact in any order
        p[-1] = 1.0
        sampler.set_priorities(np.arange(size), p)
        sampler._rng = torch.Generator().manual_seed(0)
        u = torch.rand(2001, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()[1:]
        expected = np.searchsorted(np.cumsum(p), (1 - u) * p.sum(), side="left")
        assert (sampler.draw(size, 2000) == expected).all()

    def test_rounding_in_the_tree_does_not_lead_to_zero_leaves(self):
        # 0.1 + 0.2 > 0.3: a mass between the two overshoots a node's right child and ends on its last leaf, a zero.
        sampler = MixtureSampler(8, lam=1.0)
        sampler._rng = torch.Generator().manual_seed(0)
        p = np.array([0.1, 0.0, 0.2, 0.0, 0.7, 0.0, 0.1, 0.0])
        sampler.set_priorities(np.arange(8), p)
        landed = sampler._descend(np.zeros(1000))  # 1 − u = 1: the whole mass
        assert (p[landed] > 0).all()


def test_a_million_rows_with_priorities_of_very_different_size():
    size = 10**6
    rng = np.random.default_rng(0)
    p = 10.0 ** rng.uniform(-9, 3, size) * (rng.random(size) > 0.3)
    sampler = MixtureSampler(size, lam=0.5)
    sampler._rng = torch.Generator().manual_seed(0)
    sampler.set_priorities(np.arange(size), p)
    assert sampler.positives == np.count_nonzero(p)
    np.testing.assert_allclose(sampler.total, p.sum(), rtol=1e-12)
    prioritized, uniform = [], []
    for _ in range(40):
        index = sampler.draw(size, 50_000)
        prioritized.append(index[: sampler.last_prioritized])
        uniform.append(index[sampler.last_prioritized :])
    prioritized, uniform = np.concatenate(prioritized), np.concatenate(uniform)
    assert (p[prioritized] > 0).all()
    bins = 500  # contiguous stretches of slots
    expected = p.reshape(bins, -1).sum(1) / p.sum() * len(prioritized)
    assert stats.chisquare(np.bincount(prioritized * bins // size, minlength=bins), expected).pvalue > TINY
    assert stats.chisquare(np.bincount(uniform * bins // size, minlength=bins)).pvalue > TINY
    # and by size of the priority: small ones are neither lost nor inflated
    decade = np.floor(np.log10(np.maximum(p, 1e-10))).astype(int)
    for d in range(-2, 3):
        share = p[decade == d].sum() / p.sum()
        count = np.count_nonzero(decade[prioritized] == d)
        assert abs(count - share * len(prioritized)) < 6 * np.sqrt(share * len(prioritized)) + 1
