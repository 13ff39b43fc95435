"""Clips per second of the VLM scorer: one clip at a time through processor and ``generate``, against ours, in pairs.

Both get the same stream of DoorKey-8x8 clips of 32 frames, half of them of a random policy, half of a trained agent
(``--ckpt``; without one a scripted expert with 5 % random actions stands in). Ours starts every pass with an empty
feature cache. A second row per model has frames of which no two are alike, where only batching helps. On a CPU the
clock is this process's own time, on one thread, so that whatever else the machine does counts little; on a GPU it is
the wall's.

    python benchmarks/scorer.py --models perception_lm qwen3_vl smolvlm gemma4     # small models, random weights
    python benchmarks/scorer.py --models facebook/Perception-LM-1B --frame_size 448
    python benchmarks/scorer.py --random_weights plm_1b plm_3b --frame_size 448    # true shapes, no weights needed
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlmrb.calibration.collect import CollectSettings, play_round
from vlmrb.calibration.policies import AgentPlayer, MakePlayer, RandomPlayer
from vlmrb.envs import EnvConfig, make_renderer
from vlmrb.envs.doorkey_expert import DoorKeyExpert
from vlmrb.scoring.clips import ClipBatch, Renderer
from vlmrb.scoring.hf import HFScorer
from vlmrb.scoring.prompts import PROMPTS
from vlmrb.scoring.vlm.unique_frames import unique_frames

from common import Headline, add_json_option, report
from vlms import load_model, random_model

SIZE, LENGTH = 8, 32
EPSILON = 0.05  # random actions of the agent, or of the expert in its place
BATCH = 16  # clips handed to our scorer at once, as the scoring service does
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L4": 121, "4090": 165}  # dense, 16 bit, by the makers' sheets


@dataclass(frozen=True)
class Noise:
    """Draws frames of coloured squares, each of its own: nothing repeats."""

    pixels: int
    name: str = "noise/1"

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        """See `Renderer`; a snapshot is a seed."""
        flat = snapshots.reshape(-1)
        squares = np.stack([np.random.default_rng(int(seed)).integers(0, 256, (SIZE, SIZE, 3)) for seed in flat])
        frames = squares.astype(np.uint8).repeat(self.pixels // SIZE, 1).repeat(self.pixels // SIZE, 2)
        return frames.reshape(*snapshots.shape[:-1], *frames.shape[1:])

    def observe(self, snapshots: NDArray) -> NDArray:
        """See `Renderer`."""
        return snapshots


class ExpertPlayer:
    """The scripted expert in a trained agent's place."""

    def __init__(self, env: Any, seed: int) -> None:
        self._random, self._expert = RandomPlayer(env, seed), DoorKeyExpert(SIZE)
        self._rng = np.random.default_rng(seed)

    def __call__(self, data: Any) -> torch.Tensor:
        """Returns the actions."""
        action = torch.from_numpy(self._expert.act(data["snapshot"].numpy()))
        slips = torch.from_numpy(self._rng.random(len(action)) < EPSILON)
        return torch.where(slips, self._random(data), action)


