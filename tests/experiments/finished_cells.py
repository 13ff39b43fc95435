"""Cells as `vlmrb fit` leaves them, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlmrb.experiments.cells import Cell, Scheme, folder_of


def make_cell(
    out: Path, scheme: str = "uniform", seed: int = 0, overrides: Sequence[str] = (), config: str = "base"
) -> Cell:
    base, overlay = out.parent / f"{config}.yaml", out.parent / f"{scheme}.yaml"
    for path in (base, overlay):
        if not path.exists():
            path.write_text("replay: {capacity: 1000}\n")
    folder = folder_of(out, base, scheme, seed)
    return Cell(base, Scheme(scheme, (str(overlay),)), seed, folder, tuple(overrides))


def train(
    cell: Cell,
    successes: Sequence[float],
    finished: bool = True,
    exit_code: int | None = 0,
    scoring: Mapping[str, float] | None = None,
) -> None:
    """Leaves what a run leaves that evaluated every 100 env steps; a finished one ends with its last evaluation."""
    cell.record_start()
    history = [(100 * number, success) for number, success in enumerate(successes)]
    lines = ["env_step,eval/success", *(f"{step},{success}" for step, success in history)]
    (cell.folder / "evaluations.csv").write_text("\n".join([*lines, ""]))
    (cell.folder / "checkpoints").mkdir()
    (cell.folder / "checkpoints" / "last.ckpt").touch()
    summary = {
        "success": sum(successes[-3:]) / 3,
        "best_success": max(successes),
        "env_steps": history[-1][0],
        "env_steps_to": {
            str(threshold): next((step for step, success in history if success >= threshold), None)
            for threshold in (0.5, 0.8, 0.9)
        },
        "wall_s": 10.0,
        "finished": finished,
        "env": "World-v0",
        "algorithm": "DQN",
        "scoring": scoring or {},
    }
    (cell.folder / "summary.json").write_text(json.dumps(summary))
    if exit_code is not None:
        cell.record_end(exit_code)
