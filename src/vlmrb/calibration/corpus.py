"""The corpus: a folder of labelled clips, written shard by shard so that it can be killed and continued at any moment.

::

    manifest.json    what the clips are, how they were made, which shards there are, and whether it is finished
    shard_0000.npz   snapshots [K, L, S], lengths int64[K], success bool[K], milestones bool[K, M], groups int64[K]
    labels.csv       the labels again, one line a clip, to be read with anything
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.calibration.manifest import MANIFEST, SCHEMA, Kind, read_manifest, write_whole
from vlmrb.envs import EnvConfig, make_renderer
from vlmrb.locks import LOCK, lock_folder
from vlmrb.scoring.clips import ClipBatch, Renderer


@dataclass(frozen=True)
class ClipLabels:
    """What happens in clips.

    Attributes:
        lengths: ``int64[N]``, the number of real frames, 2 to L.
        success: ``bool[N]``, strict success: the goal is reached inside this very clip.
        milestones: ``bool[N, M]``, which milestones happen inside the clip; M is 0 where none are known.
        groups: ``int64[N]``; clips of one episode, or of one video, share a group and are no independent evidence.
    """

    lengths: NDArray[np.int64]
    success: NDArray[np.bool_]
    milestones: NDArray[np.bool_]
    groups: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def progress(self) -> NDArray[np.bool_]:
        """Whether the goal or any milestone is reached, ``bool[N]``."""
        return self.success | self.milestones.any(axis=1)


@dataclass(frozen=True)
class LabelledClips(ClipLabels):
    """Clips and what happens in them.

    Attributes:
        snapshots: ``[N, L, S]``; a clip shorter than L repeats its last frame.
    """

    snapshots: NDArray

    def select(self, rows: NDArray[np.int64]) -> LabelledClips:
        """Returns the clips at the given rows, ``int64[K]``."""
        return LabelledClips(**{name: array[rows] for name, array in vars(self).items()})


@dataclass(frozen=True)
class Corpus:
    """A finished corpus; its labels are in memory, its snapshots are read when they are needed.

    Attributes:
        folder: where it lies.
        manifest: what ``manifest.json`` says.
        clips: labels of all clips, in the order of the shards.
        renderer: draws the snapshots.
    """

    folder: Path
    manifest: dict[str, Any]
    clips: ClipLabels
    renderer: Renderer

    @property
    def milestones(self) -> list[str]:
        """Names of the milestones, none if the environment has none."""
        return self.manifest["milestones"]

    def labels(self) -> dict[str, NDArray[np.bool_]]:
        """Returns the labels that a scorer can be compared with, ``bool[N]`` each."""
        labels = {"success": self.clips.success}
        return labels | {"milestone": self.clips.progress} if self.milestones else labels

    def batch(self, rows: NDArray[np.int64]) -> ClipBatch:
        """Returns the clips at the given rows, ``int64[K]``, as a scorer is handed them."""
        return ClipBatch(rows.astype(np.int64), self.snapshots(rows), self.clips.lengths[rows], self.renderer)

    def snapshots(self, rows: NDArray[np.int64] | None = None) -> NDArray:
        """Returns the snapshots ``[K, L, S]`` of the clips at the given rows, ``int64[K]``; of all without any."""
        if rows is None:
            rows = np.arange(len(self.clips))
        shards = [shard for shard in self.manifest["shards"] if "file" in shard]
        ends = np.cumsum([shard["clips"] for shard in shards])
        which = np.searchsorted(ends, rows, side="right")
        parts, order = [], []
        for number in np.unique(which):
            mine, shard = np.flatnonzero(which == number), shards[number]
            stored = _shard_snapshots(self.folder / shard["file"], shard["digest"])
            parts.append(stored[rows[mine] - (ends[number] - shard["clips"])])
            order.append(mine)
        return np.concatenate(parts)[np.argsort(np.concatenate(order))]


class CorpusWriter:
    """Writes a corpus, or goes on where an interrupted one stopped.

    A shard counts once the manifest names it; both are written beside their names and renamed, so that what a killed
    process leaves behind is a corpus that is merely shorter.

    Args:
        folder: of the corpus; made if it is missing.
        kind: where the clips come from.
        settings: all that decides which clips come out, as plain types; they must be the same when it goes on.
        renderer: what the renderer needs to be built again: ``{"env": …}`` or ``{"frame_shape": [H, W, 3]}``.
        clip_length: L.
        milestones: their names.
        command: how the corpus was asked for, for whoever finds the folder.

    Attributes:
        shards: what the manifest says of the shards written so far.

    Raises:
        ValueError: the folder holds something else, or a corpus of other settings.
        RuntimeError: another process writes there, or nobody can.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: Kind,
        settings: Mapping[str, Any],
        renderer: Mapping[str, Any],
        clip_length: int,
        milestones: list[str],
        command: str,
    ) -> None:
        self.folder = folder
        self._manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            "complete": False,
            "command": command,
            "settings": dict(settings),
            "renderer": dict(renderer),
            "clip_length": clip_length,
            "milestones": milestones,
            "counts": {},
            "notes": [],
            "shards": [],
        }
        self._lock = lock_folder(folder, "--out ")
        try:
            self._begin()
        except BaseException:
            self._lock.close()
            raise

    def _begin(self) -> None:
        folder = self.folder
        found = read_manifest(folder) if (folder / MANIFEST).is_file() else None
        if found is not None and (found["shards"] or found["complete"]):
            _require_same(folder, found, self._manifest)
            self._manifest = found
        elif found is None and any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"--out {folder} holds something else than a corpus: name a new folder")
        else:
            self._save()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self._manifest["complete"]

    @property
    def shards(self) -> list[dict[str, Any]]:
        """One entry per shard written so far."""
        return self._manifest["shards"]

    @property
    def clips(self) -> int:
        """Clips written so far."""
        return sum(shard["clips"] for shard in self.shards)

    def append(self, clips: LabelledClips, **facts: Any) -> None:
        """Writes a shard.

        Args:
            clips: K ≥ 0 clips; without any, only the facts are noted.
            **facts: what else to note about the shard, as plain types.
        """
        entry: dict[str, Any] = {"clips": len(clips)} | facts
        if len(clips):
            file = io.BytesIO()
            np.savez_compressed(file, allow_pickle=False, **vars(clips))
            name = f"shard_{len(self.shards):04d}.npz"
            write_whole(self.folder / name, file.getvalue())
            entry |= {"file": name, "digest": _digest(file.getvalue())}
        self.shards.append(entry)
        self._save()

    def finish(self, notes: list[str]) -> Corpus:
        """Counts what is there, writes ``labels.csv`` and marks the corpus as finished; returns it.

        Args:
            notes: what a reader of the results has to know.
        """
        clips = _read_labels(self.folder, self._manifest)
        self._manifest["counts"] = {
            "clips": len(clips),
            "success": int(clips.success.sum()),
            "milestone": int(clips.progress.sum()),
            "episodes": len(np.unique(clips.groups)),
            "distinct": len(_distinct(self.folder, self._manifest)),
        } | {
            name: int(count) for name, count in zip(self._manifest["milestones"], clips.milestones.sum(0), strict=True)
        }
        self._manifest["notes"] = notes
        self._manifest["complete"] = True
        write_whole(self.folder / "labels.csv", _labels_csv(clips, self._manifest["milestones"]).encode())
        self._save()
        self._lock.close()
        return load_corpus(self.folder)

    def _save(self) -> None:
        write_whole(self.folder / MANIFEST, (json.dumps(self._manifest, indent=1) + "\n").encode())


