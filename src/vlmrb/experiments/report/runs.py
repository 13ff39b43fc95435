"""A run as it lies in its folder, read for a report."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from vlmrb.experiments.children import was_interrupted
from vlmrb.experiments.report.settings import Settings, label_of

Status = Literal["finished", "interrupted", "failed", "unfinished"]
Steps = NDArray[np.float64]

RECORD, SUMMARY, EVALUATIONS = "cell.json", "summary.json", "evaluations.csv"
_NEVER_RUNS = ("checkpoints", "clips", "preflight")
_MOVED_ASIDE = re.compile(r"\.old\d+$")
_MEANS = ("replay/frequency_", "replay/share_", "scoring/delay_env_steps_mean")
_MEDIANS = ("time/env_steps_per_s", "time/scoring_latency_ms_p50")


@dataclass(frozen=True, eq=False)  # arrays do not compare
class Run:
    """One run.

    Attributes:
        source: the folder or file that it was read from.
        config: the name of its configuration, empty if no sweep has recorded it.
        label: the name of its scheme.
        seed: ``None`` if nothing says it.
        status: as in results.csv (docs/sweeps.md).
        steps: env steps of its evaluations, ``float64[K]``, increasing.
        success: share of successful episodes at each, ``float64[K]`` in [0, 1].
        wall_s: seconds since its start at each, ``float64[K]``, NaN where they were not measured.
        settings: its configuration, empty if not known.
        budget: env steps that it was to run, ``None`` if not known.
        metrics: from metrics.csv: means (of frequencies, shares and delays) and medians (of speeds) over training.
        last_words: the last line that it printed, for one that has not finished.
    """

    source: Path
    config: str
    label: str
    seed: int | None
    status: Status
    steps: Steps
    success: Steps
    wall_s: Steps
    settings: Settings = field(default_factory=dict)
    budget: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    last_words: str = ""

    @property
    def finished(self) -> bool:
        """Whether it ran over its whole budget."""
        return self.status == "finished"

    @property
    def env(self) -> str:
        """The environment's id, empty if not known."""
        return str((self.settings.get("env") or {}).get("id", ""))

    @property
    def algorithm(self) -> str:
        """The algorithm's class, empty if not known."""
        model = self.settings.get("model") or {}
        return (model if isinstance(model, str) else str(model.get("class_path", ""))).rpartition(".")[2]


def run_folders(root: Path) -> Iterator[Path]:
    """Yields the folders of runs in and below a folder, in order.

    Those that a later run has moved aside do not count, nor does an evaluations.csv that is kept beside a results.csv.
    """
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _NEVER_RUNS and not _MOVED_ASIDE.search(name))
        found = {RECORD, SUMMARY, EVALUATIONS} & set(files)
        if found and not (found == {EVALUATIONS} and "results.csv" in files):
            yield Path(folder)


def read_run(folder: Path) -> Run:
    """Reads a run's folder.

    A sweep's record names configuration and scheme; without one the folders ``<config>/<scheme>/seed_<n>`` do if there
    are no settings, and otherwise the settings themselves.

    Raises:
        ValueError: a file in it is damaged or was written by another program.
    """
    record, summary = read_json(folder / RECORD) or {}, read_json(folder / SUMMARY) or {}
    settings = _settings(folder / "config.yaml")
    config, label = _names(record)
    if not label and not settings and re.fullmatch(r"seed_\d+", folder.name):
        config, label = folder.parent.parent.name, folder.parent.name
    status = _status(record, summary)
    steps, success, wall_s = _evaluations(folder / EVALUATIONS)
    budget = (settings.get("training") or {}).get("total_env_steps")
    if budget is None and status == "finished":
        budget = summary.get("env_steps")
    return Run(
        folder,
        config,
        label or label_of(settings),
        _seed(folder, record, summary, settings),
        status,
        steps,
        success,
        wall_s,
        settings or _from_summary(summary),
        None if budget is None else int(budget),
        _metrics(folder / "metrics.csv"),
        "" if status == "finished" else _last_line(folder / "log.txt"),
    )


def _names(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the names of configuration and scheme, as this version's records have them, and as older ones do."""
    if "scheme" in record:
        return str(record["config"]), str(record["scheme"])
    return Path(record.get("config", "")).stem, Path(record.get("overlay", "")).stem


def _seed(folder: Path, *sources: Mapping[str, Any]) -> int | None:
    for source in sources:
        for name in ("seed", "seed_everything"):
            if isinstance(source.get(name), int) and not isinstance(source[name], bool):
                return source[name]
    match = re.fullmatch(r"seed_(\d+)", folder.name)
    return int(match[1]) if match else None


def _status(record: Mapping[str, Any], summary: Mapping[str, Any]) -> Status:
    if summary.get("finished"):
        return "finished"
    exit_code = record.get("exit_code")
    if exit_code is None:
        return "interrupted" if summary and not record else "unfinished"
    return "interrupted" if was_interrupted(exit_code) else "failed"


def _settings(path: Path) -> Settings:
    if not path.exists():
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: repair it, or leave {path.parent} out of the report") from error
    return content if isinstance(content, dict) else {}


def _from_summary(summary: Mapping[str, Any]) -> Settings:
    """Returns what a summary says of the settings, for a folder that holds no config.yaml."""
    names = {"env": ("env", "id"), "algorithm": ("model", "class_path")}
    return {section: {key: summary[name]} for name, (section, key) in names.items() if name in summary}


def _evaluations(path: Path) -> tuple[Steps, Steps, Steps]:
    rows = read_rows(path, ("env_step", "eval/success")) if path.exists() else []
    try:
        columns = [[float(row[name]) for row in rows] for name in ("env_step", "eval/success")]
        wall_s = [float(row.get("time/wall_s") or "nan") for row in rows]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): leave {path.parent} out of the report") from error
    steps, success = np.array(columns[0]), np.array(columns[1])
    if (np.diff(steps) <= 0).any():
        raise ValueError(f"{path} is damaged (env_step does not increase): leave {path.parent} out of the report")
    return steps, success, np.array(wall_s)


def _metrics(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    rows = read_rows(path, ("step",))
    found = {}
    for name in rows[0] if rows else ():
        if name.startswith((*_MEANS, *_MEDIANS)):
            values = np.array([float(row[name]) for row in rows if row[name]])
            if values.size:
                found[name] = float(values.mean() if name.startswith(_MEANS) else np.median(values))
    return found


def read_rows(path: Path, required: tuple[str, ...]) -> list[dict[str, str]]:
    """Returns a CSV's rows; not the last one if it has no end yet, as of a run that is writing it or was killed.

    Raises:
        ValueError: it lacks a required column.
    """
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    reader = csv.DictReader(lines)
    lacking = [name for name in required if name not in (reader.fieldnames or ())]
    if lacking:
        raise ValueError(f"{path} was not written by vlmrb: it lacks the columns {', '.join(lacking)}; leave it out")
    return list(reader)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns a file's content, ``None`` if there is none or a killed process left a part of it."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()] if path.exists() else []
    return next((line for line in reversed(lines) if line), "")
