from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from report_runs import PAPERS, PLM, SPRITES, TINY, leave_run, settings_of

from vlmrb.experiments.report.command import read_all
from vlmrb.experiments.report.factor_tables import FACTORS, factor_table, priority_table
from vlmrb.experiments.report.level_tables import gains_table, level_table
from vlmrb.experiments.report.measured_tables import frequency_table, speed_table
from vlmrb.experiments.report.paper import arm_deviations, paper, standing
from vlmrb.experiments.report.scorer_tables import (
    bins_table,
    models_table,
    prompts_table,
    read_benchmark,
    read_calibration,
    reliability_table,
    sizes_table,
)
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table, shown, to_csv, to_markdown
from vlmrb.experiments.report.task_tables import runs_table, schemes_table, together_table
from vlmrb.experiments.report.tasks import Task, common_schemes, gather

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GAPS = (None, "–")


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrb.experiments.report.statistics.RESAMPLES", 500)


def leave_arm(
    out: Path, label: str, curves: Sequence[Sequence[float]], kind: str = "", scorer: Any = SPRITES, **options: Any
) -> None:
    """Leaves one finished run per curve, in ``<out>/<label>/seed_<n>``; ``changes`` as for `settings_of`."""
    changes = options.pop("changes", None)
    for seed, success in enumerate(curves):
        settings = settings_of(kind or label, scorer, changes)
        leave_run(out / label / f"seed_{seed}", success, settings, **options)


def tasks_in(*paths: Path) -> list[Task]:
    return gather(read_all(paths)[0])[0]


def texts(table: Table, row: int, *keys: str) -> list[str]:
    """Returns cells as they are shown, intervals included."""
    kinds = {column.key: column.kind for column in table.columns}
    cells = table.rows[row].cells
    return [" ".join(part for part in shown(cells.get(key), kinds[key]) if part) for key in keys]


def value(cells: Mapping[str, Cell], key: str) -> float:
    cell = cells.get(key)
    assert isinstance(cell, Number)
    return cell.value


def row_of(table: Table, key: str, text: str) -> Mapping[str, Cell]:
    (row,) = [row for row in table.rows if row.cells[key] == text]
    return row.cells


# --- the table of a task ---------------------------------------------------------------------------------------------

UNIFORM = [[0.0, 0.0, 0.2, 0.4, 0.6], [0.0, 0.0, 0.0, 0.4, 0.4]]  # best 0.6 and 0.4: 0.5 is uniform's best
SCORED = [[0.0, 0.4, 0.8, 1.0, 1.0], [0.0, 0.2, 0.4, 0.4, 0.4]]


def test_table_of_a_task_as_markdown(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM, seconds=2)
    leave_arm(tmp_path / "door", "vlm", SCORED, seconds=4)
    leave_run(tmp_path / "door" / "vlm" / "seed_2", [0.0, 1.0], settings_of("vlm"), finished=False, exit_code=143)
    leave_run(tmp_path / "door" / "vlm_td" / "seed_0", [], settings_of("vlm_td"), exit_code=1)
    (task,) = tasks_in(tmp_path)
    lines = to_markdown(schemes_table(task)).splitlines()
    assert lines[0] == "## DoorKey-6, DQN"
    assert lines[2:] == [
        "| scheme | scorer | seeds | success: final success | success: final, IQM | success: best "
        "| success: over training | env steps to: 0.8 | env steps to: uniform's best "
        "| chance to be ahead of: uniform | time of a run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        # final (0.4 + 0.267) / 2; area (0.9/4 + 0.6/4) / 2; one seed reaches 0.5 at 400, the other counts as 400
        "| uniform | none | 2 of 2 | 0.33 [0.27, 0.40] | 0.33 [0.27, 0.40] | 0.50 [0.40, 0.60] | 0.19 [0.15, 0.23] "
        "| never (in 400) | >400 [400, 400] (1 of 2) | – | 8 s [8 s, 8 s] |",
        # final (0.933 + 0.4) / 2; area (2.7/4 + 1.2/4) / 2; 0.8 and 0.5 at 200, the other never
        "| vlm | sprites (hand-made) | 2 of 3 | 0.67 [0.40, 0.93] | 0.67 [0.40, 0.93] | 0.70 [0.40, 1.00] "
        "| 0.49 [0.30, 0.68] | >300 [200, 400] (1 of 2) | >300 [200, 400] (1 of 2) | 1.00 [1.00, 1.00] "
        "| 16 s [16 s, 16 s] |",
        "| vlm_td | sprites (hand-made) | 0 of 1 | – | – | – | – | – | – | – | – |",
        "",
        "- A smaller task: MiniGrid-DoorKey-6x6-v0 is none of the paper's environments.",
    ]


