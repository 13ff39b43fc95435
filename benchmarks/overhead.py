"""What VLM-guided replay costs the learner: PER against VLM-RB with the sprites scorer, asynchronous, in pairs.

    python benchmarks/overhead.py --size 6 --pairs 5

The ratio counts only together with the share of clips scored and their delay, so both stand in the table.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from vlmrb.algorithms import TrainingConfig
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.replay.config import ImportanceConfig, ReplayConfig, TDConfig
from vlmrb.scoring.sprites import SpritesScorer

from app import CAPACITY, LEARNING_STARTS, fit, prepare
from common import add_json_option, paired, report

PER = ReplayConfig(
    capacity=CAPACITY,
    n_steps=3,
    lam_max=1.0,
    warmup_fraction=0.0,
    td=TDConfig(exponent=0.6, eps=1e-6),
    vlm=None,
    importance_weights=ImportanceConfig(),
    clip_length=None,
)


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=6, help="DoorKey's N")
    parser.add_argument("--env-steps", type=int, default=25_600, help="env steps per run")
    parser.add_argument("--clip-length", type=int, default=16)
    parser.add_argument("--backend", choices=["process", "thread"], default="process")
    parser.add_argument("--pairs", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    training = TrainingConfig(total_env_steps=args.env_steps, learning_starts=LEARNING_STARTS)
    vlm = ReplayConfig(capacity=CAPACITY, n_steps=3, clip_length=args.clip_length)
    runs: dict[str, list[Any]] = {"VLM-RB": [], "PER": []}

    def run_vlm() -> float:
        # Without the score cache: the price of scoring every clip.
        scoring = ScoringCallback(SpritesScorer(), cache=None, backend=args.backend)
        runs["VLM-RB"].append(fit(args.size, training, vlm, scoring))
        return runs["VLM-RB"][-1].rate

    def run_per() -> float:
        runs["PER"].append(fit(args.size, training, PER))
        return runs["PER"][-1].rate

    ratios = paired(run_vlm, run_per, args.pairs)
    rows: list[dict[str, Any]] = [
        {
            "pair": pair + 1,
            "VLM-RB env steps/s": round(guided.rate),
            "PER env steps/s": round(per.rate),
            "ratio": round(ratio, 3),
            "share scored": round(guided.scoring["share_scored"], 3),
            "mean delay, env steps": round(guided.scoring["delay_env_steps_mean"]),
            "tile, px": EnvConfig().tile_size,
        }
        for pair, (guided, per, ratio) in enumerate(zip(runs["VLM-RB"], runs["PER"], ratios, strict=True))
    ]
    name = f"VLM-RB ÷ PER, env steps/s, DoorKey-{args.size}x{args.size}, L={args.clip_length}, {args.backend} back-end"
    report({"name": name, "value": round(float(np.median(ratios)), 3), "unit": "ratio"}, rows, args)


if __name__ == "__main__":
    main()
