"""What halves and beginnings of positive clips (`scoring.bisect_by`) find of the events in them, by how many calls.

Clips of a corpus are scored as a whole, and the positive ones searched in both ways with the same scorer. What is found
is compared with the transitions at which the simulator's own state shows a milestone, and with what would be found if
the located windows lay anywhere else in their clips ("by chance").

    vlmrb corpus -c configs/minigrid/doorkey_8x8_small_dqn.yaml --policy scripted --clips 600 \
      --out runs/corpora/doorkey_8x8_small
    python benchmarks/credit.py runs/corpora/doorkey_8x8_small configs/scorer/sprites.yaml configs/scorer/tiny_vlm.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.calibration.corpus import Corpus, load_corpus
from vlmrb.calibration.scores import Candidate, ask, load_candidates
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.windows import SEARCHES, Search, Way, Window, cut

from common import add_json_option, report

Score = Callable[[ClipBatch], NDArray[np.float32]]


def true_events(corpus: Corpus, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns the transitions of clips ``int64[K]`` at which a milestone happens, ``bool[K, L − 1]``."""
    clips = corpus.batch(rows)
    found = np.zeros((len(clips), clips.snapshots.shape[1] - 1), bool)
    for step in range(found.shape[1]):
        two = ClipBatch(clips.clip_ids, clips.snapshots[:, step : step + 2], np.full(len(clips), 2), clips.renderer)
        found[:, step] = MilestonesScorer().events(two).any(axis=1) & (step + 1 < clips.lengths)
    return found


def scoring(candidate: Candidate) -> Score:
    """Returns how the candidate scores any number of clips, ``float32[B]``."""

    def score(clips: ClipBatch) -> NDArray[np.float32]:
        starts = range(0, len(clips), candidate.batch_clips)
        parts = [np.arange(start, min(start + candidate.batch_clips, len(clips))) for start in starts]
        return np.concatenate([ask(candidate.scorer, candidate.shown(clips.select(part))) for part in parts])

    return score


def locate(
    corpus: Corpus, rows: NDArray[np.int64], by: Way, least: int, positive: Callable[[ClipBatch], NDArray[np.bool_]]
) -> tuple[NDArray[np.bool_], list[int]]:
    """Searches positive clips.

    Args:
        corpus: of the clips.
        rows: ``int64[K]``, the clips.
        by: the way.
        least: frames down to which it goes.
        positive: what the scorer says of windows, ``bool[B]``.

    Returns:
        The decisive transitions ``bool[K, L − 1]``, and the frames of all windows that the scorer was shown.
    """
    decisive = np.zeros((len(rows), corpus.manifest["clip_length"] - 1), bool)
    frames: list[int] = []
    lengths = corpus.clips.lengths[rows].tolist()
    going: list[tuple[int, Search, list[bool] | None]] = [
        (place, SEARCHES[by](Window(row, 0, length - 1), least), None)
        for place, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True))
    ]
    while going:
        waiting: list[tuple[int, Search, list[Window]]] = []
        for place, search, answers in going:
            try:
                waiting.append((place, search, next(search) if answers is None else search.send(answers)))
            except StopIteration as end:
                for window in end.value:
                    decisive[place, window.first : window.last] = True
        windows = [window for _, _, asked in waiting for window in asked]
        if not windows:
            break
        frames += [window.frames for window in windows]
        whole = corpus.batch(np.array([window.clip_id for window in windows]))
        told = iter(positive(cut(whole, windows)).tolist())
        going = [(place, search, [next(told) for _ in asked]) for place, search, asked in waiting]
    return decisive, frames


def compare(corpus: Corpus, candidate: Candidate, least: int) -> list[dict[str, Any]]:
    """Returns a row for each way."""
    candidate.scorer.setup()
    score, everything = scoring(candidate), np.arange(len(corpus.clips))
    threshold = np.float32(candidate.threshold)
    positive = score(corpus.batch(everything)) > threshold
    events = true_events(corpus, everything)
    rows = np.flatnonzero(positive & events.any(axis=1))
    events, lengths = events[rows], corpus.clips.lengths[rows]
    first = np.arange(events.shape[1]) == events.argmax(axis=1)[:, None]
    found = []
    for by in SEARCHES:
        decisive, frames = locate(corpus, rows, by, least, lambda clips: score(clips) > threshold)
        shifts = [
            np.mean([(np.roll(where[: n - 1], shift) & what[: n - 1]).any() for shift in range(n - 1)])
            for where, what, n in zip(decisive, events, lengths.tolist(), strict=True)
        ]
        found.append(
            {
                "scorer": candidate.label,
                "by": by,
                "true positives": len(rows),
                "false positives": int(positive.sum()) - len(rows),
                "hold an event": float((decisive & events).any(axis=1).mean()),
                "by chance": float(np.mean(shifts)),
                "hold the first": float((decisive & first).any(axis=1).mean()),
                "of all events": float((decisive & events).sum() / events.sum()),
                "transitions": float(decisive.sum(axis=1).mean()),
                "of": float((lengths - 1).mean()),
                "calls per positive": len(frames) / len(rows),
                "frames per positive": sum(frames) / len(rows),
            }
        )
    candidate.scorer.close()
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="folder of a corpus whose milestones are known")
    parser.add_argument("scorers", nargs="+", help="configurations that name one scorer each")
    parser.add_argument("--bisect_to", type=int, default=4, help="frames, as scoring.bisect_to")
    add_json_option(parser)
    arguments = parser.parse_args()
    corpus = load_corpus(arguments.corpus)
    if not corpus.milestones:
        raise SystemExit(f"{arguments.corpus} knows no milestones to compare with")
    candidates = load_candidates([], arguments.scorers)
    rows = [row for one in candidates for row in compare(corpus, one, arguments.bisect_to)]
    calls = {row["by"]: row["calls per positive"] for row in rows if row["scorer"] == candidates[0].label}
    value = round(calls["beginnings"] / calls["halves"], 3)
    report({"name": "calls of the first scorer, beginnings ÷ halves", "value": value, "unit": ""}, rows, arguments)


if __name__ == "__main__":
    main()
