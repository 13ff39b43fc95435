from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished_cells import make_cell, train

from vlmrb.experiments.cells import Cell
from vlmrb.experiments.results import (
    TABLE_FIELDS,
    confidence_interval,
    curve_of,
    format_table,
    table_row,
    write_results,
)

DOCS = Path(__file__).parents[2] / "docs"


def row_of(cells: list[Cell]) -> dict[str, Any]:
    return table_row("uniform", cells, {cell: curve_of(cell) for cell in cells})


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_confidence_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = [low <= 0.0 <= high for low, high in (confidence_interval(rng.normal(size=30), 500) for _ in range(300))]
    assert 0.9 < np.mean(covered) < 0.98


def test_threshold_that_one_seed_missed_counts_it_as_the_whole_budget(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in (0, 1)]
    train(cells[0], [0.0, 0.9, 0.6, 0.6])
    train(cells[1], [0.0, 0.6, 0.6, 0.6])
    row = row_of(cells)
    assert (row["steps_to_0.5"], row["reached_0.5"]) == (100, 2)
    assert (row["steps_to_0.8"], row["reached_0.8"]) == ((100 + 300) / 2, 1)
    assert (row["steps_to_0.8_low"], row["steps_to_0.8_high"]) == (100, 300)
    assert row["success"] == pytest.approx((0.7 + 0.6) / 2)
    # trapezoids of both curves over 300 env steps
    assert row["area"] == pytest.approx(((0.45 + 0.75 + 0.6) + (0.3 + 0.6 + 0.6)) / 2 / 3, abs=1e-3)


def test_threshold_that_no_seed_reached_has_no_number(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in (0, 1)]
    for cell in cells:
        train(cell, [0.0, 0.6, 0.6])
    write_results(cells, tmp_path / "sweep")
    (row,) = read(tmp_path / "sweep" / "table.csv")
    assert tuple(row) == TABLE_FIELDS
    assert row["reached_0.8"] == "0"
    assert [row[f"steps_to_0.8{part}"] for part in ("", "_low", "_high")] == ["", "", ""]


def test_threshold_reached_at_step_0_is_reached_at_step_0(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [1.0, 1.0, 1.0])
    assert row_of([cell])["steps_to_0.9"] == 0


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    assert not [name for name in row_of([cell]) if name.endswith(("_low", "_high"))]


def test_unfinished_run_is_in_the_results_and_in_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in (0, 1, 2)]
    train(cells[0], [0.0, 1.0, 1.0])
    train(cells[1], [0.0, 0.1], finished=False, exit_code=143)
    cells[2].record_start()
    cells[2].record_end(1)
    write_results(cells, tmp_path / "sweep")
    rows = [(row["seed"], row["status"], row["env_step"]) for row in read(tmp_path / "sweep" / "results.csv")]
    assert rows[3:] == [("1", "interrupted", "0"), ("1", "interrupted", "100"), ("2", "failed", "")]
    (row,) = read(tmp_path / "sweep" / "table.csv")
    assert (row["seeds_started"], row["seeds_finished"], row["best_success"]) == ("3", "1", "1.0")
    assert "uniform  1 of 3" in capsys.readouterr().out


def test_nothing_finished_is_said_and_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = make_cell(tmp_path / "sweep")
    cell.record_start()
    cell.record_end(1)
    write_results([cell], tmp_path / "sweep")
    assert "no run has finished" in capsys.readouterr().out
    assert not (tmp_path / "sweep" / "curves.png").exists()
    assert tuple(read(tmp_path / "sweep" / "table.csv")[0]) == TABLE_FIELDS


def test_half_a_line_at_the_end_of_the_evaluations_is_left_out(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 0.1], finished=False)
    with (cell.folder / "evaluations.csv").open("a") as file:
        file.write("20")
    assert curve_of(cell)[0].tolist() == [0, 100]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "is empty or missing, and the run ended at 200"),
        (lambda text: text.replace("100,1.0", "100"), "line 3 holds no evaluation"),
        (lambda text: text.replace("100,1.0", "\0\0\0\0"), "line 3 holds no evaluation"),
        (lambda text: text.replace("100,1.0", "\0" * 200_000), "line 3 holds no evaluation"),
        (lambda text: text.replace("100,1.0", "1e2,7"), "line 3 holds no evaluation"),
        (lambda text: text.replace("100,1.0", "0,1.0"), "line 3 holds no evaluation"),
        (lambda text: text.replace("env_step", "env"), "line 2 holds no evaluation"),
        (lambda text: text.replace("200,1.0\n", ""), "ends at env step 100, and the run at 200"),
        (lambda text: text.replace("200,1.0\n", "200,1.0"), "ends at env step 100, and the run at 200"),
    ],
)
def test_damaged_run_is_named_and_left_out_and_the_others_are_not(
    tmp_path: Path, change: Callable[[str], str], says: str
) -> None:
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in (0, 1)]
    for cell, last in zip(cells, (1.0, 0.4), strict=True):
        train(cell, [0.0, 1.0, last])
    path = cells[0].folder / "evaluations.csv"
    path.write_text(change(path.read_text()))
    (damage,) = write_results(cells, tmp_path / "sweep")
    assert damage.startswith(f"{path} is damaged: ")
    assert says in damage
    (row,) = read(tmp_path / "sweep" / "table.csv")
    assert (row["seeds_started"], row["seeds_finished"]) == ("2", "1")
    assert float(row["success"]) == pytest.approx(1.4 / 3, abs=1e-3)
    assert {row["seed"] for row in read(tmp_path / "sweep" / "results.csv")} == {"1"}
    assert (tmp_path / "sweep" / "curves.png").exists()


def test_run_without_evaluations_is_damaged_if_it_has_finished(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    (cell.folder / "evaluations.csv").unlink()
    assert write_results([cell], tmp_path / "sweep") == [
        f"{cell.folder}/evaluations.csv is damaged: it is empty or missing, and the run ended at 200"
    ]
    assert read(tmp_path / "sweep" / "table.csv")[0]["seeds_finished"] == "0"


def test_printed_table_is_aligned_and_says_who_reached_a_threshold() -> None:
    table = [
        {"scheme": "uniform", "seeds_started": 5, "seeds_finished": 5, "success": 0.7, "success_low": 0.6}
        | {"success_high": 0.81, "steps_to_0.8": 114112, "reached_0.8": 2, "reached_0.9": 0},
        {"scheme": "vlm_td", "seeds_started": 1, "seeds_finished": 1, "success": 1.0}
        | {"steps_to_0.8": 102080, "reached_0.8": 1, "steps_to_0.9": 1_161_000, "reached_0.9": 1},
        {"scheme": "per", "seeds_started": 2, "seeds_finished": 0},
    ]
    assert format_table(table).splitlines() == [
        "scheme   seeds finished  final success      steps to 0.8          steps to 0.9",
        "uniform  5 of 5          0.70 [0.60, 0.81]  >114K (2 of 5 seeds)  never",
        "vlm_td   1 of 1          1.00               102K                  1.16M",
        "per      0 of 2          -                  -                     -",
    ]


def test_every_column_is_documented() -> None:
    text = (DOCS / "sweeps.md").read_text()
    names = {field.replace("_low", "").replace("_high", "") for field in TABLE_FIELDS}
    names = {name if name[-1].isalpha() else name.rsplit("_", 1)[0] + "_" for name in names}
    assert [name for name in names if f"`{name}" not in text] == []


def test_table_of_the_published_sweep_has_these_columns() -> None:
    assert tuple(read(DOCS / "results" / "schemes" / "doorkey_6x6_dqn" / "table.csv")[0]) == TABLE_FIELDS
