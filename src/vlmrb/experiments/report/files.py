"""How a report reads files: whatever is wrong with one becomes a `ValueError` that names it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

Kinds = Mapping[str, tuple[type, ...]]
"""Dotted name → what the value may be; a ``bool`` is no ``int``, and numbers are finite."""

Lines = Sequence[tuple[int, Mapping[str, str]]]
"""Rows of a CSV, column → cell, each with the number of its line in the file."""

Steps = NDArray[np.float64]


def damaged(path: Path, what: str) -> ValueError:
    """Returns the error to raise for a file that no report can be made of."""
    return ValueError(f"{path} is damaged: {what}; mend it, or leave it out of the report")


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns a file's content, ``None`` if there is none or a killed process left a part of it."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns a file's content, empty if there is no file.

    Raises:
        ValueError: it is no YAML, or no mapping.
    """
    if not path.exists():
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise damaged(path, "it is no YAML") from error
    if not isinstance(content, dict | None):
        raise damaged(path, "it does not hold settings by name")
    return content or {}


def require_kinds(path: Path, content: Mapping[str, Any], kinds: Kinds) -> None:
    """Requires of what a file holds that every value is what it may be; a missing one is none of this.

    Raises:
        ValueError: a value is something else.
    """
    for name, allowed in kinds.items():
        found: Any = content
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                break
            found = found[part]
        else:
            usable = bool in allowed if isinstance(found, bool) else isinstance(found, allowed)
            if not usable or (isinstance(found, float) and not math.isfinite(found)):
                raise damaged(path, f"{name} is {found!r:.60}")


def read_rows(path: Path, required: Sequence[str], *, foreign: str = "", growing: bool = False) -> Lines:
    """Returns a CSV's rows.

    Args:
        path: of the file.
        required: columns that it must have.
        foreign: what to say of a file that has not.
        growing: it is written row by row; its last line does not count while it has no end.

    Raises:
        ValueError: it lacks a column, or a row has too few cells or too many.
    """
    text = path.read_text(errors="replace")
    if growing:
        text = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise damaged(path, f"line {reader.line_num}: {error}") from error
    lacking = [name for name in required if name not in (reader.fieldnames or ())]
    if lacking:
        foreign = foreign or f"was not written by vlmrb: it lacks the columns {', '.join(lacking)}; leave it out"
        raise ValueError(f"{path} {foreign}")
    for line, row in rows:
        if None in row or None in row.values():
            raise damaged(path, f"line {line}: it has {'too many' if None in row else 'too few'} cells")
    return rows


def number(path: Path, line: int, row: Mapping[str, str], column: str) -> float:
    """Returns a cell's number; NaN and infinities are numbers here.

    Raises:
        ValueError: it holds none.
    """
    try:
        return float(row[column])
    except ValueError as error:
        raise damaged(path, f"line {line}: {column} is {row[column]!r}") from error


def read_curve(path: Path, lines: Lines, success: str) -> tuple[Steps, Steps]:
    """Returns env steps, increasing, and success in [0, 1] of evaluations, ``float64[K]`` each.

    Args:
        path: of the file, for messages.
        lines: an evaluation each.
        success: the column that holds it; env steps are in ``env_step``.

    Raises:
        ValueError: a number is none, or cannot be.
    """
    curve = [tuple(number(path, line, row, name) for name in ("env_step", success)) for line, row in lines]
    before = -1.0
    for (line, row), (step, share) in zip(lines, curve, strict=True):
        if step < 0 or not step.is_integer():  # nor are NaN and infinities integers
            raise damaged(path, f"line {line}: env_step is {row['env_step']!r}, no number of env steps")
        if step <= before:
            raise damaged(path, f"line {line}: env_step does not increase")
        if not 0 <= share <= 1:
            raise damaged(path, f"line {line}: {success} is {row[success]!r}, no share of episodes")
        before = step
    table = np.array(curve, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
