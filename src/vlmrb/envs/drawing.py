"""Drawing in a process of its own, which alone loads OpenGL.

It starts with the first frame, is shared by all renderers of a process, and is killed and started anew if it hangs.
Mesa crashes a process that imports Triton later, as torch does in the learner; a context belongs to the process that
made it; and drivers have been seen to hang. None of that reaches whoever asks for frames.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import IO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

ADVICE: Final = (
    "install OpenGL, in software for instance: on Debian or Ubuntu `apt-get install libegl1 libgl1-mesa-dri "
    "libopengl0` (or `libosmesa6`), then look at `vlmrb doctor`"
)
START_S: Final = 180.0  # importing, and building a context in software, on a busy machine
BATCH_S: Final = 120.0  # drawing BATCH frames, with compiling a scene's meshes
BATCH: Final = 8  # frames asked for at a time
TRIES: Final = 2  # processes of one back-end for the same frames


class DrawingError(ValueError):
    """Frames cannot be drawn on this machine; says in one line why, and what to install."""


class Look(NamedTuple):
    """What is drawn, and how.

    Attributes:
        env_id: the environment.
        size: edge of the square frames in pixels.
        quality: see ``EnvConfig.render_quality``.
    """

    env_id: str
    size: int
    quality: str


class _LostError(RuntimeError):
    """A drawing process cannot be used (any more)."""


class _Process:
    """One process with its back-end.

    Args:
        backend: of MuJoCo: ``egl``, ``osmesa``, ``glfw``.

    Raises:
        _LostError: it draws nothing; says why.
    """

    def __init__(self, backend: str) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 — lives as long as the process
        self._pipe, theirs = Pipe(duplex=True)
        environment = os.environ | {
            "MUJOCO_GL": backend,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        environment.pop("PYOPENGL_PLATFORM", None)  # one of another back-end would win
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vlmrb.envs.drawing_worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's affair
        )
        theirs.close()
        self._wait(START_S)

    def draw(self, look: Look, snapshots: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Draws frames ``uint8[N, H, W, 3]`` of ``float64[N, S]``.

        Raises:
            DrawingError: the environment cannot be opened or shown.
            _LostError: no answer.
        """
        try:
            self._pipe.send((tuple(look), snapshots))
        except OSError as error:
            raise _LostError(self._why("ended")) from error
        frames = self._wait(BATCH_S)
        assert isinstance(frames, np.ndarray)
        return frames

    def _wait(self, timeout_s: float) -> object:
        try:
            if not self._pipe.poll(timeout_s):
                raise _LostError(self._why(f"no answer within {timeout_s:g} s"))
            kind, content = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _LostError(self._why("ended")) from error
        if kind == "failed":
            raise DrawingError(content)
        return content

    def _why(self, what: str) -> str:
        """Ends the process and says what is known, in one line."""
        if what == "ended":
            with suppress(subprocess.TimeoutExpired):
                what = f"exit code {self._process.wait(5.0)}"
        self.close()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{what}, {lines[-1].strip()}" if lines else what

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


class Drawing:
    """Draws, with whichever back-end works here: the one in ``MUJOCO_GL``, or else EGL, or else OSMesa."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._owner = 0
        self._reasons: dict[str, str] = {}  # why a back-end is not tried again

    def draw(self, look: Look, snapshots: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Draws states; may be called from any thread.

        Args:
            look: what and how.
            snapshots: ``float64[N, S]``.

        Returns:
            ``uint8[N, H, W, 3]``, 0–255.

        Raises:
            DrawingError: nothing can be drawn here.
        """
        if not len(snapshots):
            return np.empty((0, look.size, look.size, 3), np.uint8)
        with self._lock:
            parts = range(0, len(snapshots), BATCH)
            return np.concatenate([self._draw(look, snapshots[start : start + BATCH]) for start in parts])

    def close(self) -> None:
        """Ends the process; the next frame starts another."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._process.close()
            self._process = None

    def _draw(self, look: Look, snapshots: NDArray[np.float64]) -> NDArray[np.uint8]:
        if self._owner != os.getpid():  # a fork has its parent's process no longer
            self._process, self._owner = None, os.getpid()
        for backend in _backends():
            for attempt in range(1, TRIES + 1):
                if backend in self._reasons:
                    break
                try:
                    if self._process is None:
                        self._process = _Process(backend)
                    return self._process.draw(look, snapshots)
                except _LostError as error:
                    started, self._process = self._process is not None, None
                    logger.warning("drawing with %s: %s", backend, error)
                    if attempt == TRIES or not started:
                        self._reasons[backend] = str(error)
        reasons = "; ".join(f"{backend}: {why}" for backend, why in self._reasons.items() if backend in _backends())
        raise DrawingError(f"frames of {look.env_id} cannot be drawn here ({reasons}): {ADVICE}")


def _backends() -> tuple[str, ...]:
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    return (chosen,) if chosen in ("egl", "osmesa", "glfw", "glx") else ("egl", "osmesa")


DRAWING: Final = Drawing()
"""What all renderers of this process share."""
