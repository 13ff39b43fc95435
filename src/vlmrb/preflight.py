"""Looks ahead before a run is paid for: does it fit, and will the scorer keep up?

`fit` calls it at its start (`scoring.preflight`); `vlmrb doctor -c` rehearses the run as well, see `vlmrb.rehearsal`.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.callbacks.checkpoint_files import HEADROOM
from vlmrb.doctor import GIB, Check, free_memory_bytes, memory_bytes, usable_cores
from vlmrb.media import annotate, below_text, encode_gif
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.gpu import require_gpu_memory
from vlmrb.scoring.scorer import ScorerError, require_thinnable
from vlmrb.scoring.speed import Speed, SpeedWatch, speed_check
from vlmrb.scoring.student.check import student_check
from vlmrb.sizes import RunSizes, measure

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
    from vlmrb.scoring.clips import Renderer
    from vlmrb.scoring.scorer import Scorer
    from vlmrb.scoring.service import ScoringService

log = logging.getLogger(__name__)

FOLDER = "preflight"


class PreflightError(RuntimeError):
    """A run cannot fit or be scored as it is set up."""


class Preflight:
    """The preflight of one run: sizes at its start, the scorer's speed once it has answered.

    What it finds is logged and kept in ``<run_dir>/preflight``: ``preflight.json``, and ``clip.gif``, a clip with its
    prompt and score. Nothing of the run changes, no random stream either; failures of its own are logged.

    Args:
        module: the run's module, its buffer built and still empty.
        scorer: who scores; ``None`` if nobody does.
        run_dir: the run's folder.
        checkpoint: how checkpoints are saved; ``None`` if none are.
        config: of scoring; ``None`` for the defaults.
    """

    def __init__(
        self,
        module: OffPolicyModule,
        scorer: Scorer | None,
        run_dir: str | Path,
        checkpoint: ReplayCheckpoint | None = None,
        config: ScoringConfig | None = None,
    ) -> None:
        self.module = module
        self.scorer = scorer
        self.run_dir = Path(run_dir)
        self.checkpoint = checkpoint
        self.config = config or ScoringConfig()
        self.checks: list[Check] = []
        self._details: dict[str, Any] = {}
        self._watch: tuple[SpeedWatch, ScoringService] | None = None

    def look_ahead(self) -> list[Check]:
        """Checks memory, disk, GPU, frames and scorer; takes a fraction of a second for quick environments.

        Raises:
            Exception: whatever the environment or the renderer raises.
        """
        begin = time.perf_counter()
        sizes, snapshots = measure(self.module)
        scratch = Path(self.module.replay.scratch_dir or tempfile.gettempdir())
        self.checks = [buffer_check(sizes, scratch)]
        if self.checkpoint is not None:
            shared = sizes.rows_bytes if sizes.in_files and _same_disk(scratch, self.run_dir) else 0
            saved = self.checkpoint.config
            self.checks.append(checkpoint_check(sizes, self.run_dir, saved.save_replay, saved.keep, shared))
        if self.scorer is not None:
            if self.module.device.type == "cuda":  # else the question alone would take GPU memory
                self.checks += gpu_checks(self.scorer)
            self.checks += thinning_checks(self.scorer, self.config.frames_per_clip)
            drawn = [frame_check(self.scorer, self.module.renderer, snapshots)] if self.scorer.needs == "frames" else []
            self.checks += drawn
            if all(check.status != "fail" for check in drawn):  # else there is nothing to show
                self.checks += environment_checks(self.scorer, self.module.env.id, self.module.renderer, snapshots)
            if self.config.student is not None:
                self.checks.append(student_check(self.config, free_memory_bytes(), usable_cores()))
        self._details["sizes"] = asdict(sizes) | {
            name: getattr(sizes, name) for name in ("buffer_bytes", "memory_bytes", "sidecar_bytes", "checkpoint_bytes")
        }
        self._details["seconds"] = round(time.perf_counter() - begin, 3)
        return self.checks

    def require(self) -> None:
        """Looks ahead, logs what was found, and refuses what cannot fit or be scored.

        Raises:
            PreflightError: it cannot; in one line, with the numbers.
            ScorerError: the scorer refuses the run, which another try would but repeat.
        """
        try:
            self.look_ahead()
        except ScorerError:
            raise
        except Exception as error:  # an environment that cannot be made says so itself, a moment later
            log.warning("preflight: could not look ahead (%s: %s)", type(error).__name__, error)
            return
        for check in self.checks:
            if check.status != "fail":
                self._say(check)
        self.write()
        failed = [f"{check.name}: {check.found}; {check.advice}" for check in self.checks if check.status == "fail"]
        if failed:
            raise PreflightError(
                f"this run cannot start. {'. '.join(failed)}; scoring.preflight=false starts it all the same"
            )

    def watch(self, service: ScoringService) -> None:
        """Begins to watch how fast training asks and the scorer answers."""
        self._watch = SpeedWatch(service), service

    def after_batch(self, last: bool = False) -> None:
        """Takes a look after a batch of training; reports once, when enough has been seen or nothing more will come."""
        if self._watch is None:
            return
        watch, service = self._watch
        speed = watch.speed(self.module) if last else watch.look(self.module)
        if speed is not None:
            self._say(self.add(speed, service.config))
            self.write()
        if speed is not None or last:
            self._watch = None

    def add(self, speed: Speed, config: ScoringConfig) -> Check:
        """Adds whether the scorer keeps up within the run's budget, and keeps a clip with its score."""
        speed = speed.within(config.budget, self.module.training_config.total_env_steps)
        check = speed_check(speed, config)
        self.checks.append(check)
        self._details["speed"] = asdict(speed) | {
            "need_clips_per_s": speed.need_clips_per_s,
            "can_clips_per_s": speed.can_clips_per_s,
            "expected_share": speed.expected_share,
            "allowed_share": speed.allowed_share,
        }
        try:
            self._keep_clip()
        except Exception as error:  # a picture is worth no run
            log.warning("preflight: no picture of a clip (%s: %s)", type(error).__name__, error)
        return check

    def _say(self, check: Check) -> None:
        level = logging.INFO if check.status == "ok" else logging.WARNING
        log.log(level, "preflight: %s: %s%s", check.name, check.found, check.advice and f" → {check.advice}")

    def write(self) -> None:
        """Writes ``preflight.json``."""
        report = {"checks": [asdict(check) for check in self.checks], **self._details}
        try:
            (self.run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
            (self.run_dir / FOLDER / "preflight.json").write_text(
                json.dumps(report, indent=2, ensure_ascii=False) + "\n"
            )
        except OSError as error:
            log.warning("preflight: %s/%s cannot be written (%s)", self.run_dir, FOLDER, error.strerror)

    def _keep_clip(self) -> None:
        """Writes the clip that has the highest score so far as a GIF."""
        store, scorer = self.module.buffer.clips, self.scorer
        assert store is not None
        assert scorer is not None
        table = store.table()
        if not len(table["score"]) or np.isnan(table["score"]).all():
            return
        best = int(np.nanargmax(table["score"]))
        clip = store.batch([int(table["clip_id"][best])], self.module.renderer)
        frames_per_clip = self.config.frames_per_clip
        clip = clip if frames_per_clip is None else clip.thinned(frames_per_clip)
        frames = clip.frames(scorer.frame_size)[0, : clip.lengths[0]]
        text = getattr(getattr(scorer, "question", None), "text", None) or getattr(scorer, "prompt", None)
        score = float(table["score"][best])
        frames = annotate(frames, f"{scorer.name}: {score:.2f}")
        if text:
            frames = below_text(frames, str(text))
        path = self.run_dir / FOLDER / "clip.gif"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_gif(frames, fps=8))
        self._details["clip"] = {"file": path.name, "score": score, "prompt": text, "scorer": scorer.name}


