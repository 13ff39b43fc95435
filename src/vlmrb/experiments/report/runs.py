"""A run as it lies in its folder, read for a report."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlmrb.experiments.children import was_interrupted
from vlmrb.experiments.progress import read_progress
from vlmrb.experiments.report.files import (
    Kinds,
    Steps,
    damaged,
    number,
    read_curve,
    read_json,
    read_rows,
    read_yaml,
    require_kinds,
)
from vlmrb.experiments.report.settings import KINDS, Settings, label_of

Status = Literal["finished", "interrupted", "failed", "unfinished", "damaged"]

RECORD, SUMMARY, EVALUATIONS = "cell.json", "summary.json", "evaluations.csv"
SHARE_SCORED, EMITTED, SHOWN = "scoring/share_scored", "scoring/emitted", "scoring/shown"
_NEVER_RUNS = ("checkpoints", "clips", "preflight")
_MOVED_ASIDE = re.compile(r"\.old\d+$")
_NONE = type(None)
_RECORD: Kinds = {
    **dict.fromkeys(("config", "scheme", "overlay"), (str,)),
    **dict.fromkeys(("seed", "exit_code"), (int, _NONE)),
}
_SUMMARY: Kinds = {
    **{"finished": (bool,), "env_steps": (int,), "seed": (int, _NONE), "env": (str,), "algorithm": (str,)},
    **{"wall_s": (int, float), "scoring": (Mapping,), "scoring.share_scored": (int, float)},
}
_REDUCED: dict[str, Callable[[Steps], Any]] = {
    **dict.fromkeys(("replay/frequency_", "replay/share_", "scoring/delay_env_steps_mean"), np.mean),
    **dict.fromkeys(("time/env_steps_per_s", "time/scoring_latency_ms_p50"), np.median),
    **dict.fromkeys((SHARE_SCORED, EMITTED, SHOWN), lambda values: values[-1]),
}
"""Beginnings of metrics' names → how a run's values become one."""


@dataclass(frozen=True, eq=False)  # arrays do not compare
class Run:
    """One run.

    Attributes:
        source: the folder or file that it was read from.
        config: the name of its configuration, empty if no sweep has recorded it.
        label: the name of its scheme.
        seed: ``None`` if nothing says it.
        status: as in results.csv (docs/sweeps.md); ``damaged``: said to have finished, without evaluations to its end.
        steps: env steps of its evaluations, ``float64[K]``, increasing.
        success: share of successful episodes at each, ``float64[K]`` in [0, 1].
        wall_s: seconds since its start at each, ``float64[K]``, NaN where they were not measured.
        settings: its configuration, empty if not known.
        budget: env steps that it was to run, ``None`` if not known.
        metrics: from metrics.csv: means (of frequencies, shares and delays) and medians (of speeds) over training, and
            clips completed and shown to the scorer, and the share scored, at its end.
        ending: of a failed one, the last line that it printed; of an interrupted or unfinished one, how far it got; of
            a damaged one, what is wrong.
        took_s: seconds that it took in all, NaN if not measured.
        gone: of kept results, the configuration file that their commands.txt names and that is no longer there.
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
    ending: str = ""
    took_s: float = math.nan
    gone: str = ""

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
    record, summary, settings = _checked(folder / RECORD), _checked(folder / SUMMARY), read_yaml(folder / "config.yaml")
    require_kinds(folder / "config.yaml", settings, KINDS)
    if "scheme" in record and "config" not in record:
        raise damaged(folder / RECORD, "it names no config")
    config, label = _names(record)
    if not label and not settings and re.fullmatch(r"seed_\d+", folder.name):
        config, label = folder.parent.parent.name, folder.parent.name
    steps, success, wall_s = _evaluations(folder / EVALUATIONS)
    budget = (settings.get("training") or {}).get("total_env_steps")
    status = _status(record, summary)
    if status == "finished":
        budget = summary.get("env_steps") if budget is None else budget
        words = not_to_its_end(steps, budget)
        status = "damaged" if words else status
    elif status == "failed":
        words = _last_line(folder / "log.txt")
    else:
        words = how_far(max(read_progress(folder).env_steps, summary.get("env_steps", 0)), budget)
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
        _metrics(folder / "metrics.csv", summary),
        words,
        float(summary.get("wall_s", wall_s[-1] if len(wall_s) else math.nan)),
    )


def _checked(path: Path) -> dict[str, Any]:
    content = read_json(path) or {}
    require_kinds(path, content, _RECORD if path.name == RECORD else _SUMMARY)
    return content


def not_to_its_end(steps: Steps, budget: float | None) -> str:
    """Says what a run that is said to have finished lacks: its last evaluation is one at its budget or beyond.

    Args:
        steps: env steps of its evaluations, ``float64[K]``.
        budget: env steps that it was to run, ``None`` if not known.

    Returns:
        A sentence, empty if it lacks nothing.
    """
    if not len(steps):
        return "it says finished, but holds no evaluation"
    if steps[-1] < (budget or 1):
        of = "" if budget is None else f" of {budget:,}"
        return f"it says finished, but its evaluations end at {steps[-1]:,.0f}{of} env steps"
    return ""


def how_far(env_steps: float, budget: float | None) -> str:
    """Says how far a run got that has not finished.

    Args:
        env_steps: that it took, as far as its files say.
        budget: env steps that it was to run, ``None`` if not known.
    """
    of = "" if budget is None else f" of {budget:,.0f}"
    return f"got to {env_steps:,.0f}{of} env steps"


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


def _from_summary(summary: Mapping[str, Any]) -> Settings:
    """Returns what a summary says of the settings, for a folder that holds no config.yaml."""
    names = {"env": ("env", "id"), "algorithm": ("model", "class_path")}
    return {section: {key: summary[name]} for name, (section, key) in names.items() if name in summary}


def _evaluations(path: Path) -> tuple[Steps, Steps, Steps]:
    lines = read_rows(path, ("env_step", "eval/success"), growing=True) if path.exists() else []
    steps, success = read_curve(path, lines, "eval/success")
    wall_s = [number(path, line, row, "time/wall_s") if row.get("time/wall_s") else math.nan for line, row in lines]
    for (line, _), seconds in zip(lines, wall_s, strict=True):
        if seconds < 0 or math.isinf(seconds):
            raise damaged(path, f"line {line}: time/wall_s is {seconds:g}")
    return steps, success, np.array(wall_s, np.float64)


def _metrics(path: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    lines = read_rows(path, ("step",), growing=True) if path.exists() else []
    found = {}
    for name in lines[0][1] if lines else ():
        reduced = next((reduce for beginning, reduce in _REDUCED.items() if name.startswith(beginning)), None)
        if reduced is not None:
            values = np.array([number(path, line, row, name) for line, row in lines if row[name]])
            if len(values := values[np.isfinite(values)]):
                found[name] = float(reduced(values))
    told = (summary.get("scoring") or {}).get("share_scored")
    return found if told is None else {**found, SHARE_SCORED: float(told)}


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()] if path.exists() else []
    return next((line for line in reversed(lines) if line), "")