def stream(clips: int, seed: int, ckpt: str | None) -> ClipBatch:
    """Returns the clips, the random policy's first, as in a run."""
    config = EnvConfig(f"MiniGrid-DoorKey-{SIZE}x{SIZE}-v0")
    renderer = make_renderer(config)
    agent: MakePlayer = ExpertPlayer
    if ckpt is not None:
        from vlmrb.algorithms.base import OffPolicyModule

        module = OffPolicyModule.from_checkpoint(ckpt)
        agent = lambda env, player_seed: AgentPlayer(module, EPSILON, player_seed)  # noqa: E731
    snapshots: list[NDArray] = []
    lengths: list[NDArray[np.int64]] = []
    for number, (player, count) in enumerate(((RandomPlayer, clips - clips // 2), (agent, clips // 2))):
        settings = CollectSettings(clips=max(clips, 100), clip_length=LENGTH, seed=seed, stratify=False)
        found, _ = play_round(config, player, settings, number, renderer)
        snapshots.append(found.snapshots[:count])
        lengths.append(found.lengths[:count])
    every = np.concatenate(snapshots)
    return ClipBatch(np.arange(len(every)), every, np.concatenate(lengths), renderer)


def all_different(clips: int, pixels: int) -> ClipBatch:
    """Returns clips of noise."""
    seeds = np.arange(clips * LENGTH).reshape(clips, LENGTH, 1)
    renderer: Renderer = Noise(pixels)
    return ClipBatch(np.arange(clips), seeds, np.full(clips, LENGTH), renderer)


def by_generating(processor: Any, model: Any, scorer: HFScorer, clips: ClipBatch) -> NDArray[np.float32]:
    """Scores clips the way most people write it: one at a time through the processor, one token generated."""
    answers, found = scorer._answers, []
    for row in range(len(clips)):
        movie = clips.select(np.array([row])).frames(scorer.frame_size)[0]
        video = {
            "total_num_frames": len(movie),
            "fps": 1.0,
            "width": movie.shape[2],
            "height": movie.shape[1],
            "duration": float(len(movie)),
            "frames_indices": list(range(len(movie))),
        }
        content = [{"type": "video", "video": movie}, {"type": "text", "text": PROMPTS["grid"].text}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"do_sample_frames": False, "video_metadata": [video]},
        ).to(model.device, model.dtype)
        generated = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        probability = generated.logits[0][0].double().softmax(-1)
        yes, no = (probability[list(ids)].sum() for ids in (answers.yes, answers.no))
        found.append(float(yes / (yes + no)))
    return np.array(found, np.float32)


def ours(scorer: HFScorer, clips: ClipBatch) -> NDArray[np.float32]:
    """Scores clips with an empty feature cache, in the scoring service's batches."""
    scorer.forget()
    starts = range(0, len(clips), BATCH)
    return np.concatenate([scorer.score(clips.select(np.arange(s, min(s + BATCH, len(clips))))) for s in starts])


def flop_per_clip(scorer: HFScorer, clips: ClipBatch) -> float:
    """Counts the operations of one clip, every frame encoded."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode():
        shown = unique_frames(clips.select(np.arange(1)), scorer.frame_size)
        scorer._plain.logits(shown, shown.clips)
    return float(counter.get_total_flops())


def peak_memory(device: torch.device) -> float:
    """Returns the most MiB in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(name: str, what: str, clips: ClipBatch, parts: tuple[Any, Any, HFScorer], args: Any) -> dict[str, Any]:
    """Measures one model on one stream."""
    processor, model, scorer = parts
    sample = clips.select(np.linspace(0, len(clips) - 1, min(args.naive_clips, len(clips))).astype(int))
    shown = unique_frames(clips, scorer.frame_size)
    few = clips.select(np.arange(min(4, len(clips))))
    by_generating(processor, model, scorer, few)  # both once before the clock runs
    ours(scorer, few)
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    naive_rates, our_rates, difference = [], [], 0.0
    for pair in range(args.pairs):
        answers: dict[str, NDArray[np.float32]] = {}
        for side in ("naive", "ours") if pair % 2 else ("ours", "naive"):
            start = clock()
            answers[side] = by_generating(processor, model, scorer, sample) if side == "naive" else ours(scorer, clips)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            rates, count = (naive_rates, len(sample)) if side == "naive" else (our_rates, len(clips))
            rates.append(count / (clock() - start))
        rows = np.linspace(0, len(clips) - 1, len(sample)).astype(int)
        difference = max(difference, float(np.abs(answers["ours"][rows] - answers["naive"]).max()))
    row = {
        "model": name,
        "stream": what,
        "clips": len(clips),
        "duplicate clips": round(1 - len(shown.clips) / len(clips), 3),
        "different frames": round(len(shown.frames) / shown.clips.size, 3),
        "generate clips/s": float(np.median(naive_rates)),
        "ours clips/s": float(np.median(our_rates)),
        "ours ÷ generate": float(np.median(np.divide(our_rates, naive_rates))),
        "max |Δr|": f"{difference:.1e}",
        "frame hits": round(scorer._fast.hit_share, 3) if scorer._fast else 0.0,
        "peak MiB": round(peak_memory(model.device)),
    }
    if model.device.type == "cuda":
        flop = flop_per_clip(scorer, clips)
        device = torch.cuda.get_device_name(model.device)
        peak = args.peak_tflops or next((top for key, top in PEAK_TFLOPS.items() if key in device), None)
        row |= {"device": device, "TFLOP/clip": flop / 1e12}
        if peak:
            row["generate, share of peak"] = row["generate clips/s"] * flop / (peak * 1e12)
            row["ours, share of peak"] = row["ours clips/s"] * flop / (peak * 1e12)  # as if nothing were saved
    return row


def main() -> None:
    """Measures every model on both streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="ids, folders, or families of the tests' small models")
    parser.add_argument(
        "--random_weights", nargs="*", default=[], help="names or files like those in benchmarks/shapes"
    )
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--naive_clips", type=int, default=32, help="of them, evenly spread, for the slow side")
    parser.add_argument("--noise_clips", type=int, default=32, help="clips of the stream of all-different frames")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--frame_size", type=int, help="pixels; by default the model's own")
    parser.add_argument("--batch_clips", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ckpt", help="of an agent trained on DoorKey-8x8")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--peak_tflops", type=float, help="of the GPU, dense in 16 bit, if it is not among the known")
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clips = stream(args.clips, args.seed, args.ckpt)
    player = "trained agent" if args.ckpt else "scripted expert"

    rows = []
    for name, load in [(m, load_model) for m in args.models] + [(s, random_model) for s in args.random_weights]:
        processor, model = load(name, args.device, args.dtype)
        scorer = HFScorer("attached/model", frame_size=args.frame_size, batch_clips=args.batch_clips, fast=True)
        scorer.attach(processor, model)
        parts = (processor, model, scorer)
        rows.append(measure(name, f"DoorKey-8x8, random + {player}", clips, parts, args))
        noise = all_different(args.noise_clips, scorer.frame_size or 64)
        rows.append(measure(name, "all frames different", noise, parts, args))
        print(rows[-2], rows[-1], sep="\n", flush=True)
        del processor, model, scorer, parts
    ratios = [row["ours ÷ generate"] for row in rows[::2]]
    headline: Headline = {
        "name": "clips/s on DoorKey-8x8, ours ÷ processor and generate per clip, lowest of the models",
        "value": round(min(ratios), 2),
        "unit": "×",
    }
    report(headline, rows, args)


if __name__ == "__main__":
    main()
