"""`vlmrb fit`: LightningCLI with this project's sections, one key each, so that overlays never replace a list."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from vlmrb.algorithms import DQN, IQN, SAC, TD3  # noqa: F401  (so that --model DQN finds them by name)
from vlmrb.algorithms.base import OffPolicyModule, require_one_device
from vlmrb.algorithms.config import TrainingConfig
from vlmrb.callbacks.checkpoint_files import latest_checkpoint, read_env_steps
from vlmrb.callbacks.evaluation import EvaluationCallback, in_short
from vlmrb.callbacks.monitoring import MonitoringCallback
from vlmrb.callbacks.prefill import PrefillCallback
from vlmrb.callbacks.progress import ProgressBar
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.locks import lock_folder
from vlmrb.loggers import AppendingCSVLogger
from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.summary import formula, idle_settings
from vlmrb.settings import leaves

log = logging.getLogger(__name__)
SECTIONS = ("env", "training", "replay")
CALLBACKS = {
    "scoring": ScoringCallback,
    "evaluation": EvaluationCallback,
    "monitoring": MonitoringCallback,
    "checkpoint": ReplayCheckpoint,
}


# How settings are read, by `fit` and by whoever reads a run's settings without starting it.
CLI_SETTINGS: dict[str, Any] = {
    "subclass_mode_model": True,
    "auto_configure_optimizers": False,
    "seed_everything_default": 0,
    "trainer_defaults": {
        "max_epochs": 1,
        "devices": 1,
        "callbacks": [ProgressBar()],
        "enable_checkpointing": True,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1_000_000_000,  # our own monitoring writes metrics, against env steps
    },
    "parser_kwargs": {"exit_on_error": False},
}


class FitCLI(LightningCLI):
    """LightningCLI with the sections `env`, `training`, `replay`, `model` and one per callback.

    `env`, `training` and `replay` stand at the top so that an overlay for one of them fits every algorithm; they are
    handed to the model when the command line has been read.
    """

    def __init__(self, *args: Any, locks: ExitStack, **kwargs: Any) -> None:
        """Parses, builds and trains, all of it here, as LightningCLI does; ``locks`` is held by the caller."""
        self._locks = locks
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the project's sections."""
        parser.add_argument("--run_dir", type=str, default="runs/latest", help="where everything of this run goes")
        parser.add_argument(
            "--resume", type=bool, default=False, help="continue from run_dir's last checkpoint, if there is one"
        )
        parser.add_argument(
            "--overwrite", type=bool, default=False, help="move an earlier run in run_dir aside instead of refusing"
        )
        parser.add_argument(
            "--prefill",
            type=str | None,
            default=None,
            help="start with the rows of this folder: an earlier run's buffer, or episodes of `vlmrb record`",
        )
        parser.add_argument("--env", type=EnvConfig, default=EnvConfig(), help="which environment")
        parser.add_argument("--training", type=TrainingConfig, default=TrainingConfig(), help="budgets and schedules")
        parser.add_argument("--replay", type=ReplayConfig, default=ReplayConfig(), help="the replay scheme")
        for section in SECTIONS:
            parser.link_arguments(section, f"model.init_args.{section}")
        parser.link_arguments("seed_everything", "model.init_args.seed", compute_fn=int)
        for key, callback in CALLBACKS.items():
            parser.add_lightning_class_args(callback, key)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Offers `fit` only: evaluation is a verb of its own, and there are no validation or test loaders."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def _parse_ckpt_path(self) -> None:
        """Takes no settings from a checkpoint: Lightning would look for some in it, but ours holds none."""

    def before_instantiate_classes(self) -> None:
        """Settles the run folder and checks the checkpoint before anything heavy is built."""
        config = self.config["fit"]
        if config["trainer"]["callbacks"]:
            raise ValueError(
                "trainer.callbacks would replace callbacks by an overlay: use the sections "
                f"{', '.join(CALLBACKS)}, or pass your own callbacks from Python"
            )
        if not config["run_dir"]:
            raise ValueError("run_dir is empty: name a folder for this run")
        run_dir = Path(config["run_dir"])
        last = run_dir / "checkpoints" / "last.ckpt"
        if config["resume"] and not config["ckpt_path"]:
            found = latest_checkpoint(run_dir / "checkpoints")
            if found is None:
                log.info("no checkpoint in %s: the run starts from the beginning", run_dir)
            else:
                config["ckpt_path"] = str(found)
        if config["prefill"] is not None and Path(config["prefill"]).resolve() == run_dir.resolve():
            raise ValueError(f"--prefill {config['prefill']} is run_dir itself: choose another --run_dir")
        self._locks.enter_context(lock_folder(run_dir, "run_dir="))
        continues = config["ckpt_path"] and Path(config["ckpt_path"]).resolve().parent == last.resolve().parent
        if not continues and not config["resume"] and _make_room(run_dir, config["overwrite"]):
            self._locks.enter_context(lock_folder(run_dir, "run_dir="))
        if config["ckpt_path"]:
            env_steps = read_env_steps(Path(config["ckpt_path"]))
            budget = config["training"]["total_env_steps"]
            log.info("resuming %s at %s of %s env steps", config["ckpt_path"], f"{env_steps:,}", f"{budget:,}")
            if env_steps >= budget:
                log.warning("this run is complete: raise training.total_env_steps to go on")
        config["trainer"]["default_root_dir"] = str(run_dir)

    def before_fit(self) -> None:
        """Says what the replay scheme is that all the settings have come to."""
        replay, budget = self.model.replay, self.model.training_config.total_env_steps
        log.info("replay: %s", formula(replay))
        for remark in idle_settings(replay, budget):
            log.warning("%s", remark)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer with loggers that write into the run folder itself."""
        run_dir = self.config["fit"]["run_dir"]
        if self.config_init["fit"]["trainer"].get("logger") in (None, True):
            kwargs["logger"] = [TensorBoardLogger(run_dir, name="", version=""), AppendingCSVLogger(run_dir)]
        trainer = super().instantiate_trainer(**kwargs)
        if self.config_init["fit"]["prefill"] is not None and not self.config_init["fit"]["ckpt_path"]:
            trainer.callbacks.insert(0, PrefillCallback(self.config_init["fit"]["prefill"]))  # checkpoints come last
        require_one_device(trainer.num_devices * trainer.num_nodes)  # before a process is started for each
        return trainer


class SaveConfigWhenTraining(SaveConfigCallback):
    """Writes ``config.yaml`` with the first batch: a resume that is refused must not replace a run's settings."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes nothing yet."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Writes the file once; of a run that goes on with other settings, the earlier ones stay beside it."""
        if self.already_saved:
            return
        path = Path(trainer.default_root_dir) / self.config_filename
        earlier = path.read_text() if pl_module.env_steps and path.exists() else None
        super().setup(trainer, pl_module, "fit")
        if earlier is None:
            return
        before, now = (dict(leaves(yaml.safe_load(text) or {})) for text in (earlier, path.read_text()))
        changed = [name for name in before | now if name not in _NO_MATTER and before.get(name) != now.get(name)]
        if changed:
            kept = path.with_name(f"config_until_{pl_module.env_steps}.yaml")
            kept.write_text(earlier)
            told = ", ".join(f"{name} {before.get(name)} → {now.get(name)}" for name in changed)
            log.warning("the run goes on with other settings than before, which are kept in %s: %s", kept, told)


