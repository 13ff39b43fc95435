"""Means and interquartile means over runs, probabilities of improvement, and their bootstrap intervals.

The intervals are rliable's (Agarwal et al. 2021): 95 % percentile intervals of a bootstrap that draws runs anew within
each task. Where quantities of the same runs are compared, it is SciPy's paired one.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2_000
Values = NDArray[np.float64]
Statistic = Callable[..., Values]


@dataclass(frozen=True)
class Estimate:
    """A number from several runs.

    Attributes:
        value: the number, NaN if there is none.
        low: lower end of its 95 % interval, NaN if it has none.
        high: upper end.
        runs: in it.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    runs: int = 0


def load_rliable() -> ModuleType:
    """Returns rliable's ``library``.

    Raises:
        ModuleNotFoundError: it cannot be imported; the message says what to install.
    """
    try:
        from rliable import library
    except (ImportError, TypeError) as error:  # TypeError: arch 7.2 and older ones beside pandas 3
        raise ModuleNotFoundError(
            f"vlmrb report needs rliable, and pandas below 3 for it ({error}): pip install 'vlmrb[report]'"
        ) from error
    logging.getLogger("absl").setLevel(logging.WARNING)  # it announces every single estimate
    return library


def estimate(groups: Sequence[ArrayLike], statistic: Statistic) -> list[Estimate]:
    """Estimates several numbers from groups of runs, with 95 % intervals.

    Args:
        groups: ``float64[n_g, K]`` each, one row per run. Runs are drawn anew within each group and column.
        statistic: takes the groups as arguments, returns ``float64[M]``.

    Returns:
        M estimates. None has an interval if a group has one run only, or where a resample gives no number.
    """
    arrays = [np.asarray(group, np.float64) for group in groups]
    runs = min(len(array) for array in arrays)
    if not runs:
        raise ValueError("a group without runs has no statistics")
    with np.errstate(all="ignore"):
        values = np.atleast_1d(statistic(*arrays))
    if runs < 2:
        return [Estimate(float(value), runs=runs) for value in values]
    low, high = _interval(arrays, statistic)
    return [
        Estimate(float(value), float(below), float(above), runs)
        for value, below, above in zip(values, low, high, strict=True)
    ]


def means(columns: Sequence[ArrayLike]) -> list[Estimate]:
    """Estimates the mean over runs of K quantities, ``float64[n]`` each."""
    return estimate([np.stack([np.asarray(column, np.float64) for column in columns], 1)], lambda runs: runs.mean(0))


def mean_of_tasks(groups: Sequence[ArrayLike]) -> Estimate:
    """Estimates the mean over tasks of the mean over runs; each group is a task's ``float64[n_g]``."""
    columns = [np.asarray(group, np.float64)[:, None] for group in groups]
    return estimate(columns, lambda *runs: np.array([np.mean([group.mean() for group in runs])]))[0]


def interquartile_mean(groups: Sequence[ArrayLike]) -> Estimate:
    """Estimates the mean of the middle half of all runs of all tasks; each group is a task's ``float64[n_g]``."""
    columns = [np.asarray(group, np.float64)[:, None] for group in groups]
    return estimate(columns, lambda *runs: middle_half(np.concatenate(runs)))[0]


def improvement(ours: Sequence[ArrayLike], baseline: Sequence[ArrayLike]) -> Estimate:
    """Estimates the chance that a run of ours is ahead of one of the baseline, mean over tasks; a tie counts as half.

    Args:
        ours: ``float64[n_t]`` for each task.
        baseline: ``float64[m_t]`` for the same tasks.
    """
    tasks = len(ours)
    columns = [np.asarray(group, np.float64)[:, None] for group in (*ours, *baseline)]

    def chance(*groups: Values) -> Values:
        pairs = zip(groups[:tasks], groups[tasks:], strict=True)
        return np.array([np.mean([_ahead(first, second) for first, second in pairs])])

    return estimate(columns, chance)[0]


