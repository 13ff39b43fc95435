"""Verbs of the command line that need no trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def evaluate(
    ckpt: str,
    episodes: int = 50,
    epsilon: float | None = None,
    seed: int = 1_000_003,
    video: bool = False,
    frame_size: int | None = None,
    out: str | None = None,
) -> int:
    """Plays episodes with a trained agent and prints success, return and length as JSON.

    Args:
        ckpt: a checkpoint written by `vlmrb fit`.
        episodes: number of episodes.
        epsilon: share of random actions; the algorithm's if not given (0.05 for DQN and IQN, 0 for SAC and TD3).
        seed: of the levels and of exploration; the default is that of the evaluation during training.
        video: also write a GIF of the first episode.
        frame_size: pixels of the GIF's frames; the environment's default if not given.
        out: folder for ``evaluation.json`` and the GIF; the run folder if not given.
    """
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.evaluation import evaluate as play
    from vlmrb.media import encode_gif, enlarge

    module = OffPolicyModule.from_checkpoint(ckpt)
    if epsilon is None:
        epsilon = module.evaluation_epsilon
    result = play(module, module.env, episodes=episodes, seed=seed, epsilon=epsilon, video=video, frame_size=frame_size)
    folder = Path(out) if out is not None else Path(ckpt).resolve().parent.parent
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "success": result.success,
        "mean_return": result.mean_return,
        "mean_length": result.mean_length,
        "episodes": episodes,
        "epsilon": epsilon,
        "seed": seed,
        "env": module.env.id,
        "env_steps": module.env_steps,
        "ckpt": ckpt,
    }
    if result.video is not None:
        gif = folder / "evaluation.gif"
        gif.write_bytes(encode_gif(enlarge(result.video), fps=8))
        report["video"] = str(gif)
    (folder / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0
