"""Tables of numbers with intervals and gaps, and how they are written as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vlmrb.experiments.report.statistics import Estimate
from vlmrb.plots import short_number

Kind = Literal[
    "text",
    "share",
    "fine",
    "signed",
    "portion",
    "steps",
    "change",
    "percent",
    "times",
    "seconds",
    "rate",
    "plain",
    "threshold",
]
Mark = Literal["", "smaller", "other", "paper"]
GAP = "–"
_MARKDOWN = re.compile(r"[\\`*<&|~$]|\[(?=[^]]*\]\()|(?<!\w)_|_(?!\w)")  # a bracket only where it begins a link


@dataclass(frozen=True)
class Number:
    """A cell that holds a number.

    Attributes:
        value: NaN is a gap.
        low: lower end of its 95 % interval, NaN if it has none.
        high: upper end.
        runs: in it, 0 if that is not known.
        reached: of env steps to a success: how many of the runs got there; ``None`` for other numbers.
        spread: ±, as printed in the paper, NaN if there is none.
        why: of a gap, why there is no number, where that is worth a word.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    runs: int = 0
    reached: int | None = None
    spread: float = math.nan
    why: str = ""

    @classmethod
    def of(cls, estimate: Estimate, reached: int | None = None) -> Number:
        """Takes over an estimate."""
        return cls(estimate.value, estimate.low, estimate.high, estimate.runs, reached)

    @property
    def known(self) -> bool:
        """Whether there is a number."""
        return not math.isnan(self.value)


Cell = Number | str | None
"""``None`` is a gap: nothing was run or nothing is known."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        key: its name in the CSV.
        head: its name for people.
        kind: what its numbers are.
        group: a head above that of several columns, empty for none.
        paper: whether the paper's figures stand in it.
    """

    key: str
    head: str
    kind: Kind = "text"
    group: str = ""
    paper: bool = False


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        cells: by the columns' keys; what is missing is a gap.
        mark: ``smaller`` for what is no task of the paper, ``other`` for what is not finished, ``paper`` for figures of
            the paper that stand in a row of their own.
        section: a line above it and those that follow with the same text, empty for none.
    """

    cells: Mapping[str, Cell]
    mark: Mark = ""
    section: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        key: its file's name.
        title: says what it holds.
        columns: at least one.
        rows: possibly none.
        lead: what to know before reading it.
        notes: what to know of single rows or numbers.
        number: the paper's number for its table, empty where it is not known for sure.
        ours: whether any number in it is ours.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    lead: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    number: str = ""

    @property
    def ours(self) -> bool:
        """Whether a number in it is ours."""
        keys = [column.key for column in self.columns if not column.paper and column.kind != "text"]
        cells = [row.cells.get(key) for row in self.rows if row.mark != "paper" for key in keys]
        return any(isinstance(cell, Number) and cell.known for cell in cells)


def shown(cell: Cell, kind: Kind) -> tuple[str, str]:
    """Returns a cell's text, and what stands smaller behind it: interval, spread, how many got there, why a gap is."""
    if cell is None or (isinstance(cell, Number) and not cell.known):
        return GAP, cell.why if cell else ""
    if isinstance(cell, str):
        return cell, ""
    text = _write(cell.value, kind)
    behind = []
    if not math.isnan(cell.spread):
        behind.append(f"± {_write(cell.spread, kind)}")
    if not math.isnan(cell.low) and not (kind == "steps" and cell.reached == 0):
        behind.append(f"[{_write(cell.low, kind, True)}, {_write(cell.high, kind, True)}]")
    if cell.reached is not None and cell.reached < cell.runs:
        text = f">{text}" if cell.reached else "never"
        behind.append(f"({cell.reached} of {cell.runs})" if cell.reached else f"(in {_write(cell.value, kind)})")
    return text, " ".join(behind)


