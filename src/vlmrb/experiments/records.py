"""What lies in a run's folder and says how it was run and how it ended: ``cell.json`` and ``summary.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD, SUMMARY = "cell.json", "summary.json"
SCHEMA = 2
RESULTS = ("evaluations.csv", "metrics.csv", SUMMARY)  # what a run leaves once training has begun

_RECORD_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("study", "config", "scheme", "config_file"), str),
    **dict.fromkeys(("scheme_parts", "overrides", "attempts"), list),
    "seed": int,
    "settings": dict,
    "exit_code": (int, type(None)),
}
_SETTINGS_FIELDS = {"config": str, "scheme": list, "overrides": list}
_SUMMARY_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("success", "best_success", "env_steps", "wall_s"), (int, float)),
    **dict.fromkeys(("env", "algorithm"), str),
    "env_steps_to": dict,
    "finished": bool,
}


def holds_run(folder: Path) -> bool:
    """Says whether training has begun in a folder; a start that failed leaves nothing to mix up or to lose."""
    return any((folder / name).exists() for name in RESULTS)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Returns what is recorded of the run in a folder; ``None`` if nothing is.

    Half a record counts as none where nothing else of a run lies beside it.

    Raises:
        ValueError: another version of this package has recorded it, or the record is damaged.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        lacking = "it is empty, or no JSON"
    elif record.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} was written by another version of vlmrb (schema {record.get('schema', 1)}, this one's "
            f"is {SCHEMA}): choose another --out, or go on there with that version"
        )
    else:
        lacking = (
            _lacking(record, _RECORD_FIELDS)
            or _lacking(record["settings"], _SETTINGS_FIELDS)
            or ("" if record["attempts"] else "it has no 'attempts'")
        )
        if not lacking:
            return record
    if not holds_run(folder):
        return None
    raise ValueError(
        f"{path} is damaged ({lacking}), so that nobody knows how the run there was made: remove that folder to run it "
        "again, or move it elsewhere"
    )


def write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a run's record, such that a crash leaves either the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    temporary = folder / f".{RECORD}.tmp"
    with temporary.open("w") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / RECORD)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns a run's ``summary.json``; ``None`` while there is none, or one from which something is missing."""
    try:
        summary = json.loads((folder / SUMMARY).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return None if not isinstance(summary, dict) or _lacking(summary, _SUMMARY_FIELDS) else summary


def _lacking(content: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]]) -> str:
    """Returns which field is missing or of a wrong type; empty if none is."""
    wrong = [name for name, kind in fields.items() if name not in content or not isinstance(content[name], kind)]
    return f"it has no proper {wrong[0]!r}" if wrong else ""
