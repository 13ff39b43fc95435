from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from vlmrb.cli import main
from vlmrb.experiments.run import confidence_interval, parse_seeds

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-3", [0, 1, 2, 3]), ("5", [5]), ("1,4-5", [1, 4, 5]), (" 2, 7", [2, 7])]
)
def test_seeds_are_ranges_and_lists(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1-", "-3"])
def test_unreadable_seeds_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="seeds="):
        parse_seeds(text)


def test_confidence_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = [low <= 0.0 <= high for low, high in (confidence_interval(rng.normal(size=30), 500) for _ in range(300))]
    assert 0.9 < np.mean(covered) < 0.98


@pytest.mark.slow
def test_sweep_runs_every_cell_once_and_reports_each_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}\n"
        "training: {total_env_steps: 800, learning_starts: 200, frames_per_batch: 40}\n"
        "replay: {capacity: 1000, batch_size: 16}\n"
        "model: {class_path: vlmrb.algorithms.DQN}\n"
        "evaluation: {every_n_env_steps: 200, episodes: 4}\n"
        "trainer: {accelerator: cpu}\n"
    )
    out = tmp_path / "sweep"
    good, bad = ROOT / "configs/replay/uniform.yaml", tmp_path / "bad.yaml"
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
    capsys.readouterr()
    stamp = (out / "uniform" / "seed_0" / "summary.json").stat().st_mtime_ns
    assert main([*command, "--seeds", "0-1"]) == 1
    assert "4 runs, 2 already finished" in capsys.readouterr().out
    assert (out / "uniform" / "seed_0" / "summary.json").stat().st_mtime_ns == stamp
