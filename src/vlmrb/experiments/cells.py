"""One run of a study: its command, what its folder says about it, and whether the two agree.

A run lies in ``<out>/<config>/<scheme>/seed_<n>``. Beside what `vlmrb fit` writes (config.yaml, summary.json,
evaluations.csv, metrics.csv, checkpoints) its folder holds ``log.txt``, what the run printed, and the record
``cell.json``, written whenever the run starts and ends:

- ``schema``: `SCHEMA`; records without it, or with another one, are of another version and refused.
- ``study``: the study's name.
- ``config``, ``scheme``, ``seed``: the configuration's file name without its ending, the scheme's label, the seed; the
  folder's path is made of these.
- ``config_file``, ``scheme_parts``, ``overrides``: what they stand for: a path; a list of overlays' paths and option
  strings; a list of arguments of `vlmrb fit`.
- ``settings``: the same by content: ``config`` and ``scheme`` have SHA-256 digests where the above have paths.
- ``command``: a `vlmrb fit` command, to be given where the sweep was given.
- ``exit_code``: of the latest attempt: negative if a signal killed it, null while the run is under way, or if it was
  killed together with what had started it.
- ``attempts``: one entry per start, oldest first: ``started`` and ``ended`` (UTC), ``exit_code``, ``versions`` (of
  Python and packages) and ``git`` (see `vlmrb.experiments.provenance`).

Nothing in it names a machine, and paths are relative if the study's are.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from vlmrb.experiments.children import was_interrupted
from vlmrb.experiments.provenance import git_states, versions
from vlmrb.experiments.records import RECORD, SCHEMA, holds_run, read_record, read_summary, write_record

FAILED = 1  # exit code of a run that did not get as far as having one


@dataclass(frozen=True)
class Scheme:
    """What is put on top of a configuration, under the name of a curve.

    Attributes:
        label: names folders and curves.
        parts: overlays' paths, and strings of options such as ``--replay.lam_max 0.25``; later ones win.
    """

    label: str
    parts: tuple[str, ...]

    @property
    def overlays(self) -> list[Path]:
        """Returns the overlays' paths."""
        return [Path(part) for part in self.parts if not part.startswith("-")]

    @property
    def arguments(self) -> list[str]:
        """The scheme as arguments of `vlmrb fit`."""
        split = (shlex.split(part) if part.startswith("-") else ["-c", part] for part in self.parts)
        return [argument for arguments in split for argument in arguments]


@dataclass(frozen=True)
class Settings:
    """What decides a run's results beside its seed: digests of the files' content, options, and overrides."""

    config: str
    scheme: list[str]
    overrides: list[str]


