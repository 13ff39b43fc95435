"""Reads results.csv files: what a sweep writes, and what is kept of it when the runs themselves are gone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vlmrb.experiments.report.runs import Run, read_rows
from vlmrb.experiments.report.settings import Settings

COLUMNS = ("scheme", "seed", "status", "env_step", "success")
STATUS = ("finished", "interrupted", "failed", "unfinished")
_ENDING = "results.csv"


def kept_results(root: Path) -> Iterator[Path]:
    """Yields the results.csv files (also ``sac_results.csv`` and the like) in and below a folder, in order."""
    yield from sorted(root.rglob(f"*{_ENDING}"))


def read_results(path: Path) -> list[Run]:
    """Reads the runs in a results.csv.

    A commands.txt beside it (``sac_commands.txt`` beside ``sac_results.csv``), or one folder up, says which
    configuration files they were run with. Their settings are then what those files say today, as far as they exist,
    and nothing without it.

    Raises:
        ValueError: the file is something else, or damaged.
    """
    try:
        rows = read_rows(path, COLUMNS)
    except ValueError:
        raise ValueError(
            f"{path} is no results.csv of vlmrb sweep, which has the columns {', '.join(COLUMNS)}: give that file, or "
            "the folder of a run, a sweep or a calibration"
        ) from None
    beside = path.with_name(path.name.removesuffix(_ENDING) + "commands.txt")
    commands = _read_commands(beside) or _read_commands(path.absolute().parent.parent / "commands.txt", path)
    cells: dict[tuple[str, str, str], list[Mapping[str, str]]] = {}
    for number, row in enumerate(rows, 2):
        if row["status"] not in STATUS or not row["seed"].isdigit():
            raise ValueError(f"{path}, line {number}: seed {row['seed']!r} with status {row['status']!r} is no run")
        cells.setdefault((row.get("config") or "", row["scheme"], row["seed"]), []).append(row)
    return [_run(path, key, members, commands) for key, members in cells.items()]


def _run(
    path: Path,
    key: tuple[str, str, str],
    rows: Sequence[Mapping[str, str]],
    commands: Mapping[tuple[str, int], Sequence[_Command]],
) -> Run:
    config, label, seed = key
    candidates = [one for one in commands.get((label, int(seed)), ()) if config in ("", one.config)]
    command = candidates[0] if candidates else None
    try:
        points = [(float(row["env_step"]), float(row["success"])) for row in rows if row["env_step"]]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {label}, seed {seed}: {error}") from error
    steps, success = np.array([step for step, _ in points]), np.array([value for _, value in points])
    if (np.diff(steps) <= 0).any():
        raise ValueError(f"{path} is damaged: {label}, seed {seed}: env_step does not increase")
    status: Any = rows[0]["status"]
    return Run(
        path,
        config or (command.config if command else "") or _name(path),
        label,
        int(seed),
        status,
        steps,
        success,
        np.full(len(steps), np.nan),
        command.settings() if command else {},
        int(steps[-1]) if status == "finished" and len(steps) else None,
    )


def _name(path: Path) -> str:
    """Names the task of a file that says nothing about it: by its folder and the beginning of its own name."""
    beginning = path.name.removesuffix(_ENDING).strip("_-. ")
    return "_".join(part for part in (path.absolute().parent.name, beginning) if part)


@dataclass(frozen=True)
class _Command:
    """One line of a commands.txt."""

    files: tuple[Path, ...]
    overrides: tuple[tuple[str, str], ...]

    @property
    def config(self) -> str:
        """The name of the configuration, empty if the file is no longer there: its name then says nothing."""
        return self.files[0].stem if self.files[0].is_file() else ""

    def settings(self) -> Settings:
        settings: dict[str, Any] = {}
        for file in self.files:
            if file.is_file():
                content = yaml.safe_load(file.read_text())
                _merge(settings, content if isinstance(content, dict) else {})
        for name, value in self.overrides:
            _set(settings, name.split("."), yaml.safe_load(value))
        return settings


def _set(settings: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Sets one option; a class's arguments may be named without ``init_args``, as in ``scoring.control.kappa``."""
    found = settings
    for name in names[:-1]:
        if not isinstance(found.get(name), dict):
            found[name] = {}
        found = found[name]
        if "class_path" in found and "init_args" not in names and names[-1] != "class_path":
            found = found.setdefault("init_args", {})
    found[names[-1]] = value


def _merge(into: dict[str, Any], content: Mapping[str, Any]) -> None:
    """Lays settings over others; a class with other arguments replaces the one that was there."""
    for key, value in content.items():
        there = into.get(key)
        if isinstance(there, dict) and isinstance(value, Mapping):
            another = there.get("class_path") not in (None, value.get("class_path", there.get("class_path")))
            if not another:
                _merge(there, value)
                continue
        into[key] = _copy(value)


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _read_commands(path: Path, results: Path | None = None) -> dict[tuple[str, int], list[_Command]]:
    """Returns (scheme, seed) → its commands, one for each configuration, from a commands.txt.

    Args:
        path: of the commands; there may be none.
        results: count only what ran into this file's folder.
    """
    found: dict[tuple[str, int], list[_Command]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        words = shlex.split(line)
        if words[:2] != ["vlmrb", "fit"]:
            continue
        files, overrides, folder = [], [], ""
        for option, value in _options(words[2:]):
            if option in ("-c", "--config"):
                files.append(Path(value))
            elif option == "--run_dir":
                folder = value
            elif option.startswith("--") and "." in option:
                overrides.append((option.removeprefix("--"), value))
        match = re.fullmatch(r"seed_(\d+)", Path(folder).name)
        elsewhere = results is not None and Path(folder).parent.parent.name != results.absolute().parent.name
        if match and files and not elsewhere:
            key = Path(folder).parent.name, int(match[1])
            found.setdefault(key, []).append(_Command(tuple(files), tuple(overrides)))
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the options of a command with their values, written ``--name value`` or ``--name=value``."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("-"):
            name, given, value = word.partition("=")
            yield name, value if given else following
