"""What a report says of files that are damaged, and of runs that are not what they seem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import SCORED, leave_run, settings_of, tasks_in, texts
from test_report_runs import HEAD

from vlmrb.cli import main
from vlmrb.experiments.report.command import read_all, report, warnings_on
from vlmrb.experiments.report.factor_tables import FACTORS, factor_table
from vlmrb.experiments.report.kept import read_results
from vlmrb.experiments.report.runs import read_run
from vlmrb.experiments.report.table import Column, Row, Table, to_markdown
from vlmrb.experiments.report.task_tables import runs_table, schemes_table

EVALUATIONS = "env_step,eval/success\n"


def warnings_in(path: Path) -> list[str]:
    return list(warnings_on(tasks_in(path), []))


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("evaluations.csv", EVALUATIONS + "0,0\n100,zero\n", "line 3: eval/success is 'zero'"),
        ("evaluations.csv", EVALUATIONS + "0,0\n\n100,0\n100,0\n", "line 5: env_step does not increase"),
        ("evaluations.csv", EVALUATIONS + "0,1.5\n", "line 2: eval/success is '1.5', no share"),
        ("evaluations.csv", EVALUATIONS + "0,-0.1\n", "line 2: eval/success is '-0.1', no share"),
        ("evaluations.csv", EVALUATIONS + "0,nan\n", "line 2: eval/success is 'nan', no share"),
        ("evaluations.csv", EVALUATIONS + "-5,0\n", "line 2: env_step is '-5', no number of env steps"),
        ("evaluations.csv", EVALUATIONS + "0,0\nnan,0\n", "line 3: env_step is 'nan', no number of env steps"),
        ("evaluations.csv", EVALUATIONS + "0,0\n1e999,0\n", "line 3: env_step is '1e999', no number of env steps"),
        ("evaluations.csv", EVALUATIONS + "0,0\n100\n", "line 3: it has too few cells"),
        ("evaluations.csv", EVALUATIONS + "0,0,0\n", "line 2: it has too many cells"),
        ("evaluations.csv", "env_step,eval/success,time/wall_s\n0,0,inf\n", "line 2: time/wall_s is inf"),
        ("evaluations.csv", "epoch,reward\n1,2\n", "lacks the columns env_step, eval/success"),
        ("metrics.csv", "step,replay/share_unscored\n1,0.5\n2,half\n", "line 3: replay/share_unscored is 'half'"),
        ("config.yaml", "env: [", "it is no YAML"),
        ("config.yaml", "- env", "it does not hold settings by name"),
        ("config.yaml", "env: 5", "env is 5"),
        ("config.yaml", "training: {total_env_steps: many}", "training.total_env_steps is 'many'"),
        ("config.yaml", "training: {total_env_steps: .inf}", "training.total_env_steps is inf"),
        ("config.yaml", "replay: {lam_max: null}", "replay.lam_max is None"),
        ("config.yaml", "replay: {lam_max: true}", "replay.lam_max is True"),
        ("config.yaml", "replay: {vlm: [1]}", r"replay.vlm is \[1\]"),
        ("config.yaml", "scoring: {scorer: {class_path: 3}}", "scoring.scorer.class_path is 3"),
        ("config.yaml", "scoring: {control: {class_path: a.Corrupted, init_args: {kappa: x}}}", "kappa is 'x'"),
        ("cell.json", '{"scheme": "x"}', "it names no config"),
        ("cell.json", '{"scheme": null, "config": "door"}', "scheme is None"),
        ("cell.json", '{"config": null}', "config is None"),
        ("cell.json", '{"exit_code": "0"}', "exit_code is '0'"),
        ("summary.json", '{"finished": true, "env_steps": "all"}', "env_steps is 'all'"),
        ("summary.json", '{"finished": 1}', "finished is 1"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path: Path, file: str, text: str, error: str) -> None:
    folder = leave_run(tmp_path / "task" / "vlm" / "seed_0", [0.0, 0.5])
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=error) as caught:
        read_run(folder)
    said = str(caught.value)
    assert said.startswith(f"{folder / file} ")
    assert "\n" not in said
    assert "leave it out" in said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("epoch,loss\n1,2\n", "is no results.csv of vlmrb sweep, which has the columns scheme, seed"),
        (HEAD + "vlm,0,won,0,0.0\n", "line 2: seed '0' with status 'won' is no run"),
        (HEAD + "vlm,²,finished,0,0.0\n", "line 2: seed '²' with status 'finished' is no run"),
        (HEAD + "vlm,0,finished,zero,0.0\n", "line 2: env_step is 'zero'"),
        (HEAD + "vlm,0,finished,0,0\nvlm,0,finished,1e999,0\n", "line 3: env_step is '1e999'"),
        (HEAD + "vlm,0,finished,0,0\nvlm,1,finished,9,1.01\n", "line 3: success is '1.01', no share"),
        (HEAD + "vlm,0,finished,0,0\nvlm,0,finished,,1\n", "line 3: env_step is ''"),
        (HEAD + "vlm,0,finished,9,0.0\nvlm,0,finished,9,0.0\n", "line 3: env_step does not increase"),
        (HEAD + "vlm,0,finished,9,0.0\nvlm,0", "line 3: it has too few cells"),
    ],
)
def test_foreign_and_damaged_results_are_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=error) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path} is ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"corpus": {}, "label": "success", "scorers": [{"label": "a", "name": "a", "class_path": "b"}]}', "by_label"),
        ('{"corpus": {}, "label": "success", "scorers": 5}', "'int' object is not iterable"),
        (
            '{"rows": [{"model": "a", "stream": "all frames different", "ours clips/s": 0, "peak MiB": 1}]}',
            "division by zero",
        ),
    ],
)
def test_damaged_calibrations_and_benchmarks_are_named(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path} is damaged: .*{error}"):
        read_all([tmp_path])


def test_last_row_of_results_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(HEAD + "vlm,0,finished,0,0.0\nvlm,0,finished,500,0.5")
    (run,) = read_results(tmp_path / "results.csv")
    assert (run.steps.tolist(), run.success.tolist()) == ([0, 500], [0.0, 0.5])


@pytest.mark.parametrize(
    ("command", "file", "error"),
    [
        ('vlmrb fit -c a.yaml --x "1', "commands.txt", "line 2: No closing quotation"),
        (
            "vlmrb fit -c a.yaml --env.id '[' --run_dir o/vlm/seed_0",
            "commands.txt",
            r"line 2: --env.id '\[' is no YAML",
        ),
        ("vlmrb fit -c a.yaml --env.id 5 --run_dir o/vlm/seed_0", "commands.txt", "env.id is 5"),
        ("vlmrb fit -c torn.yaml --run_dir o/vlm/seed_0", "torn.yaml", "it is no YAML"),
    ],
)
def test_damage_behind_commands_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.yaml").write_text("env: [")
    Path("results.csv").write_text(HEAD + "vlm,0,finished,0,0.0\nvlm,0,finished,5,0.0\n")
    Path("commands.txt").write_text(f"what isn't a command\n{command}\n")
    with pytest.raises(ValueError, match=error) as caught:
        read_results(Path("results.csv"))
    assert str(caught.value).startswith(f"{file} is damaged: ")


def test_switch_alone_in_a_command_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    Path("results.csv").write_text(HEAD + "vlm,0,finished,5,0.0\n")
    Path("commands.txt").write_text("vlmrb fit -c a.yaml --replay.stratified --run_dir o/vlm/seed_0 --replay.x -1\n")
    (run,) = read_results(Path("results.csv"))
    assert run.settings == {"replay": {"stratified": True, "x": -1}}


@pytest.mark.parametrize(
    ("settings", "success", "words"),
    [
        ("vlm", [0.0, 0.9, 0.9], "it says finished, but its evaluations end at 200 of 400 env steps"),
        (None, [0.0, 0.9, 0.9], "it says finished, but its evaluations end at 200 of 500 env steps"),
        ("vlm", [], "it says finished, but holds no evaluation"),
    ],
)
def test_run_that_finished_without_its_last_evaluations_is_in_no_number(
    tmp_path: Path, settings: str | None, success: list[float], words: str
) -> None:
    known = None if settings is None else settings_of(settings)
    for seed, curve in enumerate(([0.0, 0.2, 0.2, 0.2, 0.2, 0.2], success)):
        folder = leave_run(tmp_path / "door" / "vlm" / f"seed_{seed}", curve, known, every=100, finished=True)
        (folder / "summary.json").write_text('{"finished": true, "env_steps": 500}')
    (task,) = tasks_in(tmp_path)
    (arm,) = task.arms
    assert [run.seed for run in arm.runs] == [0]
    assert arm.final().tolist() == [pytest.approx(0.2)]
    assert texts(schemes_table(task), 0, "seeds") == ["1 of 2"]
    assert texts(runs_table([task]), 0, "seed", "status", "final", "ending") == ["1", "damaged", "–", words]
    task = "DoorKey-6, DQN" if settings else "door"
    assert f"{task}, vlm, seed 1: damaged, in no number: {words} ({folder})" in warnings_in(tmp_path)


def test_kept_run_that_never_went_anywhere_is_in_no_number(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(HEAD + "vlm,0,finished,0,0.0\nvlm,1,finished,,\n")
    assert [(run.status, run.ending) for run in read_results(tmp_path / "results.csv")] == [
        ("damaged", "it says finished, but its evaluations end at 0 env steps"),
        ("damaged", "it says finished, but holds no evaluation"),
    ]


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "share of clips scored 0.00: as to scores this was uniform replay; it is in the numbers of this scheme"),
        (
            0.12,
            "share of clips scored 0.12: most of what it replayed had no score; it is in the numbers of this scheme",
        ),
        (0.5, ""),
    ],
)
@pytest.mark.parametrize("where", ["summary.json", "metrics.csv"])
def test_run_that_was_hardly_scored_is_warned_of(tmp_path: Path, where: str, share: float, words: str) -> None:
    for kind in ("uniform", "vlm"):
        folder = leave_run(tmp_path / "door" / kind / "seed_0", SCORED[0], settings_of(kind))
        if where == "summary.json":
            (folder / where).write_text(json.dumps({"finished": True, "scoring": {"share_scored": share}}))
        else:
            (folder / where).write_text(f"step,scoring/share_scored\n1,1\n2,{share}\n3,\n")
    found = [line for line in warnings_in(tmp_path) if "share of clips" in line]
    assert found == ([f"DoorKey-6, DQN, vlm, seed 0: {words} ({folder})"] if words else [])
    assert [len(arm.runs) for arm in tasks_in(tmp_path)[0].arms] == [1, 1]


def test_scheme_whose_settings_name_no_threshold_is_reported(tmp_path: Path) -> None:
    settings = settings_of("uniform", changes={"replay.score_reward": {"weight": 1.0}})
    for scorer in ("Sprites", "Others"):
        changed = {**settings, "scoring": {"scorer": f"own.{scorer}", "control": None}}
        leave_run(tmp_path / "door" / scorer / "seed_0", SCORED[0], changed)
    tasks = tasks_in(tmp_path)
    tables = {factor.key: factor_table(factor, tasks) for factor in FACTORS}
    assert [key for key, table in tables.items() if table.ours] == ["models"]


@pytest.mark.parametrize("name", ["out", "out/below"])
def test_out_that_is_a_file_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FileExistsError, match="--out .*out.* is a file, or lies below one: name a folder"):
        report([str(tmp_path / "nowhere")], str(tmp_path / name))


def test_label_of_any_signs_stands_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrb.experiments.report.statistics.RESAMPLES", 60)
    label = r"$\frac{a <b> *c* | d"
    for kind in ("uniform", "vlm"):
        leave_run(tmp_path / "in" / "door" / kind / "seed_0", SCORED[0], settings_of(kind), label=f"{kind} {label}")
    assert main(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    assert "$\\frac{a &lt;b&gt; *c* | d" in (tmp_path / "out" / "index.html").read_text()
    assert r"| vlm \$\\frac{a \<b> \*c\* \| d |" in (tmp_path / "out" / "report.md").read_text()


def test_markdown_shows_texts_as_they_are() -> None:
    cells = {"a": "<b>\n*x* | _y_ seed_0 `z` [l](u) [1, 2] &lt;"}
    lines = to_markdown(
        Table("key", "A *title*", [Column("a", "h|d")], [Row(cells)], "A *lead*.", ["n <o>"])
    ).splitlines()
    assert lines == [
        *("## A \\*title\\*", "", "A *lead*.", "", "| h\\|d |", "| --- |"),
        "| \\<b> \\*x\\* \\| \\_y\\_ seed_0 \\`z\\` \\[l](u) [1, 2] \\&lt; |",
        *("", "- n \\<o>"),
    ]
