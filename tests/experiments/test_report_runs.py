from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import SPRITES, leave_run, settings_of

from vlmrb.experiments.report.command import read_all
from vlmrb.experiments.report.kept import read_results
from vlmrb.experiments.report.paper import standing
from vlmrb.experiments.report.runs import Run, read_run, run_folders
from vlmrb.experiments.report.settings import (
    control_of,
    differences,
    label_of,
    scheme_kind,
    scorer_of,
)
from vlmrb.experiments.report.tasks import Task, gather

HEAD = "scheme,seed,status,env_step,success\n"


def names(tasks: list[Task]) -> list[tuple[str, str, list[int | None]]]:
    return [(task.name, arm.label, [run.seed for run in arm.runs]) for task in tasks for arm in task.arms]


def gathered(*paths: Path) -> tuple[list[Task], list[tuple[Run, str]]]:
    return gather(read_all(paths)[0])


def test_run_of_a_study_is_named_by_its_record(tmp_path: Path) -> None:
    run = read_run(leave_run(tmp_path / "doorkey_v0.5" / "lam_0.25" / "seed_3", [0.0, 0.5], settings_of("vlm")))
    assert (run.config, run.label, run.seed, run.status) == ("doorkey_v0.5", "lam_0.25", 3, "finished")
    assert (run.env, run.algorithm, run.budget) == ("MiniGrid-DoorKey-6x6-v0", "DQN", 400)
    assert (run.steps.tolist(), run.success.tolist(), run.wall_s.tolist()) == ([0, 400], [0.0, 0.5], [0.0, 1.0])


def test_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "out" / "vlm" / "seed_0", [0.0, 0.5], settings_of("vlm"))
    record = {"config": "configs/doorkey_6x6_dqn.yaml", "overlay": "configs/replay/vlm.yaml", "seed": 0, "exit_code": 0}
    (folder / "cell.json").write_text(json.dumps(record))
    run = read_run(folder)
    assert (run.config, run.label) == ("doorkey_6x6_dqn", "vlm")


def test_run_without_a_record_is_named_by_its_settings(tmp_path: Path) -> None:
    leave_run(tmp_path / "first", [0.0, 0.5], settings_of("vlm_td"), label="", seed=4)
    leave_run(tmp_path / "second", [0.0, 0.5], settings_of("uniform"), label="", seed=2)
    assert names(gathered(tmp_path)[0]) == [
        ("MiniGrid-DoorKey-6x6-v0, DQN", "uniform", [2]),
        ("MiniGrid-DoorKey-6x6-v0, DQN", "vlm_td", [4]),
    ]


def test_run_without_record_and_settings_is_named_by_its_folders(tmp_path: Path) -> None:
    leave_run(tmp_path / "doorkey" / "per" / "seed_7", [0.0, 0.5], label="")
    assert names(gathered(tmp_path)[0]) == [("doorkey", "per", [7])]


@pytest.mark.parametrize(
    ("left", "status"),
    [
        ({"success": [0.0, 0.5]}, "finished"),
        ({"success": [0.0, 0.5], "finished": False, "exit_code": 143}, "interrupted"),
        ({"success": [0.0, 0.5], "finished": False, "exit_code": -15}, "interrupted"),
        ({"success": [0.0, 0.5], "exit_code": 1}, "failed"),
        ({"success": [], "exit_code": 1}, "failed"),
        ({"success": [0.0], "exit_code": -9}, "failed"),
        ({"success": [0.0], "exit_code": None}, "unfinished"),
        ({"success": [0.0, 0.5], "finished": False, "label": ""}, "interrupted"),
        ({"success": [0.0], "exit_code": None, "label": ""}, "unfinished"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, left: dict[str, Any], status: str) -> None:
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_0", settings=settings_of("vlm"), **left)
    assert read_run(folder).status == status


def test_only_finished_runs_are_in_an_arm_and_the_failed_one_tells_why(tmp_path: Path) -> None:
    leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 1.0], settings_of("vlm"))
    leave_run(tmp_path / "task" / "vlm" / "seed_1", [0.0], settings_of("vlm"), finished=False, exit_code=143)
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_2", [], exit_code=1)
    (folder / "log.txt").write_text("INFO loading\nvlmrb fit: error: no room\n\n")
    ((task,), left_out) = gathered(tmp_path)
    (arm,) = task.arms
    assert [run.seed for run in arm.runs] == [0]
    assert [(run.seed, run.status, run.ending) for run in arm.others] == [
        (1, "interrupted", "got to 0 of 400 env steps"),
        (2, "failed", "vlmrb fit: error: no room"),
    ]
    assert left_out == []