def test_table_of_a_task_as_csv(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM[:1])
    leave_run(tmp_path / "door" / "per" / "seed_0", [0.0, 1.0], settings_of("per"), finished=False, exit_code=143)
    (task,) = tasks_in(tmp_path)
    assert to_csv(schemes_table(task)).splitlines() == [
        "scheme,scorer,seeds,final,final_runs,final_iqm,final_iqm_runs,best,best_runs,area,area_runs,"
        "to_0.8,to_0.8_reached,to_0.8_runs,to_uniform,to_uniform_reached,to_uniform_runs,wall_s,wall_s_runs",
        "uniform,none,1 of 1,0.4,1,0.4,1,0.6,1,0.225,1,400,0,1,400,1,1,4,1",
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
    (task,) = tasks_in(RESULTS / "doorkey_6x6" / "results.csv")
    table = schemes_table(task)
    with (RESULTS / "doorkey_6x6" / "table.csv").open() as file:
        expected = list(csv.DictReader(file))
    assert [row["scheme"] for row in expected] == [row.cells["scheme"] for row in table.rows]
    for theirs, ours in zip(expected, (row.cells for row in table.rows), strict=True):
        for name, key in (("success", "final"), ("best_success", "best"), ("area", "area")):
            assert value(ours, key) == pytest.approx(float(theirs[name]), abs=6e-4)
        steps = ours["to_0.8"]
        assert isinstance(steps, Number)
        assert (round(steps.value), steps.reached) == (int(theirs["steps_to_0.8"]), int(theirs["reached_0.8"]))


# --- several tasks ---------------------------------------------------------------------------------------------------


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
    assert table.notes == ["Not in these numbers, as they share fewer schemes: DoorKey-6, DQN (c)."]
    # over the four runs of both tasks 0.4, 0.267, 0.4, 0.267; steps to 0.5: 300 instead of 400
    assert value(table.rows[0].cells, "final_iqm") == pytest.approx(1 / 3)
    assert value(table.rows[2].cells, "steps") == pytest.approx(0.25)
    assert value(table.rows[2].cells, "ahead_uniform") == 1.0
    assert value(table.rows[2].cells, "ahead_per") == 0.5
    assert table.rows[0].cells.get("steps") is None


def test_one_task_is_not_put_together(tmp_path: Path) -> None:
    leave_arm(tmp_path / "a", "uniform", UNIFORM)
    leave_arm(tmp_path / "a", "vlm", UNIFORM)
    assert together_table(tasks_in(tmp_path)) is None


# --- beside the paper ------------------------------------------------------------------------------------------------

MILLION = {"every": 250_000}


def test_level_of_the_paper_stands_beside_its_figures(tmp_path: Path) -> None:
    leave_arm(tmp_path / "d16", "uniform", UNIFORM, changes=PAPERS, seconds=10, **MILLION)
    leave_arm(tmp_path / "d16", "vlm", SCORED, scorer=PLM, changes=PAPERS, seconds=20, **MILLION)
    tasks = tasks_in(tmp_path)
    assert standing(tasks[0]).same
    table = level_table(tasks, "uniform")
    cells = row_of(table, "task", "DoorKey-16, DQN")
    assert cells["scheme"] == "vlm · PLM-1B"
    assert [value(cells, key) for key in ("success", "baseline_success")] == pytest.approx([0.7, 0.5])
    assert [value(cells, key) for key in ("steps", "baseline_steps")] == [750_000, 1_000_000]
    assert value(cells, "less_steps") == 0.25
    assert value(cells, "less_time") == 1 - 60 / 40  # two and four evaluations of 20 s, four of 10 s
    assert [value(cells, f"paper_{key}") for key in ("success", "baseline_success")] == [0.92, 0.24]
    assert [value(cells, f"paper_{key}") for key in ("steps", "baseline_steps")] == [420_000, 893_000]
    assert "DoorKey-16, vlm · PLM-1B: without IQN, which is in the paper's mean." in table.notes


def test_both_algorithms_of_a_level_are_averaged(tmp_path: Path) -> None:
    for name, curves in (("dqn", SCORED), ("iqn", [[0.0, 1.0, 1.0, 1.0, 1.0]] * 2)):
        changes = {**PAPERS, "model.class_path": f"vlmrb.algorithms.{name.upper()}"}
        leave_arm(tmp_path / name, "uniform", UNIFORM, changes=changes, **MILLION)
        leave_arm(tmp_path / name, "vlm", curves, changes=changes, scorer=PLM, **MILLION)
    tasks = tasks_in(tmp_path)
    cells = row_of(level_table(tasks, "uniform"), "task", "DoorKey-16, DQN, IQN")
    assert value(cells, "success") == pytest.approx((0.7 + 1.0) / 2)
    assert value(cells, "less_steps") == pytest.approx(1 - (750_000 + 250_000) / 2_000_000)
    gains = row_of(gains_table(tasks), "domain", "DoorKey")
    assert gains["levels"] == "1 of 3"
    assert value(gains, "success_uniform") == pytest.approx(0.85 / 0.5 - 1)
    assert value(gains, "paper_success_uniform") == 0.57
    assert gains.get("success_per") is None


def test_levels_that_were_not_run_are_gaps(tmp_path: Path) -> None:
    table = level_table([], "per")
    assert [row.cells["task"] for row in table.rows] == [level["name"] for level in paper()["levels"]]
    assert {texts(table, row, "success", "steps", "less_steps", "less_time")[0] for row in range(6)} == {"–"}
    assert not table.ours
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert {line["success"] for line in lines} == {""}
    assert lines[0]["paper_steps"] == "139000"


def test_smaller_task_stands_apart_without_figures_of_the_paper(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM)
    leave_arm(tmp_path / "door", "vlm", SCORED)
    table = level_table(tasks_in(tmp_path), "uniform")
    first = table.rows[0]  # ours first, as no level of the paper was run
    assert (first.cells["task"], first.mark) == ("DoorKey-6, DQN", "smaller")
    assert first.section.startswith("Other tasks, smaller ones for the most part")
    assert not [key for key in first.cells if key.startswith("paper_")]


@pytest.mark.parametrize(
    ("changes", "badge", "reason"),
    [
        ({}, "the paper's task", None),
        ({"env.id": "MiniGrid-DoorKey-6x6-v0"}, "a smaller task", "is none of the paper's environments"),
        ({"env.id": "World-v0"}, "not a task of the paper", "World-v0 is none of the paper's environments"),
        ({"env.max_steps": 160}, "smaller than the paper's", "the horizon: 160 (paper: the environment's own)"),
        ({"env.actions": [0, 1, 2]}, "smaller than the paper's", "the actions: 3 of them (paper: all)"),
        ({"training.total_env_steps": 400_000}, "smaller than the paper's", "env steps: 400K (paper: 1M)"),
        ({"training.gamma": 0.99}, "not the paper's settings", "γ: 0.99 (paper: 0.95)"),
        ({"evaluation.episodes": 50}, "not the paper's settings", "episodes per evaluation: 50 (paper: 10)"),
        ({"model.class_path": "vlmrb.algorithms.SAC"}, "not the paper's settings", "SAC (paper: DQN and IQN)"),
    ],
)
def test_what_makes_a_task_the_papers(tmp_path: Path, changes: dict[str, Any], badge: str, reason: str | None) -> None:
    settings = settings_of("vlm", changes={**PAPERS, **changes})
    leave_run(tmp_path / "d16" / "vlm" / "seed_0", [0.0, 0.5], settings, every=1_000_000)
    (task,) = tasks_in(tmp_path)
    where = standing(task)
    assert (where.badge, where.same) == (badge, reason is None)
    assert any(reason in text for text in where.reasons) if reason else not where.reasons


def test_task_without_settings_is_not_taken_for_the_papers(tmp_path: Path) -> None:
    leave_run(tmp_path / "DoorKey-16x16" / "vlm" / "seed_0", [0.0, 0.5], label="", finished=False)
    (tmp_path / "DoorKey-16x16" / "vlm" / "seed_0" / "summary.json").unlink()
    (task,) = tasks_in(tmp_path)
    assert (standing(task).badge, standing(task).same) == ("settings not recorded", False)


def test_another_scorer_or_clip_length_on_the_papers_task_is_said(tmp_path: Path) -> None:
    settings = settings_of("vlm", TINY, {**PAPERS, "replay.clip_length": 16})
    leave_run(tmp_path / "d16" / "vlm" / "seed_0", [0.0, 0.5], settings, every=1_000_000)
    (task,) = tasks_in(tmp_path)
    assert arm_deviations(task.arms[0]) == ("scored by tiny perception_lm (paper: PLM-1B)", "L: 16 (paper: 32)")


def test_priority_variants_stand_beside_the_papers(tmp_path: Path) -> None:
    for label, curves in (("uniform", UNIFORM), ("vlm", SCORED), ("vlm_td", SCORED[:1])):
        leave_arm(tmp_path / "door", label, curves)
    table = priority_table(tasks_in(tmp_path))
    groups = dict.fromkeys(column.group for column in table.columns if column.group)
    expected = ["DoorKey-6, DQN · sprites (a smaller task)", "paper: DoorKey-16, DQN", "paper: Scene-5, SAC"]
    assert list(groups) == expected
    assert [row.cells["level"] for row in table.rows] == ["uniform", "PER", "score only", "score × TD error"]
    assert texts(table, 0, "best_0", "paper_best_0", "paper_to_per_0") == ["0.50 [0.40, 0.60]", "0.20", "never (in 1M)"]
    assert texts(table, 1, "best_0", "to_uniform_0", "paper_best_1") == ["–", "–", "0.62"]
    assert texts(table, 3, "best_0", "to_uniform_0") == ["1.00", "200"]  # one seed, no interval
    assert "sprites: hand-made recogniser, not a VLM." in table.notes


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "threshold": {"0.5": {}, "0.75": {"replay.vlm.threshold": 0.75}, "raw score": {"replay.vlm.threshold": None}},
    "lambda": {
        "pure priority": {"replay.lam_max": 1.0, "replay.warmup_fraction": 0.0},
        **{"0.25": {"replay.lam_max": 0.25}, "0.5": {}},
    },
    "corruption": {
        "0": {},
        "0.25": {
            "scoring.control": {"class_path": "vlmrb.scoring.controls.Corrupted", "init_args": {"kappa": 0.25}},
        },
        "shuffled": {"scoring.control": {"class_path": "vlmrb.scoring.controls.Shuffled", "init_args": {}}},
    },
    "models": {"PLM-1B": {"scoring.scorer": PLM}, "sprites": {}},
    "visuals": {"standard": {}, "misleading": {"env.visuals": "misleading"}},
    "clip_length": {"8": {"replay.clip_length": 8}, "16": {}},
}


