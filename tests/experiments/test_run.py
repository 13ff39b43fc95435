from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest
from finished_cells import make_cell, train
from signalled import left_running, run_until

from vlmrb.cli import main
from vlmrb.experiments.cells import Cell
from vlmrb.experiments.results import curve_of
from vlmrb.experiments.run import parse_seeds, plan

ROOT = Path(__file__).parents[2]
UNIFORM = ROOT / "configs/replay/uniform.yaml"
BASE = """
env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}
training: {total_env_steps: 800, learning_starts: 200, frames_per_batch: 40}
replay: {capacity: 1000, batch_size: 16}
model: {class_path: vlmrb.algorithms.DQN}
evaluation: {every_n_env_steps: 200, episodes: 4}
trainer: {accelerator: cpu}
"""


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-3", [0, 1, 2, 3]), ("5", [5]), ("1,4-5", [1, 4, 5]), (" 2, 7", [2, 7]), ("1,0-1", [1, 0])]
)
def test_seeds_are_ranges_and_lists(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1-", "-3", "5-3"])
def test_unreadable_seeds_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="seeds="):
        parse_seeds(text)


def test_overlays_of_one_name_are_refused_since_they_would_share_folders(tmp_path: Path) -> None:
    twin = tmp_path / "uniform.yaml"
    twin.touch()
    with pytest.raises(ValueError, match="of different names"):
        plan(UNIFORM, [UNIFORM, twin], [0], tmp_path, ())


def sweep_command(cell: Cell, *more: str) -> list[str]:
    return ["sweep", "--base", str(cell.config), "--overlays", json.dumps([str(cell.overlay)]), *more]


def test_narrower_sweep_keeps_the_others_in_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    cells = [make_cell(out, scheme, seed) for scheme in ("uniform", "vlm") for seed in (0, 1)]
    for cell in cells[:-1]:
        train(cell, [0.0, 1.0, 1.0])
    train(cells[-1], [0.0, 0.5], finished=False, exit_code=143)
    assert main(sweep_command(cells[0], "--seeds", "1", "--out", str(out))) == 0
    assert "1 run, 1 already finished" in capsys.readouterr().out
    with (out / "results.csv").open() as file:
        found = {(row["scheme"], row["seed"], row["status"]) for row in csv.DictReader(file)}
    finished = {("uniform", "0", "finished"), ("uniform", "1", "finished"), ("vlm", "0", "finished")}
    assert found == finished | {("vlm", "1", "interrupted")}
    assert (out / "commands.txt").read_text().count("vlmrb fit") == 4
    assert (out / "curves.png").exists()


def test_other_settings_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    command = sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))
    assert main([*command, "--overrides", '["--training.gamma", "0.9"]']) == 1
    error = capsys.readouterr().err
    assert f"{cell.folder} was run with --overrides []: choose another --out" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sweep" / "results.csv").exists()


@pytest.mark.slow
def test_sweep_runs_every_cell_once_and_reports_each_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(BASE)
    out = tmp_path / "sweep"
    good, bad = UNIFORM, tmp_path / "bad.yaml"
    bad.write_text("replay: {lam_max: 2.0}\n")
    command = ["sweep", "--base", str(base), "--overlays", json.dumps([str(good), str(bad)]), "--out", str(out)]
    assert main([*command, "--seeds", "0-1", "--jobs", "2"]) == 1  # two of the four cells cannot work
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["scheme"], row["seed"]) for row in rows} == {(s, n) for s in ("uniform", "bad") for n in ("0", "1")}
    assert {row["status"] for row in rows if row["scheme"] == "bad"} == {"failed"}
    assert [int(row["env_step"]) for row in rows if row["scheme"] == "uniform" and row["seed"] == "0"] == [
        *(0, 200, 400, 600, 800)
    ]
    with (out / "table.csv").open() as file:
        table = {row["scheme"]: row for row in csv.DictReader(file)}
    assert table["uniform"]["seeds_finished"] == "2"
    assert table["bad"]["seeds_started"] == "2"
    assert table["bad"]["seeds_finished"] == "0"
    assert (out / "curves.png").stat().st_size > 5_000
    assert (out / "commands.txt").read_text().count("vlmrb fit") == 4
    printed = capsys.readouterr().out
    assert "lam_max" in next(line for line in printed.splitlines() if "bad seed 0: FAILED (exit code" in line)
    assert str(out / "bad" / "seed_0" / "log.txt") in printed
    stamp = (out / "uniform" / "seed_0" / "summary.json").stat().st_mtime_ns
    assert main([*command, "--seeds", "0"]) == 1
    assert "2 runs, 1 already finished" in capsys.readouterr().out
    assert (out / "uniform" / "seed_0" / "summary.json").stat().st_mtime_ns == stamp


@pytest.mark.slow
def test_sigterm_ends_the_runs_saved_and_repeating_the_command_goes_on(tmp_path: Path) -> None:
    base, out = tmp_path / "base.yaml", tmp_path / "sweep"
    base.write_text(BASE.replace("800", "4000").replace("episodes: 4", "episodes: 1"))
    command = ["sweep", "--base", str(base), "--overlays", json.dumps([str(UNIFORM)]), "--out", str(out)]
    command += ["--seeds", "0-2", "--jobs", "2", "--overrides", '["--checkpoint.every_n_env_steps", "1000"]']
    folders = [out / "uniform" / f"seed_{seed}" for seed in range(3)]
    exit_code, printed = run_until(
        command, lambda: all((folder / "checkpoints/last.ckpt").exists() for folder in folders[:2]), [signal.SIGTERM]
    )
    assert exit_code == 143, printed
    assert left_running(str(tmp_path)) == []
    assert printed.count(": interrupted\n") == 2
    assert "FAILED" not in printed
    assert printed.rstrip().endswith("interrupted; repeat the command to go on")
    assert "interrupted" in (out / "results.csv").read_text()
    assert not folders[2].exists()
    exit_code, printed = run_until(command, lambda: True, [])
    assert exit_code == 0, printed
    assert "uniform  3 of 3" in printed
    steps = [row[0] for row in json.loads((folders[0] / "summary.json").read_text())["history"]]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    base, out = tmp_path / "base.yaml", tmp_path / "sweep"
    base.write_text(BASE.replace("800", "8000000"))
    command = ["sweep", "--base", str(base), "--overlays", json.dumps([str(UNIFORM)]), "--out", str(out)]
    ready = (out / "uniform" / "seed_0" / "evaluations.csv").exists
    command += ["--seeds", "0"]
    exit_code, printed = run_until(command, ready, [signal.SIGINT, signal.SIGINT])
    assert exit_code == 130, printed
    assert left_running(str(tmp_path)) == []


@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    cell.config.write_text(BASE)
    cell.overlay.write_text(UNIFORM.read_text())
    train(cell, [0.0, 0.7], finished=False, exit_code=None)
    (cell.folder / "checkpoints" / "last.ckpt").unlink()
    assert main(sweep_command(cell, "--seeds", "0", "--out", str(tmp_path / "sweep"))) == 0
    assert [step for step, _ in cell.summary["history"]] == [0, 200, 400, 600, 800]
    assert curve_of(cell)[0].tolist() == [0, 200, 400, 600, 800]