@dataclass(frozen=True)
class Cell:
    """A configuration, a scheme and a seed.

    Attributes:
        config: the configuration's path.
        scheme: see `Scheme`.
        seed: the run's seed.
        folder: where the run lies.
        overrides: further arguments of `vlmrb fit`, the same for all runs of a study.
        study: the study's name.
    """

    config: Path
    scheme: Scheme
    seed: int
    folder: Path
    overrides: tuple[str, ...] = ()
    study: str = ""

    @property
    def label(self) -> str:
        """The scheme's label, which names the curve."""
        return self.scheme.label

    @property
    def name(self) -> str:
        """What messages call this run."""
        return f"{self.config.stem} {self.label} seed {self.seed}"

    @property
    def arguments(self) -> list[str]:
        """The settings that it shares with other seeds, as arguments of `vlmrb fit`."""
        return ["-c", str(self.config), *self.scheme.arguments, *self.overrides]

    @property
    def command(self) -> list[str]:
        """The command that runs this cell."""
        own = ["--seed_everything", str(self.seed), "--run_dir", str(self.folder), "--resume", "true"]
        return ["vlmrb", "fit", *self.arguments, *own]

    @property
    def log(self) -> Path:
        """What the run printed, over all attempts."""
        return self.folder / "log.txt"

    @property
    def summary(self) -> dict[str, Any] | None:
        """Its summary.json; ``None`` while there is none, or one from which something is missing."""
        return read_summary(self.folder)

    @property
    def finished(self) -> bool:
        """Whether its summary covers the whole budget."""
        summary = self.summary
        return summary is not None and bool(summary["finished"])

    @property
    def share_scored(self) -> float | None:
        """Share of its clips that its scorer has scored, once training has ended; ``None`` without a scorer."""
        scoring = (self.summary or {}).get("scoring")
        share = scoring.get("share_scored") if isinstance(scoring, dict) else None
        return share if isinstance(share, int | float) else None

    @property
    def holds_run(self) -> bool:
        """Whether training has begun here; a start that failed leaves nothing to mix up or to lose."""
        return holds_run(self.folder)

    @property
    def saved(self) -> bool:
        """Whether it would go on from a checkpoint."""
        return (self.folder / "checkpoints" / "last.ckpt").exists()

    @property
    def exit_code(self) -> int | None:
        """How the latest attempt ended; ``None`` if there was none, or it has not."""
        record = read_record(self.folder)
        return None if record is None else record["exit_code"]

    @property
    def status(self) -> str:
        """``finished``, ``interrupted``, ``failed``, or ``unfinished``: under way, or killed with what started it."""
        if self.finished:
            return "finished"
        exit_code = self.exit_code
        if exit_code is None:
            return "unfinished"
        return "interrupted" if was_interrupted(exit_code) else "failed"

    def settings(self) -> Settings:
        """Reads what this cell is to run.

        Raises:
            ValueError: a file is no YAML.
        """
        scheme = [part if part.startswith("-") else _digest(Path(part)) for part in self.scheme.parts]
        return Settings(_digest(self.config), scheme, list(self.overrides))

    def last_words(self, lines: int = 1) -> list[str]:
        """Returns the last lines of its log that say something; the very last is the error if it failed."""
        return last_lines(self.log, lines)

    def record_start(self) -> None:
        """Writes down what is about to run here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        earlier = read_record(self.folder)
        attempt = {
            "started": _now(),
            "ended": None,
            "exit_code": None,
            "versions": versions(),
            "git": git_states(),
        }
        content = {
            "schema": SCHEMA,
            "study": self.study,
            "config": self.config.stem,
            "scheme": self.label,
            "seed": self.seed,
            "config_file": str(self.config),
            "scheme_parts": list(self.scheme.parts),
            "overrides": list(self.overrides),
            "settings": asdict(self.settings()),
            "command": shlex.join(self.command),
            "exit_code": None,
            "attempts": [*(earlier["attempts"] if earlier else ()), attempt],
        }
        write_record(self.folder, content)

    def record_end(self, exit_code: int) -> None:
        """Adds how the run ended."""
        record = read_record(self.folder)
        assert record is not None
        record["exit_code"] = exit_code
        record["attempts"][-1] |= {"ended": _now(), "exit_code": exit_code}
        write_record(self.folder, record)

    def record_failure(self, reason: str) -> None:
        """Records that the run failed, in its log as well, when it cannot say so itself."""
        record = read_record(self.folder)
        if record is None or record["attempts"][-1]["ended"]:
            self.record_start()
        with self.log.open("a") as log:
            log.write(f"{reason}\n")
        self.record_end(FAILED)


def recorded_cells(out: Path) -> list[Cell]:
    """Returns every cell that was ever started below ``out``, by configuration, scheme and seed.

    Raises:
        ValueError: another version has recorded one of them, or a record is damaged.
    """
    for path in out.glob(f"*/seed_*/{RECORD}"):  # where the first version's runs lie
        read_record(path.parent)
    cells = []
    for path in out.glob(f"*/*/seed_*/{RECORD}"):
        record = read_record(path.parent)
        if record is None:
            continue
        cell = Cell(
            Path(record["config_file"]),
            Scheme(record["scheme"], tuple(record["scheme_parts"])),
            record["seed"],
            path.parent,
            tuple(record["overrides"]),
            record["study"],
        )
        if path.parent == folder_of(out, cell.config, cell.label, cell.seed):  # not a copy that somebody has kept
            cells.append(cell)
    return sorted(cells, key=lambda cell: (cell.config.stem, cell.label, cell.seed))


def folder_of(out: Path, config: Path, label: str, seed: int) -> Path:
    """Returns where a run of a study lies."""
    return out / config.stem / label / f"seed_{seed}"


def require_same_settings(cells: Sequence[Cell], out: Path) -> None:
    """Refuses to go on with, or to put beside each other, runs of different settings.

    Args:
        cells: those about to run.
        out: folder of the study; every cell recorded in it for one of their configurations counts, since all of them
            go into one table.

    Raises:
        ValueError: a cell below ``out`` was run with another content of its configuration or scheme, with other
            overrides, or by another version; or its record is damaged.
    """
    now = {(cell.config.stem, cell.label): cell.settings() for cell in cells}
    for_config = {config: settings for (config, _), settings in now.items()}
    present = {cell.folder: cell for cell in [*recorded_cells(out), *cells]}
    for cell in present.values():
        if cell.config.stem not in for_config or not cell.holds_run:
            continue
        record = read_record(cell.folder)
        if record is None:
            raise ValueError(f"{cell.folder} holds a run that no sweep has recorded: choose another --out")
        then = Settings(**record["settings"])
        same_scheme = now.get((cell.config.stem, cell.label))
        settings = same_scheme or for_config[cell.config.stem]
        differences = [
            *([f"another content of {cell.config}"] if then.config != settings.config else []),
            *(["another content of its scheme"] if same_scheme and then.scheme != same_scheme.scheme else []),
            *([f"--overrides {json.dumps(then.overrides)}"] if then.overrides != settings.overrides else []),
        ]
        if differences:
            raise ValueError(
                f"{cell.folder} was run with {' and '.join(differences)}: choose another --out, or remove that folder"
            )


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last lines of a log that say something, at least one."""
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines()] if path.exists() else []
    return [line for line in lines if line][-count:] or ["it printed nothing"]


def _digest(path: Path) -> str:
    """Returns the SHA-256 of what a YAML file says; comments and layout do not count."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
