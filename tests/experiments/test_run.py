from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from finished_cells import make_cell, train
from signalled import left_running, run_until

from vlmrb.cli import main
from vlmrb.experiments import board
from vlmrb.experiments.cells import Cell
from vlmrb.experiments.results import curve_of
from vlmrb.experiments.study import read_study
from vlmrb.locks import lock_folder

ROOT = Path(__file__).parents[2]
UNIFORM = ROOT / "configs/replay/uniform.yaml"
BASE = """
env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}
training: {total_env_steps: 800, learning_starts: 200, frames_per_batch: 40}
replay: {capacity: 1000, batch_size: 16}
model: {class_path: vlmrb.algorithms.DQN}
evaluation: {every_n_env_steps: 200, episodes: 4, video_every_n_env_steps: null}
monitoring: {clips_every_n_env_steps: null}
trainer: {accelerator: cpu}
"""


def sweep_command(cell: Cell, *more: str) -> list[str]:
    return ["sweep", "--base", str(cell.config), "--overlays", cell.scheme.parts[0], *more]


def test_narrower_sweep_keeps_the_others_in_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    cells = [make_cell(out, scheme, seed) for scheme in ("uniform", "vlm") for seed in (0, 1)]
    for cell in cells[:-1]:
        train(cell, [0.0, 1.0, 1.0])
    train(cells[-1], [0.0, 0.5], finished=False, exit_code=143)
    assert main(sweep_command(cells[0], "--seeds", "1", "--out", str(out))) == 0
    assert "1 run, 1 already finished" in capsys.readouterr().out
    with (out / "base" / "results.csv").open() as file:
        found = {(row["scheme"], row["seed"], row["status"]) for row in csv.DictReader(file)}
    finished = {("uniform", "0", "finished"), ("uniform", "1", "finished"), ("vlm", "0", "finished")}
    assert found == finished | {("vlm", "1", "interrupted")}
    assert (out / "commands.txt").read_text().count("vlmrb fit") == 4
    assert (out / "base" / "curves.png").exists()


def test_overlays_of_one_name_are_refused_since_they_would_share_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = make_cell(tmp_path / "sweep")
    twin = tmp_path / "twins" / "uniform.yaml"
    twin.parent.mkdir()
    twin.touch()
    assert main([*sweep_command(cell, str(twin)), "--out", str(tmp_path / "sweep")]) == 1
    assert "schemes: uniform comes twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "name either a study file"),
        (["studies/none.yaml", "--base", "x.yaml"], "name either a study file"),
        (["studies/none.yaml"], "study studies/none.yaml cannot be read"),
        (["studies/none.yaml", "--overlays", "x.yaml"], "--overlays belongs to --base"),
        (["--base", "none.yaml", "--overlays", "x.yaml"], "overlay x.yaml does not exist"),
        (["--base", "none.yaml"], "schemes: name at least one"),
        (["--base", "none.yaml", "--out", ""], "--out is empty: name a folder"),
        (["studies/none.yaml", "--ray_timeout_s", "-1"], "--ray_timeout_s -1 must be above 0"),
        (["studies/none.yaml", "--ray_timeout_s", "1e9"], "--ray_timeout_s 1e+09 must be above 0, and at most 86400"),
        (["--base", "none.yaml", "--overrides", '["--env.id \'x"]'], "cannot be read: No closing quotation"),
    ],
)
def test_unclear_command_is_one_line(command: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *command]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_study_of_several_configurations_has_results_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    for config in ("base", "larger"):
        for scheme in ("uniform", "vlm"):
            train(make_cell(out, scheme, config=config), [0.0, 1.0, 1.0])
    study = tmp_path / "mine.yaml"
    schemes = {name: f"{tmp_path}/{name}.yaml" for name in ("uniform", "vlm")}
    content = {"configs": [f"{tmp_path}/base.yaml", f"{tmp_path}/larger.yaml"], "schemes": schemes, "seeds": 0}
    study.write_text(json.dumps(content))
    assert main(["sweep", str(study), "--out", str(out)]) == 0
    assert "4 runs, 4 already finished" in capsys.readouterr().out
    for config in ("base", "larger"):
        with (out / config / "table.csv").open() as file:
            assert [row["scheme"] for row in csv.DictReader(file)] == ["uniform", "vlm"]
    assert (out / "commands.txt").read_text().count("vlmrb fit") == 4
    assert read_study(out / "study.yaml").configs == (tmp_path / "base.yaml", tmp_path / "larger.yaml")


