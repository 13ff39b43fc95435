"""`vlmrb doctor -c`: a rehearsal of real training, and what it says of quick, slow and absent scorers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmrb import preflight, rehearsal
from vlmrb.cli import main
from vlmrb.doctor import GIB

ROOT = Path(__file__).parents[1]
SMALL = [
    *("--env.id", "MiniGrid-DoorKey-5x5-v0", "--env.num_envs", "8", "--training.frames_per_batch", "64"),
    *("--training.total_env_steps", "640000", "--replay.clip_length", "8", "--model.hidden_sizes", "[16]"),
    *("--scoring.backend", "thread", "--scoring.batch_clips", "8"),
]


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures for half a second instead of five."""
    monkeypatch.setattr(rehearsal, "SECONDS", 0.5)


def doctor(run_dir: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    configs = ("-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/replay/vlm.yaml"))
    code = main(["doctor", *configs, *SMALL, "--run_dir", str(run_dir), *arguments])
    report = run_dir / "preflight" / "preflight.json"
    return code, json.loads(report.read_text()) if report.is_file() else {}


def scorer(name: str, **settings: Any) -> tuple[str, str]:
    return "--scoring.scorer", json.dumps({"class_path": f"slow_scorers.{name}", "init_args": settings})


def check_of(report: dict[str, Any], name: str) -> dict[str, str]:
    (found,) = (check for check in report["checks"] if check["name"] == name)
    return found


@pytest.mark.slow
def test_a_quick_scorer_in_a_process_of_its_own_keeps_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, report = doctor(tmp_path / "run", "--scoring.backend", "process")
    assert code == 0
    assert check_of(report, "scorer")["status"] == "ok"
    speed = report["speed"]
    assert speed["expected_share"] == 1.0
    assert speed["can_clips_per_s"] > speed["need_clips_per_s"] > 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("ok")] == [
        ["ok", "replay"],
        ["ok", "checkpoint"],
        ["ok", "frames"],
        ["ok", "scorer"],
    ]
    assert report["sizes"]["capacity"] == 240_000  # of the run, not of the rehearsal


@pytest.mark.slow
def test_beside_a_student_the_scorer_is_measured_as_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, report = doctor(tmp_path / "run", "-c", str(ROOT / "configs/scorer/student.yaml"))
    assert code == 0
    assert check_of(report, "student")["found"].startswith("a thread of training's process")
    assert check_of(report, "scorer")["status"] == "ok"
    assert report["speed"]["need_clips_per_s"] == pytest.approx(report["speed"]["clips_per_s"], rel=0.5)
    assert any(line.split()[:2] == ["ok", "student"] for line in capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_only_the_preflights_own_folder_is_left_behind(tmp_path: Path):
    code, report = doctor(tmp_path / "run", *scorer("SleepingScorer"))
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["clip.gif", "preflight", "preflight.json"]
    assert report["clip"]["scorer"] == "sleeping"


@pytest.mark.slow
def test_a_slow_scorer_is_warned_of_with_its_speed_in_full_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, report = doctor(tmp_path / "run", *scorer("SleepingScorer", seconds_per_clip=0.02))
    assert code == 0
    assert check_of(report, "scorer")["status"] == "warn"
    assert report["speed"]["scorer_clips_per_s"] == pytest.approx(50, rel=0.2)
    assert report["speed"]["batch"] == 8
    assert report["speed"]["expected_share"] < 0.9
    assert "→ the rest is replayed uniformly; try" in capsys.readouterr().out


@pytest.mark.slow
def test_a_scorer_without_weights_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, report = doctor(tmp_path / "run", *scorer("AbsentScorer"))
    assert code == 1
    assert check_of(report, "scorer")["found"] == "scorer 'absent' has no weights: fetch them"
    assert "1 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_scorer_too_slow_to_be_measured_fails_with_what_it_did(tmp_path: Path):
    slow = scorer("SleepingScorer", seconds_per_clip=1.5)
    code, report = doctor(tmp_path / "run", *slow, "--scoring.timeout_s", "0.1", "--scoring.batch_clips", "1")
    assert code == 1
    assert "it answered 0 batches of at most 1 clips within" in check_of(report, "scorer")["found"]


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "memory_bytes", lambda: 1000)
    code, report = doctor(tmp_path / "run")
    assert code == 1
    assert check_of(report, "replay buffer")["status"] == "fail"
    assert "speed" not in report


@pytest.mark.slow
def test_without_a_scorer_the_sizes_are_told(tmp_path: Path):
    uniform = ("-c", str(ROOT / "configs/replay/uniform.yaml"))
    code, report = doctor(tmp_path / "run", *uniform, "--scoring.scorer", "null")
    assert code == 0
    assert [check["name"] for check in report["checks"]] == ["replay buffer", "checkpoint"]


@pytest.mark.parametrize(("left", "status"), [(4, "ok"), (0.5, "warn")])
def test_what_learner_and_scorer_took_of_the_gpu_is_told(left: float, status: str):
    check = rehearsal.gpu_check(int(3.5 * GIB), int(left * GIB), 16 * GIB)
    assert check.status == status
    assert check.found.startswith("learner and scorer took 3.5 GiB, ")


@pytest.mark.gpu
def test_a_rehearsal_on_a_gpu_tells_what_it_took(tmp_path: Path):
    code, report = doctor(tmp_path / "run", "--trainer.accelerator", "gpu")
    assert code == 0
    assert "are left" in check_of(report, "GPU")["found"]


def test_bad_settings_are_refused_in_one_line_as_fit_refuses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, report = doctor(tmp_path / "run", "--scoring.batch_clips", "0")
    assert code != 0
    assert report == {}
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vlmrb doctor: error:")]
    assert "scoring.batch_clips=0 must be at least 1" in line
