from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from finished_cells import make_cell

from vlmrb.experiments.progress import TAIL_BYTES, Progress, estimate, last_rows, read_progress
from vlmrb.loggers import CSVTable


def test_progress_is_the_newest_of_what_metrics_and_evaluations_say(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == Progress()
    evaluations, metrics = CSVTable(tmp_path / "evaluations.csv"), CSVTable(tmp_path / "metrics.csv", ("step",))
    evaluations.append({"env_step": 0, "eval/success": 0.0, "time/wall_s": 2.0})
    metrics.append({"step": 0, "eval/success": 0.0})
    progress = read_progress(tmp_path)
    assert (progress.env_steps, progress.seconds, progress.success) == (0, 2.0, 0.0)
    metrics.append({"step": 500, "time/wall_s": 6.0, "time/env_steps_per_s": 120.0})
    metrics.append({"step": 1000, "time/wall_s": 10.0, "time/env_steps_per_s": 130.0})
    evaluations.append({"env_step": 1000, "eval/success": 0.25, "time/wall_s": 11.0})
    metrics.append({"step": 1000, "eval/success": 0.25})
    progress = read_progress(tmp_path)
    assert (progress.env_steps, progress.seconds, progress.env_steps_per_s) == (1000, 10.0, 130.0)
    assert progress.success == 0.25


def test_progress_without_metrics_is_that_of_the_evaluations(tmp_path: Path) -> None:
    CSVTable(tmp_path / "evaluations.csv").append({"env_step": 300, "eval/success": 0.5, "time/wall_s": 3.0})
    progress = read_progress(tmp_path)
    assert (progress.env_steps, progress.seconds, progress.success) == (300, 3.0, 0.5)
    assert math.isnan(progress.env_steps_per_s)


def test_last_rows_of_a_long_file_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = TAIL_BYTES // 8
    path.write_text("step,value\n" + "".join(f"{number},{number * 2}\n" for number in range(rows)) + "99")
    found = last_rows(path)
    assert found[-1] == {"step": str(rows - 1), "value": str(2 * rows - 2)}
    assert 100 < len(found) < rows
    assert [int(row["step"]) for row in found] == list(range(rows - len(found), rows))


@pytest.mark.parametrize(
    "damage",
    [
        b"15x0,12.0,0.5\n",
        b"\0\0\0\0\0\n",
        b'1500,"12.0,0.5\n',
        b"1500\n",
        b"\xff\xfe,,\n",
        b"nan,inf,0.5\n",
        b"1e999,,\n",
    ],
    ids=["digits", "zeros", "quote", "cut", "bytes", "nan", "overflow"],
)
def test_damaged_row_is_skipped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,time/wall_s,eval/success\n1000,10.0,0.25\n" + damage)
    assert read_progress(tmp_path).env_steps == 1000
    with path.open("ab") as file:
        file.write(b"2000,20.0,0.75\n")
    progress = read_progress(tmp_path)
    assert (progress.env_steps, progress.seconds, progress.success) == (2000, 20.0, 0.75)


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 500, b"\xff\xfe\n1,2\n"])
def test_file_without_a_table_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    assert read_progress(tmp_path) == Progress()


def test_time_left_goes_down_between_two_rows(tmp_path: Path) -> None:
    progress = Progress(env_steps=1000, seconds=10.0, written=time.time() - 4)
    assert progress.seconds_left(4000, since=0.0) == pytest.approx(30 - 4, abs=0.5)
    assert progress.seconds_left(4000, since=time.time() - 1) == pytest.approx(30 - 1, abs=0.5)  # resumed since
    assert replace(progress, written=time.time() - 100).seconds_left(4000, since=0.0) == 0
    assert math.isnan(Progress().seconds_left(4000, since=0.0))


def test_study_ends_when_the_last_place_is_free(tmp_path: Path) -> None:
    small = [make_cell(tmp_path / "sweep", seed=seed) for seed in range(4)]
    large = [make_cell(tmp_path / "sweep", seed=seed, config="large") for seed in range(4)]
    durations = [(small[0], 10.0), (small[1], 30.0), (large[0], 100.0), (large[1], math.nan)]
    # places are free at 5 and 50; 20 s each for small ones: 5 + 20 + 20 < 50, and then the large one at 45
    waiting = [small[2], small[3], large[3]]
    assert estimate({small[1]: 5.0, large[2]: 50.0}, waiting, durations, jobs=2) == pytest.approx(145)
    assert estimate({small[1]: math.nan}, [], durations, jobs=2) == pytest.approx(20)
    assert estimate({}, waiting, durations, jobs=3) == pytest.approx(100)
    assert math.isnan(estimate({small[1]: math.nan}, waiting, [], jobs=2))


def test_configuration_without_durations_is_expected_to_take_the_mean(tmp_path: Path) -> None:
    cell, other = make_cell(tmp_path / "sweep"), make_cell(tmp_path / "sweep", config="large")
    assert estimate({}, [other], [(cell, 10.0), (cell, 20.0)], jobs=1) == pytest.approx(15)


def test_newest_rows_time_is_the_files(tmp_path: Path) -> None:
    CSVTable(tmp_path / "evaluations.csv").append({"env_step": 300, "eval/success": 0.5, "time/wall_s": 3.0})
    os.utime(tmp_path / "evaluations.csv", (1_000, 1_000))
    assert read_progress(tmp_path).written == 1_000
