"""Bad input ends in one readable line and a non-zero exit code, before anything is built or destroyed."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import vlmrb.fit
from vlmrb.cli import VERBS, _lists, _take_section, main
from vlmrb.doctor import Check
from vlmrb.locks import lock_folder

ROOT = Path(__file__).parents[1]
BASE = ["fit", "-c", str(ROOT / "configs/minigrid/doorkey_6x6_dqn.yaml"), "-c", str(ROOT / "configs/replay/vlm.yaml")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replay.bogus", "1"], "replay.bogus"),
        (["--training.gamma", "high"], "training.gamma"),
        (["--training.gamma", "1.5"], "training.gamma"),
        (["--training.epsilon_end", "0.1"], "training.epsilon_end is now model.init_args.epsilon_end"),
        (["--model.epsilon_end", "1.5"], "model.epsilon_end=1.5"),
        (["--replay.lam_max", "1.5"], "replay.lam_max=1.5 must lie in [0, 1]"),
        (["--replay.clip_length", "1"], "replay.clip_length=1"),
        (["--replay.capacity", "10"], "replay.capacity=10 is smaller than replay.batch_size=128"),
        (["--env.id", "MiniGrid-DorKey-6x6-v0"], "did you mean MiniGrid-DoorKey-6x6-v0"),
        (["--env.num_envs", "48"], "training.frames_per_batch=320"),
        (["--training.total_env_steps", "1000"], "training.total_env_steps=1000"),
        (["--trainer.devices", "2"], "trainer.devices=2"),
        (["--model", "NoSuchModel"], "model"),
        (["--scoring.scorer", "NoSuchScorer"], "scoring.scorer"),
        (["--scoring.scorer", "null"], "scoring.scorer"),
        (["--scoring.backend", "telepathy"], "scoring.backend"),
        (["--evaluation.episodes", "0"], "evaluation.episodes=0"),
        (["-c", "no_such_file.yaml"], "no_such_file.yaml"),
        (["--scoring.scorer", "no_such_module.Scorer"], "No module named 'no_such_module'"),
        (["--model.learning_rate", "fast"], "model.learning_rate"),
        (["--replay.capacity", "200"], "training.frames_per_batch=320"),
        (["--run_dir", ""], "run_dir is empty"),
        (["--run_dir", "/proc/nowhere"], "run_dir=/proc/nowhere cannot be written"),
    ],
)
def test_bad_setting_is_named_in_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, "--run_dir", str(tmp_path / "run"), *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert error.startswith("vlmrb fit: error: ")
    assert "\n" not in error
    assert len(error) < 400
    assert says in error


@pytest.mark.parametrize(
    ("overlay", "says"),
    [
        ("replay: {capcity: 5}", "Group 'replay' does not accept option 'capcity'"),
        ("replay: {vlm: {treshold: 1}}", "replay.vlm: Option 'treshold'"),
        ("training: {gama: 1}", "Group 'training' does not accept option 'gama'"),
        ("env: {idd: x}", "'idd'"),
        ("model: {init_args: {lr: 1}}", "model: Option 'lr'"),
        ("scoring: {batch_clip: 1}", "batch_clip"),
        ("scoring: {scorer: {init_args: {tile: 1}}}", "scoring.scorer: Option 'tile'"),
        ("evaluation: {episode: 1}", "episode"),
        ("trainer: {device: 1}", "device"),
        ("replay: null", "replay: null"),
        ("", "holds no settings"),
        ("a: [", "is no YAML"),
        ("- a list", "holds no settings"),
    ],
)
def test_overlay_with_a_mistake_is_one_line_that_names_it(
    overlay: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(overlay)
    assert main([*BASE, "-c", str(path), "--run_dir", str(tmp_path / "run")]) != 0
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert says in error


def test_run_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_folder(tmp_path, "run_dir="):
        assert main([*BASE, "--run_dir", str(tmp_path)]) != 0
    assert "is in use by another run" in capsys.readouterr().err


def test_overlay_with_callbacks_is_refused_instead_of_dropping_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.Timer}]}\n")
    assert main([*BASE, "-c", str(overlay), "--run_dir", str(tmp_path / "run")]) != 0
    assert "trainer.callbacks" in capsys.readouterr().err


def test_run_folder_of_another_run_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_text("precious\n")
    assert main([*BASE, "--run_dir", str(tmp_path)]) != 0
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "metrics.csv").read_text() == "precious\n"


def test_missing_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--ckpt", str(tmp_path / "none.ckpt")]) != 0
    assert "none.ckpt does not exist" in capsys.readouterr().err


def test_file_that_is_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.ckpt").write_bytes(b"not a checkpoint")
    assert main(["evaluate", "--ckpt", str(tmp_path / "some.ckpt")]) != 0
    assert "is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"not a checkpoint"])
def test_checkpoint_that_cannot_be_resumed_is_named(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.ckpt"
    if content is not None:
        path.write_bytes(content)
    assert main([*BASE, "--run_dir", str(tmp_path / "run"), "--ckpt_path", str(path)]) != 0
    error = capsys.readouterr().err.strip()
    assert "some.ckpt" in error
    assert "\n" not in error


def test_a_full_disk_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(args: list[str]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(VERBS, "fit", fill)
    assert main(["fit"]) == 1
    assert capsys.readouterr().err.strip() == (
        "vlmrb fit: error: [Errno 28] No space left on device; make room, then repeat the command (vlmrb fit: with "
        "--resume true)"
    )


def test_fit_says_at_once_what_it_is_about_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vlmrb.fit, "fit", lambda args: 0)
    with caplog.at_level(logging.INFO):
        main(["fit", "--help"])
        assert caplog.text == ""
        main(["fit", "-c", "one.yaml", "--config", "two.yaml", "--config=three.yaml"])
    assert "then starting one.yaml + two.yaml + three.yaml" in caplog.text


def test_unknown_verb_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "fit" in capsys.readouterr().err


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb}" in out for verb in ("fit", "evaluate", "demo", "sweep", "doctor"))


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        ("", []),
        ("-c a.yaml -c b.yaml --count 2", ["--configs+=a.yaml", "--configs+=b.yaml", "--count", "2"]),
        ("--names a b --count 2", ["--names+=a", "--names+=b", "--count", "2"]),
        ("--names [a,b]", ["--names", "[a,b]"]),
        ("--names=[a,b] --count=2", ["--names=[a,b]", "--count=2"]),
        ("--names --count 2", ["--names", "--count", "2"]),
        ("--count -1", ["--count", "-1"]),
        ("--loud --count 2", ["--loud=true", "--count", "2"]),
        ("--names a --loud", ["--names+=a", "--loud=true"]),
        ("--loud false", ["--loud", "false"]),
    ],
)
def test_lists_and_switches_are_written_as_in_a_shell(typed: str, understood: list[str]) -> None:
    def verb(configs: Sequence[str] = (), names: list[str] = [], count: int = 1, loud: bool = False) -> None:  # noqa: B006
        """Takes lists."""

    assert _lists(verb, typed.split()) == understood


@pytest.mark.parametrize(
    ("typed", "flags", "others"),
    [
        ("--env.a 1 --b 2", ["--env.a=1"], ["--b", "2"]),
        ("--b 2 --env.a=1 --env.c -3", ["--env.a=1", "--env.c=-3"], ["--b", "2"]),
        ("--env.a --b 2 --env.c", ["--env.a", "--env.c"], ["--b", "2"]),
        ("--env x --environment y", ["--env=x"], ["--environment", "y"]),
    ],
)
def test_flags_of_a_section_are_parted_from_the_others(typed: str, flags: list[str], others: list[str]) -> None:
    assert _take_section(typed.split(), "env") == (flags, others)


def test_verb_without_options_is_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("vlmrb.doctor.run_checks", lambda *_: [Check("looked", "ok", "here")])
    assert main(["doctor"]) == 0
    assert "looked" in capsys.readouterr().out


def test_dash_c_means_nothing_to_a_verb_without_configurations() -> None:
    def verb(count: int = 1) -> None:
        """Takes no lists."""

    assert _lists(verb, ["-c", "a.yaml"]) == ["-c", "a.yaml"]
