"""`vlmrb doctor -c`: rehearses a run for a few seconds in a folder that is thrown away, and says what to expect of it.

The rehearsal is the real thing: the run's environments, learner and scorer, side by side as they will be. It differs in
that learning begins at once, nothing is evaluated or saved, and the buffer is at most `CAPACITY` rows. Full batches of
clips are gathered first, so that the scorer shows what it can do.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.doctor import Check, format_table
from vlmrb.envs import make_renderer
from vlmrb.fit import CLI_SETTINGS, FitCLI, count_gpus_by_driver, quieten
from vlmrb.preflight import FOLDER, Preflight, amount
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.scorer import ScorerError
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.speed import Speed, SpeedWatch

CAPACITY = 100_000  # rows
SECONDS = 5.0  # of training that are measured, at least
GATHER_S = 30.0  # longest wait for full batches
NARROW = 0.05  # of the GPU's memory left is little
ANSWERS = 3  # waited for: the first one warms up


class Rehearsal(Callback):
    """Gathers clips, waits for the scorer, measures, and stops the training.

    Args:
        preflight: who reports.
        config: how the run will be scored; the rehearsal itself knows no budget and waits for nobody, so that the
            scorer shows what it can do.

    Attributes:
        trouble: why nothing could be measured; empty if it could.
        gpu_free_bytes: what was left of the learner's GPU at the end; ``None`` without one.
    """

    def __init__(self, preflight: Preflight, config: ScoringConfig) -> None:
        self.preflight = preflight
        self.config = config
        self.trouble = "it gave no scores"
        self.gpu_free_bytes: int | None = None
        self._held: ScoringService | None = None
        self._watch: SpeedWatch | None = None
        self._deadline = self._patience_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Holds scoring back."""
        self._held, pl_module.scoring = pl_module.scoring, None
        self._deadline = time.monotonic() + GATHER_S

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Goes on to the next part when it is time."""
        service, late = pl_module.scoring, time.monotonic() > self._deadline
        if self._watch is not None:
            speed = self._watch.look(pl_module) or (self._watch.speed(pl_module) if late else None)
            if speed is not None:
                self._end(trainer, speed)
            elif late:
                answers = f"{service.meter.batches} batches of at most {service.config.batch_clips} clips"
                self.trouble = f"it answered {answers} within {self._patience_s:.0f} s: too slow to be measured"
                trainer.should_stop = True
        elif self._gathered(pl_module, late):
            trainer.should_stop = not self._begin(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes what there is, if the run's budget was spent before enough was seen."""
        speed = self._watch.speed(pl_module) if self._watch is not None and self.trouble else None
        if speed is not None:
            self._end(trainer, speed)

    def _gathered(self, module: OffPolicyModule, late: bool) -> bool:
        assert self._held is not None
        config, clips = self._held.config, module.buffer.clips
        completed = 0 if clips is None else clips.emitted
        wanted = (config.max_in_flight + 2) * config.batch_clips
        return bool(module.grad_steps and completed) and (late or completed >= wanted)

    def _begin(self, module: OffPolicyModule) -> bool:
        """Lets the scorer begin, once it is set up; returns whether it can."""
        assert self._held is not None
        if not self._held.wait_until_ready(self._held.config.startup_timeout_s):
            self.trouble = "it could not be set up: the log says why"
            return False
        module.scoring, self._held = self._held, None
        self._watch = SpeedWatch(module.scoring, SECONDS)
        self._patience_s = SECONDS + ANSWERS * module.scoring.config.timeout_s
        self._deadline = time.monotonic() + self._patience_s
        return True

    def _end(self, trainer: Trainer, speed: Speed) -> None:
        self.trouble = ""
        self.gpu_free_bytes, _ = gpu_memory(trainer.strategy.root_device)
        self.preflight.add(speed, self.config)
        trainer.should_stop = True


class RehearsalCLI(FitCLI):
    """Reads the settings of a run as `fit` does, and rehearses it instead; of the run's folder only `FOLDER` changes.

    Attributes:
        checks: what was found.
    """

    def before_instantiate_classes(self) -> None:
        """Settles nothing: no folder is taken, no checkpoint looked for."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds a trainer that writes only into a folder that is thrown away."""
        config, scoring = self.config_init["fit"], self.config_init["fit"]["scoring"]
        self._preflight = Preflight(self.model, scoring.scorer, config["run_dir"], config["checkpoint"], scoring.config)
        self._rehearsal = Rehearsal(self._preflight, scoring.config)
        # The user's cache may know the answers, which would say nothing about the scorer.
        cache = None if scoring.cache is None else "memory"
        return Trainer(
            accelerator=config["trainer"]["accelerator"],
            precision=config["trainer"]["precision"],
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=self._locks.enter_context(tempfile.TemporaryDirectory(prefix="vlmrb-rehearsal-")),
            callbacks=[
                ScoringCallback(
                    scoring.scorer,
                    cache=cache,
                    preflight=False,
                    **vars(scoring.config) | {"budget": None, "max_delay_env_steps": None},
                ),
                self._rehearsal,
            ],
        )

    def fit(self, model: OffPolicyModule, **_: Any) -> None:
        """Looks ahead and, if the run fits, rehearses it; called in the place of the trainer's ``fit``."""
        model.configure_model()
        model.renderer = make_renderer(model.env)
        self.checks = self._preflight.look_ahead()
        if self._preflight.scorer is not None and not any(check.status == "fail" for check in self.checks):
            self._shorten(model)
            free, total = gpu_memory(self.trainer.strategy.root_device)
            try:
                self.trainer.fit(model)
            except ScorerError as error:
                self._rehearsal.trouble = str(error)
            left = self._rehearsal.gpu_free_bytes
            if free is not None and total is not None and left is not None:
                self.checks.append(gpu_check(free - left, left, total))
            if self._rehearsal.trouble:
                self.checks.append(Check("scorer", "fail", self._rehearsal.trouble, "fix the scorer, or leave it out"))
        self._preflight.write()

    @staticmethod
    def _shorten(model: OffPolicyModule) -> None:
        """Lets learning begin at once, with a buffer that is quick to make."""
        block = model.training_config.frames_per_batch
        capacity = min(model.replay.capacity, max(CAPACITY, block, model.replay.batch_size))
        model.replay = replace(model.replay, capacity=capacity)
        model._learning_from = 0


def gpu_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Returns free and total bytes of a GPU; nothing for another device."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)


def gpu_check(taken: int, left: int, total: int) -> Check:
    """How much of the GPU did learner and scorer take?

    Args:
        taken: bytes, of whoever started meanwhile.
        left: bytes still free.
        total: bytes of the GPU.
    """
    found = f"learner and scorer took {amount(taken)}, {amount(left)} of {amount(total)} are left"
    if left < total * NARROW:
        return Check("GPU", "warn", found, "choose smaller batches (scoring.batch_clips): a longer clip may not fit")
    return Check("GPU", "ok", found)


def rehearse(args: list[str]) -> int:
    """Rehearses the run that ``fit`` would start with these arguments, and prints what was found.

    Args:
        args: as for `vlmrb fit`.

    Returns:
        The exit code: 1 if the run cannot fit or its scorer gives no scores, else 0.
    """
    quieten()
    count_gpus_by_driver()
    with ExitStack() as locks:
        cli = RehearsalCLI(OffPolicyModule, locks=locks, args=["fit", *args], **CLI_SETTINGS)
    print(format_table(cli.checks))
    print(f"\ndetails, and a clip with its score if there is one, are in {cli.config['fit']['run_dir']}/{FOLDER}")
    return int(any(check.status == "fail" for check in cli.checks))
