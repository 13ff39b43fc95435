from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vlmrb.experiments.provenance import git_state, versions


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_state_is_the_commit_and_whether_tracked_files_have_changed(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked.txt").touch()
    assert git_state(checkout) == {"commit": commit, "dirty": False}
    assert git_state(checkout / "code.py") == {"commit": commit, "dirty": False}
    (checkout / "code.py").write_text("2\n")
    assert git_state(checkout) == {"commit": commit, "dirty": True}


def test_package_that_lies_untracked_in_somebodys_checkout_is_of_no_commit(checkout: Path) -> None:
    package = checkout / ".venv" / "package.py"
    package.parent.mkdir()
    package.touch()
    assert git_state(package) is None


def test_no_checkout_no_commit_and_no_git_are_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(Path.cwd()) is None


def test_versions_name_what_is_installed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmrb.experiments.provenance.PACKAGES", ("torch", "no-such-package"))
    versions.cache_clear()
    try:
        assert list(versions()) == ["python", "torch"]
    finally:
        versions.cache_clear()
