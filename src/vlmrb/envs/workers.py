"""A group of instances in this process, and one in a process of its own, spoken to alike."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vlmrb.envs.errors import FAILURES, reason
from vlmrb.envs.simulator import Spaces, Step

if TYPE_CHECKING:
    from vlmrb.envs.instance import Instance

_CLOSE_TIMEOUT_S = 5.0
_DIED = "an environment worker died; run with env.workers: 0 to see why"


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
            RuntimeError: an instance failed in a worker process.
        """
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

    def close(self) -> None:
        """Closes the instances; a second call does nothing."""
        for instance in self._instances:
            instance.close()
        self._instances = []


class RemoteGroup:
    """Instances of a worker process. It is spawned, not forked: forks of a process with threads may hang.

    Args:
        make: picklable; makes one instance.
        num_envs: how many.
    """

    def __init__(self, make: Callable[[], Instance], num_envs: int) -> None:
        self.num_envs = num_envs
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, num_envs), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Self:
        """Sends a method's name and arguments to the worker.

        Raises:
            RuntimeError: the worker died.
        """
        try:
            self._pipe.send((method, args))
        except ConnectionError as error:
            raise RuntimeError(_DIED) from error
        return self

    def result(self) -> Any:
        """Waits for the worker's answer.

        Raises:
            RuntimeError: an instance failed, its cause holds the worker's traceback; or the worker died.
        """
        try:
            value, failure = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(_DIED) from error
        if failure is not None:
            raise RuntimeError(f"{failure.reason} (in an environment worker)") from failure
        return value

    def close(self) -> None:
        """Ends the worker; a second call does nothing."""
        self._pipe.close()
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


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
