from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_runs import SCORED, UNIFORM, leave_arm, leave_run, settings_of, tasks_in, texts, value

from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table, shown, to_csv, to_markdown
from vlmrb.experiments.report.task_tables import runs_table, schemes_table, together_table
from vlmrb.experiments.report.tasks import common_schemes

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrb.experiments.report.statistics.RESAMPLES", 500)


def test_table_of_a_task_as_markdown(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM, seconds=2)
    leave_arm(tmp_path / "door", "vlm", SCORED, seconds=4)
    leave_run(tmp_path / "door" / "vlm" / "seed_2", [0.0, 1.0], settings_of("vlm"), finished=False, exit_code=143)
    leave_run(tmp_path / "door" / "vlm_td" / "seed_0", [], settings_of("vlm_td"), exit_code=1)
    (task,) = tasks_in(tmp_path)
    lines = to_markdown(schemes_table(task)).splitlines()
    assert lines[0] == "## DoorKey-6, DQN"
    assert lines[2:4] == ["In names of files: door.", ""]
    assert lines[4:] == [
        "| scheme | scorer | seeds | success: final success | success: over training | success: best "
        "| env steps to: 0.8 | env steps to: uniform's best "
        "| chance to be ahead of: uniform | final success, IQM | time of a run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        # final (0.4 + 0.267) / 2; area (0.9/4 + 0.6/4) / 2; one seed reaches 0.5 at 400, the other counts as 400
        "| uniform | none | 2 of 2 | 0.33 [0.27, 0.40] | 0.19 [0.15, 0.23] | 0.50 [0.40, 0.60] "
        "| never (in 400) | >400 [400, 400] (1 of 2) | – | 0.33 [0.27, 0.40] | 8 s [8 s, 8 s] |",
        # final (0.933 + 0.4) / 2; area (2.7/4 + 1.2/4) / 2; 0.8 and 0.5 at 200, the other never
        "| vlm | sprites (hand-made) | 2 of 3 | 0.67 [0.40, 0.93] | 0.49 [0.30, 0.68] | 0.70 [0.40, 1.00] "
        "| >300 [200, 400] (1 of 2) | >300 [200, 400] (1 of 2) | 1.00 [1.00, 1.00] "
        "| 0.67 [0.40, 0.93] | 16 s [16 s, 16 s] |",
        "| vlm_td | sprites (hand-made) | 0 of 1 | – | – | – | – | – | – | – | – |",
        "",
        "- A smaller task: MiniGrid-DoorKey-6x6-v0 is none of the paper's environments.",
    ]


def test_table_of_a_task_as_csv(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM[:1])
    leave_run(tmp_path / "door" / "per" / "seed_0", [0.0, 1.0], settings_of("per"), finished=False, exit_code=143)
    (task,) = tasks_in(tmp_path)
    assert to_csv(schemes_table(task)).splitlines() == [
        "scheme,scorer,seeds,final,final_runs,area,area_runs,best,best_runs,"
        "to_0.8,to_0.8_reached,to_0.8_runs,to_uniform,to_uniform_reached,to_uniform_runs,final_iqm,final_iqm_runs,wall_s,wall_s_runs",
        "uniform,none,1 of 1,0.4,1,0.225,1,0.6,1,400,0,1,400,1,1,0.4,1,4,1",
        "per,none,0 of 1" + 16 * ",",
    ]


def test_arm_that_differs_in_more_than_its_replay_is_said_to(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM)
    leave_arm(tmp_path / "door", "vlm", SCORED, changes={"model.init_args.learning_rate": 0.1, "replay.clip_length": 8})
    (task,) = tasks_in(tmp_path)
    (_, note) = schemes_table(task).notes
    assert note == (
        "vlm differs from uniform in more than its replay scheme: model.init_args.learning_rate 0.1 instead of 0.0003."
    )


@pytest.mark.parametrize(
    ("replay", "scorer"),
    [
        ({"replay.vlm": None, "replay.lam_max": 0.0, "replay.score_reward": {"weight": 1.0}}, "sprites (hand-made)"),
        ({"replay.vlm": None, "replay.relo": {"exponent": 0.6}}, "none"),
        ({"replay.age": {"turnover": 0.25}}, "sprites (hand-made)"),
    ],
)
def test_scorer_is_named_where_it_matters(tmp_path: Path, replay: dict[str, Any], scorer: str) -> None:
    leave_arm(tmp_path / "door", "arm", SCORED[:1], "vlm", changes=replay)
    (task,) = tasks_in(tmp_path)
    assert schemes_table(task).rows[0].cells["scorer"] == scorer


def test_runs_are_listed_with_those_first_that_are_in_no_number(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM)
    leave_run(tmp_path / "door" / "vlm" / "seed_5", [0.0, 0.9], settings_of("vlm"), exit_code=1)
    table = runs_table(tasks_in(tmp_path))
    keys = ("scheme", "seed", "status", "env_steps", "final")
    assert [texts(table, row, *keys) for row in range(3)] == [
        ["vlm", "5", "failed", "100", "–"],
        ["uniform", "0", "finished", "400", "0.40"],
        ["uniform", "1", "finished", "400", "0.27"],
    ]


