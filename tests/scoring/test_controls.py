from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from vlmrb.scoring.controls import Corrupted, Flipped, Shuffled
from vlmrb.scoring.scorer import ScoreControl

SCORES = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(0, 1, width=32))
CONTROLS = [
    pytest.param(lambda: Shuffled(memory=7, seed=3), id="shuffled"),
    pytest.param(lambda: Corrupted(kappa=0.4, seed=3), id="corrupted"),
    pytest.param(lambda: Flipped(rate=0.4, seed=3), id="flipped"),
]


@pytest.mark.parametrize("make", [Shuffled, Corrupted, Flipped])
def test_controls_follow_the_runs_seed_unless_they_have_their_own(make):
    def spoiled(run, **own):
        control = make(**own)
        control.follow(run)
        return control.apply(stream()).tolist()

    assert spoiled(5) == spoiled(0, seed=5) == spoiled(9, seed=5)
    assert spoiled(5) != spoiled(6)
    assert make().apply(stream()).tolist() == spoiled(0)


def stream(count=200, seed=0):
    return np.random.default_rng(seed).random(count).astype(np.float32)


def in_batches(control, scores, *cuts):
    return np.concatenate([control.apply(part) for part in np.split(scores, sorted(cuts))])


@pytest.mark.parametrize("make", CONTROLS)
class TestEveryControl:
    def test_keeps_to_the_protocol(self, make):
        assert isinstance(make(), ScoreControl)

    def test_answers_with_scores_and_leaves_its_input_alone(self, make):
        scores = stream()
        given_scores = scores.copy()
        answer = make().apply(scores)
        assert (answer.shape, answer.dtype) == (scores.shape, np.float32)
        assert ((answer >= 0) & (answer <= 1)).all()
        assert np.array_equal(scores, given_scores)

    def test_depends_on_its_seed_alone(self, make):
        assert np.array_equal(make().apply(stream()), make().apply(stream()))

    @given(scores=SCORES, cuts=st.lists(st.integers(0, 60), max_size=4))
    def test_is_the_same_however_the_stream_is_cut_into_batches(self, make, scores, cuts):
        assert np.array_equal(in_batches(make(), scores, *cuts), make().apply(scores))

    def test_goes_on_exactly_after_a_checkpoint(self, make):
        saved, control, scores = io.BytesIO(), make(), stream()
        control.apply(scores)
        torch.save(control.state_dict(), saved)
        saved.seek(0)
        resumed = make()
        resumed.load_state_dict(torch.load(saved, weights_only=True))
        later = stream(seed=1)
        assert np.array_equal(resumed.apply(later), control.apply(later))
        assert resumed.stats() == control.stats()
        assert resumed.state_dict() == control.state_dict()

    def test_a_state_once_taken_does_not_change(self, make):
        control = make()
        control.apply(stream())
        state = control.state_dict()
        before = repr(state)
        control.apply(stream())
        assert repr(state) == before


@given(scores=SCORES, memory=st.integers(2, 20))
def test_a_shuffled_score_is_one_of_the_latest(scores, memory):
    answer = Shuffled(memory).apply(scores)
    for row, score in enumerate(answer):
        assert score in scores[max(0, row + 1 - memory) : row + 1]


def test_shuffled_draws_evenly_from_its_memory():
    lag = np.arange(20_000, dtype=np.float32) - Shuffled(memory=10, seed=1).apply(np.arange(20_000, dtype=np.float32))
    assert stats.chisquare(np.bincount(lag[10:].astype(int), minlength=10)).pvalue > 0.001


def test_shuffled_scores_say_nothing_about_their_clips():
    scores = stream(20_000)
    answer = Shuffled().apply(scores)
    assert abs(np.corrcoef(scores, answer)[0, 1]) < 0.03  # 4 standard deviations under independence
    assert answer.mean() == pytest.approx(scores.mean(), abs=0.02)


def test_shuffling_within_less_than_two_scores_is_refused():
    with pytest.raises(ValueError, match=r"^a shuffling control needs a memory of at least 2 scores, got 1$"):
        Shuffled(memory=1)


