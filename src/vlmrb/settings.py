"""Reads configuration files and single sections of them, for verbs that need no training run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from vlmrb.envs.config import EnvConfig
    from vlmrb.scoring.section import ScoringSection

# Settings that stand elsewhere since a later version: `old name → new name`.
MOVED = {
    f"training.{name}": f"model.init_args.{name}"
    for name in ("target_update_interval", "epsilon_start", "epsilon_end", "epsilon_fraction")
}


def refuse_moved(names: Collection[str], where: str) -> None:
    """Refuses settings by names that they no longer have.

    Args:
        names: of the settings that are used.
        where: what uses them, for the message.

    Raises:
        ValueError: saying where they went.
    """
    moved = [f"{name} is now {MOVED[name]}" for name in sorted(names) if name in MOVED]
    if moved:
        raise ValueError(f"{where} is of an earlier version: {', '.join(moved)}")


def load_env(files: Sequence[str | Path], flags: Sequence[str] = (), base: EnvConfig | None = None) -> EnvConfig:
    """Returns the ``env`` section of configuration files, later ones over earlier ones, flags over all of them.

    Args:
        files: the configurations.
        flags: ``--env.NAME=VALUE``, as for `vlmrb fit`.
        base: what counts where neither files nor flags say otherwise; ``None`` is `EnvConfig`'s defaults.

    Raises:
        ArgumentError: a flag names no setting, or its value has a wrong type.
        ValueError: a file is no YAML, there are neither flags nor a file with such a section, or a setting cannot work.
    """
    from jsonargparse import ArgumentParser

    from vlmrb.envs.config import EnvConfig

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--env", type=EnvConfig, default=base or EnvConfig())
    return _build(parser, "env", files, flags)


def load_scoring(files: Sequence[str | Path]) -> ScoringSection:
    """Returns the ``scoring`` section of configuration files, later ones over earlier ones, its scorer not set up yet.

    Neither torch nor Lightning is loaded.

    Raises:
        ValueError: a file is no YAML, no file has such a section, or it names no scorer.
    """
    from jsonargparse import ArgumentParser

    from vlmrb.scoring.section import ScoringSection

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ScoringSection, "scoring")
    scoring: ScoringSection = _build(parser, "scoring", files)
    if scoring.scorer is None:
        raise ValueError(f"{_names(files)}: scoring.scorer is not set; name one as in configs/scorer/sprites.yaml")
    return scoring


def _build(parser: Any, section: str, files: Sequence[str | Path], flags: Sequence[str] = ()) -> Any:
    found = bool(flags)
    config = parser.get_defaults()
    for file in files:
        content = read_yaml(file)
        if section in content:
            found = True
            if not isinstance(content[section], dict):
                raise ValueError(f"configuration {file}: section {section!r} holds no settings")
            config = parser.parse_object({section: content[section]}, cfg_base=config)
    if not found:
        raise ValueError(f"{_names(files)}: no section {section!r}; is this a configuration for something else?")
    if flags:
        config = parser.parse_args(list(flags), namespace=config)
    return parser.instantiate_classes(config)[section]


def read_yaml(file: str | Path) -> dict[str, Any]:
    """Returns the settings in a file.

    Raises:
        ValueError: the file is missing, empty, no YAML, or something else than a mapping.
    """
    try:
        content = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"configuration {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"configuration {file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"configuration {file} holds no settings")
    _require_words_as_keys(content, file)
    return content


def _require_words_as_keys(content: Any, file: str | Path) -> None:
    """Refuses the keys ``yes`` and ``no`` of a prompt without quotes, which YAML reads as true and false."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(key, bool):
            raise ValueError(
                f"configuration {file}: YAML reads a bare yes or no as true or false; put the words in quotes, as in "
                '"yes": "yes"'
            )
        _require_words_as_keys(value, file)


def read_section(file: str | Path, *names: str) -> dict[str, Any]:
    """Returns a section of a file, or a section of one (``"replay", "vlm"``); empty if it is not there.

    Raises:
        ValueError: as `read_yaml`, or it is something else than a mapping.
    """
    found = read_yaml(file)
    for depth, name in enumerate(names, 1):
        found = found.get(name) or {}
        if not isinstance(found, dict):
            raise ValueError(f"configuration {file}: section {'.'.join(names[:depth])!r} holds no settings")
    return found


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted names of settings with their values, such as ``replay.td.eps``; an empty section is a value."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _names(files: Sequence[str | Path]) -> str:
    return ", ".join(map(str, files)) or "no configuration file"
