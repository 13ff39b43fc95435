"""Overlays of schemes that act while a run goes on: they train for real, leave their marks, and can be resumed."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from vlmrb.cli import main
from vlmrb.replay.similarity import SimilaritySelector

ROOT = Path(__file__).parents[2]
SHORT = [
    *("--env.num_envs", "4", "--env.max_steps", "20", "--training.total_env_steps", "2000"),
    *("--training.frames_per_batch", "40", "--training.learning_starts", "400", "--training.replay_ratio", "0.1"),
    *("--replay.capacity", "2000", "--replay.batch_size", "32", "--evaluation.episodes", "1"),
    *("--evaluation.every_n_env_steps", "2000", "--evaluation.video_every_n_env_steps", "null"),
    *("--monitoring.every_n_env_steps", "400", "--checkpoint.every_n_env_steps", "2000"),
]


def train(overlay: str, run_dir: Path) -> list[dict[str, float]]:
    """Trains briefly, and goes on for a block; returns the rows of metrics."""
    configs = ("-c", str(ROOT / "configs/minigrid/doorkey_6x6_dqn.yaml"), "-c", f"{ROOT}/configs/replay/{overlay}.yaml")
    command = ["fit", *configs, *SHORT, "--run_dir", str(run_dir)]
    assert main(command) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["env_steps"], summary["grad_steps"]) == (2000, 164)
    assert main([*command, "--training.total_env_steps", "2040", "--resume", "true"]) == 0
    assert json.loads((run_dir / "summary.json").read_text())["grad_steps"] == 168
    with (run_dir / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "replay/size" in row]


@pytest.mark.slow
def test_ero_replays_what_its_masks_keep(tmp_path: Path) -> None:
    """Episodes of at most 20 steps, four at a time: ten have ended after 240 env steps, and as long after each mask."""
    rows = train("ero", tmp_path / "run")
    assert all(math.isfinite(row["train/loss"]) for row in rows)
    shares = [row["replay/positives"] / row["replay/size"] for row in rows]
    assert all(0.1 < share < 0.9 for share in shares)
    assert len(set(shares)) == len(shares)
    assert {row["replay/uniform_fallbacks"] for row in rows} == {0}


@pytest.mark.slow
def test_aer_trains_on_a_choice_until_forty_per_cent_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    plain = SimilaritySelector.choose

    def watched(self: SimilaritySelector, observation, count, generator):  # type: ignore[no-untyped-def]
        sizes.append(len(observation))
        return plain(self, observation, count, generator)

    monkeypatch.setattr(SimilaritySelector, "choose", watched)
    rows = train("aer", tmp_path / "run")
    assert all(math.isfinite(row["train/loss"]) for row in rows)
    assert sizes[0] == 4 * 32
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 80  # four gradient steps per block, the last of them before 1,200 env steps
