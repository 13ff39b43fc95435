"""Shows the clips that tell most about a scorer: its highest, its lowest, and those it gets most wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vlmrb.calibration.corpus import Corpus
from vlmrb.calibration.manifest import write_whole
from vlmrb.media import encode_gif, enlarge

SHOWN_SIZE = 160  # pixels of a clip on the page
FPS = 8.0


@dataclass(frozen=True)
class Shown:
    """A clip on the page.

    Attributes:
        file: name of the GIF.
        clip: its number in the corpus.
        score: of the scorer, in [0, 1].
        happens: what happens in it, in words.
    """

    file: str
    clip: int
    score: float
    happens: str


def pick(
    scores: NDArray[np.float32], labels: NDArray[np.bool_], threshold: float, count: int, seed: int = 0
) -> dict[str, NDArray[np.int64]]:
    """Picks clips; among equal scores chance decides, so that they are not all from one place of the corpus.

    Args:
        scores: ``float32[N]`` in [0, 1].
        labels: ``bool[N]``.
        threshold: τ; a clip is wrong if it is on the other side of it than its label.
        count: most clips of each kind.
        seed: of the choice among equals.

    Returns:
        Positions in the corpus for ``highest``, ``lowest``, ``missed`` (lowest of those with success below τ) and
        ``false alarms`` (highest of those without success above τ).
    """
    order = np.random.default_rng(seed).permutation(len(scores))
    rising = order[np.argsort(scores[order], kind="stable")]
    above = scores > np.float32(threshold)
    return {
        "highest": rising[::-1][:count],
        "lowest": rising[:count],
        "missed": rising[(labels & ~above)[rising]][:count],
        "false alarms": rising[::-1][(~labels & above)[rising[::-1]]][:count],
    }


def write_clips(corpus: Corpus, rows: NDArray[np.int64], scores: NDArray[np.float32], folder: Path) -> list[Shown]:
    """Writes clips as GIFs, by their places in the corpus.

    Args:
        corpus: where the clips are.
        rows: ``int64[K]``, positions in the corpus.
        scores: ``float32[N]``, of all clips.
        folder: for the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    for row in rows.tolist():
        path = folder / f"clip_{row:05d}.gif"  # one that is there may be another corpus's, or broken off
        batch = corpus.batch(np.array([row]))
        frames = batch.frames()[0]
        if max(frames.shape[1:3]) > SHOWN_SIZE:
            frames = corpus.renderer.render(batch.snapshots[0], SHOWN_SIZE)
        write_whole(path, encode_gif(enlarge(frames[: batch.lengths[0]], SHOWN_SIZE), FPS))
        shown.append(Shown(path.name, row, float(scores[row]), happens(corpus, row)))
    return shown


def happens(corpus: Corpus, row: int) -> str:
    """Says what happens in a clip, in words."""
    if not corpus.milestones:
        return "success" if corpus.clips.success[row] else "no success"
    reached = [name for name, seen in zip(corpus.milestones, corpus.clips.milestones[row], strict=True) if seen]
    if corpus.clips.success[row] and "goal" not in reached:
        reached.append("success")
    return ", ".join(reached) or "nothing"