def _write(value: float, kind: Kind, bound: bool = False) -> str:
    if kind == "share":
        return f"{value:.2f}"
    if kind == "fine":
        return f"{value:.3f}"
    if kind == "signed":
        return f"{value:+.3f}".replace("-", "−")
    if kind == "portion":
        return f"{100 * value:.1f} %"
    if kind == "threshold":
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if kind == "steps":
        return short_number(float(f"{value:.3g}"))
    if kind == "change":  # of a quantity that is better the smaller it is
        percent = 100 * value
        if bound:
            return f"{percent:.0f}".replace("-", "−")
        return f"{abs(percent):.0f} % {'less' if percent >= 0 else 'more'}"
    if kind == "percent":
        return f"{100 * value:+.1f} %".replace("-", "−") if not bound else f"{100 * value:+.0f}".replace("-", "−")
    if kind == "times":
        return f"{value:.2f}×"
    if kind == "seconds":
        return f"{value:,.0f} s" if value >= 10 else f"{value:.3g} s"
    return f"{value:,.0f}" if kind == "rate" or value >= 100 else f"{value:.3g}"


def slug(text: str) -> str:
    """Returns a text as a part of a file's or a column's name: lower case, without blanks and signs."""
    return re.sub(r"[^\w-]+", "_", text).strip("_").lower()


def unlike(name: str, taken: Collection[str]) -> str:
    """Returns a name that is not taken: itself, or with a number behind it."""
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def to_csv(table: Table) -> str:
    """Writes a table as CSV: plain numbers, gaps empty, intervals in columns of their own where there are any."""
    fields: list[tuple[Column, str]] = []
    for column in table.columns:
        cells = [cell for row in table.rows if isinstance(cell := row.cells.get(column.key), Number)]
        fields.append((column, "value"))
        for name in ("low", "high", "spread"):
            if any(not math.isnan(getattr(cell, name)) for cell in cells):
                fields.append((column, name))
        if any(cell.reached is not None for cell in cells):
            fields.append((column, "reached"))
        if any(cell.known and cell.runs for cell in cells):
            fields.append((column, "runs"))
        if any(cell.why for cell in cells):
            fields.append((column, "why"))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sections = any(row.section for row in table.rows)
    head = [column.key if name == "value" else f"{column.key}_{name}" for column, name in fields]
    writer.writerow((["section"] if sections else []) + head)
    for row in table.rows:
        line = [_plain(row.cells.get(column.key), name) for column, name in fields]
        writer.writerow(([row.section] if sections else []) + line)
    return text.getvalue()


def _plain(cell: Cell, name: str) -> str:
    if isinstance(cell, str) and name == "value":
        return cell
    if not isinstance(cell, Number) or not (cell.known or name == "why"):
        return ""
    value = getattr(cell, name)
    if value is None or (name == "runs" and not value) or (isinstance(value, float) and math.isnan(value)):
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() or abs(value) >= 1e5 else f"{value:.6g}"


def to_markdown(table: Table) -> str:
    """Writes a table as Markdown, with its title, lead and notes; only the lead may hold Markdown of its own."""
    lines = [f"## {_literal(table.title)}", ""]
    if table.lead:
        lines += [table.lead, ""]
    heads = [f"{column.group}: {column.head}" if column.group else column.head for column in table.columns]
    lines += [_line(map(_literal, heads)), _line("---" for _ in heads)]
    section = ""
    for row in table.rows:
        if row.section != section:
            section = row.section
            lines.append(_line([f"*{_literal(section)}*", *("" for _ in heads[1:])]))
        cells = [shown(row.cells.get(column.key), column.kind) for column in table.columns]
        lines.append(_line(_literal(" ".join(part for part in cell if part)) for cell in cells))
    lines += ["", *(f"- {_literal(note)}" for note in table.notes), *([""] if table.notes else [])]
    return "\n".join(lines)


def _literal(text: str) -> str:
    """Returns Markdown that shows a text as it is, on one line."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