def buffer_check(sizes: RunSizes, scratch: Path) -> Check:
    """Do the buffer's rows and clips fit into memory, or the rows onto the disk that they are mapped to?

    Args:
        sizes: the run's.
        scratch: where memory-mapped rows lie.
    """
    total, free = memory_bytes(), free_memory_bytes()
    found = (
        f"{amount(sizes.buffer_bytes)} at the end: {sizes.filled:,} rows of {amount(sizes.row_bytes)}, clips "
        f"{amount(sizes.clips_bytes)}"
    )
    name = "replay buffer"
    if sizes.in_files:
        disk = shutil.disk_usage(_existing(scratch)).free
        found += f"; {amount(sizes.rows_bytes)} of it in files in {scratch} ({amount(disk)} free)"
        if sizes.rows_bytes > disk:
            return Check(name, "fail", found, "set replay.scratch_dir to a larger disk, or lower replay.capacity")
    found += f"; {amount(sizes.memory_bytes)} in memory ({amount(free)} free of {amount(total)})"
    elsewhere = "" if sizes.in_files else "set replay.storage=memmap, which keeps rows on disk, or "
    if sizes.memory_bytes > total:
        return Check(name, "fail", found, f"{elsewhere}lower replay.capacity")
    if sizes.memory_bytes > free:
        return Check(name, "warn", found, f"{elsewhere}lower replay.capacity, or stop what else runs here")
    return Check(name, "ok", found)


