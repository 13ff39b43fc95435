"""SAC and TD3 learn a sparse continuous task from its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrb.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_point_reach_is_learnt(tmp_path: Path, algorithm: str) -> None:
    arguments = ["fit", "-c", str(ROOT / f"configs/point_reach/point_reach_6_{algorithm}.yaml")]
    arguments += ["-c", str(ROOT / "configs/replay/uniform.yaml"), "--training.total_env_steps", "5600"]
    assert main([*arguments, "--run_dir", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["history"][0][1] < 0.5  # before training
    assert summary["success"] >= 0.9
    assert summary["evaluation"]["epsilon"] == 0.0
    assert main(["evaluate", "--ckpt", str(tmp_path / "checkpoints/last.ckpt"), "--out", str(tmp_path)]) == 0
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["success"] == pytest.approx(summary["history"][-1][1])  # same starts, same policy, same result
