"""The statistics of a calibration report, against hand-made numbers, naive versions and SciPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from vlmrb.calibration.statistics import (
    ReliabilityBin,
    agreement,
    best_threshold,
    calibration_error,
    confusion,
    halves,
    interval,
    reliability,
    resample,
    resampled_auc,
    resampled_confusion,
    roc_auc,
    roc_curve,
    spearman,
    threshold_table,
)

SCORES = np.array([0.1, 0.2, 0.2, 0.6, 0.7, 0.9], np.float32)
LABELS = np.array([0, 0, 1, 0, 1, 1], bool)


def random_case(seed: int, count: int = 60, levels: int = 12) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    labels = rng.random(count) < 0.4
    labels[:2] = True, False
    scores = np.round(np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1) * levels) / levels  # with ties
    return scores.astype(np.float32), labels


def test_confusion_by_hand() -> None:
    # Above 0.5: 0.6 (no), 0.7 and 0.9 (yes); one success of three, the 0.2, stays below.
    found = confusion(SCORES, LABELS, 0.5)
    assert (found.true_positives, found.false_positives, found.false_negatives, found.true_negatives) == (2, 1, 1, 2)
    assert found.precision == pytest.approx(2 / 3)
    assert found.recall == pytest.approx(2 / 3)
    assert found.fpr == pytest.approx(1 / 3)
    assert found.fnr == pytest.approx(1 / 3)
    assert found.balanced_accuracy == pytest.approx(2 / 3)
    assert found.share_positive == pytest.approx(1 / 2)


def test_a_score_equal_to_the_threshold_is_not_positive_although_float32_rounds_it_up() -> None:
    assert float(np.float32(0.7)) != 0.7
    assert confusion(np.array([0.7], np.float32), np.array([True]), 0.7).recall == 0.0
    assert confusion(np.array([0.1], np.float32), np.array([True]), 0.1).recall == 0.0


def test_precision_of_nothing_is_undefined() -> None:
    assert np.isnan(confusion(SCORES, LABELS, 0.95).precision)


def naive_auc(scores: NDArray[np.float32], labels: NDArray[np.bool_]) -> float:
    pairs = list(itertools.product(scores[labels].tolist(), scores[~labels].tolist()))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


@given(st.integers(0, 10_000), st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_auc_is_the_chance_of_the_right_order(seed: int, levels: int) -> None:
    scores, labels = random_case(seed, levels=levels)
    assert roc_auc(scores, labels) == pytest.approx(naive_auc(scores, labels), abs=1e-12)


def test_auc_is_the_area_under_the_curve() -> None:
    scores, labels = random_case(3)
    fpr, tpr = roc_curve(scores, labels)
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    area = (np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2).sum()
    assert area == pytest.approx(roc_auc(scores, labels), abs=1e-12)


def test_auc_of_one_class_is_undefined() -> None:
    assert np.isnan(roc_auc(SCORES, np.ones(6, bool)))


def test_best_threshold_lies_in_the_widest_of_the_best_gaps() -> None:
    scores = np.array([0.1, 0.1, 0.7, 0.85, 1.0], np.float32)
    assert best_threshold(scores, np.array([0, 0, 1, 1, 1], bool)) == pytest.approx(0.4)
    assert best_threshold(scores, np.array([0, 0, 0, 0, 1], bool)) == pytest.approx(0.925)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_no_threshold_beats_the_best_one(seed: int) -> None:
    scores, labels = random_case(seed)
    best = confusion(scores, labels, best_threshold(scores, labels)).balanced_accuracy
    others = [confusion(scores, labels, float(t)).balanced_accuracy for t in np.linspace(-0.01, 1.01, 300)]
    assert best >= max(others) - 1e-12


def test_best_threshold_of_scores_that_never_differ_is_the_papers() -> None:
    assert best_threshold(np.full(4, 0.3, np.float32), LABELS[:4]) == 0.5


def test_threshold_table_by_hand() -> None:
    table = threshold_table(SCORES, LABELS, width=0.1)
    assert [line.lower for line in table] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert [round(line.share * 6) for line in table] == [1, 2, 0, 0, 0, 1, 1, 0, 1]
    # τ = 0.2: above are 0.6, 0.7, 0.9, so two of three successes and one of three others.
    assert table[1].balanced_accuracy == pytest.approx(2 / 3)
    # τ = 0.6: above are 0.7 and 0.9 only.
    assert table[5].balanced_accuracy == pytest.approx((2 / 3 + 1) / 2)
    assert sum(line.share for line in table) == pytest.approx(1)


def test_threshold_table_puts_the_ends_into_bins() -> None:
    table = threshold_table(np.array([0.0, 1.0], np.float32), np.array([False, True]))
    assert len(table) == 20
    assert (table[0].share, table[-1].share) == (0.5, 0.5)
    assert table[0].balanced_accuracy == 1.0


def test_reliability_by_hand() -> None:
    points = reliability(SCORES, LABELS, bins=2)
    assert [point.count for point in points] == [3, 3]
    assert points[0].mean_score == pytest.approx(0.5 / 3)
    assert points[0].observed == pytest.approx(1 / 3)
    assert calibration_error([ReliabilityBin(0.2, 0.5, 1), ReliabilityBin(0.8, 0.7, 3)]) == pytest.approx(0.15)


def test_spearman_is_scipys() -> None:
    first, _ = random_case(1)
    second, _ = random_case(2)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert spearman(first, first**3) == pytest.approx(1)
    assert np.isnan(spearman(first, np.full_like(first, 0.5)))


def test_agreement_counts_clips_on_the_same_side() -> None:
    assert agreement(np.array([1, 1, 0, 0], bool), np.array([1, 0, 0, 0], bool)) == 0.75


def test_halves_part_no_group_and_share_out_success() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(80), rng.integers(1, 6, 80))
    labels = rng.random(len(groups)) < 0.2
    first, second = halves(labels, groups)
    assert sorted([*first, *second]) == list(range(len(groups)))
    assert not set(groups[first]) & set(groups[second])
    assert abs(len(first) - len(second)) < 0.1 * len(groups)
    assert abs(labels[first].sum() - labels[second].sum()) <= 3
    assert not np.array_equal(first, halves(labels, groups, seed=1)[0])


def test_samples_hold_whole_groups() -> None:
    groups = np.array([4, 4, 9, 9, 9, 2])
    times = resample(groups, replicates=50)
    for group in (4, 9, 2):
        assert (np.ptp(times[:, groups == group], axis=1) == 0).all()
    drawn = times[:, [0, 2, 5]]  # one column per group
    assert (drawn.sum(axis=1) == 3).all()


def test_resampled_values_are_those_of_the_clips_drawn() -> None:
    scores, labels = random_case(5)
    times = resample(np.arange(60) // 3, replicates=20)
    aucs = resampled_auc(scores, labels, times)
    counted = resampled_confusion(scores, labels, 0.5, times)
    for row in range(20):
        drawn = np.repeat(np.arange(60), times[row])
        assert aucs[row] == pytest.approx(roc_auc(scores[drawn], labels[drawn]), abs=1e-12)
        assert counted[row] == pytest.approx(confusion(scores[drawn], labels[drawn], 0.5).as_dict())


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """100 samples of 20 groups of 5 equal clips: an interval that ignored groups would cover far too seldom."""
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        groups = np.repeat(np.arange(20), 5)
        labels = np.repeat(np.arange(20) < 10, 5)
        scores = np.repeat(rng.normal(labels[::5] * 1.0, 1.0), 5)
        scores = (scores - scores.min()) / np.ptp(scores)
        low, high = interval(resampled_auc(scores, labels, resample(groups, 200)))
        covered += low <= stats.norm.cdf(1 / np.sqrt(2)) <= high
    assert 85 <= covered <= 100


def test_interval_of_undefined_values_is_undefined() -> None:
    assert np.isnan(interval([float("nan")])).all()
    assert interval([0.0, float("nan"), 1.0]) == pytest.approx((0.025, 0.975))
