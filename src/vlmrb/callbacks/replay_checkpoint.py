"""Checkpoints from which a run goes on exactly: every so many env steps, at the end, on SIGTERM and on Ctrl-C."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from vlmrb.callbacks.checkpoint_files import (
    REFERENCE_KEY,
    CheckpointError,
    CheckpointFolder,
    Reference,
    read_sidecar,
    tensor_bytes,
    verify_sidecar,
)
from vlmrb.callbacks.config import CheckpointConfig
from vlmrb.callbacks.signals import StopRequest

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule

log = logging.getLogger(__name__)


class ReplayCheckpoint(Checkpoint):
    """Saves pairs of a `.ckpt` and a replay side-car in ``<run_dir>/checkpoints`` and restores them on resume.

    The `.ckpt` holds networks, optimizers, counters, random states and the environments; the side-car holds the replay
    buffer with its clips and the scoring queue. ``last.ckpt`` is always the newest; pass it as ``ckpt_path`` to
    `Trainer.fit`. Being a `Checkpoint`, this callback runs after all others: what they did at the end of a batch is
    part of what is saved, and what they set up is there to be restored.

    SIGTERM and the first Ctrl-C save at the end of the current batch and stop the run as if it were complete; the
    process should then exit with `exit_code`. A second Ctrl-C stops at once, unsaved.

    A save that fails (no room, folder gone read-only) leaves the older pair as it was, says so, and training goes on.

    Args:
        **settings: see `CheckpointConfig`.

    Attributes:
        config: the settings.
        exit_code: 143 after SIGTERM, 130 after Ctrl-C, 0 otherwise.
        failed_saves: how many checkpoints could not be written.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = CheckpointConfig(**settings)
        self.exit_code = 0
        self.failed_saves = 0
        self._stop = StopRequest()
        self._reference: Reference | None = None  # set while a pair is being written
        self._sidecar_to_restore: Path | None = None
        self._saved_at = 0  # env steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes sure that checkpoints can be written, before anything is trained."""
        if stage == "fit":
            self.folder = CheckpointFolder(Path(trainer.default_root_dir) / "checkpoints", self.config.keep)
            self.folder.prepare()

    # Resuming

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Checks the side-car that the `.ckpt` names, before environments and scorers are started.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        folder = Path(str(trainer.ckpt_path)).parent
        if folder.resolve() == self.folder.path.resolve():
            self.folder.adopt()
        if pl_module.env_steps < pl_module.training_config.total_env_steps:
            # The run may have been complete under a smaller budget: there are more batches to come now.
            checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
        reference = checkpoint.get(REFERENCE_KEY)
        if reference is not None and not self.config.ignore_replay:
            self._sidecar_to_restore = verify_sidecar(folder, reference)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores buffer and scoring queue: all other callbacks are set up, no batch has been collected."""
        if trainer.received_sigterm:  # during set-up; nothing has been trained yet
            raise SystemExit(128 + signal.SIGTERM)
        self._saved_at = pl_module.env_steps
        if self._sidecar_to_restore is not None:
            path, self._sidecar_to_restore = self._sidecar_to_restore, None
            self._restore(pl_module, path)
        elif pl_module.env_steps:
            log.warning("resuming at %d env steps without replay: the buffer fills up first", pl_module.env_steps)
        # Later than Lightning's own handlers, which would raise in the middle of things and exit with 0.
        self._stop = StopRequest()
        self.exit_code = 0
        self._stop.install()
        pl_module.stop_requested = self._stop.__bool__

    @staticmethod
    def _restore(module: OffPolicyModule, path: Path) -> None:
        content = read_sidecar(path)
        try:
            module.buffer.load_state_dict(content["buffer"])
            if module.scoring is not None and content["scoring"] is not None:
                module.scoring.load_state_dict(content["scoring"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"replay side-car {path} does not fit this run ({type(error).__name__}: {error}): resume with the "
                "settings that it was saved with, or with --checkpoint.ignore_replay true to fill the buffer again"
            ) from error
        if (module.scoring is None) != (content["scoring"] is None):
            log.warning("%s was saved %s scoring", path, "without" if content["scoring"] is None else "with")

    # Saving

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves when it is due; stops the run if a signal asked for it."""
        every = self.config.every_n_env_steps
        due = pl_module.env_steps // every > self._saved_at // every
        complete = trainer.is_last_batch or trainer.should_stop
        if due or self._stop or (complete and self.config.save_on_end):
            self._try_to_save(trainer, pl_module, with_replay=self.config.replay_on_end or not trainer.is_last_batch)
        if self._stop:  # asked again: the signal may have come during the save
            self.exit_code = self._stop.exit_code
            trainer.should_stop = True

    def _try_to_save(self, trainer: Trainer, module: OffPolicyModule, with_replay: bool) -> None:
        try:
            self.save(trainer, module, with_replay)
        except OSError as error:
            self.failed_saves += 1
            log.error("no checkpoint at %d env steps; older ones are untouched: %s", module.env_steps, error)

    def save(self, trainer: Trainer, pl_module: OffPolicyModule, with_replay: bool = True) -> Path:
        """Saves a pair now; call it between two batches only.

        Args:
            trainer: of the run.
            pl_module: of the run.
            with_replay: write the side-car, if the settings want any.

        Returns:
            The `.ckpt`.

        Raises:
            OSError: no room, or the folder cannot be written.
        """
        start = time.perf_counter()
        self._saved_at = pl_module.env_steps  # a failed save is not tried again at every batch
        replay = None
        if self.config.save_replay and with_replay:
            replay = {
                "buffer": pl_module.buffer.state_dict(),
                "scoring": None if pl_module.scoring is None else pl_module.scoring.state_dict(),
                "env_steps": pl_module.env_steps,
            }

        def write_checkpoint(path: Path, reference: Reference | None) -> None:
            self._reference = reference
            try:
                trainer.save_checkpoint(path, weights_only=False)
            finally:
                self._reference = None

        checkpoint_bytes = tensor_bytes([pl_module.state_dict(), [o.state_dict() for o in trainer.optimizers]])
        path = self.folder.save(pl_module.env_steps, replay, write_checkpoint, checkpoint_bytes)
        log.info("saved %s in %.1f s", path, time.perf_counter() - start)
        return path

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Names the side-car; a `.ckpt` that somebody else saves has none."""
        checkpoint[REFERENCE_KEY] = self._reference

    # Giving the signals back

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives SIGTERM and SIGINT back."""
        self._stop.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Gives SIGTERM and SIGINT back; saves nothing, as the state may be torn."""
        self._stop.restore()
