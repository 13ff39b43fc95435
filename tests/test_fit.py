"""Whole `vlmrb fit` commands on a tiny budget: what they write, and what a resume leaves alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

from vlmrb.cli import main
from vlmrb.fit import count_gpus_by_driver

ROOT = Path(__file__).parents[1]
SHORT = [
    *("--env.id", "MiniGrid-DoorKey-5x5-v0", "--env.num_envs", "4", "--scoring.backend", "sync"),
    *("--training.frames_per_batch", "40", "--training.learning_starts", "200", "--evaluation.episodes", "2"),
    *("--evaluation.every_n_env_steps", "200", "--monitoring.every_n_env_steps", "200"),
    *("--evaluation.video_every_n_env_steps", "null"),
]


def fit(run_dir: Path, *arguments: str) -> int:
    configs = ("-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/replay/vlm.yaml"))
    return main(["fit", *configs, *SHORT, "--run_dir", str(run_dir), *arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert fit(folder, "--training.total_env_steps", "800") == 0
    return folder


def content(run_dir: Path) -> dict[str, bytes]:
    names = ("config.yaml", "metrics.csv", "evaluations.csv", "summary.json", "checkpoints/last.ckpt")
    return {name: (run_dir / name).read_bytes() for name in names}


def evaluated_at(run_dir: Path) -> list[int]:
    with (run_dir / "evaluations.csv").open() as file:
        return [int(row["env_step"]) for row in csv.DictReader(file)]


def test_gpus_are_counted_without_a_search_for_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning leaves it
    searches = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: searches.append("NVML") or 0)
    monkeypatch.setattr("torch.cuda._is_compiled", lambda: True)
    monkeypatch.setattr("torch._C._cuda_getDeviceCount", lambda: 0, raising=False)
    assert not torch.cuda.is_available()  # asked by every step of Adam
    assert searches == ["NVML"]
    count_gpus_by_driver()
    assert not torch.cuda.is_available()
    assert searches == ["NVML"]


@pytest.mark.slow
def test_run_folder_holds_what_the_readme_promises(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["env_steps"] == 800
    assert summary["scoring"]["share_scored"] == 1.0
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["replay"]["n_steps"] == 3
    assert list(run_dir.glob("events.out.tfevents.*"))
    assert evaluated_at(run_dir) == [0, 200, 400, 600, 800]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--replay.td", "{exponent: 1.0}"), "replay"),
        (("--replay.capacity", "5000"), "capacity"),
        (("--env.id", "MiniGrid-DoorKey-6x6-v0"), "other networks"),
        (("--env.num_envs", "8"), "env.num_envs"),
        (("--model.hidden_sizes", "[16]"), "other networks"),
    ],
)
def test_refused_resume_is_one_line_and_changes_nothing(
    change: tuple[str, str], says: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run_dir)
    capsys.readouterr()
    assert fit(run_dir, "--training.total_env_steps", "1200", "--resume", "true", *change) != 0
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vlmrb fit: error:")]
    assert len(error) == 1
    assert says in error[0]
    assert content(run_dir) == before


@pytest.mark.slow
def test_complete_run_goes_on_under_a_larger_budget(run_dir: Path) -> None:
    assert fit(run_dir, "--training.total_env_steps", "1200", "--resume", "true") == 0
    assert json.loads((run_dir / "summary.json").read_text())["env_steps"] == 1200
    assert evaluated_at(run_dir) == [0, 200, 400, 600, 800, 1000, 1200]


@pytest.mark.slow
def test_run_that_died_before_its_first_checkpoint_starts_over(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints").iterdir():
        path.unlink()
    assert fit(run_dir, "--training.total_env_steps", "800", "--resume", "true") == 0
    assert evaluated_at(run_dir) == [0, 200, 400, 600, 800]
    assert (run_dir / "evaluations.1.csv").exists()  # what the dead run wrote is kept


@pytest.mark.slow
def test_overwrite_moves_the_earlier_run_aside(run_dir: Path) -> None:
    before = content(run_dir)
    assert fit(run_dir, "--training.total_env_steps", "400", "--overwrite", "true") == 0
    assert content(run_dir.with_name("run.old1")) == before
    assert json.loads((run_dir / "summary.json").read_text())["env_steps"] == 400


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_settings_says_so_and_keeps_the_earlier_ones(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = (run_dir / "config.yaml").read_text()
    assert fit(run_dir, "--training.total_env_steps", "840", "--resume", "true", "--replay.lam_max", "0.75") == 0
    (said,) = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert "training.total_env_steps 800 → 840" in said
    assert "replay.lam_max 0.5 → 0.75" in said
    assert "resume" not in said
    assert (run_dir / "config_until_800.yaml").read_text() == earlier
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["replay"]["lam_max"] == 0.75


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_a_run_without_its_last_ckpt_goes_on_from_what_that_was_a_copy_of(
    damage: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = run_dir / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    last.unlink()
    if damage == "cut":
        last.write_bytes(whole[:1000])
    assert fit(run_dir, "--training.total_env_steps", "840", "--resume", "true") == 0
    assert any("last.ckpt is lost" in record.getMessage() for record in caplog.records)
    assert evaluated_at(run_dir)[-2:] == [800, 840]


@pytest.mark.slow
def test_a_run_none_of_whose_checkpoints_can_be_read_is_not_begun_anew(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run_dir / "checkpoints").glob("*.ckpt"):
        path.write_bytes(b"damaged")
    before = content(run_dir)
    assert fit(run_dir, "--training.total_env_steps", "840", "--resume", "true") == 1
    assert "can be read: remove that folder to begin the run anew" in capsys.readouterr().err
    assert content(run_dir) == before
