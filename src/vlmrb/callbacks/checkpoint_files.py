"""A checkpoint on disk: a `.ckpt` and the replay side-car that it names, written so that a crash never leaves half.

The side-car comes first, under a name of its own; then the `.ckpt` that names it with its digest. The rename of the
`.ckpt` is the commit point: before it the older pair is whole, after it the newer one. Nothing here knows Lightning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SCHEMA = 1
REFERENCE_KEY = "vlmrb_replay"  # where a .ckpt names its side-car: {"file", "sha256", "bytes"}, or None
HEADROOM = 1.05  # of the estimated bytes must be free
LAST = "last.ckpt"
_CHECKPOINTS = "checkpoint-*.ckpt"
_SIDECARS = "replay-*.pt"
_IGNORE_HINT = "or resume with --checkpoint.ignore_replay true: the buffer then fills up again before training goes on"

Reference = dict[str, Any]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or a folder that cannot take one; the message is one line for the user."""


class CheckpointFolder:
    """Writes pairs into one folder and removes those that newer ones replace.

    Args:
        path: the folder; created by `prepare`.
        keep: pairs that stay. Only pairs written or adopted by this object are ever removed.
    """

    def __init__(self, path: Path, keep: int = 1) -> None:
        self.path = path
        self.keep = keep
        self._pairs: list[Path] = []  # committed .ckpt files, oldest first

    def prepare(self) -> None:
        """Creates the folder and tries that it can be written, before training starts.

        Raises:
            CheckpointError: it cannot.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoints into {self.path}: {error.strerror or error}") from error

    def adopt(self) -> None:
        """Takes over the pairs of an earlier process, so that this run's saves replace them."""
        self._pairs = sorted(self.path.glob(_CHECKPOINTS), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def save(
        self,
        env_steps: int,
        replay: dict[str, Any] | None,
        write_checkpoint: Callable[[Path, Reference | None], None],
        checkpoint_bytes: int = 0,
    ) -> Path:
        """Writes a pair, points ``last.ckpt`` to it, and removes older pairs last.

        Args:
            env_steps: part of both names.
            replay: what the side-car holds, plain containers of tensors and numbers; ``None`` for no side-car.
            write_checkpoint: writes the `.ckpt` to the path it gets, with the reference under `REFERENCE_KEY`.
            checkpoint_bytes: estimated size of the `.ckpt`.

        Returns:
            The `.ckpt`.

        Raises:
            OSError: no room, or the folder cannot be written. Pairs committed earlier are untouched.
        """
        self._remove_strays()
        replay = None if replay is None else _compact(replay)
        self._require_space(tensor_bytes(replay) + 2 * checkpoint_bytes)
        stem = f"{env_steps:09d}-{secrets.token_hex(4)}"
        checkpoint = self.path / f"checkpoint-{stem}.ckpt"
        sidecar = self.path / f"replay-{stem}.pt"
        try:
            reference = None if replay is None else self._write_sidecar(sidecar, replay)
            _replace(checkpoint, lambda path: write_checkpoint(path, reference))
        finally:
            if checkpoint.exists():  # committed, even if what followed failed
                self._pairs.append(checkpoint)
            else:
                sidecar.unlink(missing_ok=True)
        # A copy, not a link: small, works on every file system, and survives being uploaded.
        _replace(self.path / LAST, lambda path: shutil.copyfile(checkpoint, path))
        while len(self._pairs) > self.keep:
            self._remove_pair(self._pairs[0])
            self._pairs.pop(0)
        return checkpoint

    def _write_sidecar(self, path: Path, replay: dict[str, Any]) -> Reference:
        reference: Reference = {"file": path.name}

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                writer = _HashingWriter(file)
                try:
                    torch.save({"schema": SCHEMA, **replay}, writer)  # type: ignore[arg-type] # write and flush are enough
                except RuntimeError as error:  # torch.save reports a failed write as an inconsistent archive
                    raise writer.error or error from error
                reference.update(sha256=writer.digest.hexdigest(), bytes=writer.bytes)

        _replace(path, write)
        return reference

    def _require_space(self, estimate: int) -> None:
        free, needed = shutil.disk_usage(self.path).free, HEADROOM * estimate
        if free < needed:
            raise OSError(
                f"{self.path} has {free / 1e6:,.1f} MB free, but this checkpoint needs {needed / 1e6:,.1f} MB"
            )

    def _remove_strays(self) -> None:
        """Removes what a killed process left: temporary files, and side-cars that no `.ckpt` names."""
        for pattern in (_CHECKPOINTS, _SIDECARS, LAST):
            for path in self.path.glob(pattern + ".tmp"):
                path.unlink(missing_ok=True)
        sidecars = {path.name: path for path in self.path.glob(_SIDECARS)}
        for checkpoint in self.path.glob("*.ckpt"):
            if not sidecars:
                return
            try:
                reference = read_reference(checkpoint)
            except CheckpointError as error:  # whatever it names may be needed still
                log.warning("no clean-up of replay side-cars in %s: %s", self.path, error)
                return
            if reference is not None:
                sidecars.pop(reference["file"], None)
        for path in sidecars.values():
            path.unlink(missing_ok=True)

    def _remove_pair(self, checkpoint: Path) -> None:
        if not checkpoint.exists():
            return
        try:
            reference = read_reference(checkpoint)
        except CheckpointError:  # unreadable: goes alone; its side-car is a stray from then on
            reference = None
        checkpoint.unlink(missing_ok=True)
        if reference is not None:
            (self.path / reference["file"]).unlink(missing_ok=True)


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest `.ckpt` that can be read: ``last.ckpt`` or, should that be lost or damaged, what it copied.

    Raises:
        CheckpointError: there are some, and none can be read.
    """
    present = [path for path in (folder / LAST, *sorted(folder.glob(_CHECKPOINTS), reverse=True)) if path.exists()]
    for path in present:
        try:
            read_env_steps(path)
        except CheckpointError as error:
            log.warning("%s", error)
            continue
        if path.name != LAST:
            log.warning("going on from %s, as %s is lost", path, LAST)
        return path
    if present:
        raise CheckpointError(f"no checkpoint in {folder} can be read: remove that folder to begin the run anew")
    return None


def read_reference(checkpoint: Path) -> Reference | None:
    """Returns how a `.ckpt` names its side-car; ``None`` if it was saved without one.

    Raises:
        CheckpointError: the `.ckpt` cannot be read.
    """
    return _read(checkpoint).get(REFERENCE_KEY)


def read_env_steps(checkpoint: Path) -> int:
    """Returns the env steps at which a `.ckpt` was saved.

    Raises:
        CheckpointError: the `.ckpt` cannot be read, or is none of ours.
    """
    state = _read(checkpoint).get("vlmrb", {})
    if "env_steps" not in state:
        raise CheckpointError(f"{checkpoint} is no checkpoint of vlmrb")
    return state["env_steps"]


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint} is no readable checkpoint ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{checkpoint} is no checkpoint of vlmrb")
    return content


def verify_sidecar(folder: Path, reference: Reference) -> Path:
    """Checks that a side-car is the one that its `.ckpt` was saved with.

    Args:
        folder: where the `.ckpt` lies.
        reference: as the `.ckpt` holds it.

    Returns:
        The side-car's path.

    Raises:
        CheckpointError: it is missing or differs.
    """
    path = folder / Path(reference["file"]).name  # never outside the folder
    if not path.is_file():
        raise CheckpointError(f"replay side-car {path} is missing: put it beside its .ckpt, {_IGNORE_HINT}")
    size = path.stat().st_size
    if size != reference["bytes"]:
        raise CheckpointError(
            f"replay side-car {path} is damaged ({size:,} bytes instead of {reference['bytes']:,}): "
            f"resume from another checkpoint, {_IGNORE_HINT}"
        )
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != reference["sha256"]:
        raise CheckpointError(
            f"replay side-car {path} is damaged (its SHA-256 differs): resume from another checkpoint, {_IGNORE_HINT}"
        )
    return path


def read_sidecar(path: Path) -> dict[str, Any]:
    """Reads a verified side-car; its tensors are mapped, not yet in memory.

    Raises:
        CheckpointError: it cannot be read, or another version of this package wrote it.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"replay side-car {path} cannot be read ({type(error).__name__}): "
            f"resume from another checkpoint, {_IGNORE_HINT}"
        ) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise CheckpointError(
            f"replay side-car {path} has schema {schema}, this version of vlmrb reads schema {SCHEMA}: "
            f"resume with the version that wrote it, {_IGNORE_HINT}"
        )
    return content


def tensor_bytes(tree: Any) -> int:
    """Returns the bytes of all tensors in nested dicts, lists and tuples."""
    return sum(tensor.nbytes for tensor in _tensors(tree))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _compact(tree: Any) -> Any:
    """Copies tensors that are views: `torch.save` would write all of the storage below them."""
    if isinstance(tree, Tensor):
        return tree.clone() if tree.untyped_storage().nbytes() > tree.nbytes else tree
    if isinstance(tree, dict):
        return {key: _compact(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_compact(value) for value in tree)
    return tree


class _HashingWriter:
    """A file for `torch.save` that computes the digest on the way and remembers why a write failed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file whole or not at all, and lasting when this returns: temporary file, fsync, rename, fsync."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        _fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
