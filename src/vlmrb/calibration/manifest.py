"""The manifest of a corpus: what is in the folder, and whether it can be read."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
MANIFEST = "manifest.json"
Kind = Literal["environment", "videos"]
_ENTRIES = {
    **dict.fromkeys(("kind", "command"), str),
    **dict.fromkeys(("settings", "renderer", "counts"), dict),
    **dict.fromkeys(("milestones", "notes", "shards"), list),
    **{"complete": bool, "clip_length": int},
}  # of a manifest, beside its schema


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a corpus's manifest.

    Raises:
        ValueError: the folder is missing or holds no corpus, or one that this version cannot read.
    """
    if not folder.is_dir():
        raise ValueError(f"corpus {folder} does not exist: make one with vlmrb corpus --out {folder}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        schema = manifest["schema"]
    except OSError as error:
        raise ValueError(f"{folder} is no corpus: it holds no {MANIFEST}; make one with vlmrb corpus") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no corpus: its {MANIFEST} cannot be read ({error})") from error
    if schema != SCHEMA:
        raise ValueError(f"corpus {folder} has schema {schema}, this version reads {SCHEMA}: make it anew")
    broken = [key for key, kind in _ENTRIES.items() if not isinstance(manifest.get(key), kind)]
    if "shards" not in broken and not all(_is_shard(shard) for shard in manifest["shards"]):
        broken.append("shards")
    if broken:
        raise ValueError(f"corpus {folder} is damaged: {MANIFEST} has no usable {', '.join(broken)}; make it anew")
    return manifest


def _is_shard(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("clips"), int):
        return False
    return "file" not in entry or all(isinstance(entry.get(key), str) for key in ("file", "digest"))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file beside its name and renames it, so that it is there whole or not at all.

    Raises:
        OSError: naming the file; what was there stays.
    """
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:  # of a full disk, the system's own error names no file
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
