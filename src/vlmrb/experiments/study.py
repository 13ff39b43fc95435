"""A study: configurations × schemes × seeds, as one YAML file or as a few options of `vlmrb sweep`."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vlmrb.experiments.cells import Cell, Scheme, folder_of

# Options of `vlmrb fit` that a sweep sets itself, or that would start nothing.
OWN = ("-c", "--config", "--seed_everything", "--run_dir", "--resume", "--overwrite", "--print_config", "-h", "--help")
RESOURCES = {"num_cpus": 1.0, "num_gpus": 0.0}  # of one run
KEYS = ("name", "configs", "schemes", "seeds", "overrides", "jobs", "resources", "out")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# Files of a study's folder and of its configurations' folders.
FILES = ("commands.txt", "study.yaml", "results.csv", "table.csv", "curves.png", "curves.pdf")
HIGHEST_SEED = 2**32 - 1
MOST_SEEDS = 10_000
SMALLEST, LARGEST = 0.0001, 1_000_000  # cores or GPUs of a run; the smallest share is Ray's


@dataclass(frozen=True)
class Study:
    """What is to be run.

    Attributes:
        name: of the study.
        configs: paths of the configurations.
        schemes: what is compared on each of them.
        seeds: of every scheme.
        out: folder of the study.
        overrides: arguments of `vlmrb fit` for every run.
        jobs: runs at a time; ``None``: as many as there is room for.
        resources: ``num_cpus`` and ``num_gpus`` of one run; fractions share a GPU.
    """

    name: str
    configs: tuple[Path, ...]
    schemes: tuple[Scheme, ...]
    seeds: tuple[int, ...]
    out: Path
    overrides: tuple[str, ...] = ()
    jobs: int | None = None
    resources: Mapping[str, float] = field(default_factory=lambda: dict(RESOURCES))

    def __post_init__(self) -> None:
        """Refuses what cannot be run, or would run into one folder.

        Raises:
            ValueError: saying what is wrong.
        """
        for what, names in (
            ("configs", [path.stem for path in self.configs]),
            ("schemes", [scheme.label for scheme in self.schemes]),
        ):
            if not names:
                raise ValueError(f"{what}: name at least one")
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{what}: {', '.join(twice)} comes twice, but folders are called by these names")
            if unfit := [name for name in names if name.lower() in FILES or name.startswith(".")]:
                raise ValueError(f"{what}: {unfit[0]} cannot name a folder: it begins with a dot, or names a result")
        if not LABEL.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}: it names a folder: use letters, digits and _ . + -")
        for scheme in self.schemes:
            if not LABEL.fullmatch(scheme.label):
                raise ValueError(f"scheme {scheme.label!r}: labels name folders: use letters, digits and _ . + -")
            for part in scheme.parts:
                _require_free(as_arguments([part], f"scheme {scheme.label}"), f"scheme {scheme.label}")
            for overlay in scheme.overlays:
                _require_file(overlay, f"scheme {scheme.label}: overlay")
        for config in self.configs:
            _require_file(config, "configuration")
        _require_free(self.overrides, "overrides")
        if not self.seeds:
            raise ValueError("seeds: name at least one")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs={self.jobs} must be at least 1")

    def cells(self) -> list[Cell]:
        """Lists the runs, seed by seed, so that all schemes have results early."""
        return [
            Cell(
                config,
                scheme,
                seed,
                folder_of(self.out, config, scheme.label, seed),
                self.overrides,
                self.name,
            )
            for seed in self.seeds
            for config in self.configs
            for scheme in self.schemes
        ]

    def to_yaml(self) -> str:
        """Returns the study as a file that `read_study` reads."""
        content = {
            "name": self.name,
            "configs": [str(path) for path in self.configs],
            "schemes": {scheme.label: list(scheme.parts) for scheme in self.schemes},
            "seeds": list(self.seeds),
            "overrides": list(self.overrides),
            "jobs": self.jobs,
            "resources": dict(self.resources),
            "out": str(self.out),
        }
        return yaml.safe_dump(content, sort_keys=False, width=120)


def read_study(
    file: str | Path,
    *,
    seeds: str | None = None,
    out: str | None = None,
    jobs: int | None = None,
    overrides: Sequence[str] = (),
) -> Study:
    """Reads a study file.

    Args:
        file: docs/sweeps.md explains its keys. Paths in it are relative to the working directory.
        seeds: instead of the file's; so are ``out`` and ``jobs``.
        out: see above.
        jobs: see above.
        overrides: after those of the file.

    Raises:
        ValueError: the file cannot be read, a key is unknown, missing or comes twice, a value is of a wrong type, or
            the study cannot work.
    """
    content = _load(Path(file))
    try:
        if unknown := [str(key) for key in content if key not in KEYS]:
            raise ValueError(f"unknown key {unknown[0]!r}{_closest(unknown[0], KEYS)}; there are {', '.join(KEYS)}")
        if missing := [key for key in ("configs", "schemes") if not content.get(key)]:
            raise ValueError(f"{missing[0]} is missing: a study needs configs and schemes")
        name = _text(content.get("name") or Path(file).stem, "name")
        return Study(
            name=name,
            configs=tuple(Path(path) for path in _texts(content["configs"], "configs")),
            schemes=_schemes(content["schemes"]),
            seeds=parse_seeds(seeds if seeds is not None else content.get("seeds", "0-4")),
            out=Path(out or _text(content.get("out") or f"runs/{name}", "out")),
            overrides=(
                *as_arguments(_texts(content.get("overrides") or [], "overrides"), "overrides"),
                *as_arguments(overrides, "--overrides"),
            ),
            jobs=jobs if jobs is not None else _jobs(content.get("jobs")),
            resources=_resources(content.get("resources") or {}),
        )
    except ValueError as error:
        raise ValueError(f"study {file}: {error}") from error


def parse_seeds(value: object) -> tuple[int, ...]:
    """Reads ``"0-4"``, ``"0,3,7"``, a mixture, a number or a list of numbers; a seed named twice counts once.

    Raises:
        ValueError: it is none of these, or names seeds beyond `HIGHEST_SEED`, or more than `MOST_SEEDS`.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    ranges: list[range] = []
    for part in parts:
        first, dash, last = str(part).strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"seeds={value!r}: expected something like 0-4 or 0,3,7")
        if max(len(first), len(last)) > len(str(HIGHEST_SEED)) or int(last or first) > HIGHEST_SEED:
            raise ValueError(f"seeds={value!r}: seeds go from 0 to {HIGHEST_SEED}")
        if int(last or first) < int(first):
            raise ValueError(f"seeds={value!r}: expected something like 0-4 or 0,3,7")
        ranges.append(range(int(first), int(last or first) + 1))
    if (count := sum(map(len, ranges))) > MOST_SEEDS:
        raise ValueError(f"seeds={value!r}: these are {count:,} seeds, and a study has at most {MOST_SEEDS:,}")
    return tuple(dict.fromkeys(seed for seeds in ranges for seed in seeds))