def test_kept_results_give_the_numbers_of_their_sweep() -> None:
    (task,) = tasks_in(RESULTS / "schemes" / "doorkey_6x6_dqn" / "results.csv")
    table = schemes_table(task)
    with (RESULTS / "schemes" / "doorkey_6x6_dqn" / "table.csv").open() as file:
        expected = {row["scheme"]: row for row in csv.DictReader(file)}
    found = {row.cells["scheme"]: row.cells for row in table.rows}
    assert set(found) == set(expected)
    for scheme, ours in found.items():
        theirs = expected[str(scheme)]
        for name, key in (("success", "final"), ("best_success", "best"), ("area", "area")):
            assert value(ours, key) == pytest.approx(float(theirs[name]), abs=6e-4)
        steps = ours["to_0.8"]
        assert isinstance(steps, Number)
        assert (round(steps.value), steps.reached) == (int(theirs["steps_to_0.8"]), int(theirs["reached_0.8"]))


def test_all_tasks_together_are_those_that_share_most_schemes(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        leave_arm(tmp_path / name, "uniform", UNIFORM)
    for name in ("a", "b"):
        leave_arm(tmp_path / name, "per", SCORED)
        leave_arm(tmp_path / name, "vlm", SCORED)
    tasks = tasks_in(tmp_path)
    labels, shared = common_schemes(tasks)
    assert (labels, [task.name for task in shared]) == (["uniform", "per", "vlm"], ["a", "b"])
    table = together_table(tasks)
    assert table is not None
    assert table.notes == [
        "What these have in common: DoorKey-6, DQN (a); DoorKey-6, DQN (b).",
        "Not in these numbers, as they share fewer schemes: DoorKey-6, DQN (c).",
    ]
    # over the four runs of both tasks 0.4, 0.267, 0.4, 0.267; steps to 0.5: 300 instead of 400
    assert value(table.rows[0].cells, "final_iqm") == pytest.approx(1 / 3)
    assert value(table.rows[2].cells, "steps") == pytest.approx(0.25)
    assert value(table.rows[2].cells, "ahead_uniform") == 1.0
    assert value(table.rows[2].cells, "ahead_per") == 0.5
    assert table.rows[0].cells.get("steps") is None


def test_nothing_is_reached_where_the_baseline_never_succeeded(tmp_path: Path) -> None:
    for name in ("a", "b"):
        leave_arm(tmp_path / name, "uniform", [[0.0] * 5] * 2)
        leave_arm(tmp_path / name, "vlm", SCORED)
    tasks = tasks_in(tmp_path)
    table = schemes_table(tasks[0])
    for row in range(2):
        assert texts(table, row, "to_uniform") == ["– uniform never succeeded"]
    line = next(line for line in csv.DictReader(to_csv(table).splitlines()) if line["scheme"] == "vlm")
    assert (line["to_uniform"], line["to_uniform_why"]) == ("", "uniform never succeeded")
    together = together_table(tasks)
    assert together is not None
    never = "uniform never succeeded on DoorKey-6, DQN"
    assert texts(together, 1, "steps") == [f"– {never} (a); {never} (b)"]


def test_time_of_a_run_is_that_of_its_summary(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "door" / "vlm" / "seed_0", [0.0, 0.5], settings_of("vlm"), seconds=3)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "wall_s": 7.5}))
    tasks = tasks_in(tmp_path)
    assert value(schemes_table(tasks[0]).rows[0].cells, "wall_s") == 7.5
    assert value(runs_table(tasks).rows[0].cells, "wall_s") == 7.5
    assert tasks[0].arms[0].wall_to(0.5) == [3.0]
    assert tasks[0].arms[0].wall_to(0.9) == [7.5]


@pytest.mark.parametrize(
    ("number", "text"),
    [(1e6, "1000000"), (1234567.4, "1234567"), (0.123456789, "0.123457"), (12.5, "12.5"), (0.0, "0")],
)
def test_csv_has_plain_numbers(number: float, text: str) -> None:
    table = Table("key", "title", [Column("a", "a", "steps")], [Row({"a": Number(number)})])
    assert to_csv(table) == f"a\n{text}\n"


def test_one_task_is_not_put_together(tmp_path: Path) -> None:
    leave_arm(tmp_path / "a", "uniform", UNIFORM)
    leave_arm(tmp_path / "a", "vlm", UNIFORM)
    assert together_table(tasks_in(tmp_path)) is None


@pytest.mark.parametrize(
    ("cell", "kind", "text"),
    [
        (None, "share", "–"),
        (Number(math.nan), "steps", "–"),
        (Number(0.0), "share", "0.00"),
        (Number(0.0, runs=2, reached=2), "steps", "0"),
        (Number(123_456.0, 90_000, 150_000, 5, 5), "steps", "123K [90K, 150K]"),
        (Number(123_456.0, 90_000, 150_000, 5, 4), "steps", ">123K [90K, 150K] (4 of 5)"),
        (Number(240_000.0, 240_000, 240_000, 5, 0), "steps", "never (in 240K)"),
        (Number(0.512, 0.4, 0.6), "change", "51 % less [40, 60]"),
        (Number(-0.21, -0.89, 0.18), "change", "21 % more [−89, 18]"),
        (Number(0.326), "percent", "+32.6 %"),
        (Number(-0.04), "percent", "−4.0 %"),
        (Number(1234.4), "seconds", "1,234 s"),
        (Number(0.99974), "threshold", "0.9997"),
        ("text", "text", "text"),
    ],
)
def test_number_as_text(cell: Cell, kind: Any, text: str) -> None:
    assert " ".join(part for part in shown(cell, kind) if part) == text


def test_bars_in_a_cell_do_not_break_the_table() -> None:
    table = Table("key", "title", [Column("a", "a|b")], [Row({"a": "|δ|"})])
    assert to_markdown(table).splitlines()[2:5] == ["| a\\|b |", "| --- |", "| \\|δ\\| |"]
