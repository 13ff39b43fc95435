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

from vlmrb.experiments.report.files import Lines, damaged, read_curve, read_rows, read_yaml, require_kinds
from vlmrb.experiments.report.runs import Run, how_far, not_to_its_end
from vlmrb.experiments.report.settings import KINDS, Settings

COLUMNS = ("scheme", "seed", "status", "env_step", "success")
STATUS = ("finished", "interrupted", "failed", "unfinished")
_ENDING = "results.csv"
_FOREIGN = (
    f"is no results.csv of vlmrb sweep, which has the columns {', '.join(COLUMNS)}: give that file, or the folder of a "
    "run, a sweep or a calibration"
)


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
    rows = read_rows(path, COLUMNS, foreign=_FOREIGN)
    beside = path.with_name(path.name.removesuffix(_ENDING) + "commands.txt")
    commands = _read_commands(beside) or _read_commands(path.absolute().parent.parent / "commands.txt", path)
    cells: dict[tuple[str, str, int], list[tuple[int, Mapping[str, str]]]] = {}
    for line, row in rows:
        if row["status"] not in STATUS or not row["seed"].isdecimal():
            raise damaged(path, f"line {line}: seed {row['seed']!r} with status {row['status']!r} is no run")
        cells.setdefault((row.get("config") or "", row["scheme"], int(row["seed"])), []).append((line, row))
    return [_run(path, key, members, commands) for key, members in cells.items()]


def _run(
    path: Path, key: tuple[str, str, int], lines: Lines, commands: Mapping[tuple[str, int], Sequence[_Command]]
) -> Run:
    config, label, seed = key
    candidates = [one for one in commands.get((label, seed), ()) if config in ("", one.config)]
    command = candidates[0] if candidates else None
    steps, success = read_curve(
        path, [(line, row) for line, row in lines if row["env_step"] or row["success"]], "success"
    )
    status: Any = lines[0][1]["status"]
    settings = command.settings() if command else {}
    if status == "finished":
        words, budget = not_to_its_end(steps, None), int(steps[-1]) if len(steps) else None
    else:
        budget = (settings.get("training") or {}).get("total_env_steps")
        words = "" if status == "failed" else how_far(steps[-1] if len(steps) else 0, budget)
    return Run(
        path,
        config or (command.config if command else "") or _name(path),
        label,
        seed,
        "damaged" if words else status,
        steps,
        success,
        np.full(len(steps), np.nan),
        settings,
        None if budget is None else int(budget),
        ending=words,
        gone=command.gone if command else "",
    )


def _name(path: Path) -> str:
    """Names the task of a file that says nothing about it: by its folder and the beginning of its own name."""
    beginning = path.name.removesuffix(_ENDING).strip("_-. ")
    return "_".join(part for part in (path.absolute().parent.name, beginning) if part)


@dataclass(frozen=True)
class _Command:
    """One line of a commands.txt."""

    where: Path
    line: int
    files: tuple[Path, ...]
    overrides: tuple[tuple[str, str], ...]

    @property
    def config(self) -> str:
        """The name of the configuration, empty if the file is no longer there: its name then says nothing."""
        return self.files[0].stem if self.files[0].is_file() else ""

    @property
    def gone(self) -> str:
        """The first of its files that is no longer there, empty if all are."""
        return next((str(file) for file in self.files if not file.is_file()), "")

    def settings(self) -> Settings:
        """Returns the settings that its files and options hold, none if one of its files is gone."""
        settings: dict[str, Any] = {}
        for file in self.files:
            _merge(settings, read_yaml(file))
        for name, value in self.overrides:
            try:
                _set(settings, name.split("."), yaml.safe_load(value))
            except yaml.YAMLError as error:
                raise damaged(self.where, f"line {self.line}: --{name} {value!r} is no YAML") from error
        require_kinds(self.where, settings, KINDS)
        return {} if self.gone else settings


def _set(settings: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Sets one option; a class's arguments may be named without ``init_args``, as in ``scoring.control.kappa``."""
    found = settings
    for name in names[:-1]:
        found = _section(found, name)
        if "class_path" in found and "init_args" not in names and names[-1] != "class_path":
            found = _section(found, "init_args")
    found[names[-1]] = value


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a section to set an option in, a new one in the place of what is none."""
    if not isinstance(settings.get(name), dict):
        settings[name] = {}
    return settings[name]


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
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else (), 1):
        if line.split()[:2] != ["vlmrb", "fit"]:
            continue
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise damaged(path, f"line {number}: {error}") from error
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
            found.setdefault(key, []).append(_Command(path, number, tuple(files), tuple(overrides)))
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields a command's options with their values, ``--name value`` or ``--name=value``; ``--name`` alone is true."""
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("-"):
            name, given, value = word.partition("=")
            yield name, value if given else "true" if following.startswith("--") else following
