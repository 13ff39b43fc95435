"""One run of a sweep: its command, what its folder says about it, and whether the two agree."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from vlmrb.experiments.children import was_interrupted

RECORD = "cell.json"


@dataclass(frozen=True)
class Cell:
    """A configuration, a replay overlay and a seed."""

    config: Path
    overlay: Path
    seed: int
    folder: Path
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The overlay's name, which names the curve."""
        return self.overlay.stem

    @property
    def command(self) -> list[str]:
        """The command that runs this cell."""
        return [
            *("vlmrb", "fit", "-c", str(self.config), "-c", str(self.overlay)),
            *("--seed_everything", str(self.seed), "--run_dir", str(self.folder), "--resume", "true"),
            *self.overrides,
        ]

    @property
    def log(self) -> Path:
        """What the run printed, over all attempts."""
        return self.folder / "log.txt"

    @property
    def summary(self) -> dict[str, Any] | None:
        """Its summary.json; ``None`` while there is none, or half of one."""
        return _read_json(self.folder / "summary.json")

    @property
    def finished(self) -> bool:
        """Whether its summary covers the whole budget."""
        summary = self.summary
        return summary is not None and bool(summary["finished"])

    @property
    def holds_run(self) -> bool:
        """Whether training has begun here; a start that failed leaves nothing to mix up or to lose."""
        return any((self.folder / name).exists() for name in ("evaluations.csv", "metrics.csv", "summary.json"))

    @property
    def status(self) -> str:
        """``finished``, ``interrupted``, ``failed``, or ``unfinished``: under way, or killed with its sweep."""
        if self.finished:
            return "finished"
        record = _read_json(self.folder / RECORD)
        if record is None or record["exit_code"] is None:
            return "unfinished"
        return "interrupted" if was_interrupted(record["exit_code"]) else "failed"

    def settings(self) -> Settings:
        """Reads what this cell is to run."""
        return Settings(_digest(self.config), _digest(self.overlay), list(self.overrides))

    def last_words(self) -> str:
        """Returns the last line of its log, which is the error if it failed."""
        return last_line(self.log)

    def record_start(self) -> None:
        """Writes down what is about to run here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_record(
            {
                "config": str(self.config),
                "overlay": str(self.overlay),
                "seed": self.seed,
                "settings": asdict(self.settings()),
                "command": shlex.join(self.command),
                "exit_code": None,
            }
        )

    def record_end(self, exit_code: int) -> None:
        """Adds how the run ended."""
        self._write_record({**json.loads((self.folder / RECORD).read_text()), "exit_code": exit_code})

    def _write_record(self, content: dict[str, Any]) -> None:
        path = self.folder / RECORD
        path.with_suffix(".tmp").write_text(json.dumps(content, indent=2) + "\n")
        os.replace(path.with_suffix(".tmp"), path)


@dataclass(frozen=True)
class Settings:
    """What decides a run's results beside its seed: digests of both files' content, and the overrides."""

    config: str
    overlay: str
    overrides: list[str]


def recorded_cells(out: Path) -> list[Cell]:
    """Returns every cell that was ever started below ``out``, by scheme and seed."""
    cells = []
    for path in out.glob(f"*/seed_*/{RECORD}"):
        record = _read_json(path)
        if record is None or path.parent.name != f"seed_{record['seed']}":  # such as a copy that somebody has kept
            continue
        overrides = tuple(record["settings"]["overrides"])
        cells.append(Cell(Path(record["config"]), Path(record["overlay"]), record["seed"], path.parent, overrides))
    return sorted(cells, key=lambda cell: (cell.label, cell.seed))


def require_same_settings(cells: Sequence[Cell], out: Path) -> None:
    """Refuses to go on with, or to put beside each other, runs of different settings.

    Args:
        cells: those about to run, at least one.
        out: folder of the sweep; every cell recorded in it counts, since all of them go into one table.

    Raises:
        ValueError: a cell below ``out`` was run with another base or other overrides, or its overlay has changed.
    """
    present = {cell.folder: cell for cell in [*recorded_cells(out), *cells]}
    for cell in present.values():
        if not cell.holds_run:
            continue
        record = _read_json(cell.folder / RECORD)
        if record is None:
            raise ValueError(f"{cell.folder} holds a run that no sweep has recorded: choose another --out")
        then, same_scheme = Settings(**record["settings"]), [other for other in cells if other.label == cell.label]
        now = (same_scheme or cells)[0].settings()
        differences = [
            *(["another content of --base"] if then.config != now.config else []),
            *(["another content of its overlay"] if same_scheme and then.overlay != now.overlay else []),
            *([f"--overrides {json.dumps(then.overrides)}"] if then.overrides != now.overrides else []),
        ]
        if differences:
            raise ValueError(
                f"{cell.folder} was run with {' and '.join(differences)}: choose another --out, or remove that folder"
            )


def _digest(path: Path) -> str:
    """Returns the SHA-256 of what a YAML file says; comments and layout do not count."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Returns a file's content; ``None`` if there is none, or a killed process left a part of it."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def last_line(path: Path) -> str:
    """Returns a log's last line that says something."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()] if path.exists() else []
    return next((line for line in reversed(lines) if line), "it printed nothing")