def test_two_sweeps_into_one_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    with lock_folder(tmp_path / "sweep", "--out "):
        assert main(sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))) == 1
    assert f"--out {tmp_path}/sweep is in use by another run" in capsys.readouterr().err


def test_sweep_that_another_one_overtook_sees_what_that_has_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, other = make_cell(tmp_path / "sweep"), make_cell(tmp_path / "sweep", overrides=["--training.gamma", "0.9"])
    command = sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))
    monkeypatch.setattr("vlmrb.experiments.run.budgets", lambda cells: train(cell, [0.0, 1.0, 1.0]) or {})
    assert main(command) == 0
    assert "1 run, 1 already finished" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "sweep")
    monkeypatch.setattr("vlmrb.experiments.run.budgets", lambda cells: train(other, [0.0, 1.0, 1.0]) or {})
    assert main(command) == 1
    assert f"{cell.folder} was run with --overrides" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_folder_that_is_a_file_is_refused_at_once(tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    cell = make_cell(tmp_path / "sweep")
    assert main(sweep_command(cell, "--out", str(tmp_path / out), "--dry_run", "true")) == 1
    assert f"--out {tmp_path}/{out}: {tmp_path}/file is a file: choose another folder" in capsys.readouterr().err


def test_damaged_run_is_listed_and_decides_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [make_cell(tmp_path / "sweep", scheme) for scheme in ("uniform", "vlm")]
    for cell in cells:
        train(cell, [0.0, 1.0, 1.0], scoring={"share_scored": 0.25})
    (cells[1].folder / "evaluations.csv").write_text("env_step,eval/success\n0,0.0\n100\n")
    assert main(sweep_command(cells[0], "--seeds", "0", "--out", str(tmp_path / "sweep"))) == 1
    printed = capsys.readouterr().out
    assert "uniform  1 of 1" in printed
    assert "vlm      0 of 1" in printed
    assert f"\n{cells[1].folder}/evaluations.csv is damaged: line 3" in printed
    assert "\nbase uniform seed 0: only 25.0% of the clips scored" in printed


FIRST = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)"
SECOND = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""


@pytest.mark.parametrize(("where", "fails"), [(Cell, "record_end"), (board, "_outcome")])
def test_runs_are_asked_to_save_when_the_sweep_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: Any, fails: str
) -> None:
    cell = make_cell(tmp_path / "sweep")

    def start(arguments: list[str], output: object) -> subprocess.Popen[bytes]:
        program = SECOND if children else FIRST
        children.append(subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "ready")]))
        return children[-1]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    children: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("vlmrb.experiments.children.start_child", start)
    monkeypatch.setattr(where, fails, full)
    monkeypatch.setattr("vlmrb.experiments.run.budgets", lambda cells: {})
    assert main(sweep_command(cell, "--seeds", "0-1", "--jobs", "2", "--out", str(tmp_path / "sweep"))) == 1
    said = capsys.readouterr()
    assert "asking all runs to save and exit, as this failed: " in said.out
    assert "No space left on device" in said.err
    assert [child.poll() for child in children] == [0, 143]


def test_folder_of_the_first_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = make_cell(tmp_path / "sweep")
    old = tmp_path / "sweep" / "uniform" / "seed_0"
    old.mkdir(parents=True)
    (old / "cell.json").write_text(json.dumps({"seed": 0, "overlay": "uniform.yaml", "exit_code": 0}))
    assert main(sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))) == 1
    error = capsys.readouterr().err
    assert f"{old}/cell.json was written by another version of vlmrb (schema 1" in error
    assert error.count("\n") == 1


