"""Whole runs, small enough for a test: DQN and IQN with VLM-guided replay solve DoorKey-5x5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrb.cli import main

ROOT = Path(__file__).parents[2]


FEW_QUANTILES = [f"--model.num_{kind}quantiles={count}" for kind, count in (("", 4), ("target_", 4), ("policy_", 8))]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "settings"), [("dqn", []), ("iqn", FEW_QUANTILES)])
def test_guided_replay_solves_doorkey_5x5(tmp_path: Path, algorithm: str, settings: list[str]) -> None:
    arguments = ["fit", "-c", str(ROOT / f"configs/minigrid/doorkey_6x6_{algorithm}.yaml"), *settings]
    arguments += ["-c", str(ROOT / "configs/replay/vlm.yaml"), "-c", str(ROOT / "configs/scorer/milestones.yaml")]
    arguments += ["--env.id", "MiniGrid-DoorKey-5x5-v0", "--training.total_env_steps", "80000"]
    assert main([*arguments, "--run_dir", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["success"] >= 0.9
    assert main(["evaluate", "--ckpt", str(tmp_path / "checkpoints/last.ckpt"), "--out", str(tmp_path)]) == 0
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["success"] == pytest.approx(summary["history"][-1][1])  # same levels, same policy, same result