# Settings that say how a run is started, not what it is.
_NO_MATTER = ("resume", "overwrite", "ckpt_path", "run_dir", "prefill", "trainer.default_root_dir")


def _make_room(run_dir: Path, overwrite: bool) -> bool:
    """Refuses to mix two runs in one folder; returns whether an earlier one was moved aside.

    Raises:
        FileExistsError: the folder holds a run and ``overwrite`` is false.
    """
    results = ("metrics.csv", "evaluations.csv", "summary.json", "checkpoints/*.ckpt")  # a failed start leaves none
    if not any(True for pattern in results for _ in run_dir.glob(pattern)):
        return False
    if not overwrite:
        raise FileExistsError(
            f"run_dir={run_dir} already holds a run: choose another with --run_dir, continue it with --resume true, "
            "or move it aside with --overwrite true"
        )
    move_aside(run_dir)
    return True


def move_aside(folder: Path) -> Path:
    """Renames a folder to the first free of ``NAME.old1``, ``NAME.old2``, …, and returns the new path."""
    numbered = (folder.with_name(f"{folder.name}.old{number}") for number in range(1, 10_000))
    return folder.rename(next(path for path in numbered if not path.exists()))


def quieten() -> None:
    """Silences what Lightning and TorchRL say about things that are as they should be here."""
    for name in ("lightning.pytorch", "lightning.fabric", "torchrl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        "LightningCLI's args parameter",  # the verb was taken off the command line
        ".*smaller than the logging interval",  # our own monitoring logs against env steps
        ".*treespec, LeafSpec",  # a deprecation between Lightning and torch
    ):
        warnings.filterwarnings("ignore", message=message)


def count_gpus_by_driver() -> None:
    """Has PyTorch ask the CUDA driver whether there is a GPU, as every step of Adam does.

    Lightning has it ask NVML, so that processes can be forked later, which is not done here. Without a GPU, NVML's
    library is looked for in vain each time: 65 µs instead of 1, 8 % of a DQN run's time.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def fit(args: list[str]) -> int:
    """Trains; returns the exit code: 0, or 143 and 130 after SIGTERM and Ctrl-C with the run saved."""
    quieten()
    count_gpus_by_driver()
    with ExitStack() as locks:
        cli = FitCLI(
            OffPolicyModule,
            locks=locks,
            save_config_callback=SaveConfigWhenTraining,
            save_config_kwargs={"overwrite": True, "config_filename": "config.yaml"},
            args=["fit", *args],
            **CLI_SETTINGS,
        )
        checkpoint = next(callback for callback in cli.trainer.callbacks if isinstance(callback, ReplayCheckpoint))
        evaluation = next(callback for callback in cli.trainer.callbacks if isinstance(callback, EvaluationCallback))
        log.info(in_short(evaluation.summary(cli.model)))
        log.info("results are in %s; look at them with tensorboard --logdir %s", *(cli.trainer.default_root_dir,) * 2)
        return checkpoint.exit_code
