from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `vlmrb` is a script of the test's own: /bin/sh with the lines in $VLMRB_SCRIPT."""
    program = tmp_path / "bin" / "vlmrb"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\neval "$VLMRB_SCRIPT"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "runs").mkdir()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "VLMRB_RUNS_DIR": str(tmp_path / "runs"), "HOME": str(tmp_path)}


def enter(environment: dict[str, str], script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = environment | {"VLMRB_SCRIPT": script}
    return subprocess.run([ENTRYPOINT, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_the_entry_point_passes_arguments_and_exit_code_unchanged(environment):
    done = enter(environment, 'printf "%s\\n" "$@"; exit 7', "fit", "-c", "two words.yaml", "")
    assert done.stdout.split("\n")[:4] == ["fit", "-c", "two words.yaml", ""]
    assert done.returncode == 7


def test_a_signal_reaches_the_program_itself(environment):
    script = 'trap "exit 143" TERM; echo $$; while :; do sleep 0.05; done'
    command = [ENTRYPOINT, "fit"]
    with subprocess.Popen(command, env=environment | {"VLMRB_SCRIPT": script}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 143


def test_a_runs_folder_that_cannot_be_written_stops_the_start_in_one_line(environment, tmp_path):
    (tmp_path / "file").touch()
    environment["VLMRB_RUNS_DIR"] = str(tmp_path / "file")
    done = enter(environment, "echo started", "fit")
    assert done.returncode == 73
    assert done.stdout == ""
    assert done.stderr.startswith("vlmrb: user ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["doctor"]])
def test_help_and_doctor_need_no_runs_folder(environment, arguments):
    environment["VLMRB_RUNS_DIR"] = "/nonexistent"
    assert enter(environment, "echo started", *arguments).stdout == "started\n"


def test_the_writability_check_leaves_nothing_behind(environment, tmp_path):
    enter(environment, "true", "fit")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_user_without_a_home_gets_one(environment):
    environment["HOME"] = "/nonexistent"
    assert enter(environment, 'test -w "$HOME" && echo writable', "doctor").stdout == "writable\n"


def test_the_image_asks_for_extras_that_exist():
    extras = set(metadata("vlmrb").get_all("Provides-Extra") or [])
    default = re.search(r"^ARG EXTRAS=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert default is not None
    assert set(default[1].split(",")) <= extras


def test_what_the_image_copies_is_in_the_build_context_and_in_the_tree():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    copied = {source for sources in copies for source in sources.split()}
    assert copied == allowed
    assert [source for source in sorted(copied) if not (ROOT / source).exists()] == []


def test_the_composed_trainer_starts_with_configs_that_exist():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert set(services) == {"trainer", "tensorboard"}
    configs = [argument.removeprefix("-c=") for argument in services["trainer"]["command"] if ".yaml" in argument]
    assert configs
    assert [config for config in configs if not (ROOT / config).is_file()] == []