def as_arguments(options: Sequence[str], where: str) -> tuple[str, ...]:
    """Splits options that were given with their values: ``["--a 1", "--b", "2"]`` → ``("--a", "1", "--b", "2")``.

    Args:
        options: as they were given.
        where: for the message.

    Raises:
        ValueError: a quote is not closed.
    """
    arguments: list[str] = []
    for option in options:
        try:
            arguments += shlex.split(option) if option.startswith("-") else [option]
        except ValueError as error:
            raise ValueError(f"{where}: {option!r} cannot be read: {error}") from error
    return tuple(arguments)


class _Loader(yaml.SafeLoader):
    """Refuses keys that come twice, of which YAML's usual reader takes the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"{twice[0]!r} comes twice (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


def _load(file: Path) -> dict[Any, Any]:
    try:
        content = yaml.load(file.read_text(), _Loader)  # noqa: S506 (a safe loader)
    except OSError as error:
        raise ValueError(f"study {file} cannot be read: {error.strerror}{_siblings(file)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"study {file} is no YAML: {error}") from error
    except ValueError as error:
        raise ValueError(f"study {file}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"study {file} holds no settings")
    return content


def _schemes(value: object) -> tuple[Scheme, ...]:
    if not isinstance(value, dict):
        raise ValueError("schemes: expected labels, each with a list of overlays and options")
    return tuple(
        Scheme(_text(label, "schemes"), tuple(_texts(parts if parts is not None else [], f"scheme {label}")))
        for label, parts in value.items()
    )


def _texts(value: object, what: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_text(item, what) for item in values]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}: expected text, got {value!r}" + ("" if value is None else "; put it in quotes"))
    return value


def _jobs(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"jobs={value!r} must be a whole number")
    return value


def _resources(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or value.keys() - RESOURCES.keys():
        raise ValueError(f"resources={value!r}: expected numbers for {', '.join(RESOURCES)}")
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= LARGEST:
            raise ValueError(f"resources.{key}={number!r} must be a number from 0 to {LARGEST:,}")
        if 0 < number < SMALLEST:
            raise ValueError(f"resources.{key}={number!r} must be at least {SMALLEST}")
    if value.get("num_cpus") == 0:
        raise ValueError("resources.num_cpus must be above 0: every run takes some")
    return RESOURCES | {key: float(number) for key, number in value.items()}


def _require_free(arguments: Sequence[str], where: str) -> None:
    """Refuses options that the sweep gives itself."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in OWN:
            reason = "name overlays by their paths alone" if name in ("-c", "--config") else "the sweep sees to it"
            raise ValueError(f"{where}: {name} has no place here: {reason}")


def _require_file(path: Path, what: str) -> None:
    if not path.is_file():
        raise ValueError(f"{what} {path} does not exist{_siblings(path)}")


def _siblings(path: Path) -> str:
    """Says what lies where a file was looked for, the likeliest first."""
    there = sorted(other.name for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    if close := difflib.get_close_matches(path.name, there, 1):
        return f"; did you mean {path.parent / close[0]}?"
    if there:
        return f"; in {path.parent} there are {', '.join(there)}"
    return "" if path.is_absolute() else f" in {os.getcwd()}"


def _closest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, 1)
    return f", did you mean {close[0]}?" if close else ""
