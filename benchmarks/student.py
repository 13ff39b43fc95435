"""How many of a scorer's positives a run with a student found, and how many clips the scorer was shown for that.

Every clip that the run's last checkpoint holds is scored anew with the run's own scorer, and compared with what replay
went by: the scorer's answer, the student's guess, or nothing. Use it on runs whose scorer is quick and without a
control.

    vlmrb fit -c configs/minigrid/doorkey_8x8_small_dqn.yaml -c configs/replay/vlm.yaml -c configs/scorer/student.yaml \
      --run_dir runs/student
    python benchmarks/student.py runs/student
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.callbacks.checkpoint_files import read_reference, read_sidecar
from vlmrb.envs import make_renderer
from vlmrb.replay.clips import ClipStore
from vlmrb.settings import load_env, load_scoring, read_section

from common import add_json_option, report

BATCH = 64
WINDOWS = 6


def read_clips(run: Path) -> ClipStore:
    """Returns the clips of a run's last checkpoint."""
    checkpoint = run / "checkpoints" / "last.ckpt"
    reference = read_reference(checkpoint)
    if reference is None:
        raise SystemExit(f"{checkpoint} has no replay side-car: run with checkpoint.save_replay and replay_on_end")
    buffer = read_sidecar(checkpoint.parent / reference["file"])["buffer"]
    if buffer["clips"] is None:
        raise SystemExit(f"{run} keeps no clips: its replay scheme reads no scores")
    clips = ClipStore(buffer["settings"]["capacity"], buffer["clips"]["clip_length"])
    clips.load_state_dict(buffer["clips"])
    return clips


def score(run: Path, clips: ClipStore, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns what the run's scorer says of clips, ``float32[N]``."""
    config = run / "config.yaml"
    renderer, scorer = make_renderer(load_env([config])), load_scoring([config]).scorer
    assert scorer is not None
    scorer.setup()
    parts = [clips.batch(ids[start : start + BATCH].tolist(), renderer) for start in range(0, len(ids), BATCH)]
    scores = np.concatenate([scorer.score(part) for part in parts])
    scorer.close()
    return scores


def compare(run: Path) -> list[dict[str, Any]]:
    """Returns a row for each part of the run, in env steps."""
    clips = read_clips(run)
    table = clips.table()
    threshold = np.float32(read_section(run / "config.yaml", "replay", "vlm").get("threshold") or 0.5)
    positive = score(run, clips, table["clip_id"]) > threshold
    replayed, asked = table["score"] > threshold, ~np.isnan(table["score"]) & ~table["guessed"]
    edges = np.linspace(0, table["born"].max() + 1, WINDOWS + 1)
    rows = []
    for first, last in [*zip(edges, edges[1:], strict=False), (0.0, edges[-1])]:
        part = (table["born"] >= first) & (table["born"] < last)
        hits = int((positive & replayed & part).sum())
        rows.append(
            {
                "env steps": f"{first:,.0f}–{last:,.0f}",
                "clips": int(part.sum()),
                "positive": float(positive[part].mean()),
                "shown to the scorer": float(asked[part].mean()),
                "recall": hits / max(1, int((positive & part).sum())),
                "precision": hits / max(1, int((replayed & part).sum())),
            }
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of vlmrb fit")
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = compare(arguments.run)
    report({"name": "recall over the whole run", "value": round(rows[-1]["recall"], 3), "unit": ""}, rows, arguments)


if __name__ == "__main__":
    main()
