"""Trains a tiny vision-language model on privileged labels: `python -m examples.tiny_vlm.train perception_lm`.

Next-token loss alone teaches such a model nothing: 128 noisy tokens, one bit of answer. So its eyes are opened first,
by telling from single frames whether the key is in hand, the door open, the agent on the goal; and they are kept open
by the same task while it learns to answer, or it forgets how an open door looks and answers by key and goal alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from examples.tiny_vlm import models
from examples.tiny_vlm.clips import FLAGS, FRAME_SIZE, LENGTH, RENDERER, ClipSet, flags, make_clips

logger = logging.getLogger("tiny_vlm")

HERE = Path(__file__).parent
BACKWARDS = 1 / 3  # share of the negatives that are positives played backwards
EYES_OPEN = 0.5  # weight of telling single frames apart while answers are learnt
OTHERWISE = 1 / 8  # share of the clips that are asked about in other words, to be answered No whatever they show
_ROUND = 2048  # clips made at a time, each seen once
_HELD_OUT_SEED, _TRAINING_SEED = 1, 1_000  # clips never share a seed


def main() -> None:
    """Trains and saves one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=models.FAMILIES)
    parser.add_argument("--out", type=Path, help="folder of the model (default: beside this file, by family)")
    parser.add_argument("--start", type=Path, help="a model's folder to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vision-steps", type=int, default=600, help="batches of 512 frames")
    parser.add_argument("--steps", type=int, default=2000, help="batches of clips")
    parser.add_argument("--batch", type=int, default=16, help="clips")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    out = options.out or HERE / options.family
    processor, model = models.load(options.start) if options.start else models.make(options.family)
    parameters = sum(weights.numel() for weights in model.parameters())
    logger.info("%s: %d parameters, %d tokens", options.family, parameters, len(processor.tokenizer))
    before = json.loads((options.start / "recipe.json").read_text())["stages"] if options.start else []
    started = time.monotonic()
    head = open_eyes(processor, model, options.vision_steps, options.seed)
    learn_to_answer(processor, model, head, options, out)
    save(processor, model, out)
    stage = {
        "command": shlex.join(["python", "-m", "examples.tiny_vlm.train", *sys.argv[1:]]),
        "commit": _commit(),
        "clips_seen": options.steps * options.batch,
        "training_s": round(time.monotonic() - started),
    }
    prompt = f"{models.PROMPT.name}/{models.PROMPT.version}"
    recipe = {"parameters": parameters, "prompt": prompt, "stages": [*before, stage]}
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    )
    return found.stdout.strip() or "unknown"


def stream(seed: int, batch: int) -> Iterator[ClipSet]:
    """Yields ever new batches of clips."""
    for number in range(1_000_000):
        clips = make_clips(_ROUND, _TRAINING_SEED + 1_000_000 * seed + number, backwards=BACKWARDS)
        for start in range(0, _ROUND, batch):
            yield clips.select(np.arange(start, start + batch))


def open_eyes(processor: Any, model: Any, steps: int, seed: int) -> nn.Linear:
    """Teaches the vision tower and the projector to show what single frames hold; returns the head that reads it."""
    rng = np.random.default_rng(seed)
    clips = make_clips(2 * _ROUND, _TRAINING_SEED - 1 + 1_000_000 * (seed + 1))
    frames = clips.snapshots.reshape(-1, clips.snapshots.shape[-1])
    width = models.frame_features(model, models.encode(processor, _render(frames[None, :LENGTH]))).shape[1]
    head = nn.Linear(width, FLAGS)
    weights = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    losses: list[float] = []
    for step in range(steps):
        chosen = frames[rng.integers(len(frames), size=(16, LENGTH))]
        inputs = models.encode(processor, _render(chosen))
        target = torch.from_numpy(flags(chosen).reshape(-1, FLAGS)).float()
        loss = nn.functional.binary_cross_entropy_with_logits(head(models.frame_features(model, inputs)), target)
        _descend(loss, weights, optimizer, schedule)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            logger.info("frames: step %d, loss %.4f", step + 1, np.mean(losses[-50:]))
    return head


def learn_to_answer(processor: Any, model: Any, head: nn.Linear, options: argparse.Namespace, out: Path) -> None:
    """Teaches the whole model to say Yes or No after the prompt: next-token loss on the last position."""
    yes, no = models.answer_ids(processor)
    rng = np.random.default_rng(options.seed)
    held_out = make_clips(384, _HELD_OUT_SEED + 1, balanced=False)
    weights = [*model.parameters(), *head.parameters()]
    rate, steps = options.learning_rate, options.steps
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    losses: list[float] = []
    for step, clips in zip(range(steps), stream(options.seed, options.batch), strict=False):
        otherwise = rng.random(len(clips)) < OTHERWISE
        others = rng.integers(len(models.OTHER_PROMPTS), size=len(clips))
        prompts = [
            models.OTHER_PROMPTS[other] if so else models.PROMPT for so, other in zip(otherwise, others, strict=True)
        ]
        target = torch.where(torch.from_numpy(clips.labels & ~otherwise), yes, no)
        inputs = models.encode(processor, _render(clips.snapshots), prompts)
        logits, seen = models.answer_logits(model, inputs, clips.snapshots)
        loss = nn.functional.cross_entropy(logits, target)
        shown = torch.from_numpy(flags(seen.snapshots)).float()
        eyes = nn.functional.binary_cross_entropy_with_logits(head(seen.features), shown)
        _descend(loss + EYES_OPEN * eyes, weights, optimizer, schedule)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            logger.info("clips: step %d, loss %.4f, frames %.4f", step + 1, np.mean(losses[-50:]), eyes.item())
        if (step + 1) % 250 == 0:
            logger.info("clips: step %d, held-out AUC %.4f", step + 1, _auc(processor, model, held_out))
            save(processor, model, out)


def _descend(loss: torch.Tensor, weights: list[nn.Parameter], optimizer: Any, schedule: Any) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([weight for weight in weights if weight.grad is not None], 1.0)
    optimizer.step()
    schedule.step()


def _render(snapshots: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return RENDERER.render(snapshots, FRAME_SIZE)


@torch.inference_mode()
def _auc(processor: Any, model: Any, clips: ClipSet) -> float:
    yes, no = models.answer_ids(processor)
    margins = []
    for start in range(0, len(clips), 32):
        snapshots = clips.snapshots[start : start + 32]
        logits, _ = models.answer_logits(model, models.encode(processor, _render(snapshots)), snapshots)
        margins.append((logits[:, yes] - logits[:, no]).numpy())
    return auc(clips.labels, np.concatenate(margins))


def auc(labels: NDArray[np.bool_], scores: NDArray) -> float:
    """Returns the share of pairs of a positive and a negative that are in the right order, ties counting half."""
    difference = scores[labels][:, None] - scores[~labels]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def save(processor: Any, model: Any, out: Path) -> None:
    """Writes model, tokenizer and processor as transformers loads them."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    processor.save_pretrained(out)


if __name__ == "__main__":
    main()
