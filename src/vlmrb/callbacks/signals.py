"""SIGTERM and the first Ctrl-C as a request that the training loop honours between two batches."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class StopRequest:
    """Remembers that the run was asked to stop, so that it stops where its state is whole.

    A second Ctrl-C raises `KeyboardInterrupt` at once. Python calls signal handlers in the main thread between two
    bytecodes; this one only sets an attribute.

    Attributes:
        signal: the signal that asked first; ``None`` while nobody has.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The process's exit code by shell convention: 143 after SIGTERM, 130 after Ctrl-C, 0 if nobody asked."""
        return 0 if self.signal is None else 128 + self.signal

    def install(self) -> None:
        """Takes over SIGTERM and SIGINT; does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("training runs outside the main thread: SIGTERM and Ctrl-C will not save a checkpoint")
            return
        self._pid = os.getpid()
        for number in (signal.SIGTERM, signal.SIGINT):
            # A shell starts background jobs with SIGINT ignored: they must not mind their neighbour's Ctrl-C.
            if signal.getsignal(number) not in (signal.SIG_IGN, self._handle):
                self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Gives the signals back to whoever had them; a second call does nothing."""
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._handle and handler is not None:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker inherited the handler: it must die as it would have
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal is None:
            self.signal = signal.Signals(number)
            message = f"\n{self.signal.name}: saving a checkpoint after this batch, then stopping"
            message += " (Ctrl-C again: stop at once, unsaved)\n" if number == signal.SIGINT else "\n"
            os.write(2, message.encode())  # logging takes locks that the interrupted code may hold
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
