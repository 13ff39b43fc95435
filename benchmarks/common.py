"""What all benchmarks share: pairs measured in turn, a table, and a JSON file for machines.

This is meant for noisy machines: two things are compared only within one run, one right after the other, and the
median of the pairs' ratios is the answer.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

_PACKAGES = ("vlmrb", "torch", "torchrl", "tensordict", "lightning", "numpy", "minigrid", "gymnasium")


class Headline(TypedDict):
    """The one number a benchmark is about."""

    name: str
    value: float
    unit: str


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")


def rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """Repeats ``work`` for about so many seconds.

    Args:
        work: what is timed.
        amount: what one call gets done, in the rate's unit.
        seconds: lower bound of the time spent; at least one call is made.

    Returns:
        Amount per second.
    """
    calls, start = 0, time.perf_counter()
    while True:
        work()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return amount * calls / elapsed


def paired(first: Callable[[], float], second: Callable[[], float], pairs: int) -> list[float]:
    """Measures two things in turn, the order within a pair alternating, so that drift and warm-up favour neither.

    Args:
        first: returns its measurement, a rate or a time.
        second: the same for what it is compared with.
        pairs: how many pairs.

    Returns:
        One ratio, first ÷ second, for each pair.
    """
    ratios = []
    for pair in range(pairs):
        if pair % 2:
            denominator, numerator = second(), first()
        else:
            numerator, denominator = first(), second()
        ratios.append(numerator / denominator)
    return ratios


def report(headline: Headline, rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints rows and headline, and writes them with command and versions where ``--json`` says.

    Args:
        headline: name, value and unit.
        rows: one dictionary a row; not every row has to have every column.
        args: parsed arguments, with ``json``.
    """
    print_table(rows)
    print(f"\n{headline['name']}: {headline['value']} {headline['unit']}")
    if args.json is not None:
        versions = {name: version(name) for name in _PACKAGES}
        result = {
            "headline": headline,
            "rows": list(rows),
            "command": shlex.join(["python", *sys.argv]),
            "versions": {"python": platform.python_version(), **versions},
        }
        args.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows under their keys, numbers to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    print("  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip())
    for row, line in zip(rows, cells, strict=True):
        parts = [
            cell.rjust(width) if isinstance(row.get(column), int | float) else cell.ljust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