def test_run_that_was_cut_off_tells_how_far_it_got(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 0.5], settings_of("vlm"), exit_code=None)
    (folder / "log.txt").write_text("INFO some line that says nothing\n")
    assert read_run(folder).ending == "got to 100 of 400 env steps"
    (folder / "metrics.csv").write_text("step,time/wall_s\n100,1\n250,2\n")
    assert read_run(folder).ending == "got to 250 of 400 env steps"


def test_kept_run_that_was_cut_off_tells_how_far_it_got(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(
        HEAD + "vlm,0,interrupted,0,0.0\nvlm,0,interrupted,1500,0.5\nvlm,1,failed,,\n"
    )
    first, second = read_results(tmp_path / "results.csv")
    assert (first.ending, second.ending) == ("got to 1,500 env steps", "")


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 0.5], exit_code=None)
    with (folder / "evaluations.csv").open("a") as file:
        file.write("200,0.")
    assert read_run(folder).steps.tolist() == [0, 100]


def test_metrics_are_averaged_over_training(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 0.5])
    rows = ["step,replay/frequency_unscored,time/env_steps_per_s,train/loss", "1,0.5,10,1", "2,,30,1", "3,1.5,1000,1"]
    (folder / "metrics.csv").write_text("\n".join([*rows, ""]))
    # the mean of frequencies, the median of speeds; the rest is not read
    assert read_run(folder).metrics == {"replay/frequency_unscored": 1.0, "time/env_steps_per_s": 30.0}


def test_runs_that_a_later_one_moved_aside_are_not_read(tmp_path: Path) -> None:
    leave_run(tmp_path / "demo", [0.0, 0.5], settings_of("vlm"), label="", seed=0)
    leave_run(tmp_path / "demo" / "uniform", [0.0, 0.5], settings_of("uniform"), label="", seed=0)
    leave_run(tmp_path / "demo.old1", [0.0, 0.5], settings_of("vlm"), label="", seed=0)
    assert list(run_folders(tmp_path)) == [tmp_path / "demo", tmp_path / "demo" / "uniform"]


def test_folder_given_twice_is_read_once(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 0.5])
    tasks, left_out = gathered(tmp_path, folder)
    assert (names(tasks), left_out) == ([("task", "vlm", [0])], [])


def test_seed_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    leave_run(tmp_path / "a" / "task" / "vlm" / "seed_0", [0.0], finished=False, exit_code=143)
    leave_run(tmp_path / "b" / "task" / "vlm" / "seed_0", [0.0, 0.5])
    leave_run(tmp_path / "c" / "task" / "vlm" / "seed_0", [0.0, 0.7])
    ((task,), left_out) = gathered(tmp_path)
    assert [run.source for run in task.arms[0].runs] == [tmp_path / "b" / "task" / "vlm" / "seed_0"]
    assert sorted(str(run.source.relative_to(tmp_path))[0] for run, _ in left_out) == ["a", "c"]


def test_runs_of_different_budgets_are_refused(tmp_path: Path) -> None:
    leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 0.5], settings_of("vlm"))
    leave_run(
        tmp_path / "task" / "vlm" / "seed_1", [0.0], settings_of("vlm", changes={"training.total_env_steps": 900})
    )
    with pytest.raises(
        ValueError, match=r"task, scheme vlm: .*seed_0 ran for 400 env steps and .*seed_1 for 900"
    ) as caught:
        gathered(tmp_path)
    assert "report them apart" in str(caught.value)


def test_one_label_for_different_settings_is_refused(tmp_path: Path) -> None:
    leave_run(tmp_path / "a" / "task" / "vlm" / "seed_0", [0.0, 0.5], settings_of("vlm"))
    changed = settings_of("vlm", changes={"replay.clip_length": 32})
    leave_run(tmp_path / "b" / "task" / "vlm" / "seed_1", [0.0, 0.5], changed)
    with pytest.raises(ValueError, match=r"differ in replay.clip_length \(16 and 32\): give them labels of their own"):
        gathered(tmp_path)


