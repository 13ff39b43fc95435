"""Settings that cannot work are refused before PyTorch is loaded, and no others."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from vlmrb.early import LATER, SECTIONS, require_sound
from vlmrb.scoring.section import ScoringSection

ROOT = Path(__file__).parents[1]
BASE = ["-c", str(ROOT / "configs/minigrid/doorkey_6x6_dqn.yaml"), "-c", str(ROOT / "configs/replay/vlm.yaml")]
SHIPPED = sorted(
    path for folder in ("minigrid", "ogbench", "point_reach") for path in (ROOT / "configs" / folder).iterdir()
)

WITHOUT_TORCH = """
import sys
from vlmrb.cli import main
code = main(sys.argv[1:])
assert code in (1, 2), code
assert not {"torch", "lightning", "torchrl"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["fit", *BASE, "--training.total_env_steps", "1000"], "training.total_env_steps=1000 must be a multiple of"),
        (["doctor", *BASE, "--evaluation.episodes", "0"], "evaluation.episodes=0 must be at least 1"),
    ],
)
def test_verbs_refuse_numbers_without_loading_torch(command: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vlmrb {command[0]}: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--env.num_envs 48", "training.frames_per_batch=320 must be a multiple of env.num_envs=48"),
        ("--replay.capacity 256", "replay.capacity=256 is smaller than one block of training.frames_per_batch=320"),
        ("--replay.n_steps 8000", "replay.n_steps=8000 rows of each of env.num_envs=32 environments do not fit"),
        ("--replay.vlm.threshold 2", "threshold must lie in [0, 1], got 2"),
        ("--replay.clip_length null", "replay.vlm needs clips"),
        ("--env.max_steps 0", "env.max_steps must be at least 1"),
        ("--scoring.duty_cycle 2", "scoring.duty_cycle=2.0"),
        ("--scoring.bisect_by beginnings", "scoring.bisect_by=beginnings has no effect without scoring.bisect_to"),
        ("--scoring.budget.clips_per_s 0", "scoring.budget.clips_per_s=0.0 must be positive"),
        ("--scoring.budget.clips_per_env_step 0.5", "160 clips in each block of training.frames_per_batch=320"),
        ("--scoring.max_delay_env_steps 100", "must be at least one block, training.frames_per_batch=320"),
        ("--scoring.max_delay_env_steps 20000", "lets 1354 or more clips wait, and scoring.max_waiting=1024 drops"),
        ("--scoring.audit_share 2", "scoring.audit_share=2.0 must lie in [0, 1]"),
        ("--evaluation.epsilon=-1", "evaluation.epsilon=-1.0 must lie in [0, 1]"),
        ("--monitoring.clips_every_n_env_steps 0", "must be at least 1, or null"),
        ("--checkpoint.keep 0", "checkpoint.keep=0 must be at least 1"),
        ("--training.gamma high", "training.gamma"),
        ("--training.gamma", "expected one argument"),
        ("--training.gamma --run_dir x", "expected one argument"),
        ("--replay.bogus 1", "replay.bogus"),
        ("--training.epsilon_end 0.1", "is now model.init_args.epsilon_end"),
    ],
)
def test_what_cannot_work_is_named(arguments: str, says: str) -> None:
    with pytest.raises(Exception, match=r".") as raised:
        require_sound([*BASE, *arguments.split()])
    assert says in str(raised.value)


@pytest.mark.parametrize("scheme", ["uniform", "per", "vlm", "vlm_td"])
def test_configurations_that_come_with_the_program_pass(scheme: str) -> None:
    overlay = str(ROOT / f"configs/replay/{scheme}.yaml")
    for config in SHIPPED:
        require_sound(["-c", str(config), "-c", overlay])


def test_what_is_not_judged_here_is_left_alone() -> None:
    later = "-c none.yaml --model NoModel --model.bogus 1 --trainer.devices 2 --scoring.scorer no.Scorer --resume true"
    require_sound(
        [*BASE, *later.split(), "--scoring.scorer.init_args.bogus=1", "--scoring.cache", "x", "--run_dir", ""]
    )


def test_of_the_scoring_section_only_what_names_classes_or_files_is_left_for_later() -> None:
    parameters = set(inspect.signature(ScoringSection).parameters) - {"settings"}  # these are `ScoringConfig`'s
    assert set(LATER["scoring"]) == parameters
    assert not parameters & {field.name for field in fields(SECTIONS["scoring"])}


def test_files_and_flags_count_in_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.yaml", tmp_path / "wrong.yaml"
    right.write_text(yaml.safe_dump({"training": {"total_env_steps": 640}}))
    wrong.write_text(yaml.safe_dump({"training": {"total_env_steps": 641}}))
    require_sound([*BASE, "-c", str(wrong), f"--config={right}"])
    require_sound([*BASE, "-c", str(wrong), "--training.total_env_steps=320"])
    require_sound([*BASE, "--training.total_env_steps", "641", "-c", str(right)])
    for arguments in (["-c", str(right), "-c", str(wrong)], ["--training.total_env_steps", "640", "-c", str(wrong)]):
        with pytest.raises(ValueError, match="total_env_steps=641"):
            require_sound([*BASE, *arguments])


@pytest.mark.parametrize("section", ["env", "training", "replay", "scoring", "evaluation"])
def test_an_empty_section_is_no_setting(section: str, tmp_path: Path) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(f"{section}:\n")
    with pytest.raises(ValueError, match=f"{section}: null is no setting"):
        require_sound([*BASE, "-c", str(path)])
