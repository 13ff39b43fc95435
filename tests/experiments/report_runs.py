"""Run folders as `vlmrb fit` and `vlmrb sweep` leave them, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

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
    every: int = 100,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Leaves a run that evaluated every ``every`` env steps, from 0 on, each of them ``seconds`` after the last.

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
        every: env steps between evaluations.
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
