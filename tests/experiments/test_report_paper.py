from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import (
    PAPERS,
    PLM,
    SCORED,
    TINY,
    UNIFORM,
    leave_arm,
    leave_run,
    row_of,
    settings_of,
    tasks_in,
    texts,
    value,
)

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
from vlmrb.experiments.report.table import Number, to_csv

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrb.experiments.report.statistics.RESAMPLES", 500)


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
    assert {texts(table, row, "success", "steps", "less_steps")[0] for row in range(6)} == {"–"}
    assert "less_time" not in [column.key for column in table.columns]  # there are no times to compare
    assert not table.ours
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert {line["success"] for line in lines} == {""}
    assert lines[0]["paper_steps"] == "139000"


def test_tables_without_anything_of_ours_are_told_by_that() -> None:
    tables = [make([]) for make in (bins_table, reliability_table, models_table, prompts_table, sizes_table)]
    assert not any(table.ours for table in tables)


def test_smaller_task_stands_apart_without_figures_of_the_paper(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "uniform", UNIFORM)
    leave_arm(tmp_path / "door", "vlm", SCORED)
    table = level_table(tasks_in(tmp_path), "uniform")
    first = table.rows[0]  # ours first, as no level of the paper was run
    assert (first.cells["task"], first.mark) == ("DoorKey-6, DQN", "smaller")
    assert first.section.startswith("Other tasks, smaller ones for the most part")
    assert not [key for key in first.cells if key.startswith("paper_")]


def test_schemes_of_ones_own_stand_below_on_any_task(tmp_path: Path) -> None:
    quarter = {"replay.lam_max": 0.25}
    rank = {"replay.vlm": None, "replay.rank": {"exponent": 0.7}}
    leave_arm(tmp_path / "d16", "uniform", UNIFORM, changes=PAPERS, **MILLION)
    leave_arm(tmp_path / "d16", "vlm", SCORED, changes=PAPERS, **MILLION)
    leave_arm(tmp_path / "d16", "quarter", SCORED, "vlm", changes={**PAPERS, **quarter}, **MILLION)
    leave_arm(tmp_path / "door", "uniform", UNIFORM)
    leave_arm(tmp_path / "door", "per", UNIFORM)
    leave_arm(tmp_path / "door", "rank", SCORED, "vlm", changes=rank)
    tasks = tasks_in(tmp_path)
    table = level_table(tasks, "uniform")
    own = [row for row in table.rows if row.section.startswith("Other schemes")]
    assert [(row.cells["task"], row.cells["scheme"], row.mark) for row in own] == [
        ("DoorKey-16, DQN", "quarter · sprites", ""),
        ("DoorKey-6, DQN", "rank", "smaller"),
    ]
    assert value(own[1].cells, "less_steps") == 0.25
    papers = [row for row in table.rows if row.section == "The paper's tasks" and "success" in row.cells]
    assert [row.cells["scheme"] for row in papers] == ["vlm · sprites"]
    assert "DoorKey-16, DQN: no finished run of PER to compare with." in level_table(tasks, "per").notes


def test_no_comparison_rests_on_a_baseline_that_never_succeeded(tmp_path: Path) -> None:
    leave_arm(tmp_path / "d16", "uniform", [[0.0] * 5] * 2, changes=PAPERS, **MILLION)
    leave_arm(tmp_path / "d16", "vlm", SCORED, changes=PAPERS, **MILLION)
    leave_arm(tmp_path / "d16", "quarter", SCORED, "vlm", changes={**PAPERS, "replay.lam_max": 0.25}, **MILLION)
    tasks = tasks_in(tmp_path)
    never = "– uniform never succeeded"
    table = level_table(tasks, "uniform")
    ours = [number for number, row in enumerate(table.rows) if "success" in row.cells]
    for row in ours:
        assert texts(table, row, "steps", "baseline_steps", "less_steps", "less_time") == [never] * 4
    assert len(ours) == 2
    assert texts(gains_table(tasks), 0, "success_uniform", "steps_uniform") == [never, never]
    assert texts(priority_table(tasks), 2, "best_d16", "to_uniform_d16") == ["0.70 [0.40, 1.00]", never]
    assert texts(factor_table(FACTORS[1], tasks), 1, "to_uniform_d16") == [never]


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
    assert standing(task).reasons == ("no config.yaml lies with its runs",)


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
    assert texts(table, 0, "best_door", "paper_best_doorkey-16_dqn", "paper_to_per_doorkey-16_dqn") == [
        "0.50 [0.40, 0.60]",
        "0.20",
        "never (in 1M)",
    ]
    assert texts(table, 1, "best_door", "to_uniform_door", "paper_best_scene-5_sac") == ["–", "–", "0.62"]
    assert texts(table, 3, "best_door", "to_uniform_door") == ["1.00", "200"]  # one seed, no interval
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
    leave_arm(tmp_path / "door", "uniform", [[0.0, 0.9]])  # beside all levels
    other = {"replay.batch_size": 7, "replay.vlm.threshold": 0.9}
    leave_arm(tmp_path / "door", "elsewhere", [[0.0, 0.9]], "vlm", changes=other)  # more than one thing is different
    table = factor_table(factor, tasks_in(tmp_path))
    found = {row.cells["level"]: row.cells for row in table.rows if isinstance(row.cells.get("best_door"), Number)}
    assert value(found.pop("uniform"), "best_door") == 0.9
    assert list(found) == list(CHANGES[factor.key])
    assert [value(cells, "best_door") for cells in found.values()] == [number / 10 for number in range(len(found))]
    assert [value(cells, "area_door") for cells in found.values()] == [number / 20 for number in range(len(found))]
    assert [column.key for column in table.columns if column.key.startswith("best_")] == ["best_door"]


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
    cell = row_of(table, "level", "0.5")["best_door"]
    assert isinstance(cell, Number)
    assert (cell.value, cell.runs) == (pytest.approx((0.2 + 0.4 + 0.9) / 3), 3)


def test_papers_spread_and_gaps_are_kept(tmp_path: Path) -> None:
    table = factor_table(FACTORS[0], [])
    assert texts(table, 0, "paper_best_doorkey-16_dqn", "paper_to_0.8_doorkey-16_dqn") == ["0.53 ± 0.27", "–"]
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
    assert texts(table, 0, "times_door_vlm", "share_door_vlm", "paper_times") == [
        "3.00× [3.00×, 3.00×]",
        "12.5 % [12.5 %, 12.5 %]",
        "1.41×",
    ]
    assert texts(table, 1, "times_door_vlm", "paper_times") == ["–", "2.17×"]  # no episode has succeeded
    assert table.number == "8"


def test_speed_is_compared_with_that_of_per(tmp_path: Path) -> None:
    leave_arm(tmp_path / "door", "vlm", SCORED, metrics={"time/env_steps_per_s": 900.0})
    leave_arm(tmp_path / "door", "per", UNIFORM, metrics={"time/env_steps_per_s": 1000.0})
    table = speed_table(tasks_in(tmp_path))
    assert texts(table, 0, "per", "scored", "ratio")[2] == "0.90× [0.90×, 0.90×]"
    assert texts(table, 1, "task", "ratio", "paper_per", "paper_scored") == ["DoorKey-16, A100", "–", "111", "97"]


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
    assert {
        row.cells["prompt"] for row in table.rows if "auc_tiny_model_minigrid-8x8-standard-tile8-v1" in row.cells
    } == {
        "base",
        "terse",
        "Is it done?",
    }
    cells = row_of(table, "prompt", "paraphrase A")
    assert cells.get("auc_tiny_model_minigrid-8x8-standard-tile8-v1") is None
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
