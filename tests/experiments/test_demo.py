from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from signalled import left_running, run_until

SHORT = ["--training.total_env_steps", "960", "--training.learning_starts", "320", "--evaluation.episodes", "1"]


def demo_command(out: Path, *overrides: str) -> list[str]:
    return ["demo", "--out", str(out), "--overrides", json.dumps(overrides)]


@pytest.mark.slow
def test_demo_trains_both_runs_and_draws_their_curves(tmp_path: Path) -> None:
    exit_code, printed = run_until(demo_command(tmp_path / "demo", *SHORT), lambda: True, [])
    assert exit_code == 0, printed
    assert "uniform: success" in printed
    for run_dir in (tmp_path / "demo", tmp_path / "demo" / "uniform"):
        assert json.loads((run_dir / "summary.json").read_text())["env_steps"] == 960
    assert (tmp_path / "demo" / "curves.png").stat().st_size > 5_000


@pytest.mark.slow
def test_sigterm_ends_both_runs(tmp_path: Path) -> None:
    run_dirs = [tmp_path / "demo", tmp_path / "demo" / "uniform"]
    exit_code, printed = run_until(
        demo_command(tmp_path / "demo"),
        lambda: all((run_dir / "evaluations.csv").exists() for run_dir in run_dirs),
        [signal.SIGTERM],
    )
    assert exit_code == 143, printed
    assert "interrupted" in printed
    assert left_running(str(tmp_path)) == []


@pytest.mark.slow
def test_failure_is_told_in_one_line(tmp_path: Path) -> None:
    exit_code, printed = run_until(demo_command(tmp_path / "demo", "--replay.lam_max", "2"), lambda: True, [])
    assert exit_code == 1
    assert "lam_max" in printed
    assert "run failed: " in printed.splitlines()[-1]
    assert left_running(str(tmp_path)) == []