@pytest.mark.parametrize("factor", FACTORS, ids=lambda factor: factor.key)
def test_levels_of_a_factor_are_told_apart_by_their_settings(tmp_path: Path, factor: Any) -> None:
    for number, (_, changes) in enumerate(CHANGES[factor.key].items()):
        leave_arm(tmp_path / "door", f"arm_{number}", [[0.0, number / 10], [0.0, number / 10]], "vlm", changes=changes)
    leave_arm(tmp_path / "door", "uniform", [[0.0, 0.9]])  # no level of anything
    other = {"replay.batch_size": 7, "replay.vlm.threshold": 0.9}
    leave_arm(tmp_path / "door", "elsewhere", [[0.0, 0.9]], "vlm", changes=other)  # more than one thing is different
    table = factor_table(factor, tasks_in(tmp_path))
    found = {row.cells["level"]: row.cells for row in table.rows if isinstance(row.cells.get("best_0"), Number)}
    assert list(found) == list(CHANGES[factor.key])
    assert [value(cells, "best_0") for cells in found.values()] == [number / 10 for number in range(len(found))]
    assert not [column for column in table.columns if column.key == "best_1"]


def test_one_level_is_no_comparison(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "vlm", SCORED)
    for factor in FACTORS:
        assert not factor_table(factor, tasks_in(tmp_path)).ours


