"""Measures the kept models through the production scorer, whole and with one wire at a time cut.

    python -m examples.tiny_vlm.measure --json docs/results/tiny_vlm.json

A wiring fault of a scorer hardly ever raises: it only makes the scores mean something else. These figures say what each
one does to a model that really sees, and so which bounds a test needs to notice it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.tiny_vlm.clips import FRAME_SIZE, ClipSet, make_clips, reversed_in_time
from examples.tiny_vlm.models import FAMILIES, PROMPT
from examples.tiny_vlm.train import HERE, auc
from vlmrb.scoring.clips import Renderer
from vlmrb.scoring.hf import HFScorer
from vlmrb.scoring.prompts import PROMPTS
from vlmrb.scoring.vlm.answers import AnswerTokens

HELD_OUT_SEED = 5
_GENERATION_PROMPT = "{% if add_generation_prompt %}"


def main() -> None:
    """Prints and writes the figures of every kept model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--clips", type=int, default=1000)
    parser.add_argument("--least_auc", type=float, help="fail if a model tells the clips apart less well")
    parser.add_argument("--models", nargs="*", default=[family for family in FAMILIES if (HERE / family).exists()])
    options = parser.parse_args()
    torch.set_num_threads(1)
    clips = make_clips(options.clips, HELD_OUT_SEED, balanced=False)
    results: dict[str, Any] = {
        "command": f"python -m examples.tiny_vlm.measure --clips {options.clips}",
        "what": "tiny models trained on privileged labels, not evidence for any vision-language model",
        "env": "MiniGrid-DoorKey-8x8-v0",
        "frame_size": FRAME_SIZE,
        "clips": len(clips),
        "positives": int(clips.labels.sum()),
        "prompt": f"{PROMPT.name}/{PROMPT.version}",
        "models": {},
    }
    for name in options.models:
        folder = HERE / name if (HERE / name).exists() else Path(name)
        results["models"][folder.name] = figures = measure(folder, clips)
        print(folder.name, json.dumps(figures, indent=2), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.least_auc is not None:
        worst = min(results["models"], key=lambda name: results["models"][name]["auc"])
        found = results["models"][worst]["auc"]
        if not found >= options.least_auc:
            sys.exit(f"{worst}: AUC {found} on {len(clips)} held-out clips is below {options.least_auc}")


def measure(folder: Path, clips: ClipSet) -> dict[str, Any]:
    """Returns all figures of one model."""
    recipe = json.loads((folder / "recipe.json").read_text())
    scorer = make_scorer(folder)
    scorer.score(clips.select(np.arange(2)).batch())  # the first call loads and compares
    started = time.process_time()
    scores = score(scorer, clips)
    fast_s = time.process_time() - started
    stats = scorer.stats()
    labels = clips.labels
    positives, negatives = clips.select(labels), clips.select(~labels)
    figures: dict[str, Any] = {
        "parameters": recipe["parameters"],
        "auc": auc(labels, scores),
        "accuracy": float(((scores > 0.5) == labels).mean()),
        "positives_above_half": float((scores[labels] > 0.5).mean()),
        "negatives_above_half": float((scores[~labels] > 0.5).mean()),
        "recall_of_single_events": {
            name: float((scores[only(clips, event)] > 0.5).mean()) for event, name in enumerate(("key", "door", "goal"))
        },
        "mass": stats["mass"],
        "mass_min": stats["mass_min"],
        "frame_hits": stats["frame_hits"],
    }

    backwards = backwards_without_event(positives)
    against, turned = score(scorer, negatives), score(scorer, backwards)
    figures["auc_reversed"] = _auc(turned, against)
    figures["backwards_above_half"] = float((turned > 0.5).mean())
    figures["auc_shuffled"] = auc(labels, score(scorer, shuffled(clips)))
    figures["auc_forwards_from_backwards"] = _auc(scores[labels], turned)
    figures["auc_forwards_from_backwards_shuffled"] = _auc(
        score(scorer, shuffled(positives)), score(scorer, shuffled(backwards))
    )
    figures["auc_first_frame_only"] = auc(labels, score(scorer, first_frame_only(clips)))
    figures["auc_blank"] = auc(labels, score(scorer, clips, blank))
    figures["auc_channels_swapped"] = auc(labels, score(scorer, clips, channels_swapped))

    swapped = make_scorer(folder, prompt=replace(PROMPT, yes="no", no="yes", name="swapped"))
    figures["auc_yes_no_swapped"] = auc(labels, score(swapped, clips))
    figures["lower_case_only"] = _level(lower_case_only(make_scorer(folder)), clips)
    figures["wrong_prompt"] = _level(make_scorer(folder, prompt=PROMPTS["grid_terse"]), clips)
    with tempfile.TemporaryDirectory() as copy:
        if without_generation_prompt(folder, Path(copy)):
            figures["no_generation_prompt"] = _level(make_scorer(Path(copy)), clips)

    some = clips.select(np.arange(min(200, len(clips))))
    plain = make_scorer(folder, fast=False)
    plain.score(clips.select(np.arange(2)).batch())
    started = time.process_time()
    plain_scores = score(plain, some)
    plain_s = time.process_time() - started
    figures["largest_difference"] = {
        "fast_from_plain": _difference(scores[: len(some)], plain_scores),
        "images_from_video": _difference(score(make_scorer(folder, video=False, fast=False), some), plain_scores),
        "single_from_batch": _difference(score(make_scorer(folder, fast=False, batch_clips=1), some), plain_scores),
    }
    figures["clips_per_cpu_s"] = {
        "fast": len(clips) / fast_s,
        "plain": len(some) / plain_s,
        "threads": 1,
        "device": "cpu",
    }
    return _rounded(figures)


def make_scorer(folder: Path, **changes: Any) -> HFScorer:
    """Returns the production scorer of a kept model, set up."""
    settings = {"dtype": "float32", "device": "cpu", "frame_size": FRAME_SIZE, "batch_clips": 16} | changes
    scorer = HFScorer(str(folder), **settings)
    scorer.setup()
    return scorer


def score(
    scorer: HFScorer, clips: ClipSet, change: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None = None
) -> NDArray[np.float32]:
    """Scores clips; ``change`` is done to every frame."""
    batch = clips.batch()
    if change is not None:
        assert batch.renderer is not None
        batch = replace(batch, renderer=Changed(batch.renderer, change))
    return np.concatenate(
        [
            scorer.score(batch.select(np.arange(start, min(start + 64, len(clips)))))
            for start in range(0, len(clips), 64)
        ]
    )


@dataclass
class Changed:
    """A renderer whose frames ``uint8[..., H, W, 3]`` are changed."""

    renderer: Renderer
    change: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
    name: str = "changed"

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        """Renders and changes."""
        return self.change(self.renderer.render(snapshots, frame_size))

    def observe(self, snapshots: NDArray) -> NDArray:
        """As the renderer does."""
        return self.renderer.observe(snapshots)


def blank(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Shows nothing."""
    return np.full_like(frames, 100)


def channels_swapped(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Takes RGB for BGR."""
    return np.ascontiguousarray(frames[..., ::-1])


def shuffled(clips: ClipSet) -> ClipSet:
    """Shows the real frames of each clip in random order, its label unchanged."""
    rng = np.random.default_rng(0)
    order = np.tile(np.arange(clips.snapshots.shape[1]), (len(clips), 1))
    for row, length in zip(order, clips.lengths, strict=True):
        row[:length] = rng.permutation(length)
    return replace(clips, snapshots=np.take_along_axis(clips.snapshots, order[..., None], axis=1))


def first_frame_only(clips: ClipSet) -> ClipSet:
    """Shows nothing but the first frame of each clip, its label unchanged."""
    return replace(clips, snapshots=np.broadcast_to(clips.snapshots[:, :1], clips.snapshots.shape))


def backwards_without_event(positives: ClipSet) -> ClipSet:
    """Plays positives backwards and leaves out those that are positive that way, too."""
    turned = reversed_in_time(positives)
    return turned.select(~turned.labels)


def only(clips: ClipSet, event: int) -> NDArray[np.bool_]:
    """Says in which clips this milestone happens and no other."""
    return clips.events[:, event] & (clips.events.sum(axis=1) == 1)


def lower_case_only(scorer: HFScorer) -> HFScorer:
    """Makes a scorer overlook all spellings but yes and no."""
    found = scorer._answers
    pair = found.spellings.index(("yes", "no"))
    scorer._answers = AnswerTokens((found.yes[pair],), (found.no[pair],), (("yes", "no"),))
    return scorer


def without_generation_prompt(folder: Path, copy: Path) -> bool:
    """Copies a model without the end of its chat template; says whether that works for this family."""
    template = folder / "chat_template.jinja"
    if "SmolVLM" in (folder / "config.json").read_text():
        return False  # SmolVLM's processor takes a template of its own for videos
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (copy / template.name).write_text(template.read_text().partition(_GENERATION_PROMPT)[0])
    return True


def _level(scorer: HFScorer, clips: ClipSet) -> dict[str, float]:
    scores = score(scorer, clips)
    return {
        "auc": auc(clips.labels, scores),
        "positives_above_half": float((scores[clips.labels] > 0.5).mean()),
        "mass": scorer.stats()["mass"],
    }


def _auc(positive: NDArray[np.float32], negative: NDArray[np.float32]) -> float:
    labels = np.arange(len(positive) + len(negative)) < len(positive)
    return auc(labels, np.concatenate((positive, negative)))


def _difference(one: NDArray, other: NDArray) -> float:
    return float(np.abs(one - other).max())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
