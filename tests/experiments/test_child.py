from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vlmrb.experiments.child import wait_until_free
from vlmrb.experiments.children import Children, start_child
from vlmrb.locks import lock_folder


def test_busy_folder_is_waited_for(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, "run_dir=")
    threading.Timer(0.3, lock.close).start()
    begun = time.monotonic()
    wait_until_free(tmp_path, patience_s=30)
    assert 0.3 <= time.monotonic() - begun < 20
    lock_folder(tmp_path, "run_dir=").close()


def test_patience_ends(tmp_path: Path) -> None:
    with lock_folder(tmp_path, "run_dir="):
        begun = time.monotonic()
        wait_until_free(tmp_path, patience_s=0.2)
        assert time.monotonic() - begun >= 0.2


def test_free_and_missing_folders_are_not_waited_for_and_left_as_they_are(tmp_path: Path) -> None:
    begun = time.monotonic()
    wait_until_free(tmp_path, patience_s=60)
    wait_until_free(tmp_path / "missing", patience_s=60)
    assert time.monotonic() - begun < 30
    assert not (tmp_path / "missing").exists()


def test_waiting_for_children_comes_back_when_time_is_up(tmp_path: Path) -> None:
    with Children() as children, (tmp_path / "log.txt").open("w") as log:
        child = children.start(["--version"], log)
        assert children.wait(timeout_s=0.0) == []
        assert children.wait() == [child]
    assert child.returncode == 0
    assert (tmp_path / "log.txt").read_text().strip()


@pytest.mark.parametrize("logged", [True, False])
def test_children_take_one_thread_unless_the_environment_says_otherwise(
    logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr("subprocess.Popen", lambda command, env, **_: seen.update(env))
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    for name in ("OMP_NUM_THREADS", "VLMRB_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with (tmp_path / "log.txt").open("w") as log:
        start_child(["fit"], log if logged else None)
    assert (seen["OMP_NUM_THREADS"], seen["MKL_NUM_THREADS"]) == ("1", "3")
    assert seen.get("VLMRB_DEBUG") == ("1" if logged else None)  # a terminal has no use for tracebacks


SAVING = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.3)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).write_text("working")
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("error", "left"), [(OSError("disk full"), "saved"), (KeyboardInterrupt(), "working")], ids=["error", "ctrl-c"]
)
def test_error_lets_children_save_and_a_second_ctrl_c_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, left: str
) -> None:
    said = tmp_path / "said"

    def start(arguments: list[str], output: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SAVING, str(said)])

    def run(children: Children) -> None:
        with children:
            started.append(children.start([]))
            while not said.exists() or not said.read_text():
                time.sleep(0.01)
            raise error

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("vlmrb.experiments.children.start_child", start)
    with pytest.raises(type(error)):
        run(Children())
    assert said.read_text() == left
    assert [child.poll() for child in started] == [143 if left == "saved" else -9]