def test_one_seeds_different_settings_are_refused_and_not_dropped(tmp_path: Path) -> None:
    leave_run(tmp_path / "a" / "task" / "vlm" / "seed_0", [0.0, 0.5], settings_of("vlm"))
    changed = settings_of("vlm", changes={"replay.clip_length": 32})
    leave_run(tmp_path / "b" / "task" / "vlm" / "seed_0", [0.0], changed, finished=False, exit_code=143)
    with pytest.raises(ValueError, match=r"differ in replay.clip_length \(16 and 32\): give them labels of their own"):
        gathered(tmp_path)


def test_settings_of_a_later_version_are_no_difference() -> None:
    one = settings_of("vlm")
    assert differences(one, {**one, "replay": {**one["replay"], "added_since": 1}}) == {}
    assert differences(one, {**one, "env": {**one["env"], "workers": 4}}) == {}
    assert differences(settings_of("vlm"), settings_of("uniform")).keys() == {
        "replay.lam_max",
        "replay.vlm",
        "scoring.scorer",
    }


def test_schemes_are_in_the_same_order_everywhere(tmp_path: Path) -> None:
    for label in ("aer", "vlm_td", "per", "vlm", "uniform"):
        leave_run(tmp_path / "task" / label / "seed_0", [0.0, 0.5])
    assert [label for _, label, _ in names(gathered(tmp_path)[0])] == ["uniform", "per", "vlm", "vlm_td", "aer"]


@pytest.mark.parametrize("kind", ["uniform", "per", "vlm", "vlm_td"])
def test_kind_of_a_scheme_is_what_its_settings_turn_on(kind: str) -> None:
    assert scheme_kind(settings_of(kind)) == kind
    assert label_of(settings_of(kind)) == kind


@pytest.mark.parametrize(
    ("replay", "kind"),
    [
        ({"lam_max": 1.0, "vlm": None, "rank": {"exponent": 0.7}, "importance_weights": {"beta_start": 0.5}}, "rank"),
        ({"lam_max": 0.0, "vlm": None, "aer": {"candidates": 4}}, "aer"),
        ({"lam_max": 0.0, "vlm": {"threshold": 0.5}}, "uniform"),
        ({"capacity": 1000}, "vlm"),
        ({"lam_max": 0.5, "vlm": {"threshold": 0.5}, "age": {"turnover": 0.2}}, "age+vlm"),
    ],
)
def test_kind_of_other_schemes_names_their_sections(replay: dict[str, Any], kind: str) -> None:
    assert scheme_kind({"replay": replay}) == kind


def hf(model: str) -> dict[str, Any]:
    return {"scorer": {"class_path": "vlmrb.scoring.hf.HFScorer", "init_args": {"model": model}}}


@pytest.mark.parametrize(
    ("scoring", "name", "kind"),
    [
        ({"scorer": SPRITES}, "sprites", "hand-made"),
        ({"scorer": "vlmrb.scoring.milestones.MilestonesScorer"}, "milestones", "privileged"),
        (hf("examples/tiny_vlm/perception_lm"), "tiny perception_lm", "tiny"),
        (hf("facebook/Perception-LM-1B"), "PLM-1B", "vlm"),
        (hf("/models/Perception-LM-8B/"), "PLM-8B", "vlm"),
        (hf("somebody/fine-tuned-on-doorkey"), "fine-tuned-on-doorkey", "other"),
        ({"scorer": {"class_path": "vlmrb.scoring.remote.RemoteScorer"}}, "remote scorer", "unknown"),
        ({"scorer": {"class_path": "my_world.Brighter"}}, "Brighter", "other"),
        ({"scorer": None}, "no scorer", "none"),
        (None, "scorer not recorded", "unknown"),
    ],
)
def test_only_known_checkpoints_are_called_a_vlm(scoring: Any, name: str, kind: str) -> None:
    found = scorer_of(scoring)
    assert (found.name, found.kind) == (name, kind)
    assert (found.remark == "") == (kind in ("vlm", "none"))


