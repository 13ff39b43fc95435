"""Run folders as `vlmrb fit` and `vlmrb sweep` leave them, without training, and what a report makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlmrb.experiments.report.command import read_all
from vlmrb.experiments.report.table import Cell, Number, Table, shown
from vlmrb.experiments.report.tasks import Task, gather

SPRITES = {"class_path": "vlmrb.scoring.sprites.SpritesScorer", "init_args": {}}
PLM = {"class_path": "vlmrb.scoring.hf.HFScorer", "init_args": {"model": "facebook/Perception-LM-1B"}}
TINY = {"class_path": "vlmrb.scoring.hf.HFScorer", "init_args": {"model": "examples/tiny_vlm/perception_lm"}}

REPLAY: dict[str, dict[str, Any]] = {
    "uniform": {"lam_max": 0.0, "warmup_fraction": 0.1, "td": None, "vlm": None},
    "per": {"lam_max": 1.0, "warmup_fraction": 0.0, "td": {"exponent": 0.6, "eps": 1e-6}, "vlm": None},
    "vlm": {"lam_max": 0.5, "warmup_fraction": 0.1, "td": None, "vlm": {"threshold": 0.5, "exponent": 1.0}},
    "vlm_td": {
        **{"lam_max": 0.5, "warmup_fraction": 0.1, "td": {"exponent": 1.0, "eps": 0.0}},
        "vlm": {"threshold": 0.5, "exponent": 1.0},
    },
}

PAPERS = {
    **{"env.id": "MiniGrid-DoorKey-16x16-v0", "training.total_env_steps": 1_000_000, "replay.clip_length": 32},
    **{"model.init_args.learning_rate": 4e-5, "model.init_args.target_update_interval": 1000},
    **{"evaluation.episodes": 10, "evaluation.every_n_env_steps": 10_000},
}
"""What makes a run one of the paper's task."""

UNIFORM = [[0.0, 0.0, 0.2, 0.4, 0.6], [0.0, 0.0, 0.0, 0.4, 0.4]]  # best 0.6 and 0.4: 0.5 is uniform's best
SCORED = [[0.0, 0.4, 0.8, 1.0, 1.0], [0.0, 0.2, 0.4, 0.4, 0.4]]


def settings_of(kind: str, scorer: Any = SPRITES, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a configuration for a replay kind; ``changes`` are dotted name → value."""
    settings: dict[str, Any] = {
        "env": {"id": "MiniGrid-DoorKey-6x6-v0", "visuals": "standard", "max_steps": None, "actions": None},
        "training": {"total_env_steps": 400, "gamma": 0.95},
        "model": {"class_path": "vlmrb.algorithms.DQN", "init_args": {"learning_rate": 3e-4}},
        "replay": {"batch_size": 128, "clip_length": 16, **json.loads(json.dumps(REPLAY[kind]))},
        "scoring": {"scorer": scorer if "vlm" in kind else None, "control": None},
        "evaluation": {"episodes": 50, "every_n_env_steps": 100},
    }
    for key, value in (changes or {}).items():
        *sections, last = key.split(".")
        section = settings
        for name in sections:
            section = section[name]
        section[last] = value
    return settings


def leave_run(
    folder: Path,
    success: Sequence[float],
    settings: Mapping[str, Any] | None = None,
    *,
    finished: bool = True,
    exit_code: int | None = 0,
    config: str | None = None,
    label: str | None = None,
    seed: int | None = None,
    seconds: float = 1.0,
    every: int | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Leaves a run that evaluated every so many env steps, from 0 on, each of them ``seconds`` after the last.

    Args:
        folder: ``<config>/<scheme>/seed_<n>``; a record is written, unless ``label`` is empty.
        success: of each evaluation; none: the run failed at once.
        settings: of its config.yaml; ``None``: there is none.
        finished: whether its summary says so; there is no summary for one that failed.
        exit_code: in the record.
        config: in the record; by default that of the folder.
        label: in the record; by default that of the folder.
        seed: in the record; by default that of the folder.
        seconds: between evaluations.
        every: env steps between evaluations; by default 100, or so many that a finished run ends at its budget.
        metrics: of its metrics.csv, the same in two rows.
    """
    folder.mkdir(parents=True)
    label = folder.parent.name if label is None else label
    seed = int(folder.name.rpartition("_")[2]) if seed is None else seed
    if label:
        config = folder.parent.parent.name if config is None else config
        record = {"schema": 2, "config": config, "scheme": label, "seed": seed, "exit_code": exit_code}
        (folder / "cell.json").write_text(json.dumps(record))
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": seed, **settings}))
    if every is None:
        budget = settings["training"]["total_env_steps"] if settings is not None and finished and exit_code == 0 else 0
        every = max(100, budget // max(1, len(success) - 1))
    lines = [f"{every * n},{value},{seconds * n}" for n, value in enumerate(success)]
    if success:
        (folder / "evaluations.csv").write_text("\n".join(["env_step,eval/success,time/wall_s", *lines, ""]))
    if success and exit_code in (0, 143):
        summary = {"finished": finished, "seed": seed, "env_steps": every * (len(success) - 1)}
        summary |= {"env": "MiniGrid-DoorKey-6x6-v0", "algorithm": "DQN"}
        (folder / "summary.json").write_text(json.dumps(summary))
    if metrics:
        row = ",".join(str(value) for value in metrics.values())
        (folder / "metrics.csv").write_text(f"step,{','.join(metrics)}\n100,{row}\n200,{row}\n")
    return folder


def leave_arm(
    out: Path, label: str, curves: Sequence[Sequence[float]], kind: str = "", scorer: Any = SPRITES, **options: Any
) -> None:
    """Leaves one finished run per curve, in ``<out>/<label>/seed_<n>``; ``changes`` as for `settings_of`."""
    changes = options.pop("changes", None)
    for seed, success in enumerate(curves):
        settings = settings_of(kind or label, scorer, changes)
        leave_run(out / label / f"seed_{seed}", success, settings, **options)


def tasks_in(*paths: Path) -> list[Task]:
    """Returns what a report makes of folders and files."""
    return gather(read_all(paths)[0])[0]


def texts(table: Table, row: int, *keys: str) -> list[str]:
    """Returns cells as they are shown, intervals included."""
    kinds = {column.key: column.kind for column in table.columns}
    cells = table.rows[row].cells
    return [" ".join(part for part in shown(cells.get(key), kinds[key]) if part) for key in keys]


def value(cells: Mapping[str, Cell], key: str) -> float:
    """Returns a cell's number."""
    cell = cells.get(key)
    assert isinstance(cell, Number)
    return cell.value


def row_of(table: Table, key: str, text: str) -> Mapping[str, Cell]:
    """Returns the cells of the one row with a text in a column."""
    (row,) = [row for row in table.rows if row.cells[key] == text]
    return row.cells
