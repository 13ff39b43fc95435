from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from vlmrb.callbacks.signals import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    request = StopRequest()
    request.install()
    yield request
    request.restore()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_nothing_is_requested_at_first(stop: StopRequest) -> None:
    assert not stop
    assert stop.exit_code == 0


def test_sigterm_requests_a_stop_with_143(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop
    assert stop.exit_code == 143


def test_first_ctrl_c_requests_a_stop_with_130_and_says_so(
    stop: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.exit_code == 130
    assert "Ctrl-C again" in capfd.readouterr().err


def test_second_ctrl_c_interrupts_at_once(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_repeated_sigterm_changes_nothing(stop: StopRequest) -> None:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 143


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        request = StopRequest()
        request.install()
        os.kill(os.getpid(), signal.SIGINT)
        request.restore()
        assert not request
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_that_somebody_else_installed_later_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    request.install()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        request.restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_installing_outside_the_main_thread_warns_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=StopRequest().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert "outside the main thread" in caplog.text


def test_a_forked_worker_dies_of_sigterm(stop: StopRequest) -> None:
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"!")  # a signal that comes before Python has settled in the child would be lost
        for _ in range(500):
            time.sleep(0.01)
        os._exit(0)
    os.read(ready, 1)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    os.close(ready)
    os.close(tell)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not stop