def test_equal_settings_under_two_names_are_one_level_and_each_seed_counts_once(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "vlm", [[0.0, 0.2], [0.0, 0.4]])
    leave_arm(tmp_path / "door", "same", [[0.0, 0.8]], "vlm")
    leave_run(tmp_path / "door" / "same" / "seed_9", [0.0, 0.9], settings_of("vlm"))
    leave_arm(tmp_path / "door", "quarter", [[0.0, 0.1]], "vlm", changes={"replay.lam_max": 0.25})
    table = factor_table(FACTORS[1], tasks_in(tmp_path))
    cell = row_of(table, "level", "0.5")["best_0"]
    assert isinstance(cell, Number)
    assert (cell.value, cell.runs) == (pytest.approx((0.2 + 0.4 + 0.9) / 3), 3)


def test_papers_spread_and_gaps_are_kept(tmp_path: Path) -> None:
    table = factor_table(FACTORS[0], [])
    assert texts(table, 0, "paper_best_0", "paper_to_0.8_0") == ["0.53 ± 0.27", "–"]
    assert not table.ours


def test_replay_frequencies_are_read_from_the_runs(tmp_path: Path) -> None:
    metrics = {
        "replay/frequency_vlm_positive": 3.0,
        "replay/share_vlm_positive": 0.125,
        "replay/frequency_unscored": 0.5,
    }
    leave_arm(tmp_path / "door", "vlm", SCORED, metrics=metrics)
    leave_arm(tmp_path / "door", "uniform", UNIFORM, metrics={"replay/frequency_unscored": 1.0})
    table = frequency_table(tasks_in(tmp_path))
    assert texts(table, 0, "times_0", "share_0", "paper_times") == [
        "3.00× [3.00×, 3.00×]",
        "12.5 % [12.5 %, 12.5 %]",
        "1.41×",
    ]
    assert texts(table, 1, "times_0", "paper_times") == ["–", "2.17×"]  # no episode has succeeded
    assert table.number == "8"