def test_other_settings_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    command = sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))
    assert main([*command, "--overrides", '["--training.gamma", "0.9"]']) == 1
    error = capsys.readouterr().err
    assert f"{cell.folder} was run with --overrides []: choose another --out" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sweep" / "base" / "results.csv").exists()


def write_study(tmp_path: Path, base: str = BASE, **settings: object) -> tuple[Path, Path]:
    """Returns a study file and the folder of its runs."""
    (tmp_path / "base.yaml").write_text(base)
    out = tmp_path / "sweep"
    content = {"configs": f"{tmp_path}/base.yaml", "schemes": {"uniform": str(UNIFORM)}, "out": str(out), "jobs": 2}
    (tmp_path / "study.yaml").write_text(json.dumps(content | settings))
    return tmp_path / "study.yaml", out


def unreadable_episodes(tmp_path: Path) -> str:
    """Returns an option that no check of settings refuses, and with which a run fails."""
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "episode-0.npz").touch()
    return f"--prefill {tmp_path}/nowhere"


@pytest.mark.slow
def test_study_runs_every_cell_once_and_reports_each_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schemes = {"uniform": str(UNIFORM), "bad": [str(UNIFORM), unreadable_episodes(tmp_path)]}
    study, out = write_study(tmp_path, schemes=schemes, seeds="0-1")
    assert main(["sweep", str(study)]) == 1  # two of the four cells cannot work
    with (out / "base" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["scheme"], row["seed"]) for row in rows} == {(s, n) for s in ("uniform", "bad") for n in ("0", "1")}
    assert {row["status"] for row in rows if row["scheme"] == "bad"} == {"failed"}
    assert [int(row["env_step"]) for row in rows if row["scheme"] == "uniform" and row["seed"] == "0"] == [
        *(0, 200, 400, 600, 800)
    ]
    with (out / "base" / "table.csv").open() as file:
        table = {row["scheme"]: row for row in csv.DictReader(file)}
    assert table["uniform"]["seeds_finished"] == "2"
    assert table["bad"]["seeds_started"] == "2"
    assert table["bad"]["seeds_finished"] == "0"
    assert (out / "base" / "curves.png").stat().st_size > 5_000
    assert (out / "commands.txt").read_text().count("vlmrb fit") == 4
    printed = capsys.readouterr().out
    failed = out / "base" / "bad" / "seed_0"
    assert "nowhere" in next(line for line in printed.splitlines() if "bad seed 0: FAILED (exit code" in line)
    assert f"base bad seed 0 failed; the end of {failed}/log.txt:\n    " in printed
    record = json.loads((out / "base" / "uniform" / "seed_1" / "cell.json").read_text())
    summary = json.loads((out / "base" / "uniform" / "seed_1" / "summary.json").read_text())
    assert record["command"] == summary["command"]
    assert record["attempts"][0]["versions"].items() >= summary["versions"].items()
    stamp = (out / "base" / "uniform" / "seed_0" / "summary.json").stat().st_mtime_ns
    assert main(["sweep", str(study), "--seeds", "0"]) == 1
    assert "2 runs, 1 already finished" in capsys.readouterr().out
    assert (out / "base" / "uniform" / "seed_0" / "summary.json").stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_settings_that_fit_refuses_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schemes = {
        "uniform": str(UNIFORM),
        "bad": [str(UNIFORM), "--model.learning_rat 1"],
        "too": "--model.learning_rat 1",
        "cut": [str(UNIFORM), "--trainer.max_steps 5"],
        "no": [str(UNIFORM), "--prefill /nope"],
    }
    study, out = write_study(tmp_path, schemes=schemes)
    assert main(["sweep", str(study)]) == 1
    error = capsys.readouterr().err
    assert "nothing was started: " in error
    assert "learning_rat" in error
    assert "(scheme bad on base, too on base)" in error
    assert "trainer.max_steps=5 has no place in a study" in error
    assert "--prefill /nope: neither a run with" in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.slow
