"""What scores cost: clips shown, and gains paired by seed."""

import math
from pathlib import Path

import numpy as np
import pytest
from tests.experiments.report_runs import leave_arm, row_of, tasks_in, texts, value

from vlmrb.experiments.report.cost_tables import cost_table
from vlmrb.experiments.report.figures import cost_picture
from vlmrb.experiments.report.statistics import paired

LEVELS = np.array([0.1, 0.3, 0.5, 0.7, 0.9])  # of five seeds, far apart


def flat(values: np.ndarray) -> list[list[float]]:
    """Returns curves whose area is the value."""
    return [[float(value)] * 5 for value in values]


def shown(clips: int, emitted: int = 1000) -> dict[str, float]:
    return {"scoring/emitted": emitted, "scoring/shown": clips}


def test_gains_are_paired_by_seed_and_related_to_scoring_everything(tmp_path: Path) -> None:
    wobble = np.array([0.01, -0.01, 0.02, -0.02, 0.0])
    leave_arm(tmp_path, "uniform", flat(LEVELS - 0.1))
    leave_arm(tmp_path, "per", flat(LEVELS - 0.05))
    leave_arm(tmp_path, "vlm", flat(LEVELS + wobble), metrics=shown(980))
    leave_arm(tmp_path, "tenth", flat(LEVELS - 0.02), "vlm", metrics=shown(100))
    (task,) = tasks_in(tmp_path)
    table = cost_table(task)
    assert table is not None
    tenth = row_of(table, "scheme", "tenth")
    assert (value(tenth, "shown"), value(tenth, "shown_share")) == (100, pytest.approx(0.1))
    assert value(tenth, "gain") == pytest.approx(0.08)
    assert value(tenth, "over_per") == pytest.approx(0.03)
    assert value(tenth, "gain_share") == pytest.approx(0.8)
    assert tenth["gain"].low == pytest.approx(0.08)  # every seed gains the same, however far apart seeds are
    assert 0.7 < tenth["gain_share"].low < 0.8 < tenth["gain_share"].high < 0.95
    assert "gain" not in row_of(table, "scheme", "uniform")
    assert "gain_share" not in row_of(table, "scheme", "vlm")
    assert "shown" not in row_of(table, "scheme", "per")
    picture = cost_picture(task, table)
    assert picture is not None
    assert picture.light.startswith(b"\x89PNG")


def test_seeds_that_one_side_lacks_are_in_no_gain(tmp_path: Path) -> None:
    leave_arm(tmp_path, "uniform", flat(LEVELS[:3]))
    leave_arm(tmp_path, "vlm", flat(LEVELS[:5] + 0.05), metrics=shown(900))
    (task,) = tasks_in(tmp_path)
    table = cost_table(task)
    assert table is not None
    gain = row_of(table, "scheme", "vlm")["gain"]
    assert (gain.value, gain.runs) == (pytest.approx(0.05), 3)
    assert cost_picture(task, table) is None  # one share only


@pytest.mark.filterwarnings("error")
def test_where_scoring_everything_gains_nothing_there_is_no_share_of_it(tmp_path: Path) -> None:
    leave_arm(tmp_path, "uniform", flat(LEVELS))
    leave_arm(tmp_path, "vlm", flat(LEVELS - 0.05), metrics=shown(900))
    leave_arm(tmp_path, "tenth", flat(LEVELS + 0.05), "vlm", metrics=shown(90))
    (table,) = map(cost_table, tasks_in(tmp_path))
    assert table is not None
    assert math.isnan(value(row_of(table, "scheme", "tenth"), "gain_share"))
    sometimes = paired([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], lambda one, other: one.mean() / other.mean())
    assert (sometimes.value, math.isnan(sometimes.low)) == (pytest.approx(3), True)  # a draw of zeros alone
    place = [row.cells["scheme"] for row in table.rows].index("vlm")
    assert texts(table, place, "gain", "shown_share") == ["−0.050 [−0.050, −0.050]", "90.0 % [90.0 %, 90.0 %]"]


def test_without_uniform_replay_or_another_scheme_there_is_no_table(tmp_path: Path) -> None:
    leave_arm(tmp_path / "a", "uniform", flat(LEVELS))
    leave_arm(tmp_path / "b", "vlm", flat(LEVELS), metrics=shown(10))
    assert [cost_table(task) for task in tasks_in(tmp_path)] == [None, None]


def test_runs_that_do_not_say_what_they_showed_have_gains_alone(tmp_path: Path) -> None:
    leave_arm(tmp_path, "uniform", flat(LEVELS))
    leave_arm(tmp_path, "vlm", flat(LEVELS + 0.05))
    (task,) = tasks_in(tmp_path)
    table = cost_table(task)
    assert table is not None
    assert value(row_of(table, "scheme", "vlm"), "gain") == pytest.approx(0.05)
    assert not {"shown", "shown_share"} & {column.key for column in table.columns}
    assert cost_picture(task, table) is None


def test_paired_draws_keep_the_quantities_of_a_run_together() -> None:
    rng = np.random.default_rng(1)
    common = rng.normal(size=40)
    together = paired([common + 1, common], lambda one, other: (one - other).mean())
    assert together.value == pytest.approx(1)
    assert together.high - together.low < 1e-9
    noise = rng.normal(size=40)
    found = paired([common + noise, common], lambda one, other: (one - other).mean())
    error = noise.std(ddof=1) / math.sqrt(40)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert paired([[1.0], [0.5]], lambda one, other: (one - other).mean()).value == 0.5
    assert math.isnan(paired([[], []], lambda one, other: (one - other).mean()).value)
