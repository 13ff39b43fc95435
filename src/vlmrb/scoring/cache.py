"""Scores by content: a clip that was scored before, by the same scorer and with the same looks, is not scored again."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch

if TYPE_CHECKING:
    from vlmrb.scoring.scorer import Scorer

logger = logging.getLogger(__name__)

SCHEMA = 1  # stored in the file's user_version; a file of another schema is set aside like a damaged one
KEY_BYTES = 16
_HEADER = b"SQLite format 3\0"  # the first bytes of every SQLite file
_LEAST_BYTES = 128 << 10  # what an empty file takes, with its log and index
_BATCH = 500  # keys in one SELECT, below SQLite's oldest limit of 999 variables


class ScoreCache:
    """Maps a clip's content to its score, in memory and, given a path, on disk.

    The key is a digest of the scorer (name, version, prompt, frame size), the renderer's name and the clip's own
    snapshots, so nothing needs rendering to ask. The file is an SQLite database with a write-ahead log: a process
    killed at any moment loses at most the last answers, and several runs may share it. A cache never ends a run: if
    the disk is full or the file turns out damaged, it says so once, counts it and goes on in memory; a damaged file
    is renamed, never deleted. A file that is no SQLite database to begin with is somebody else's and left alone.

    Args:
        path: a file, or a folder in which ``scores.sqlite`` is kept; ``None`` keeps scores in memory only.
        max_entries: most scores held in memory, the least recently used going first; about 150 bytes each. The file
            is not bounded, since its answers may have been paid for; about 50 bytes each.

    Raises:
        ValueError: ``max_entries`` is below 1, or the file is no SQLite database.
        OSError: the file cannot be created, opened or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, max_entries: int = 200_000) -> None:
        if max_entries < 1:
            raise ValueError(f"a score cache must hold at least 1 entry, got max_entries={max_entries}")
        self.max_entries = max_entries
        self.path = None if path is None else _file_of(Path(path))
        self.hits = 0
        self.misses = 0
        self.disk_errors = 0
        self._memory: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._disk = None if self.path is None else _open(self.path)

    def __len__(self) -> int:
        """Returns the number of scores in memory."""
        return len(self._memory)

    def keys(self, scorer: Scorer, clips: ClipBatch) -> list[bytes]:
        """Digests clips as the scorer would see them.

        Args:
            scorer: whose answers are meant.
            clips: B clips; of what lies beyond a clip's own length only the amount counts, as scorers may be shown
                its last frame for so long.

        Returns:
            B keys of 16 bytes.
        """
        identity = (
            scorer.name,
            scorer.version,
            getattr(scorer, "prompt", ""),
            getattr(scorer, "frame_size", None),
            "" if clips.renderer is None else clips.renderer.name,
            clips.snapshots.dtype.str,
            clips.snapshots.shape[2:],
        )
        frames = clips.snapshots.shape[1]
        whole = hashlib.blake2b(repr(identity).encode(), digest_size=KEY_BYTES)
        padded = hashlib.blake2b(repr((*identity, frames)).encode(), digest_size=KEY_BYTES)
        keys = []
        for snapshots, length in zip(np.ascontiguousarray(clips.snapshots), clips.lengths.tolist(), strict=True):
            digest = whole.copy() if length == frames else padded.copy()
            digest.update(snapshots[:length].data)  # the byte count, and so the length, is part of the digest
            keys.append(digest.digest())
        return keys

    def get_many(self, keys: Sequence[bytes]) -> NDArray[np.float32]:
        """Looks scores up, in memory first.

        Args:
            keys: B keys.

        Returns:
            ``float32[B]`` in [0, 1], NaN where a clip has not been scored yet.
        """
        with self._lock:
            scores = [self._recall(key) for key in keys]
            missing = [key for key, score in zip(keys, scores, strict=True) if score is None]
            if missing and self._disk is not None:
                found = self._read(missing)
                self._remember(found.items())
                scores = [found.get(key) if score is None else score for key, score in zip(keys, scores, strict=True)]
            answers = np.array([np.nan if score is None else score for score in scores], dtype=np.float32)
            unknown = int(np.isnan(answers).sum())
            self.misses += unknown
            self.hits += len(keys) - unknown
        return answers

    def put_many(self, keys: Sequence[bytes], scores: NDArray[np.float32]) -> None:
        """Keeps scores.

        Args:
            keys: B keys.
            scores: ``float32[B]`` in [0, 1].

        Raises:
            ValueError: not one score per key, or a score outside [0, 1]; nothing is kept then.
        """
        scores = np.asarray(scores, dtype=np.float32)
        if scores.shape != (len(keys),):
            raise ValueError(f"score cache: {len(keys)} keys came with scores of shape {scores.shape}")
        if not ((scores >= 0) & (scores <= 1)).all():  # also catches NaN, which would be read as "not scored"
            raise ValueError("score cache: refused scores that are not numbers in [0, 1]")
        items = list(zip(keys, scores.tolist(), strict=True))
        with self._lock:
            self._remember(items)
            self._write(items)

    def stats(self) -> dict[str, float]:
        """Returns ``hits``, ``misses``, ``entries`` in memory and ``disk_errors``."""
        return {
            "hits": float(self.hits),
            "misses": float(self.misses),
            "entries": float(len(self._memory)),
            "disk_errors": float(self.disk_errors),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the scores that are in memory only; what a file holds is there again when a run resumes.

        Without them a control would meet scores in another order than in a run that was never interrupted.
        """
        known = {} if self._disk is not None else self._memory
        keys = np.frombuffer(b"".join(known), np.uint8).reshape(-1, KEY_BYTES)
        return {"keys": torch.from_numpy(keys.copy()), "scores": torch.tensor(list(known.values()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the scores of `state_dict`."""
        keys = [key.tobytes() for key in state["keys"].numpy()]
        with self._lock:
            self._remember(zip(keys, state["scores"].tolist(), strict=True))

    def close(self) -> None:
        """Closes the file; the cache goes on in memory. May be called more than once."""
        with self._lock:
            if self._disk is not None:
                self._disk.close()
                self._disk = None

    def _recall(self, key: bytes) -> float | None:
        score = self._memory.get(key)
        if score is not None:
            self._memory.move_to_end(key)
        return score

    def _remember(self, items: Iterable[tuple[bytes, float]]) -> None:
        for key, score in items:
            self._memory[key] = score
            self._memory.move_to_end(key)
        while len(self._memory) > self.max_entries:
            self._memory.popitem(last=False)

    def _read(self, keys: list[bytes]) -> dict[bytes, float]:
        assert self._disk is not None
        found: dict[bytes, float] = {}
        try:
            for start in range(0, len(keys), _BATCH):
                part = keys[start : start + _BATCH]
                places = ",".join("?" * len(part))
                found.update(self._disk.execute(f"SELECT key, score FROM scores WHERE key IN ({places})", part))
        except sqlite3.Error as error:
            self._disk_failed(error)
        return found

    def _write(self, items: list[tuple[bytes, float]]) -> None:
        if self._disk is None:
            return
        try:
            with self._disk:  # one transaction: all of a batch or none of it
                self._disk.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", items)
        except sqlite3.Error as error:
            self._disk_failed(error)

    def _disk_failed(self, error: sqlite3.Error) -> None:
        """Counts a failure; keeps the file for one that may pass (full, locked), and lets go of a damaged one."""
        self.disk_errors += 1
        if self.disk_errors == 1:
            logger.warning("score cache %s: %s; its scores are kept in memory only while this lasts", self.path, error)
        if _is_damaged(error):
            assert self._disk is not None
            assert self.path is not None
            self._disk.close()
            self._disk = None
            try:
                self._disk = _start_afresh(self.path, error)
            except OSError as failure:
                logger.warning("score cache %s: %s; going on in memory", self.path, failure)


def _file_of(path: Path) -> Path:
    return path if path.suffix and not path.is_dir() else path / "scores.sqlite"


class _OtherSchemaError(sqlite3.DatabaseError):
    """The file is a sound database, but not one that this version can read."""


def _is_damaged(error: sqlite3.Error) -> bool:
    if isinstance(error, _OtherSchemaError):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code, what is above it a detail
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _open(path: Path) -> sqlite3.Connection:
    """Opens or makes the file; a damaged one or one of another schema is set aside.

    Raises:
        ValueError: the file is no SQLite database.
        OSError: the file cannot be created, opened or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(len(_HEADER))
            if start not in (b"", _HEADER):  # SQLite may leave an empty file behind before it first writes
                raise ValueError(f"scoring.cache={path} is a file of another kind: name a new file or a folder")
        return _connect(path)
    except OSError as error:
        reason = f"scoring.cache cannot be used ({error.strerror})"
        raise OSError(error.errno, reason, error.filename or str(path)) from error
    except sqlite3.Error as error:
        if _is_damaged(error):
            return _start_afresh(path, error)
        full = shutil.disk_usage(path.parent).free < _LEAST_BYTES  # SQLite itself speaks of an I/O error
        code, reason = (errno.ENOSPC, "no space left on device") if full else (errno.EIO, str(error))
        raise OSError(code, f"scoring.cache cannot be opened ({reason})", str(path)) from error


def _connect(path: Path) -> sqlite3.Connection:
    # The learner may wait for another run's write, but not for long. Calls are serialised by the cache's own lock.
    connection = sqlite3.connect(path, timeout=0.25, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost the last answers, never the file
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise _OtherSchemaError(f"its schema is {schema}, this version reads {SCHEMA}")
        with connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID"
            )
            connection.execute(f"PRAGMA user_version={SCHEMA}")
    except BaseException:
        connection.close()
        raise
    return connection


def _start_afresh(path: Path, reason: sqlite3.Error) -> sqlite3.Connection:
    """Renames the file, with its log, to a name not taken yet and makes a new one.

    Raises:
        OSError: renaming or creating failed.
    """
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    logger.warning("score cache %s: %s; kept as %s, starting afresh", path, reason, aside.name)
    try:
        return _connect(path)
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"scoring.cache cannot be created ({error})", str(path)) from error
