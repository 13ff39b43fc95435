"""A group of instances in this process, and one in a process of its own, spoken to alike."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.errors import FAILURES, reason
from vlmrb.envs.simulator import Spaces, Step

if TYPE_CHECKING:
    from vlmrb.envs.instance import Instance

_CLOSE_TIMEOUT_S = 5.0
_START_S = 180.0  # until a worker's first answer, at least: it imports and makes its instances, on a busy machine


class Group(Protocol):
    """Instances that are told to do something by ``call`` and hand over the outcome by ``result``, once each.

    Attributes:
        num_envs: instances in the group.
    """

    num_envs: int

    def call(self, method: str, *args: Any) -> Self:
        """Starts one of :class:`LocalGroup`'s methods."""
        ...

    def result(self) -> Any:
        """Waits for what ``call`` started and returns its value.

        Raises:
            RuntimeError: an instance failed in a worker process, or that process died or hangs.
        """
        ...

    def begin_close(self) -> None:
        """Lets the instances end without waiting for it, so that several groups end side by side."""
        ...

    def close(self) -> None:
        """Closes the instances; a second call does nothing."""
        ...


class LocalGroup:
    """Instances of this process.

    Args:
        make: makes one.
        num_envs: how many, n.
    """

    def __init__(self, make: Callable[[], Instance], num_envs: int) -> None:
        self.num_envs = num_envs
        self._instances = [make() for _ in range(num_envs)]
        self._outcome: Any = None

    def call(self, method: str, *args: Any) -> Self:
        """Runs a method at once."""
        self._outcome = getattr(self, method)(*args)
        return self

    def result(self) -> Any:
        """Returns the value of the last call."""
        return self._outcome

    def describe(self) -> Spaces:
        """Returns the spaces of one instance."""
        return self._instances[0].spaces

    def reset(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        """Begins a new episode in the instances ``rows``, each with its seed."""
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self._instances[row].reset(seed)

    def first(self, method: str) -> Any:
        """Runs a method of a family's own on the first instance."""
        return getattr(self._instances[0], method)()

    def step(self, action: NDArray) -> Step:
        """Moves every instance on."""
        pairs = zip(self._instances, action, strict=True)
        reward, success, terminated, truncated = zip(*(i.step(a) for i, a in pairs), strict=True)
        flags = (np.array(flag, np.bool_) for flag in (success, terminated, truncated))
        return Step(*self.look(), np.array(reward, np.float32), *flags)

    def look(self) -> tuple[NDArray, NDArray]:
        """Returns fresh arrays of the current observations ``[n, …]`` and snapshots ``[n, S]``."""
        observations, snapshots = zip(*(instance.look() for instance in self._instances), strict=True)
        return np.stack(observations), np.stack(snapshots)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Runs a method of a family's own on every instance, with one tuple of arguments each."""
        pairs = zip(self._instances, arguments, strict=True)
        return [getattr(instance, method)(*given) for instance, given in pairs]

    def begin_close(self) -> None:
        """Does nothing: instances of this process end one after the other."""

    def close(self) -> None:
        """Closes the instances; a second call does nothing."""
        for instance in self._instances:
            instance.close()
        self._instances = []


class RemoteGroup:
    """Instances of a worker process. It is spawned, not forked: forks of a process with threads may hang.

    The process ends with this object, and before Python waits for its children at exit: a stopped one would never end
    by itself.

    Args:
        make: picklable; makes one instance.
        num_envs: how many.
        name: of the worker, for messages: environment and number.
        timeout_s: seconds to wait for an answer; ``None`` waits for ever. The first one has three minutes or more.
    """

    def __init__(self, make: Callable[[], Instance], num_envs: int, name: str, timeout_s: float | None = None) -> None:
        self.num_envs = num_envs
        self._name, self._timeout_s = name, timeout_s
        self._patience_s = None if timeout_s is None else max(timeout_s, _START_S)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        _set_timeout(self._pipe, self._patience_s)
        self._process = context.Process(target=_serve, args=(theirs, make, num_envs), daemon=True)
        self._process.start()
        theirs.close()
        self._end = Finalize(self, _end, (self._pipe, self._process), exitpriority=0)

    def call(self, method: str, *args: Any) -> Self:
        """Sends a method's name and arguments to the worker.

        Raises:
            RuntimeError: the worker died, or hangs and was ended.
        """
        try:
            self._pipe.send((method, args))
        except BlockingIOError as error:
            raise self._hangs() from error
        except ConnectionError as error:
            raise self._died() from error
        return self

    def result(self) -> Any:
        """Waits for the worker's answer.

        Raises:
            RuntimeError: an instance failed, its cause holds the worker's traceback; or the worker died, or hangs and
                was ended.
        """
        try:
            value, failure = self._pipe.recv()
        except BlockingIOError as error:
            raise self._hangs() from error
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if self._patience_s != self._timeout_s:
            self._patience_s = self._timeout_s
            _set_timeout(self._pipe, self._patience_s)
        if failure is not None:
            raise RuntimeError(f"{failure.reason} (in an environment worker)") from failure
        return value

    def begin_close(self) -> None:
        """Tells the worker to end."""
        self._pipe.close()

    def close(self) -> None:
        """Ends the worker, by force if it does not answer; a second call does nothing."""
        self._end()

    def _died(self) -> RuntimeError:
        return RuntimeError(f"{self._name} died; run with env.workers: 0 to see why")

    def _hangs(self) -> RuntimeError:
        self._process.kill()
        return RuntimeError(
            f"{self._name} (process {self._process.pid}) gave no answer within {self._patience_s:g} s and was killed: "
            f"it hangs, or env.worker_timeout_s = {self._timeout_s:g} is too short (null waits for ever)"
        )


def _set_timeout(pipe: Connection, timeout_s: float | None) -> None:
    """Lets reads and writes of a duplex pipe, which is a socket, fail after so many seconds without a byte.

    Waiting for the pipe to become ready would not do: a process may stop in the middle of a long message.
    """
    microseconds = 0 if timeout_s is None else max(1, round(1e6 * timeout_s))  # 0: never
    interval = struct.pack("ll", *divmod(microseconds, 1_000_000))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setblocking(True)  # whatever socket.setdefaulttimeout says
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, interval)


def _end(pipe: Connection, process: BaseProcess) -> None:
    pipe.close()
    process.join(_CLOSE_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join(_CLOSE_TIMEOUT_S)


class WorkerFailure(Exception):
    """What failed in a worker, as text: an exception's traceback is lost on its way through a pipe.

    Args:
        reason: type and message of the exception, in one line.
        trace: its traceback.
    """

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason, trace)
        self.reason, self.trace = reason, trace

    def __str__(self) -> str:
        return f"in the worker:\n{self.trace}"


def _serve(pipe: Connection, make: Callable[[], Instance], num_envs: int) -> None:
    """Runs a group until the other end of the pipe is closed, be it by ``close`` or by the parent's death.

    An end that is closed with an answer unread resets the connection: that too is no more than an end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    group: LocalGroup | None = None
    answer: tuple[Any, WorkerFailure | None]
    try:
        while True:
            try:
                method, args = pipe.recv()
            except (EOFError, ConnectionError):
                return
            try:
                group = group or LocalGroup(make, num_envs)
                answer = (group.call(method, *args).result(), None)
            except FAILURES as error:
                answer = (None, WorkerFailure(reason(error), traceback.format_exc()))
            try:
                pipe.send(answer)
            except ConnectionError:
                return
    finally:
        if group is not None:
            group.close()
