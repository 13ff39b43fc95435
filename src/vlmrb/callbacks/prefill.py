"""Fills the buffer of a new run before anything is collected: ``--prefill FOLDER``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.callbacks.checkpoint_files import read_reference, read_sidecar, verify_sidecar
from vlmrb.envs import make_env
from vlmrb.replay.blocks import Form
from vlmrb.replay.prefill import PATTERN, episode_files, prefill_with_buffer, prefill_with_episodes

if TYPE_CHECKING:
    from vlmrb.algorithms.base import OffPolicyModule

log = logging.getLogger(__name__)
SCORE_TIMEOUT_S = 600.0  # for each part of the clips


class PrefillCallback(Callback):
    """Starts a run with rows that others have collected, their clips scored anew before training begins.

    A resumed run has its own rows, and is left as it is.

    Args:
        folder: of recorded episodes (`vlmrb record`), or a run's, whose last checkpoint has a replay side-car.

    Raises:
        FileNotFoundError: there is nothing of that kind in the folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._ckpt = self.folder / "checkpoints" / "last.ckpt"
        if not self._ckpt.exists() and not episode_files(self.folder):
            raise FileNotFoundError(
                f"--prefill {folder}: neither a run with checkpoints/last.ckpt nor recorded episodes ({PATTERN}) there"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fills the buffer of a new run, and has its clips scored.

        Raises:
            ValueError: what is in the folder does not fit this run.
        """
        if pl_module.env_steps:
            log.info("--prefill %s: this run goes on with the rows that it has", self.folder)
            return
        if self._ckpt.exists():
            prefill_with_buffer(pl_module.buffer, self._saved_buffer())
        else:
            files = episode_files(self.folder)
            for _ in tqdm(prefill_with_episodes(pl_module.buffer, self.folder), "prefill", len(files), unit="episode"):
                pass
        self._require_same_rows(pl_module)
        log.info("prefilled %s rows from %s", f"{len(pl_module.buffer):,}", self.folder)
        if pl_module.scoring is not None:
            clips = len(pl_module.buffer.clips.table()["clip_id"])
            with tqdm(total=clips, desc="scoring prefilled clips", unit="clip") as bar:
                for scored in pl_module.scoring.score_completed(SCORE_TIMEOUT_S):
                    bar.update(scored)

    def _saved_buffer(self) -> dict[str, Any]:
        reference = read_reference(self._ckpt)
        if reference is None:
            raise ValueError(f"--prefill {self.folder}: {self._ckpt} was saved without its replay buffer")
        return read_sidecar(verify_sidecar(self._ckpt.parent, reference))["buffer"]

    def _require_same_rows(self, module: OffPolicyModule) -> None:
        """Refuses rows of another environment before a scorer meets them."""
        probe = make_env(module.env, num_envs=1)
        ours = {"action": probe.action_spec, **dict(probe.observation_spec.items())}
        probe.close()
        for name, theirs in module.buffer.row_forms.items():
            if name in ours and (ours[name].shape[1:], ours[name].dtype) != tuple(theirs):
                raise ValueError(
                    f"--prefill {self.folder}: {name} is {theirs} there, and with env.id={module.env.id!r} "
                    f"{Form(ours[name].shape[1:], ours[name].dtype)}: are these rows of another environment?"
                )
