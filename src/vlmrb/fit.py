"""`vlmrb fit`: LightningCLI with this project's sections, one key each, so that overlays never replace a list."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from vlmrb.algorithms.base import OffPolicyModule, TrainingConfig, require_one_device
from vlmrb.callbacks.checkpoint_files import read_reference
from vlmrb.callbacks.evaluation import EvaluationCallback
from vlmrb.callbacks.monitoring import MonitoringCallback
from vlmrb.callbacks.progress import ProgressBar
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.loggers import AppendingCSVLogger
from vlmrb.replay.config import ReplayConfig

CALLBACKS = {
    "scoring": ScoringCallback,
    "evaluation": EvaluationCallback,
    "monitoring": MonitoringCallback,
    "checkpoint": ReplayCheckpoint,
}


class FitCLI(LightningCLI):
    """LightningCLI with the sections `env`, `training`, `replay`, `model` and one per callback.

    `env`, `training` and `replay` stand at the top so that an overlay for one of them fits every algorithm; they are
    handed to the model when the command line has been read.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the project's sections."""
        parser.add_argument("--run_dir", type=str, default="runs/latest", help="where everything of this run goes")
        parser.add_argument(
            "--resume", type=bool, default=False, help="continue from run_dir's last checkpoint, if there is one"
        )
        parser.add_argument(
            "--overwrite", type=bool, default=False, help="move an earlier run in run_dir aside instead of refusing"
        )
        parser.add_argument("--env", type=EnvConfig, default=EnvConfig(), help="which environment")
        parser.add_argument("--training", type=TrainingConfig, default=TrainingConfig(), help="budgets and schedules")
        parser.add_argument("--replay", type=ReplayConfig, default=ReplayConfig(), help="the replay scheme")
        for section in ("env", "training", "replay"):
            parser.link_arguments(section, f"model.init_args.{section}")
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=int)
        for key, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, key)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Offers `fit` only: evaluation is a verb of its own, and there are no validation or test loaders."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def _parse_ckpt_path(self) -> None:
        """Checks a checkpoint before anything is built; Lightning would look for settings, but ours holds none."""
        if self.config["fit"]["ckpt_path"]:
            read_reference(Path(self.config["fit"]["ckpt_path"]))

    def before_instantiate_classes(self) -> None:
        """Settles the run folder before anything heavy is built."""
        config = self.config["fit"]
        if config["trainer"]["callbacks"]:
            raise ValueError(
                "trainer.callbacks would replace callbacks by an overlay: use the sections "
                f"{', '.join(CALLBACKS)}, or pass your own callbacks from Python"
            )
        run_dir = Path(config["run_dir"])
        last = run_dir / "checkpoints" / "last.ckpt"
        if config["resume"] and last.exists() and not config["ckpt_path"]:
            config["ckpt_path"] = str(last)
        if not config["ckpt_path"]:
            _make_room(run_dir, config["overwrite"])
        config["trainer"]["default_root_dir"] = str(run_dir)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer with loggers that write into the run folder itself."""
        run_dir = self.config["fit"]["run_dir"]
        if self.config_init["fit"]["trainer"].get("logger") in (None, True):
            kwargs["logger"] = [TensorBoardLogger(run_dir, name="", version=""), AppendingCSVLogger(run_dir)]
        trainer = super().instantiate_trainer(**kwargs)
        require_one_device(trainer.num_devices * trainer.num_nodes)  # before a process is started for each
        return trainer


def _make_room(run_dir: Path, overwrite: bool) -> None:
    """Refuses to mix two runs in one folder.

    Raises:
        FileExistsError: the folder holds a run and ``overwrite`` is false.
    """
    results = ("metrics.csv", "evaluations.csv", "summary.json", "checkpoints/*.ckpt")  # a failed start leaves none
    if not any(True for pattern in results for _ in run_dir.glob(pattern)):
        return
    if not overwrite:
        raise FileExistsError(
            f"run_dir={run_dir} already holds a run: choose another with --run_dir, continue it with --resume true, "
            "or move it aside with --overwrite true"
        )
    number = next(n for n in range(1, 10_000) if not run_dir.with_name(f"{run_dir.name}.old{n}").exists())
    run_dir.rename(run_dir.with_name(f"{run_dir.name}.old{number}"))


def _quieten() -> None:
    """Silences what Lightning and TorchRL say about things that are as they should be here."""
    for name in ("lightning.pytorch", "lightning.fabric", "torchrl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "LightningCLI's args parameter",  # the verb was taken off the command line
        ".*smaller than the logging interval",  # our own monitoring logs against env steps
        ".*treespec, LeafSpec",  # a deprecation between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message=message)


def fit(args: list[str]) -> int:
    """Trains; returns the exit code: 0, or 143 and 130 after SIGTERM and Ctrl-C with the run saved."""
    _quieten()
    cli = FitCLI(
        OffPolicyModule,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True, "config_filename": "config.yaml"},
        trainer_defaults={
            "max_epochs": 1,
            "devices": 1,
            "callbacks": [ProgressBar()],
            "enable_checkpointing": True,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1_000_000_000,  # our own monitoring writes metrics, against env steps
        },
        parser_kwargs={"exit_on_error": False},
        args=["fit", *args],
    )
    checkpoint = next(callback for callback in cli.trainer.callbacks if isinstance(callback, ReplayCheckpoint))
    return checkpoint.exit_code
