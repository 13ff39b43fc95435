"""What the README shows is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vlmrb.cli import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"(?:^    |`)(vlmrb [^`\n]*(?:\\\n[^`\n]*)*)", README.replace("\\\n", " "), re.MULTILINE)


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


def block(marker: str) -> str:
    (found,) = [code for code in BLOCKS if marker in code]
    return found


@pytest.mark.slow
def test_the_buffer_works_in_ones_own_loop(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(block("VLMReplayBuffer"))
    result = run([sys.executable, str(tmp_path / "loop.py")], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    scored, positive = map(int, re.findall(r"\d+", result.stdout.splitlines()[-1]))  # TorchRL logs to stdout before it
    assert scored > 150  # 3,200 env steps in clips of at most 15 rows
    assert positive > 200  # a random policy takes the key in every fifth clip or so


@pytest.mark.slow
def test_ones_own_environment_trains(tmp_path: Path) -> None:
    code = block("# my_world.py")
    assert sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines()) <= 10  # of code
    (tmp_path / "my_world.py").write_text(code)
    (command,) = [command for command in COMMANDS if "my_world" in command]
    verb, *arguments = shlex.split(command)[1:]
    arguments[arguments.index("--run_dir") + 1] = str(tmp_path / "run")
    (tmp_path / "configs").symlink_to(ROOT / "configs")  # a user stands in a checkout, with the module beside it
    short = ["--training.total_env_steps", "1920", "--training.learning_starts", "640", "--evaluation.episodes", "2"]
    result = run([str(Path(sys.executable).with_name("vlmrb")), verb, *arguments, *short], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_known_verbs_and_files_that_exist(command: str) -> None:
    words = shlex.split(command.split(" VERB")[0])
    if len(words) > 1:
        assert words[1] in VERBS
    for path in re.findall(r"configs/[\w/]+\.yaml", command):
        assert (ROOT / path).is_file()


@pytest.mark.slow
def test_the_page_on_ones_own_environment_and_question_works_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs/your-own-environment.md").read_text()
    for language in ("yaml", "python"):
        (code,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        assert sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines()) <= 10
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    model = str(ROOT / "examples/tiny_vlm/perception_lm")  # small enough to be here; what it answers says nothing
    config = (tmp_path / "my_run.yaml").read_text()
    assert config.count("facebook/Perception-LM-1B") == 1
    small = f"{model}\n      device: cpu\n      frame_size: 64"
    (tmp_path / "my_run.yaml").write_text(config.replace("facebook/Perception-LM-1B", small))
    budget = "--training.total_env_steps 1920 --training.learning_starts 640 --evaluation.episodes 2"
    short = {"corpus": "--clips 40 --max_env_steps 20000", "calibrate": "", "fit": budget}
    commands = re.findall(r"^    (vlmrb .*)$", page, re.MULTILINE)
    assert [command.split()[1] for command in commands] == list(short)
    for command in commands:
        verb, *arguments = shlex.split(command)[1:]
        result = run([str(Path(sys.executable).with_name("vlmrb")), verb, *arguments, *short[verb].split()], tmp_path)
        assert result.returncode == 0, (verb, result.stderr[-2000:])
    assert (tmp_path / "runs/my_calibration/calibrated.yaml").exists()
    summary = json.loads((tmp_path / "runs/my_world/summary.json").read_text())
    assert summary["scoring"]["emitted"] > 0