def checkpoint_check(sizes: RunSizes, run_dir: Path, save_replay: bool, keep: int, reserved: int = 0) -> Check:
    """Do checkpoints fit onto the disk, and the copy that is made while one is saved into memory?

    Args:
        sizes: the run's.
        run_dir: the run's folder.
        save_replay: whether the replay buffer is saved.
        keep: pairs that stay on disk.
        reserved: bytes of the same disk that the buffer's rows will take.
    """
    name, sidecar = "checkpoint", sizes.sidecar_bytes if save_replay else 0
    pair = sizes.checkpoint_bytes + sidecar
    free = max(0, shutil.disk_usage(_existing(run_dir)).free - reserved)
    found = (
        f"{amount(pair)} at the end, {amount(sidecar)} of it replay, {keep} kept and one more while it is written; "
        f"{amount(free)} free in {run_dir}"
    )
    smaller = "lower replay.capacity, or set checkpoint.save_replay=false" if save_replay else "make room"
    if HEADROOM * pair > free:
        return Check(name, "fail", found, f"choose a run_dir on a larger disk, {smaller}")
    total = memory_bytes()
    if sizes.memory_bytes + sidecar > total:
        found += (
            f"; saving copies the replay, {amount(sizes.memory_bytes + sidecar)} in memory in all of {amount(total)}"
        )
        return Check(name, "fail", found, smaller)
    if HEADROOM * (keep + 1) * pair > free:
        return Check(name, "warn", found, f"choose a run_dir on a larger disk, {smaller}")
    if sizes.memory_bytes + sidecar > free_memory_bytes():
        found += f"; saving copies the replay, {amount(sizes.memory_bytes + sidecar)} in memory in all"
        return Check(name, "warn", found, smaller)
    return Check(name, "ok", found)


def gpu_checks(scorer: Scorer) -> list[Check]:
    """Is there as much GPU memory as the scorer says it needs? Nothing is found if it does not say."""
    if not scorer.memory_bytes:
        return []
    try:
        require_gpu_memory(scorer)
    except ScorerError as error:
        found, _, advice = str(error).partition(": ")
        return [Check("GPU", "fail", found, advice)]
    return [Check("GPU", "ok", f"scorer {scorer.name!r} needs {amount(scorer.memory_bytes)}, and they are free")]


def thinning_checks(scorer: Scorer, frames_per_clip: int | None) -> list[Check]:
    """Can the scorer do without some frames? Nothing is found if it can, or need not."""
    try:
        require_thinnable(scorer, frames_per_clip)
    except ScorerError as error:
        found, _, advice = str(error).partition(": ")
        return [Check("clips", "fail", found, advice)]
    return []


def frame_check(scorer: Scorer, renderer: Any, snapshots: NDArray) -> Check:
    """Are frames drawn, and no larger than the scorer takes them?

    Args:
        scorer: who needs frames.
        renderer: who draws them.
        snapshots: ``[T, S]``.
    """
    try:
        height, width = renderer.render(snapshots[:1], scorer.frame_size).shape[1:3]
    except ValueError as error:
        return Check("frames", "fail", f"they cannot be drawn: {error}", "set the scorer's frame_size to fit")
    found = f"{height} × {width} pixels, of {scorer.frame_size or 'any number'} that scorer {scorer.name!r} takes"
    if scorer.frame_size is not None and max(height, width) > scorer.frame_size:
        return Check("frames", "fail", found, f"renderer {renderer.name!r} must stay within frame_size")
    return Check("frames", "ok", found)


def environment_checks(scorer: Scorer, env_id: str, renderer: Renderer, snapshots: NDArray) -> list[Check]:
    """Does the scorer know this kind of environment? Nothing is found if it has no objection.

    Args:
        scorer: who scores.
        env_id: the environment.
        renderer: who draws and explains its states.
        snapshots: ``[T, S]``, of its first states.
    """
    clip = ClipBatch(np.zeros(1, np.int64), snapshots[None], np.array([len(snapshots)]), renderer)
    objection = scorer.objection(clip)
    if objection is None:
        return []
    found = f"scorer {scorer.name!r} cannot judge {env_id}: {objection}"
    advice = "choose another scorer (an overlay of configs/scorer), or none (configs/replay/uniform.yaml)"
    return [Check("environment", "fail", found, advice)]


def amount(size: float) -> str:
    """Returns a number of bytes for the eye."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} B"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _same_disk(one: Path, other: Path) -> bool:
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev
