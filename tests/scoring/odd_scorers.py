"""Scorers for tests: some well-behaved, others misbehave in one way each. Light to import: scoring processes do."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Needs, Scorer, ScorerError


def expected_scores(snapshots: NDArray) -> NDArray[np.float32]:
    """A number in [0, 1) that depends on every snapshot of a clip, ``[B, L, S]`` → ``float32[B]``."""
    weights = np.arange(1, snapshots[0].size + 1)
    return ((snapshots.reshape(len(snapshots), -1) * weights).sum(-1) % 997 / 997).astype(np.float32)


class GoodScorer(Scorer):
    """Answers at once, the same for the same clip; notes which clips it saw."""

    name = "good"
    version = "1"
    needs: Needs = "snapshots"

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.seen.append(clips.clip_ids.tolist())
        return expected_scores(clips.snapshots)


class CountingScorer(GoodScorer):
    """Learns how many clips there have been, and answers with the number of the batch's first one, in hundredths."""

    name = "counting"

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.padding = padding
        self.count = 0

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        before, self.count = self.count, self.count + len(clips)
        return np.full(len(clips), before / 100, np.float32)

    def state(self) -> bytes:
        return self.count.to_bytes(8) + bytes(self.padding)

    def restore(self, state: bytes) -> None:
        self.count = int.from_bytes(state[:8])


class SlowScorer(GoodScorer):
    name = "slow"

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        time.sleep(self.seconds)
        return super().score(clips)


class GatedScorer(GoodScorer):
    """Waits for `gate` (thread and sync back-ends only: a lock cannot be pickled)."""

    name = "gated"

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.gate.wait(30)
        return super().score(clips)


class Trouble:
    """What a scorer does when it meets clip ``poison``, or any clip if that is ``None``, at most ``times`` times.

    Times are counted in a file, so that a restarted process goes on counting.
    """

    def __init__(self, kind: str, poison: int | None = None, times: int = 10**9, count_file: str | None = None) -> None:
        self.kind, self.poison, self.times, self.count_file = kind, poison, times, count_file

    def strike(self, clip_ids: NDArray[np.int64]) -> None:
        if self.poison is not None and self.poison not in clip_ids:
            return
        if self.count_file is not None:
            path = Path(self.count_file)
            path.touch()
            if path.stat().st_size >= self.times:
                return
            with path.open("a") as file:
                file.write("x")
        if self.kind == "raise":
            raise RuntimeError("boom")
        if self.kind == "exit":
            sys.exit(0)
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "hang":
            time.sleep(3600)
        if self.kind == "die":
            os._exit(3)
        if self.kind in ("die slowly", "go deaf"):
            os.closerange(3, 256)  # the pipe is among them
            time.sleep(0.1 if self.kind == "die slowly" else 3600)
            os._exit(3)
        if self.kind == "oom":
            os.kill(os.getpid(), signal.SIGKILL)


class TroubledScorer(GoodScorer):
    name = "troubled"

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.trouble = trouble

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        self.trouble.strike(clips.clip_ids)
        return super().score(clips)


class BrokenSetupScorer(GoodScorer):
    name = "broken setup"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def setup(self) -> None:
        Trouble(self.kind).strike(np.zeros(0, np.int64))


class WrongScorer(GoodScorer):
    """Breaks the contract: ``nan``, ``shape``, ``range``, ``none`` or ``text``."""

    name = "wrong"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        good = np.full(len(clips), 0.5, np.float32)
        answers = {
            "nan": np.where(np.arange(len(clips)) == 0, np.nan, good),
            "shape": np.zeros((len(clips), 2), np.float32),
            "range": good + 1,
            "none": None,
            "text": ["yes"] * len(clips),
        }
        return answers[self.kind]


class FrameScorer(GoodScorer):
    """Reads the frames' mean brightness."""

    name = "frames"
    needs: Needs = "frames"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        return clips.frames().reshape(len(clips), -1).mean(1).astype(np.float32) / 255


class GreyRenderer:
    """Draws a snapshot as 4×4 pixels of one grey."""

    name = "grey"

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        grey = (snapshots.sum(-1) % 256).astype(np.uint8)
        return np.broadcast_to(grey[..., None, None, None], (*grey.shape, 4, 4, 3))

    def observe(self, snapshots: NDArray) -> NDArray:
        return snapshots


class ParentScorer(GoodScorer):
    """Starts a process of its own and writes both process ids to a file."""

    name = "parent"

    def __init__(self, pid_file: str) -> None:
        super().__init__()
        self.pid_file = pid_file

    def setup(self) -> None:
        helper = subprocess.Popen(["sleep", "3600"])
        Path(self.pid_file).write_text(f"{os.getpid()} {helper.pid}")


class LibrariesScorer(GoodScorer):
    """Scores 1 if any heavy library has been imported beside it, else 0."""

    name = "libraries"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        heavy = {"torch", "lightning", "torchrl", "tensordict", "matplotlib"} & set(sys.modules)
        return np.full(len(clips), float(bool(heavy)), np.float32)


class ReportingScorer(GoodScorer):
    """Reports ``stats`` beside the number of clips that it has seen; an exception is raised."""

    name = "reporting"

    def __init__(self, stats: Any, seconds: float = 0.0) -> None:
        super().__init__()
        self.answer = stats
        self.seconds = seconds

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        time.sleep(self.seconds)
        return super().score(clips)

    def stats(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        if not isinstance(self.answer, dict):
            return self.answer
        return {**self.answer, "clips": sum(map(len, self.seen))}


class BusyScorer(GoodScorer):
    """Computes on one core for some seconds and reports how much processor time it got."""

    name = "busy"

    def __init__(self, core: int, seconds: float) -> None:
        super().__init__()
        self.core = core
        self.seconds = seconds
        self.cpu_s = 0.0

    def setup(self) -> None:
        os.sched_setaffinity(0, {self.core})

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        begin, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - begin < self.seconds:
            pass
        self.cpu_s = time.process_time() - cpu
        return super().score(clips)

    def stats(self) -> dict[str, float]:
        return {"cpu_s": self.cpu_s}


class NicenessScorer(GoodScorer):
    """Reports the niceness at which it was set up, and that of a thread and of a child which it has started there."""

    name = "niceness"

    def setup(self) -> None:
        self.set_up = os.getpriority(os.PRIO_PROCESS, 0)
        self.thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
        self.thread.start()
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])

    def stats(self) -> dict[str, float]:
        thread = self.thread.native_id
        assert thread is not None
        nice = {
            name: os.getpriority(os.PRIO_PROCESS, pid) for name, pid in (("thread", thread), ("child", self.child.pid))
        }
        return {"set_up": self.set_up, **nice}

    def close(self) -> None:
        self.child.kill()


class SpinningScorer(GoodScorer):
    """Takes so many seconds of a processor for a batch, and sleeps as long."""

    name = "spinning"

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        begin = time.thread_time()
        while time.thread_time() - begin < self.seconds:
            pass
        time.sleep(self.seconds)
        return super().score(clips)


class LargeScorer(GoodScorer):
    """Says how much GPU memory it needs."""

    name = "large"

    def __init__(self, memory_bytes: int | None, device: str = "auto") -> None:
        super().__init__()
        self.memory_bytes = memory_bytes
        self.device = device
        self.setups = 0

    def setup(self) -> None:
        self.setups += 1


class RefusingScorer(GoodScorer):
    """Refuses to be set up; given a file, only from the second time on, after it has died at its first batch."""

    name = "refusing"

    def __init__(self, count_file: str | None = None) -> None:
        super().__init__()
        self.count_file = count_file

    def setup(self) -> None:
        if self.count_file is not None and not Path(self.count_file).exists():
            Path(self.count_file).touch()
            return
        raise ScorerError("scorer 'refusing' has no weights")

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        os._exit(3)


class MultiplyingScorer(GoodScorer):
    """Multiplies large matrices on the GPU for about a second."""

    name = "multiplying"

    def setup(self) -> None:
        import torch

        self.matrix = torch.randn(8192, 8192, device="cuda")

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        import torch

        begin = time.monotonic()
        while time.monotonic() - begin < 1.0:
            self.matrix @ self.matrix
            torch.cuda.synchronize()
        return super().score(clips)


class TalkativeScorer(Scorer):
    """Says something about itself, as a model does that has been loaded."""

    name, version, needs = "talkative", "1", "snapshots"

    def setup(self) -> None:
        logging.getLogger("vlmrb.scoring.talkative").info("here I am")

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        return np.zeros(len(clips), np.float32)