def test_kept_results_take_their_settings_from_the_commands_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("world.yaml").write_text(
        "env: {id: World-v0}\nmodel: {class_path: vlmrb.algorithms.SAC}\n"
        "replay: {lam_max: 0.5, vlm: {threshold: 0.5}}\n"
        "scoring: {scorer: {class_path: vlmrb.scoring.sprites.SpritesScorer, init_args: {grades: 1}}}\n"
    )
    Path("plm.yaml").write_text(
        "scoring: {scorer: {class_path: vlmrb.scoring.hf.HFScorer, init_args: {model: facebook/Perception-LM-1B}}}\n"
    )
    Path("kept").mkdir()
    Path("kept/sac_results.csv").write_text(HEAD + "plm,3,finished,0,0.0\nplm,3,finished,500,0.5\n")
    Path("kept/sac_commands.txt").write_text(
        "vlmrb sweep --base world.yaml\n\n"
        "vlmrb fit -c world.yaml -c plm.yaml --seed_everything 3 --run_dir runs/x/plm/seed_3 --replay.lam_max 0.25 "
        "--replay.vlm.threshold=null\n"
    )
    (run,) = read_results(Path("kept/sac_results.csv"))
    assert (run.config, run.label, run.seed, run.env, run.algorithm) == ("world", "plm", 3, "World-v0", "SAC")
    assert run.budget == 500
    assert run.settings["replay"] == {"lam_max": 0.25, "vlm": {"threshold": None}}
    assert run.settings["scoring"]["scorer"]["init_args"] == {"model": "facebook/Perception-LM-1B"}  # another class


def test_options_of_a_command_may_leave_init_args_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("world.yaml").write_text(
        "scoring: {control: {class_path: vlmrb.scoring.controls.Corrupted, init_args: {kappa: 0.5}}}\n"
    )
    Path("results.csv").write_text(HEAD + "vlm,0,finished,0,0.0\nvlm,0,finished,5,0.0\n")
    Path("commands.txt").write_text(
        "vlmrb fit -c world.yaml --scoring.control.kappa 0.1 --env.max_steps 9 --run_dir out/vlm/seed_0\n"
    )
    (run,) = read_results(Path("results.csv"))
    assert run.settings["scoring"]["control"]["init_args"] == {"kappa": 0.1}
    assert run.settings["env"] == {"max_steps": 9}
    assert control_of(run.settings) == ("corrupted", 0.1)


def test_results_in_a_studys_folder_take_their_commands_from_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text(f"env: {{id: World-{name}}}\n")
    Path("study/b").mkdir(parents=True)
    Path("study/b/results.csv").write_text(HEAD + "vlm,0,finished,0,0.0\n")
    commands = [f"vlmrb fit -c {name}.yaml --run_dir runs/study/{name}/vlm/seed_0" for name in ("a", "b")]
    Path("study/commands.txt").write_text("\n".join([*commands, ""]))
    (run,) = read_results(Path("study/b/results.csv"))
    assert (run.config, run.env) == ("b", "World-b")


def test_evaluations_kept_beside_results_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "evaluations.csv").write_text("env_step,eval/success\n0,0.0\n")
    (tmp_path / "results.csv").write_text(HEAD + "vlm,0,finished,0,0.0\n")
    assert list(run_folders(tmp_path)) == []
    assert len(read_all([tmp_path])[0]) == 1


def test_kept_results_without_their_configuration_are_named_by_their_folder(tmp_path: Path) -> None:
    (tmp_path / "reach").mkdir()
    path = tmp_path / "reach" / "sac_results.csv"
    path.write_text(HEAD + "vlm,0,finished,0,0.0\nvlm,0,finished,500,0.5\nvlm,1,failed,,\n")
    (tmp_path / "reach" / "there.yaml").write_text("replay: {lam_max: 0.5}\n")
    files = f"-c gone.yaml -c {tmp_path}/reach/there.yaml"
    (tmp_path / "reach" / "sac_commands.txt").write_text(f"vlmrb fit {files} --run_dir runs/vlm/seed_0\n")
    first, second = read_results(path)
    assert (first.config, first.settings, first.finished) == ("reach_sac", {}, True)
    assert (second.status, len(second.steps), second.budget) == ("failed", 0, None)
    (task,), _ = gathered(path)
    assert standing(task).reasons == ("gone.yaml, which its commands.txt names, is gone",)


def test_results_beside_their_runs_are_not_read_again(tmp_path: Path) -> None:
    leave_run(tmp_path / "out" / "task" / "vlm" / "seed_0", [0.0, 0.5])
    (tmp_path / "out" / "results.csv").write_text(HEAD + "vlm,0,finished,0,0.9\n")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "results.csv").write_text(HEAD + "per,0,finished,9,0.9\n")
    assert names(gathered(tmp_path)[0]) == [("kept", "per", [0]), ("task", "vlm", [0])]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs found in .*: give the --out of a vlmrb sweep"):
        read_all([tmp_path])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_all([tmp_path / "nowhere"])
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match="is no file that a report reads"):
        read_all([tmp_path / "notes.json"])
