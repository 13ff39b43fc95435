"""`vlmrb record`, and runs that start with rows of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.test_fit import ROOT, fit

from vlmrb.cli import main

ENV = "env: {id: MiniGrid-DoorKey-5x5-v0, num_envs: 4}\n"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    (tmp_path / "env.yaml").write_text(ENV)
    folder = tmp_path / "episodes"
    assert main(["record", "-c", str(tmp_path / "env.yaml"), "--episodes", "6", "--out", str(folder)]) == 0
    assert len(list(folder.glob("episode-*.npz"))) == 6
    return folder


@pytest.mark.slow
def test_a_run_starts_with_recorded_episodes_and_their_scores(recorded: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prefill = ("--prefill", str(recorded))
    assert fit(run_dir, *prefill, "--training.total_env_steps", "400") == 0
    plain = tmp_path / "plain"
    assert fit(plain, "--training.total_env_steps", "400") == 0
    more, fewer = (json.loads((path / "summary.json").read_text())["scoring"]["scored"] for path in (run_dir, plain))
    assert more > fewer
    assert fit(run_dir, *prefill, "--training.total_env_steps", "800", "--resume", "true") == 0
    after = json.loads((run_dir / "summary.json").read_text())
    assert after["env_steps"] == 800
    assert after["scoring"]["scored"] - more < fewer + 10  # those of the new env steps alone


@pytest.mark.slow
def test_a_run_starts_with_an_earlier_runs_rows_under_another_scheme(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = tmp_path / "earlier"
    assert fit(earlier, "--training.total_env_steps", "800", "--scoring.scorer", "null", "--replay.vlm", "null",
               "--replay.td", "{exponent: 0.6}") == 0  # fmt: skip
    run_dir = tmp_path / "run"
    caplog.set_level("INFO")
    assert fit(run_dir, "--prefill", str(earlier), "--training.total_env_steps", "400") == 0
    assert "prefilled 800 rows" in caplog.text
    assert json.loads((run_dir / "summary.json").read_text())["scoring"]["share_scored"] == 1.0


@pytest.mark.slow
def test_rows_of_another_environment_and_empty_folders_are_refused_in_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ("--env.id", "MiniGrid-DoorKey-6x6-v0", "--training.total_env_steps", "400")
    assert fit(tmp_path / "run", "--prefill", str(recorded), *other) == 1
    assert "its rows were made with env.id='MiniGrid-DoorKey-5x5-v0'" in capsys.readouterr().err
    fewer = ("--env.actions", "[0, 1, 2, 3, 5]", "--training.total_env_steps", "400")
    assert fit(tmp_path / "run", "--prefill", str(recorded), *fewer) == 1
    assert "with env.actions=None, and this run has [0, 1, 2, 3, 5]" in capsys.readouterr().err
    (recorded / "recording.json").unlink()  # as with episodes from elsewhere
    assert fit(tmp_path / "run", "--prefill", str(recorded), *other) == 1
    assert "are these rows of another environment?" in capsys.readouterr().err
    assert fit(tmp_path / "run", "--prefill", str(recorded), *fewer) == 1
    assert "actions from 0 to 6 are there, and with" in capsys.readouterr().err
    assert fit(tmp_path / "other", "--prefill", str(tmp_path / "nothing"), *other) == 1
    error = capsys.readouterr().err
    assert "neither a run with checkpoints/last.ckpt nor recorded episodes" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_recording_that_was_broken_off_is_made_whole_by_the_same_command(recorded: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in recorded.glob("*.npz")}
    description = json.loads((recorded / "recording.json").read_text())
    (recorded / "recording.json").write_text(json.dumps({**description, "complete": False}))
    (recorded / "episode-00004.npz").unlink()
    command = ["record", "-c", str(tmp_path / "env.yaml"), "--episodes", "6", "--out", str(recorded)]
    assert main([*command, "--seed", "1"]) == 1  # another recording
    assert main(command) == 0
    assert {path.name: path.read_bytes() for path in recorded.glob("*.npz")} == before
    assert json.loads((recorded / "recording.json").read_text())["complete"]


@pytest.mark.slow
def test_a_run_is_not_its_own_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(tmp_path / "run", "--prefill", str(tmp_path / "run"), "--training.total_env_steps", "400") == 1
    assert "is run_dir itself" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_holds_episodes_is_not_recorded_into(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", "-c", str(tmp_path / "env.yaml"), "--out", str(recorded)]) == 1
    assert "already holds recorded episodes" in capsys.readouterr().err
    assert main(["record", "-c", str(ROOT / "configs/quickstart.yaml"), "--out", "x", "--episodes", "0"]) == 1
    assert "--episodes 0 must be at least 1" in capsys.readouterr().err