def test_speed_is_compared_with_that_of_per(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "vlm", SCORED, metrics={"time/env_steps_per_s": 900.0})
    leave_arm(tmp_path / "door", "per", UNIFORM, metrics={"time/env_steps_per_s": 1000.0})
    table = speed_table(tasks_in(tmp_path))
    assert texts(table, 0, "per", "scored", "ratio")[2] == "0.90× [0.90×, 0.90×]"
    assert texts(table, 1, "task", "ratio", "paper_per", "paper_scored") == ["DoorKey-16, A100", "–", "111", "97"]


# --- scorers ---------------------------------------------------------------------------------------------------------


def test_kept_calibration_stands_beside_the_papers_scorers() -> None:
    report = read_calibration(RESULTS / "calibration_doorkey_8x8" / "report.json")
    assert report is not None
    tables = {table.key: table for table in (make([report]) for make in (bins_table, reliability_table, models_table))}
    cells = row_of(tables["reliability"], "scorer", "tiny_vlm")
    by_label = report["scorers"][0]["by_label"]
    assert value(cells, "precision_success") == by_label["success"]["at_configured"]["precision"]
    assert value(cells, "recall_milestone") == by_label["milestone"]["at_configured"]["recall"]
    assert value(row_of(tables["models_offline"], "scorer", "tiny_vlm"), "auc") == by_label["success"]["auc"]
    assert value(row_of(tables["models_offline"], "scorer", "paper: Qwen3-VL-2B"), "auc") == 0.89
    line = row_of(tables["threshold_offline"], "threshold", "0.50")
    assert (value(line, "paper_accuracy"), value(line, "paper_share")) == (0.938, 0.105)
    notes = {note for table in tables.values() for note in table.notes}
    assert notes == {
        "tiny_vlm: tiny model trained on privileged labels, no evidence for any VLM.",
        "sprites: hand-made recogniser, not a VLM.",
        "milestones: privileged: reads the simulator's state, not a VLM.",
    }


def test_prompts_are_matched_with_the_papers(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "calibration_doorkey_8x8" / "report.json").read_text())
    base = report["scorers"][0]
    other = {**base, "label": "tiny_vlm, grid_terse prompt", "prompt": "grid_terse/1: Goal?"}
    own = {**base, "label": "tiny_vlm, mine", "prompt": "Is it done?"}
    table = prompts_table([{**report, "scorers": [base, other, own]}])
    assert {row.cells["prompt"] for row in table.rows if "auc_0" in row.cells} == {"base", "terse", "Is it done?"}
    cells = row_of(table, "prompt", "paraphrase A")
    assert cells.get("auc_0") is None
    assert value(cells, "paper_auc") == 0.989


def test_sizes_of_models_are_read_from_the_benchmark(tmp_path: Path) -> None:
    rows = [
        {"model": "facebook/Perception-LM-1B", "stream": "all frames different", "ours clips/s": 4.0, "peak MiB": 2048}
    ]
    (tmp_path / "scorer.json").write_text(json.dumps({"rows": [{**rows[0], "device": "GPU"}]}))
    benchmark = read_benchmark(tmp_path / "scorer.json")
    kept = read_benchmark(RESULTS / "benchmarks" / "scorer.json")
    assert benchmark is not None
    assert kept is not None
    table = sizes_table([benchmark, kept])
    assert texts(table, 0, "model", "machine", "gib", "seconds", "paper_gib", "paper_seconds") == [
        *("PLM-1B", "GPU", "2", "0.25 s", "3.77", "0.46 s")
    ]
    assert texts(table, 1, "model", "machine")[0] == "perception_lm, no published checkpoint"
    assert texts(table, len(table.rows) - 1, "model", "gib", "paper_gib") == ["PLM-8B", "–", "20.3"]


def test_other_json_files_are_neither(tmp_path: Path) -> None:
    for path in (RESULTS / "tiny_vlm.json", RESULTS / "benchmarks" / "throughput.json"):
        assert read_calibration(path) is None
        assert read_benchmark(path) is None


# --- how numbers are written -----------------------------------------------------------------------------------------


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
