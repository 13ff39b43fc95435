from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import AgeTerm, LiveMaximum, PriorityTerm, TDTerm, VLMTerm, compose


def priority(term: PriorityTerm, *values: float) -> list[float]:
    """Returns the priorities of values of the term's column."""
    return compose([term], {term.column: np.array(values)}, np.arange(len(values))).tolist()


class TestTDTerm:
    def test_per(self):
        # Schaul et al. 2016: p = (|δ| + ε)^α, here (0.5 + 1e-6)^0.6
        assert priority(TDTerm(0.6, 1e-6), 0.5, 0.0) == pytest.approx([(0.5 + 1e-6) ** 0.6, 1e-6**0.6], rel=1e-12)

    def test_an_error_of_zero_is_an_exact_zero(self):
        assert priority(TDTerm(), 0.0, 2.0) == [0.0, pytest.approx(2.0)]

    def test_exponent_0_has_no_effect(self):
        assert priority(TDTerm(0.0), 0.0, 2.0) == [1.0, 1.0]


class TestVLMTerm:
    def test_only_scores_strictly_above_the_threshold_count(self):
        above = float(np.nextafter(np.float32(0.5), np.float32(1)))
        assert priority(VLMTerm(), 0.0, 0.5, above, 1.0) == [0.0, 0.0, 1.0, 1.0]

    @pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7])
    def test_a_float32_score_equal_to_the_threshold_is_not_above_it(self, threshold):
        assert priority(VLMTerm(threshold), float(np.float32(threshold))) == [0.0]

    def test_without_a_threshold_the_score_is_the_priority(self):
        assert priority(VLMTerm(None), 0.0, 0.25, 1.0) == [0.0, pytest.approx(0.25), 1.0]
        assert priority(VLMTerm(None, exponent=2.0), 0.5) == [pytest.approx(0.25)]

    @pytest.mark.parametrize("threshold", [None, 0.5])
    def test_rows_without_a_score_get_the_provisional_priority(self, threshold):
        assert priority(VLMTerm(threshold), np.nan) == [0.0]
        assert priority(VLMTerm(threshold, unscored=0.3), np.nan) == [pytest.approx(0.3)]


class TestCompose:
    @given(
        td=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=20),
        alpha=st.floats(0.1, 2.0),
        data=st.data(),
    )
    def test_is_the_product_of_its_factors(self, td, alpha, data):
        score = data.draw(st.lists(st.sampled_from([np.nan, 0.0, 0.4, 0.9]), min_size=len(td), max_size=len(td)))
        columns = {"td_error": np.array(td), "score": np.array(score, np.float32)}
        terms = [VLMTerm(None, unscored=0.1), TDTerm(alpha)]
        factors = [compose([term], columns, np.arange(len(td))) for term in terms]
        np.testing.assert_allclose(compose(terms, columns, np.arange(len(td))), factors[0] * factors[1], rtol=1e-12)

    def test_no_factors_are_one(self):
        assert compose([], {}, np.arange(3)).tolist() == [1.0, 1.0, 1.0]

    def test_a_zero_factor_is_an_exact_zero_whatever_the_others(self):
        columns = {"score": np.array([0.0]), "td_error": np.array([1e300])}
        assert compose([TDTerm(), VLMTerm()], columns, np.array([0])).tolist() == [0.0]

    def test_extremes_stay_finite_and_positive(self):
        p = compose([TDTerm(2.0)], {"td_error": np.array([1e-300, 1e300])}, np.array([0, 1]))
        assert 0 < p[0] < 1e-149
        assert 1e149 < p[1] < np.inf

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_refuses_what_is_no_priority(self, bad):
        class Broken(PriorityTerm):
            name = "broken"
            column = "x"

            def log_priority(self, values):
                return values + bad

        with pytest.raises(ValueError, match=r"me: priority term 'broken' gave a priority that is not finite"):
            compose([TDTerm(), Broken()], {"td_error": np.ones(2), "x": np.ones(2)}, np.arange(2), source="me")

    def test_a_term_that_does_not_say_how_is_named(self):
        class Empty(PriorityTerm):
            name = "empty"
            column = "x"

        with pytest.raises(TypeError, match="Empty does not say how a value of 'x' becomes a priority"):
            compose([Empty()], {"x": np.ones(2)}, np.arange(2))


