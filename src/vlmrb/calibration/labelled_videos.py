"""Makes a corpus of a user's own videos, with labels of their own."""

from __future__ import annotations

import csv
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from vlmrb.calibration.corpus import Corpus, CorpusWriter, LabelledClips, load_corpus
from vlmrb.calibration.videos import as_snapshots, frame_shape, frame_times, pad, read_frames

logger = logging.getLogger(__name__)

SUFFIXES = (".gif", ".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm")
SHARD_CLIPS = 16
_YES = ("1", "yes", "true", "y", "success")
_NO = ("0", "no", "false", "n", "failure")


class LabelledVideo(NamedTuple):
    """One line of the labels.

    Attributes:
        line: its number in the file, for error messages.
        file: the video.
        success: the label.
        start: seconds, where the clip begins.
        end: seconds, where it ends; infinite for the video's end.
    """

    line: int
    file: Path
    success: bool
    start: float = 0.0
    end: float = float("inf")


def collect_videos(
    folder: Path,
    videos: Path,
    labels: Path,
    *,
    clip_length: int,
    frame_size: int,
    command: str,
    progress: bool = True,
) -> Corpus:
    """Makes a corpus of videos, or finishes one that was interrupted.

    Each line of the labels becomes one clip: L frames spread evenly over its stretch of the video, the first and the
    last among them; a stretch of fewer frames is padded as in training. Frames of different sizes are put in the
    middle of black ones of a common size.

    Args:
        folder: of the corpus.
        videos: folder of the videos.
        labels: a CSV file with the columns ``file``, ``label`` and, if wanted, ``start`` and ``end``.
        clip_length: L.
        frame_size: longest side of the stored frames in pixels.
        command: noted in the manifest.
        progress: show a progress bar.

    Raises:
        ValueError: a label, a file or the folder cannot be used.
    """
    if clip_length < 2:
        raise ValueError(f"--clip_length {clip_length} must be at least 2 frames")
    if frame_size < 1:
        raise ValueError(f"--frame_size {frame_size} must be at least 1 pixel")
    entries = read_labels(labels, videos)
    files = sorted({entry.file for entry in entries})
    shapes = [frame_shape(file, frame_size) for file in files]
    height, width = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    writer = CorpusWriter(
        folder,
        kind="videos",
        settings={
            "clips": len(entries),
            "clip_length": clip_length,
            "frame_size": frame_size,
            "labels": hashlib.blake2b(labels.read_bytes(), digest_size=16).hexdigest(),
        },
        renderer={"frame_shape": [height, width, 3]},
        clip_length=clip_length,
        milestones=[],
        command=command,
    )
    if writer.complete:
        return load_corpus(folder)
    with tqdm(total=len(entries), initial=writer.clips, unit="clip", desc="corpus", disable=not progress) as bar:
        for start in range(writer.clips, len(entries), SHARD_CLIPS):
            part = entries[start : start + SHARD_CLIPS]
            writer.append(_clips(part, files, clip_length, frame_size, (height, width)))
            bar.update(len(part))
    unlabelled = sum(file.suffix.lower() in SUFFIXES for file in videos.iterdir()) - len(files)
    what = "1 video has" if unlabelled == 1 else f"{unlabelled} videos have"
    notes = [f"{what} no label and stayed out of the corpus ({videos})"] if unlabelled > 0 else []
    for note in notes:
        logger.warning("corpus %s: %s", folder, note)
    return writer.finish(notes)


def read_labels(labels: Path, videos: Path) -> list[LabelledVideo]:
    """Reads the labels.

    Raises:
        ValueError: naming the line that cannot be used.
    """
    if not videos.is_dir():
        raise ValueError(f"--videos {videos} is no folder")
    try:
        with labels.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = {"file", "label"} - set(reader.fieldnames or ())
            if missing:
                raise ValueError(f"--labels {labels} needs the columns file and label in its first line")
            entries = [_entry(labels, reader.line_num, row, videos) for row in reader]
    except OSError as error:
        raise ValueError(f"--labels {labels} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--labels {labels} is no CSV file: {error}") from error
    if not entries:
        raise ValueError(f"--labels {labels} holds no labels")
    return entries


def _entry(labels: Path, line: int, row: dict[str, str | None], videos: Path) -> LabelledVideo:
    where = f"--labels {labels}, line {line}"
    file = videos / (row["file"] or "").strip()
    if not file.is_file():
        raise ValueError(f"{where}: video {file} does not exist")
    label = (row["label"] or "").strip().lower()
    if label not in _YES + _NO:
        raise ValueError(f"{where}: label {row['label']!r} is neither yes nor no (1/0, true/false and so on will do)")
    try:
        start, end = float(row.get("start") or 0), float(row.get("end") or "inf")
    except ValueError as error:
        raise ValueError(f"{where}: start and end are seconds ({error})") from error
    if not 0 <= start < end:
        raise ValueError(f"{where}: the stretch from {start} s to {end} s is none")
    return LabelledVideo(line, file, label in _YES, start, end)


def _clips(
    entries: Sequence[LabelledVideo], files: list[Path], clip_length: int, frame_size: int, shape: tuple[int, int]
) -> LabelledClips:
    snapshots, lengths = [], []
    for entry in entries:
        times = frame_times(entry.file)
        inside = np.flatnonzero((times >= entry.start) & (times <= entry.end))
        if len(inside) < 2:
            raise ValueError(
                f"video {entry.file} is too short for a clip, which takes 2 frames: {len(inside)} from {entry.start} s "
                f"to {entry.end} s (line {entry.line} of the labels)"
            )
        count = min(len(inside), clip_length)
        which = inside[np.linspace(0, len(inside) - 1, count).round().astype(np.int64)]
        frames = pad(read_frames(entry.file, frame_size, which).frames, *shape)
        frames = np.concatenate([frames, np.repeat(frames[-1:], clip_length - count, axis=0)])
        snapshots.append(as_snapshots(frames)[0])
        lengths.append(count)
    return LabelledClips(
        lengths=np.array(lengths, np.int64),
        success=np.array([entry.success for entry in entries]),
        milestones=np.zeros((len(entries), 0), np.bool_),
        groups=np.array([files.index(entry.file) for entry in entries], np.int64),
        snapshots=np.stack(snapshots),
    )
