"""Fills the buffer of a new run before anything is collected: ``--prefill FOLDER``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.callbacks.checkpoint_files import read_reference, read_sidecar, verify_sidecar
from vlmrb.envs import EnvConfig, make_env
from vlmrb.recording import PATTERN, Recording, episode_files
from vlmrb.replay.blocks import Form
from vlmrb.replay.prefill import prefill_with_buffer, prefill_with_episodes
from vlmrb.scoring.beforehand import score_beforehand

if TYPE_CHECKING:
    from torchrl.data import TensorSpec

log = logging.getLogger(__name__)
SCORE_TIMEOUT_S = 600.0  # for each part of the clips
SAME = ("id", "actions", "kwargs", "wrappers", "state")  # settings by which rows mean something else


class PrefillCallback(Callback):
    """Starts a new run with rows that others have collected, their clips scored anew before training begins.

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
        """Fills the buffer, and has its clips scored; of a resumed run, which has rows of its own, leaves it as it is.

        Raises:
            ValueError: what is in the folder does not fit this run.
        """
        if pl_module.env_steps:
            log.info("not prefilled from %s: a run that is resumed goes on with the rows that it has", self.folder)
            return
        try:
            self._fill(pl_module)
        except ValueError as error:
            raise ValueError(f"--prefill {self.folder}: {error}") from error
        log.info("prefilled %s rows from %s", f"{len(pl_module.buffer):,}", self.folder)
        if pl_module.scoring is not None:
            clips = len(pl_module.buffer.clips.table()["clip_id"])
            with tqdm(total=clips, desc="scoring prefilled clips", unit="clip", disable=None) as bar:
                for scored in score_beforehand(pl_module.scoring, SCORE_TIMEOUT_S):
                    bar.update(scored)

    def _fill(self, module: OffPolicyModule) -> None:
        if self._ckpt.exists():
            require_same_environment(OffPolicyModule.from_checkpoint(self._ckpt).env, module.env)
            prefill_with_buffer(module.buffer, self._saved_buffer())
        else:
            recording = Recording.read(self.folder)
            if recording is not None:
                if not recording.complete:
                    log.warning("--prefill %s: its recording was broken off; `vlmrb record` again", self.folder)
                require_same_environment(recording.env, module.env)
            files = episode_files(self.folder)
            filled = prefill_with_episodes(module.buffer, files)
            for _ in tqdm(filled, "prefill", len(files), unit="episode", disable=None):
                pass
        require_same_rows(module)

    def _saved_buffer(self) -> dict[str, Any]:
        reference = read_reference(self._ckpt)
        if reference is None:
            raise ValueError(f"{self._ckpt} was saved without its replay buffer")
        return read_sidecar(verify_sidecar(self._ckpt.parent, reference))["buffer"]


def require_same_environment(theirs: EnvConfig, ours: EnvConfig) -> None:
    """Refuses rows of another environment, or of other actions and observations of the same.

    Raises:
        ValueError: naming the setting.
    """
    for name in SAME:
        made_with, used_with = getattr(theirs, name), getattr(ours, name)
        if made_with != used_with:
            raise ValueError(f"its rows were made with env.{name}={made_with!r}, and this run has {used_with!r}")


def require_same_rows(module: OffPolicyModule) -> None:
    """Refuses rows that this run's environment cannot have made, before a scorer or a network meets them.

    Raises:
        ValueError: shape or dtype of a key differs, or an action is out of range.
    """
    probe = make_env(module.env, num_envs=1)
    ours: dict[str, TensorSpec] = {"action": probe.action_spec, **dict(probe.observation_spec.items())}
    probe.close()
    for name, theirs in module.buffer.row_forms.items():
        if name in ours and (ours[name].shape[1:], ours[name].dtype) != tuple(theirs):
            raise ValueError(
                f"{name} is {theirs} there, and with env.id={module.env.id!r} "
                f"{Form(ours[name].shape[1:], ours[name].dtype)}: are these rows of another environment?"
            )
    if not len(module.buffer):
        return
    actions, spec = module.buffer[:]["action"].numpy(), ours["action"][0]
    low, high = (0, spec.n - 1) if hasattr(spec, "n") else (spec.space.low.numpy(), spec.space.high.numpy())
    if not ((actions >= low) & (actions <= high)).all():
        got = f"{np.nanmin(actions)} to {np.nanmax(actions)}"
        raise ValueError(
            f"actions from {got} are there, and with env.id={module.env.id!r} they go from {low} to {high}"
        )