@given(scores=SCORES, kappa=st.floats(0, 1), threshold=st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_corrupted_keeps_the_number_of_positives_up_to_its_debt(scores, kappa, threshold):
    control, worst = Corrupted(kappa, threshold), 0
    positives = answered = 0
    for score in scores:
        (answer,) = control.apply(np.array([score]))
        positives += score > threshold
        answered += answer > threshold
        assert positives - answered == control.stats()["debt"] >= 0
        worst = max(worst, positives - answered)
    counts = control.stats()
    assert counts["worst_debt"] == worst
    assert counts["demoted"] - counts["promoted"] == counts["debt"]


@given(scores=SCORES, kappa=st.floats(0, 1))
def test_corrupted_moves_the_scores_of_positives_without_changing_them(scores, kappa):
    control = Corrupted(kappa)
    answer = control.apply(scores)
    kept = Counter(answer[answer > 0.5].tolist())
    kept.update(control.state_dict()["owed"])
    assert kept == Counter(scores[scores > 0.5].tolist())


@given(scores=SCORES)
def test_corrupted_by_nothing_changes_nothing(scores):
    assert np.array_equal(Corrupted(0.0).apply(scores), scores)


@given(scores=SCORES)
def test_corrupted_for_certain_leaves_no_true_positive(scores):
    assert not (Corrupted(1.0).apply(scores)[scores > 0.5] > 0.5).any()


def test_corrupted_demotes_each_positive_with_its_probability():
    scores = stream(40_000)
    positive = scores > 0.5
    demoted = int((Corrupted(0.3, seed=2).apply(scores)[positive] <= 0.5).sum())
    assert stats.binomtest(demoted, int(positive.sum()), 0.3).pvalue > 0.001


def test_corrupted_by_hand():
    # κ = 1: the 0.9 falls to the latest negative's 0.2, the 0.8 too; then 0.9 and 0.8 pass to the next two negatives.
    scores = np.array([0.2, 0.9, 0.8, 0.1, 0.3, 0.4], np.float32)
    control = Corrupted(1.0)
    assert control.apply(scores).tolist() == np.array([0.2, 0.2, 0.2, 0.9, 0.8, 0.4], np.float32).tolist()
    assert control.stats() == {"demoted": 2, "promoted": 2, "debt": 0, "worst_debt": 2}


def test_a_score_of_exactly_the_threshold_is_no_positive_to_corrupt():
    scores = np.array([0.9, 0.1, 0.1], np.float32)  # 0.1 is above 0.1 as float32
    assert Corrupted(1.0, threshold=0.1).apply(scores).tolist() == np.array([0.0, 0.9, 0.1], np.float32).tolist()


def test_corrupted_without_a_negative_so_far_demotes_to_zero():
    assert Corrupted(1.0).apply(np.array([0.9], np.float32)).tolist() == [0.0]


@pytest.mark.parametrize("setting", ["kappa", "threshold"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_corrupted_by_more_than_everything_is_refused(setting, value):
    with pytest.raises(ValueError, match=rf"^{setting} of the corrupted control must lie in \[0, 1\], got [^\n]*$"):
        Corrupted(**{setting: value})


class TestFlipped:
    def test_turns_its_share_of_the_scores_round_whatever_they_are(self):
        scores, control = stream(20_000), Flipped(rate=0.25, seed=1)
        answer = control.apply(scores)
        turned = answer != scores
        np.testing.assert_allclose(answer[turned], 1 - scores[turned], rtol=1e-6)
        for part in (scores > 0.5, scores <= 0.5):
            share, count = turned[part].mean(), part.sum()
            assert stats.binomtest(int(share * count), int(count), 0.25).pvalue > 1e-4
        assert control.stats() == {"turned": float(turned.sum())}

    def test_of_rate_0_leaves_all_scores_as_they_are(self):
        assert np.array_equal(Flipped(rate=0).apply(stream()), stream())

    @pytest.mark.parametrize("rate", [-0.1, 0.6, float("nan")])
    def test_a_rate_that_is_none_is_refused(self, rate):
        with pytest.raises(ValueError, match="rate of the flipped control"):
            Flipped(rate)