@given(st.lists(st.tuples(st.integers(0, 12), st.one_of(st.none(), st.floats(0, 1e6))), max_size=60))
def test_the_live_maximum_is_the_largest_value_known(changes):
    maximum, known = LiveMaximum(13), {}
    assert maximum.value(default=7.0) == 7.0
    for slot, value in changes:
        if value is None:
            maximum.forget(np.array([slot]))
            known.pop(slot, None)
        else:
            maximum.set(np.array([slot]), np.array([value]))
            known[slot] = value
        assert maximum.value(default=7.0) == max(known.values(), default=7.0)
        assert np.flatnonzero(maximum.known(13)).tolist() == sorted(known)


def test_freshness_is_lost_at_the_rate_tau():
    young, old = priority(AgeTerm(50.0), 1000.0, 900.0)
    assert old / young == pytest.approx(np.exp(-100 / 50))


def test_a_buffer_refuses_a_term_that_cannot_take_a_row_without_late_information():
    class Reciprocal(PriorityTerm):
        name = "reciprocal"
        column = "visits"  # 0 for a row just written

        def log_priority(self, values):
            return -np.log(values)

    with pytest.raises(ValueError, match=r"a row without late information: priority term 'reciprocal' gave a"):
        VLMReplayBuffer(8, batch_size=2, terms=[Reciprocal()])


class RewardTerm(PriorityTerm):
    """Priority 1 + the row's reward, doubled at every refresh; counts the raw rows that it has seen."""

    name, column, initial = "reward", "reward", 0.0

    def __init__(self) -> None:
        self.seen, self.due, self.scale = 0, False, 1.0

    def observe(self, block: TensorDictBase) -> None:
        self.seen += block.numel()

    def values_of(self, rows: TensorDictBase) -> dict[str, NDArray[np.float64]]:
        return {"reward": rows["next", "reward"].squeeze(-1).double().numpy()}

    def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(self.scale * (1 + values))

    def needs_refresh(self, env_steps: int) -> bool:
        return self.due

    def refresh(self, env_steps: int, columns: Mapping[str, NDArray]) -> None:
        columns["reward"][:] *= 2
        self.due = False


def rewarded(rewards: list[list[float]], start: int) -> TensorDict:
    shape = (len(rewards), len(rewards[0]))
    steps = torch.arange(start, start + shape[1] + 1).float().expand(shape[0], -1)
    return TensorDict(
        {
            "observation": steps[:, :-1, None],
            "action": torch.zeros(shape, dtype=torch.int64),
            "next": {
                "observation": steps[:, 1:, None],
                "reward": torch.tensor(rewards).unsqueeze(-1),
                "done": torch.zeros(*shape, 1, dtype=torch.bool),
                "terminated": torch.zeros(*shape, 1, dtype=torch.bool),
            },
        },
        shape,
    )


def test_a_term_reads_rows_when_they_are_stored_and_may_change_its_columns_at_a_refresh() -> None:
    term = RewardTerm()
    buffer = VLMReplayBuffer(8, batch_size=2, terms=[term], lam=1.0)
    buffer.extend(rewarded([[0.0, 1.0], [2.0, 3.0]], 0))
    assert buffer._sampler.priorities(4) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    term.due = True
    buffer.extend(rewarded([[0.0], [5.0]], 2))
    assert term.seen == 6
    assert buffer.columns["reward"][:6].tolist() == [0.0, 2.0, 4.0, 6.0, 0.0, 10.0]
    assert buffer._sampler.priorities(6) == pytest.approx([1.0, 3.0, 5.0, 7.0, 1.0, 11.0])


def test_rows_get_the_largest_live_value_of_every_column_that_asks_for_it() -> None:
    class Hopeful(PriorityTerm):
        name, column, initial, largest_first = "hope", "hope", 0.5, True

        def log_priority(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
            return values

    buffer = VLMReplayBuffer(8, batch_size=2, terms=[Hopeful(), TDTerm()], lam=1.0)
    index = buffer.extend(rewarded([[0.0, 0.0]], 0))
    assert buffer.columns["hope"][:2].tolist() == [0.5, 0.5]
    buffer.write_column("hope", index, torch.zeros(2, dtype=torch.int64), [-3.0, -2.0], source="test")
    buffer.extend(rewarded([[0.0]], 2))
    assert buffer.columns["hope"][2] == -2.0
    assert buffer.columns["td_error"][2] == 1.0
    copy = VLMReplayBuffer(8, batch_size=2, terms=[Hopeful(), TDTerm()], lam=1.0)
    copy.load_state_dict(buffer.state_dict())
    copy.extend(rewarded([[0.0]], 3))
    assert copy.columns["hope"][3] == -2.0