def load_corpus(folder: str | Path) -> Corpus:
    """Reads a finished corpus.

    Raises:
        ValueError: there is none, it is not finished, damaged, empty, or of another schema.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest["complete"]:
        have = sum(shard["clips"] for shard in manifest["shards"])
        raise ValueError(
            f"corpus {folder} is not finished ({have} of {manifest['settings'].get('clips', '?')} clips): repeat the "
            f"command that makes it, which goes on where it stopped: {manifest['command']}"
        )
    try:
        renderer = build_renderer(manifest["renderer"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"corpus {folder} is damaged: {MANIFEST}: renderer: {error}; make it anew") from error
    return Corpus(folder, manifest, _read_labels(folder, manifest), renderer)


def build_renderer(facts: Mapping[str, Any]) -> Renderer:
    """Builds the renderer that a manifest describes."""
    if "env" in facts:
        return make_renderer(EnvConfig(**facts["env"]))
    from vlmrb.envs.gymnasium import FrameRenderer

    return FrameRenderer("video", tuple(facts["frame_shape"]), (0,), "|u1")


def env_facts(config: EnvConfig) -> dict[str, Any]:
    """Returns what `build_renderer` needs of an environment."""
    return {"env": asdict(config)}


def _require_same(folder: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for what in ("kind", "clip_length", "renderer", "settings"):
        old, new = found[what], json.loads(json.dumps(asked[what]))
        if old == new:
            continue
        names = [] if isinstance(old, dict) else [what]
        while isinstance(old, dict) and isinstance(new, dict):  # down to the setting that differs
            names.append(next(key for key in {**old, **new} if old.get(key) != new.get(key)))
            old, new = old.get(names[-1]), new.get(names[-1])
        raise ValueError(
            f"--out {folder} holds a corpus of other settings ({'.'.join(names)}: {old} there, {new} asked for): name "
            "another folder"
        )


def _read_labels(folder: Path, manifest: Mapping[str, Any]) -> ClipLabels:
    """Reads all labels, and checks that the files are what was written."""
    parts: list[ClipLabels] = []
    for shard in manifest["shards"]:
        if "file" not in shard:
            continue
        path = folder / shard["file"]
        try:
            content = path.read_bytes()
            if _digest(content) != shard["digest"]:
                raise ValueError("its content is not what was written")
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                if "snapshots" not in arrays:
                    raise ValueError("it holds no snapshots")
                parts.append(ClipLabels(**{name: arrays[name] for name in arrays if name != "snapshots"}))
            if len(parts[-1]) != shard["clips"]:
                raise ValueError(f"{len(parts[-1])} clips, where {MANIFEST} says {shard['clips']}")
        except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"corpus {folder} is damaged: {path.name}: {error}; make it anew") from error
    if not parts:
        raise ValueError(f"corpus {folder} holds no clips")
    return ClipLabels(**{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])})


@functools.lru_cache(maxsize=2)
def _shard_snapshots(path: Path, digest: str) -> NDArray:
    """Returns a shard's snapshots; the last ones are kept (by path and digest), since clips are asked for in order."""
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["snapshots"]


def _distinct(folder: Path, manifest: Mapping[str, Any]) -> set[str]:
    """Returns the digests of all clips' contents."""
    shards = [shard for shard in manifest["shards"] if "file" in shard]
    return {
        _digest(clip.tobytes())
        for shard in shards
        for clip in _shard_snapshots(folder / shard["file"], shard["digest"])
    }


def _labels_csv(clips: ClipLabels, milestones: list[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["clip", "group", "frames", "success", *milestones])
    table = np.column_stack([np.arange(len(clips)), clips.groups, clips.lengths, clips.success, clips.milestones])
    writer.writerows(table.astype(int).tolist())
    return text.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