def paired(columns: Sequence[ArrayLike], statistic: Callable[..., Any]) -> Estimate:
    """Estimates a number from several quantities of the same runs, which are drawn anew together.

    Args:
        columns: ``float64[n]`` each, in the same order of runs.
        statistic: takes them as arguments, returns a number.

    Returns:
        Without an interval if there is one run only, or where a resample gives no number; NaN without runs.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap  # comes with rliable

    arrays = [np.asarray(column, np.float64) for column in columns]
    runs = len(arrays[0])
    with np.errstate(all="ignore"), warnings.catch_warnings():
        value = float(statistic(*arrays)) if runs else math.nan
        if runs < 2 or not math.isfinite(value):
            return Estimate(value if math.isfinite(value) else math.nan, runs=runs)
        warnings.simplefilter("ignore", DegenerateDataWarning)  # a draw that gives no number: there is no interval
        found = bootstrap(
            arrays, statistic, paired=True, vectorized=False, n_resamples=RESAMPLES, method="percentile", rng=0
        )
    low, high = map(float, found.confidence_interval)
    return Estimate(value, low, high, runs) if math.isfinite(low + high) else Estimate(value, runs=runs)


def _ahead(ours: Values, baseline: Values) -> float:
    """Mann and Whitney's U ÷ the number of pairs: what rliable computes by ranks, at a hundredth of the time."""
    difference = ours - baseline.T
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def relative(ours: Sequence[ArrayLike], baseline: Sequence[ArrayLike], less: bool = False) -> Estimate:
    """Estimates how much more ours is than the baseline, as a share of it: ours ÷ baseline − 1.

    Both are the mean over tasks of the mean over runs.

    Args:
        ours: ``float64[n_t]`` for each task.
        baseline: ``float64[m_t]`` for the same tasks.
        less: how much less instead: 1 − ours ÷ baseline.
    """
    tasks = len(ours)
    columns = [np.asarray(group, np.float64)[:, None] for group in (*ours, *baseline)]

    def change(*groups: Values) -> Values:
        first, second = (np.mean([group.mean() for group in part]) for part in (groups[:tasks], groups[tasks:]))
        more = first / second - 1
        return np.array([-more if less else more])

    found = estimate(columns, change)[0]
    return found if math.isfinite(found.value) else Estimate(math.nan, runs=found.runs)


def curve(tables: Sequence[Values], interquartile: bool = False) -> tuple[Values, Values, Values]:
    """Averages curves over runs, with a pointwise 95 % interval.

    Args:
        tables: ``float64[n_t, K]`` for each task, success at the same K places for all.
        interquartile: take the mean of the middle half of all runs instead of the mean over tasks of means.

    Returns:
        The average and the interval's ends, ``float64[K]`` each; the ends are NaN if a task has one run only.
    """

    def average(*groups: Values) -> Values:
        if interquartile:
            return middle_half(np.concatenate(groups))
        return np.mean([group.mean(0) for group in groups], 0)

    found = estimate(tables, average)
    value, low, high = ([getattr(point, name) for point in found] for name in ("value", "low", "high"))
    return np.array(value), np.array(low), np.array(high)


def middle_half(values: Values) -> Values:
    """Returns each column's mean without its lowest and its highest quarter, ``float64[n, K]`` → ``float64[K]``.

    What rliable computes for one column, for many at once.
    """
    cut = len(values) // 4
    return np.sort(values, 0)[cut : len(values) - cut].mean(0)


def _interval(arrays: Sequence[Values], statistic: Statistic) -> tuple[Values, Values]:
    library = load_rliable()
    data: Any = arrays[0] if len(arrays) == 1 else list(arrays)
    with _seeded(), np.errstate(all="ignore"):
        _, found = library.get_interval_estimates({"": data}, statistic, reps=RESAMPLES)
    low, high = np.asarray(found[""], np.float64)
    unknown = ~(np.isfinite(low) & np.isfinite(high))
    return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)


@contextmanager
def _seeded() -> Iterator[None]:
    """Makes draws the same each time: rliable takes a generator, but draws from NumPy's global one."""
    state = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(state)
