"""Where metrics go: CSV files that survive a resume, and TensorBoard files that are told of it."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class CSVTable:
    """An append-only CSV file whose columns may grow.

    A row is one line, written and flushed at once. When a row brings a new column, the file is written anew beside the
    old one and renamed over it, so that a killed process leaves either the old file or the new one. A last line without
    its newline, which only a crash leaves behind, is dropped when the file is read.

    Columns are ordered: ``leading`` first, the rest by name, whatever order they appeared in.

    Args:
        path: the file; it and its folder are created with the first row.
        leading: columns to put first.
    """

    def __init__(self, path: str | os.PathLike[str], leading: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self.leading = tuple(leading)
        self._columns: list[str] | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one row.

        Args:
            row: column → number, 0-dimensional tensor, string or ``None`` (an empty cell). Floats are written so that
                they read back exactly.

        Raises:
            OSError: the file cannot be written.
        """
        cells = {name: _cell(value) for name, value in row.items()}
        columns = self._load()
        if columns and cells.keys() <= set(columns):
            with self.path.open("a", newline="") as file:
                file.write(_lines([cells], columns))
        else:
            self._rewrite([*self.rows(), cells], {*columns, *cells})

    def rows(self) -> list[dict[str, str]]:
        """Returns all rows, cells as written (an empty string where a row has no value).

        Raises:
            ValueError: the file is damaged.
        """
        return [row for _, row in self._numbered_rows()]

    def truncate_after(self, column: str, value: float) -> int:
        """Drops the rows beyond a value of a counter.

        They were written after the checkpoint from which a run resumes, which will write them again. If none would
        stay, the file is of another run and is kept under another name (``metrics.csv`` → ``metrics.1.csv``).

        Args:
            column: the counter's column; rows without a value there stay.
            value: the last value to keep.

        Returns:
            How many rows were dropped.

        Raises:
            ValueError: the file is damaged.
        """
        columns, rows, kept = self._load(), self._numbered_rows(), []
        if rows and column not in columns:
            raise self._damaged(1, f"it does not name {column}")
        for line, row in rows:
            try:
                if not row.get(column) or float(row[column]) <= value:
                    kept.append(row)
            except ValueError as error:
                raise self._damaged(line, f"{column} is {row[column]!r}") from error
        if rows and not kept:
            number = 1
            while (aside := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
                number += 1
            self.path.rename(aside)
        elif len(kept) < len(rows):
            self._rewrite(kept, set(columns))
        return len(rows) - len(kept)

    def _numbered_rows(self) -> list[tuple[int, dict[str, str]]]:
        """Returns all rows, each with the number of its line."""
        columns, rows = self._load(), []
        if not columns:
            return []
        with self.path.open(newline="", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    cells = next(csv.reader([line], strict=True), [])
                    if cells and number > 1:
                        rows.append((number, dict(zip(columns, cells, strict=True))))
                except (ValueError, csv.Error) as error:
                    raise self._damaged(number, f"it does not fill {len(columns)} columns") from error
        return rows

    def _damaged(self, line: int, what: str) -> ValueError:
        mend = "remove" if line > 1 else "repair"
        return ValueError(f"{self.path}, line {line}, is damaged ({what}): {mend} that line, then repeat the command")

    def _load(self) -> list[str]:
        """Returns the columns of the file as it is now, having dropped a torn last line; empty if there is no file."""
        if not self.path.exists():
            self._columns = None
            return []
        if self._columns is None:
            text = self.path.read_text(errors="replace")
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                self._replace(whole)
            self._columns = next(csv.reader(io.StringIO(whole)), [])
        return self._columns

    def _rewrite(self, rows: list[dict[str, str]], columns: set[str]) -> None:
        first = [name for name in self.leading if name in columns]
        ordered = first + sorted(columns - set(first))
        self._replace(_lines([dict(zip(ordered, ordered, strict=True)), *rows], ordered))
        self._columns = ordered

    def _replace(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)


def _lines(rows: Iterable[Mapping[str, str]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([row.get(name, "") for name in columns] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    if isinstance(value, bool):
        value = int(value)
    return repr(value) if isinstance(value, float) else str(value)


class AppendingCSVLogger(Logger):
    """Metrics as a CSV file, one row per `log_metrics`; a resumed run appends where Lightning's own would start anew.

    The column ``step`` holds env steps, for all that this package logs. Two calls at one step give two rows.

    Args:
        save_dir: the run's folder.
        file_name: name of the file in it.
    """

    def __init__(self, save_dir: str | os.PathLike[str], file_name: str = "metrics.csv") -> None:
        super().__init__()
        self._save_dir = os.fspath(save_dir)
        self.table = CSVTable(Path(save_dir) / file_name, leading=("step",))

    @property
    def name(self) -> str:
        """Empty: the file lies in the run's folder itself."""
        return ""

    @property
    def version(self) -> str:
        """Empty: a run's folder holds one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return self._save_dir

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return self._save_dir

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Appends one row.

        Args:
            metrics: name → value.
            step: env steps.

        Raises:
            ValueError: ``step`` is missing, so that a resume could not tell which rows to keep.
        """
        if step is None:
            raise ValueError(f"{self.table.path.name} needs the env steps of each row: log_metrics(…, step=env_steps)")
        self.table.append({"step": step, **metrics})

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Leaves settings to the configuration file that is saved beside the metrics."""

    @rank_zero_only
    def truncate_after(self, step: int) -> None:
        """Drops the rows beyond ``step`` env steps; see `CSVTable.truncate_after`."""
        self.table.truncate_after("step", step)


def start_loggers(loggers: Iterable[Logger], env_steps: int) -> None:
    """Tells loggers at which env step a run starts or resumes, so that nothing shows what was logged beyond it.

    CSV rows beyond are dropped. TensorBoard's files only grow; a session mark makes it disregard what lies beyond.

    Args:
        loggers: the trainer's loggers; others than those two kinds are left alone.
        env_steps: env steps taken so far.
    """
    last_kept = env_steps or -1  # a new run logs at step 0
    for logger in loggers:
        if isinstance(logger, AppendingCSVLogger):
            logger.truncate_after(last_kept)
        for writer in tensorboard_writers([logger]):
            file = writer._get_file_writer()
            file.add_event(Event(step=last_kept + 1, file_version="brain.Event:2"))
            file.add_event(Event(step=last_kept + 1, session_log=SessionLog(status=SessionLog.START)))


def tensorboard_writers(loggers: Iterable[Logger]) -> list[SummaryWriter]:
    """Returns the writers of the TensorBoard loggers among ``loggers``."""
    return [logger.experiment for logger in loggers if isinstance(logger, TensorBoardLogger)]
