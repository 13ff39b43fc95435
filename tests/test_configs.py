"""Every configuration trains, learns and is scored: briefly, on what it names."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from vlmrb.cli import main

ROOT = Path(__file__).parents[1]
RUNS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if "model" in yaml.safe_load(path.read_text()))
PAPER = [f"minigrid/doorkey_{n}x{n}_{name}" for n in (8, 12, 16) for name in ("dqn", "iqn")]
PAPER += [f"ogbench/scene_{task}_{name}" for task in (3, 4, 5) for name in ("sac", "td3")]
SHORT = [
    *("--env.num_envs", "4", "--env.workers", "0", "--env.max_steps", "100", "--training.total_env_steps", "1200"),
    *("--training.frames_per_batch", "40", "--training.learning_starts", "400", "--training.replay_ratio", "0.1"),
    *("--replay.capacity", "1200", "--scoring.backend", "thread", "--evaluation.episodes", "1"),
    *("--evaluation.every_n_env_steps", "1200", "--evaluation.video_every_n_env_steps", "null"),
    *("--monitoring.every_n_env_steps", "400", "--checkpoint.every_n_env_steps", "600"),
]


def _name(path: Path) -> str:
    return path.relative_to(ROOT / "configs").with_suffix("").as_posix()


def test_each_of_the_papers_pairs_has_a_configuration_with_its_budget() -> None:
    found = {_name(path): yaml.safe_load(path.read_text()) for path in RUNS}
    assert len(PAPER) == 12
    for name in PAPER:
        config = found[name]
        assert config["training"]["total_env_steps"] == 1_000_000
        assert (config["evaluation"]["every_n_env_steps"], config["evaluation"]["episodes"]) == (10_000, 10)
        assert config["replay"]["clip_length"] == 32
        assert config["model"]["class_path"] == f"vlmrb.algorithms.{name.rpartition('_')[2].upper()}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=_name)
def test_it_learns_is_scored_and_goes_on(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_dir = tmp_path / "run"
    command = [
        "fit",
        "-c",
        str(path),
        "-c",
        str(ROOT / "configs/replay/vlm_td.yaml"),
        *SHORT,
        "--run_dir",
        str(run_dir),
    ]
    assert main(command) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["grad_steps"] >= 50
    assert summary["scoring"]["scored"] >= 20
    with (run_dir / "metrics.csv").open() as file:
        metrics = [row for row in csv.DictReader(file) if row["replay/lambda"]]
    assert float(metrics[-1]["replay/lambda"]) > 0.2
    assert metrics[-1]["train/loss"]
    assert list(run_dir.glob("events.out.tfevents.*"))
    more = ["--training.total_env_steps", "1400", "--resume", "true"]
    assert main([*command, *more]) == 0
    assert json.loads((run_dir / "summary.json").read_text())["env_steps"] == 1400


# Scheme and control overlays → what they show of themselves in the summary's scoring, on continuous actions.
POINT_REACH = ROOT / "configs/point_reach/point_reach_6_sac.yaml"
OVERLAYS = {
    "replay/her": None,
    "replay/vlm_reward": "scored",
    "replay/vlm_td scorer/shuffled": "control_remembered",
    "replay/vlm_reward scorer/corrupted": "control_demoted",
    "replay/vlm scorer/wrong": "control_promoted",
    "replay/vlm scorer/student": "student_to_scorer",
    "replay/vlm scorer/flipped": "control_turned",
    "replay/vlm scorer/budget": "budget_used",
}


@pytest.mark.slow
@pytest.mark.parametrize("names", OVERLAYS)
def test_an_overlay_trains_and_goes_on(names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_dir, shows = tmp_path / "run", OVERLAYS[names]
    overlays = [part for name in names.split() for part in ("-c", str(ROOT / f"configs/{name}.yaml"))]
    command = ["fit", "-c", str(POINT_REACH), *overlays, *SHORT, "--run_dir", str(run_dir)]
    assert main(command) == 0
    assert main([*command, "--training.total_env_steps", "1400", "--resume", "true"]) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["env_steps"] == 1400
    assert summary["grad_steps"] >= 70
    if shows is None:
        assert not summary.get("scoring")
    else:
        assert summary["scoring"][shows] > 0