def test_dry_run_prints_the_commands_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, out = write_study(tmp_path, seeds="0-1")
    assert main(["sweep", str(study), "--dry_run", "true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"vlmrb fit -c {tmp_path}/base.yaml -c {UNIFORM}") for line in lines] == [True, True]
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_during_the_check_of_settings_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    study, out = write_study(tmp_path)
    mark = "vlmrb.experiments.soundness"
    before = len(left_running(mark))
    exit_code, printed = run_until(["sweep", str(study)], lambda: len(left_running(mark)) > before, [number])
    assert exit_code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number], printed
    deadline = time.monotonic() + 30
    while len(left_running(mark)) > before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not out.exists()


LONG = BASE.replace("800", "4000").replace("episodes: 4", "episodes: 1")
OFTEN = ["--checkpoint.every_n_env_steps 1000"]


@pytest.mark.slow
def test_sigterm_ends_the_runs_saved_and_repeating_the_command_goes_on(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, LONG, seeds="0-2", overrides=OFTEN)
    folders = [out / "base" / "uniform" / f"seed_{seed}" for seed in range(3)]
    exit_code, printed = run_until(
        ["sweep", str(study)],
        lambda: all((folder / "checkpoints/last.ckpt").exists() for folder in folders[:2]),
        [signal.SIGTERM],
    )
    assert exit_code == 143, printed
    assert left_running(str(tmp_path)) == []
    assert printed.count(": interrupted\n") == 2
    assert "FAILED" not in printed
    assert printed.rstrip().endswith("interrupted; repeat the command to go on")
    assert "interrupted" in (out / "base" / "results.csv").read_text()
    assert not folders[2].exists()
    exit_code, printed = run_until(["sweep", str(study)], lambda: True, [])
    assert exit_code == 0, printed
    assert "uniform  3 of 3" in printed
    steps = [row[0] for row in json.loads((folders[0] / "summary.json").read_text())["history"]]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_killed_sweep_ends_its_runs_saved_and_can_be_repeated_at_once(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, LONG, seeds="0", overrides=OFTEN)
    folder = out / "base" / "uniform" / "seed_0"
    checkpoint = folder / "checkpoints/last.ckpt"
    exit_code, _ = run_until(["sweep", str(study)], checkpoint.exists, [signal.SIGKILL])
    assert exit_code == -signal.SIGKILL
    exit_code, printed = run_until(["sweep", str(study)], lambda: True, [])
    assert exit_code == 0, printed
    record = json.loads((folder / "cell.json").read_text())
    assert [attempt["exit_code"] for attempt in record["attempts"]] == [None, 0]
    assert "resuming" in (folder / "log.txt").read_text()
    steps = [row[0] for row in json.loads((folder / "summary.json").read_text())["history"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4000
    assert left_running(str(tmp_path)) == []


@pytest.mark.slow
def test_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, BASE.replace("800", "8000000"), seeds="0")
    ready = (out / "base" / "uniform" / "seed_0" / "evaluations.csv").exists
    exit_code, printed = run_until(["sweep", str(study)], ready, [signal.SIGINT, signal.SIGINT])
    assert exit_code == 130, printed
    assert left_running(str(tmp_path)) == []


@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    cell.config.write_text(BASE)
    Path(cell.scheme.parts[0]).write_text(UNIFORM.read_text())
    train(cell, [0.0, 0.7], finished=False, exit_code=None)
    (cell.folder / "checkpoints" / "last.ckpt").unlink()
    assert main(sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))) == 0
    assert cell.summary is not None
    assert [step for step, _ in cell.summary["history"]] == [0, 200, 400, 600, 800]
    assert curve_of(cell)[0].tolist() == [0, 200, 400, 600, 800]
