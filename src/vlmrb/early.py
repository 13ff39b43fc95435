"""What can be said of a run's settings before PyTorch is loaded: whether each is right, and whether they fit together.

The settings are read as `vlmrb fit` reads them: files and flags in the order in which they are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser

from vlmrb.algorithms.config import TrainingConfig, require_fitting
from vlmrb.callbacks.config import CheckpointConfig, EvaluationConfig, MonitoringConfig
from vlmrb.envs.config import EnvConfig
from vlmrb.envs.registry import make_goals
from vlmrb.replay.config import ReplayConfig
from vlmrb.scoring.config import ScoringConfig
from vlmrb.settings import read_yaml, refuse_moved

SECTIONS: dict[str, Any] = {
    "env": EnvConfig,
    "training": TrainingConfig,
    "replay": ReplayConfig,
    "scoring": ScoringConfig,
    "evaluation": EvaluationConfig,
    "monitoring": MonitoringConfig,
    "checkpoint": CheckpointConfig,
}
# Settings of a section that only the program itself can judge: they name classes, which may load anything.
LATER = {"scoring": ("scorer", "control", "cache", "preflight")}


def require_sound(args: Sequence[str]) -> None:
    """Refuses settings of a run that cannot work.

    Nothing is said about what is not looked at here: the model's and the trainer's settings, scorers, files that do not
    exist.

    Args:
        args: as for `vlmrb fit`.

    Raises:
        ArgumentError: a setting is unknown or of a wrong type.
        ValueError: a file is empty, no YAML, or something else than a mapping; or a setting has moved, lies outside its
            range, or does not fit another.
    """
    refuse_moved({name.removeprefix("--") for name, _ in _options(args)}, "the command")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    for section, settings in SECTIONS.items():
        parser.add_argument(f"--{section}", type=settings, default=settings())
    judged = []
    for name, value in _options(args):
        section, _, setting = name.removeprefix("--").partition(".")
        if name in ("-c", "--config"):
            if value is not None and Path(value).is_file():  # jsonargparse names files that do not exist
                judged.append(f"--config={json.dumps(_sections(value))}")
        elif section in SECTIONS and setting.partition(".")[0] not in LATER.get(section, ()):
            judged.append(name if value is None else f"{name}={value}")
    config = parser.parse_args(judged)
    found = parser.instantiate_classes(config)
    require_fitting(found.training, found.replay, found.env.num_envs)
    found.replay.require_for(found.env.id)
    found.scoring.require_for(found.training.frames_per_batch, found.replay.clip_length)
    if found.replay.her is not None:
        make_goals(found.env)  # refuses environments without


def _sections(file: str) -> dict[str, Any]:
    """Reads from a file what is judged here."""
    content = read_yaml(file)
    training = content.get("training")
    if isinstance(training, dict):
        refuse_moved({f"training.{name}" for name in training}, f"configuration {file}")
    found = {}
    for section in SECTIONS.keys() & content.keys():
        if content[section] is None:
            raise ValueError(f"{section}: null is no setting; leave the section out for its defaults")
        found[section] = content[section]
        if isinstance(found[section], dict):
            found[section] = {name: v for name, v in found[section].items() if name not in LATER.get(section, ())}
    return found


def _options(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yields options with their values, ``None`` for those without."""
    for option, following in zip(args, [*args[1:], "--"], strict=True):
        if option.startswith("-"):
            name, equals, value = option.partition("=")
            yield name, value if equals else None if following.startswith("--") else following
