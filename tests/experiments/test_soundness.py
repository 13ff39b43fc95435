from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finished_cells import make_cell, train

from vlmrb.experiments import soundness
from vlmrb.experiments.soundness import budgets, require_whole_budget

WHOLE = {"max_epochs": 1, "max_steps": -1, "max_time": None, "limit_train_batches": None, "fast_dev_run": False}


def test_trainers_own_defaults_run_to_the_end() -> None:
    require_whole_budget({**WHOLE, "overfit_batches": 0.0, "accelerator": "cpu"})
    require_whole_budget({})


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_epochs", 0), ("max_epochs", None), ("max_steps", 5), ("max_time", "00:01:00:00"), ("fast_dev_run", True)]
    + [("limit_train_batches", 1), ("limit_train_batches", 0.5), ("overfit_batches", 1)],
)
def test_trainer_that_would_stop_elsewhere_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^trainer.{name}=.* has no place in a study: runs end with training.total"):
        require_whole_budget({**WHOLE, name: value})


def test_prefill_counts_for_runs_that_have_yet_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def read(combinations: list[list[str]]) -> list[dict[str, Any]]:
        asked.extend(combinations)
        return [{"total_env_steps": 7} for _ in combinations]

    monkeypatch.setattr(soundness, "_early", lambda arguments: "")
    monkeypatch.setattr(soundness, "_read", read)
    cells = [make_cell(tmp_path / "sweep", seed=seed, overrides=["--prefill", "there"]) for seed in (0, 1)]
    train(cells[0], [0.0, 0.1], finished=False)
    assert budgets(cells) == budgets(cells[:1]) == {("base", "uniform"): 7}
    assert [arguments[-2:] for arguments in asked] == [["--prefill", "there"], ["--prefill", "null"]]


def test_reader_of_settings_ends_with_its_parent() -> None:
    lives = "from vlmrb.experiments.child import stop_with; import time; stop_with(1); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", lives], timeout=50).returncode == -signal.SIGTERM
