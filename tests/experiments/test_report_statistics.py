from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from rliable import metrics

from vlmrb.experiments.report.runs import Run
from vlmrb.experiments.report.statistics import (
    curve,
    estimate,
    improvement,
    interquartile_mean,
    load_rliable,
    mean_of_tasks,
    means,
    middle_half,
    relative,
)
from vlmrb.experiments.report.tasks import Arm


def make_run(seed: int, success: list[float], wall_s: list[float] | None = None) -> Run:
    steps = 100.0 * np.arange(len(success))
    seconds = np.array(wall_s if wall_s is not None else [np.nan] * len(success))
    took_s = float(seconds[-1]) + 2.0  # an evaluation's clock stops before the run's own
    return Run(Path("runs"), "task", "scheme", seed, "finished", steps, np.array(success), seconds, took_s=took_s)


# Resampling k of n runs whose sum is theirs: k ~ Binomial(n, 1/n), so the quantiles of the mean are known.
@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.0, 1.0], 0.0, 1.0),  # P(0) = P(1) = 1/4
        ([0.0, 0.0, 3.0], 0.0, 3.0),  # P(0) = 8/27, P(3) = 1/27
        ([0.0, 0.0, 0.0, 4.0], 0.0, 3.0),  # P(0) = 0.32, P(≥ 3) = 0.051, P(4) = 0.004
        ([0.25, 0.25, 0.25], 0.25, 0.25),
    ],
)
def test_interval_has_the_quantiles_of_all_resamples(values: list[float], low: float, high: float) -> None:
    (found,) = means([values])
    assert (found.value, found.low, found.high, found.runs) == (np.mean(values), low, high, len(values))


def test_runs_are_drawn_within_their_task() -> None:
    found = mean_of_tasks([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)  # drawn from all six it would scatter


def test_tasks_with_unequal_numbers_of_runs_count_equally() -> None:
    assert mean_of_tasks([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0]]).value == 0.5


def test_single_run_has_no_interval_and_gives_none_to_others() -> None:
    for found in (means([[0.7]])[0], mean_of_tasks([[0.1, 0.2], [0.7]]), improvement([[0.5]], [[0.1, 0.2]])):
        assert math.isfinite(found.value)
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="without runs"):
        means([[]])


def test_interquartile_mean_drops_a_quarter_at_each_end() -> None:
    assert interquartile_mean([[8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]]).value == 4.5
    assert interquartile_mean([[0.0, 0.0], [4.0, 100.0]]).value == 2.0  # over the runs of both tasks
    assert interquartile_mean([[0.0, 3.0, 9.0]]).value == 4.0  # three: nothing to drop


@pytest.mark.parametrize("runs", range(1, 14))
def test_interquartile_mean_is_that_of_rliable(runs: int) -> None:
    table = np.random.default_rng(runs).random((runs, 3))
    expected = [metrics.aggregate_iqm(table[:, column]) for column in range(3)]
    np.testing.assert_allclose(middle_half(table), expected)


def test_improvement_counts_pairs_and_halves_ties() -> None:
    # 1 > 0, 1 < 2, 2 > 0, 2 = 2
    assert improvement([[1.0, 2.0]], [[0.0, 2.0]]).value == (1 + 0 + 1 + 0.5) / 4
    assert improvement([[1.0, 2.0], [0.0]], [[0.0, 2.0], [1.0]]).value == 0.625 / 2


def test_improvement_is_that_of_rliable() -> None:
    rng = np.random.default_rng(0)
    ours, baseline = rng.integers(0, 4, (6, 3)) / 3, rng.integers(0, 4, (4, 3)) / 3  # with ties
    found = improvement(list(ours.T), list(baseline.T))
    assert found.value == pytest.approx(metrics.probability_of_improvement(ours, baseline))
    assert found.low <= found.value <= found.high


def test_relative_compares_means_over_tasks() -> None:
    more = relative([[100.0, 300.0], [500.0, 500.0]], [[400.0, 400.0], [1000.0, 1000.0]])
    assert more.value == pytest.approx(350 / 700 - 1)
    less = relative([[100.0, 300.0]], [[400.0, 400.0]], less=True)
    assert (less.value, less.low, less.high) == (0.5, 0.25, 0.75)  # 1 − {100, 200, 300} ÷ 400


def test_relative_to_nothing_has_no_value() -> None:
    assert math.isnan(relative([[0.5, 0.6]], [[0.0, 0.0]]).value)


def test_resample_without_a_number_leaves_no_interval() -> None:
    found = relative([[0.5, 0.5]], [[0.0, 1.0]])  # a quarter of the resamples divides by 0
    assert found.value == 0.0
    assert math.isnan(found.low)


def test_curve_has_a_mean_and_an_interval_at_each_place() -> None:
    value, low, high = curve([np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]])])
    assert value.tolist() == [0.0, 1.0, 0.5]
    assert low.tolist() == [0.0, 1.0, 0.0]
    assert high.tolist() == [0.0, 1.0, 1.0]
    assert curve([np.array([[0.0], [0.0], [1.0], [9.0]])], interquartile=True)[0].tolist() == [0.5]


def test_intervals_are_the_same_each_time_and_leave_global_draws_alone() -> None:
    values = np.random.default_rng(0).random(7)
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    first, second = means([values]), means([values])
    assert first == second
    assert np.random.random() == expected


def test_intervals_of_several_numbers_are_those_of_each() -> None:
    columns = [[0.0, 0.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0]]
    found = estimate([np.array(columns).T], lambda runs: np.array([*runs.mean(0), runs.max()]))
    assert [(one.value, one.low, one.high) for one in found[:2]] == [(1.0, 0.0, 3.0), (1.0, 1.0, 1.0)]
    assert found[2].value == 4.0


def test_missing_rliable_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rliable", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'vlmrb\[report\]'"):
        load_rliable()


def test_measures_of_runs_are_those_computed_by_hand() -> None:
    arm = Arm("scheme", (make_run(0, [0.0, 0.5, 0.9, 0.6, 0.6]), make_run(1, [0.0, 0.2, 0.4, 0.4, 0.4])))
    assert arm.final().tolist() == pytest.approx([0.7, 0.4])
    assert arm.best().tolist() == [0.9, 0.4]
    # trapezoids: (0 + 0.5)/2 + (0.5 + 0.9)/2 + (0.9 + 0.6)/2 + 0.6, over four intervals
    assert arm.area().tolist() == pytest.approx([(0.25 + 0.7 + 0.75 + 0.6) / 4, (0.1 + 0.3 + 0.4 + 0.4) / 4])
    steps, reached = arm.steps_to(0.5)
    assert (steps.tolist(), reached) == ([100.0, 400.0], 1)  # the second never: its budget
    assert arm.steps_to(0.0)[0].tolist() == [0.0, 0.0]


def test_success_kept_as_float32_reaches_its_own_mean() -> None:
    third = float(np.float32(0.98))
    arm = Arm("scheme", tuple(make_run(seed, [0.0, third, third]) for seed in range(3)))
    assert arm.steps_to(0.98)[1] == 3


def test_time_to_a_success_is_the_measured_one() -> None:
    arm = Arm("scheme", (make_run(0, [0.0, 0.5], [1.0, 7.5]), make_run(1, [0.0, 0.2], [1.0, 9.0])))
    assert arm.wall_to(0.5).tolist() == [7.5, 11.0]  # never: all it took
    assert np.isnan(Arm("scheme", (make_run(0, [0.0, 0.5]),)).wall_to(0.5)).all()
