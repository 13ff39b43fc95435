"""Where the time of training goes, per algorithm and environment: real `vlmrb fit` runs of configurations, cut short.

    python benchmarks/breakdown.py configs/minigrid/doorkey_16x16_dqn.yaml configs/ogbench/scene_3_sac.yaml

Evaluation, checkpoints and videos are left out; replay is uniform unless `--overlay` says otherwise. Shares add up to
the time from the first gradient step's block to the last.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch.optim import Adam

from timers import timed_parts
from vlmrb.algorithms.base import OffPolicyModule
from vlmrb.algorithms.collector import ReplayCollector
from vlmrb.algorithms.sac import SAC
from vlmrb.algorithms.td3 import TD3
from vlmrb.algorithms.value_based import ValueBased
from vlmrb.cli import main as vlmrb
from vlmrb.envs.batch import SimulatorEnv
from vlmrb.replay.buffer import VLMReplayBuffer

from app import prepare
from common import add_json_option, report

NEVER = "1000000000"
_CONTINUOUS = [(SAC, "update"), (TD3, "update")]
_EXPLORES = [(ValueBased, "explore"), (SAC, "explore"), (TD3, "explore")]
PARTS: dict[str, list[tuple[Any, str]]] = {
    "collect": [(ReplayCollector, "rollout")],
    "environment": [(SimulatorEnv, "step_and_maybe_reset")],
    "acting": _EXPLORES,
    "extend": [(VLMReplayBuffer, "extend")],
    "sample": [(VLMReplayBuffer, "sample")],
    "|δ|": [(VLMReplayBuffer, "update_td_error")],
    "update": [(ValueBased, "update"), *_CONTINUOUS],
    "backward": [(LightningModule, "manual_backward")],
    "optimizer": [(Adam, "step")],
    "training_step": [(OffPolicyModule, "training_step")],
}


class Window:
    """Counts only what happens from the first block with a gradient step on."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.start, self.module = seconds, 0.0, None

    def watch(self, module: OffPolicyModule) -> None:
        """Looks at the module after one of its blocks."""
        now = time.perf_counter()
        if self.start == 0.0 and module.grad_steps:
            self.start, self.before = now, dict(self.seconds)
            self.env_steps, self.grad_steps = module.env_steps, module.grad_steps
        self.end, self.after, self.module = now, dict(self.seconds), module


def measure(config: Path, overlay: Path, env_steps: int, num_envs: int | None) -> dict[str, Any]:
    """Returns one configuration's row: env steps/s, gradient steps/s, and the share of each part in percent."""
    with timed_parts(PARTS) as seconds, tempfile.TemporaryDirectory() as folder:
        window = Window(seconds)
        timed_step = OffPolicyModule.training_step

        def watched(module: OffPolicyModule, *args: Any) -> None:
            timed_step(module, *args)
            window.watch(module)

        OffPolicyModule.training_step = watched  # type: ignore[method-assign]
        try:
            code = vlmrb(
                ["fit", "-c", str(config), "-c", str(overlay), "--run_dir", folder, "--scoring.preflight", "false"]
                + ["--training.total_env_steps", str(env_steps), "--replay.capacity", str(env_steps)]
                + ["--training.learning_starts", str(env_steps // 8), "--trainer.accelerator", "cpu"]
                + ["--evaluation.every_n_env_steps", NEVER, "--evaluation.episodes", "1"]
                + ["--evaluation.video_every_n_env_steps", "null", "--checkpoint.every_n_env_steps", NEVER]
                + ["--checkpoint.save_on_end", "false"]
                + ([] if num_envs is None else ["--env.num_envs", str(num_envs), "--env.workers", "0"])
            )
        finally:
            OffPolicyModule.training_step = timed_step  # type: ignore[method-assign]
        if code:
            raise SystemExit(code)
        total = window.end - window.start
        spent = {name: window.after.get(name, 0.0) - window.before.get(name, 0.0) for name in PARTS}
        module = window.module
        assert module is not None
    apart = sum(spent[name] for name in ("collect", "extend", "sample", "|δ|", "update"))
    shares = {
        "environment": spent["environment"],
        "acting": spent["acting"],
        "collector": spent["collect"] - spent["environment"] - spent["acting"],
        "extend": spent["extend"],
        "sample": spent["sample"],
        "|δ|": spent["|δ|"],
        "loss": spent["update"] - spent["backward"] - spent["optimizer"],
        "backward": spent["backward"],
        "optimizer": spent["optimizer"],
        "Lightning, the rest": total - apart,
    }
    return {
        "configuration": config.stem,
        "env steps/s": round((module.env_steps - window.env_steps) / total, 1),
        "gradient steps/s": round((module.grad_steps - window.grad_steps) / total, 1),
        **{f"{name} %": round(100 * value / total, 1) for name, value in shares.items()},
    }


def main() -> None:
    """Runs the configurations one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--overlay", type=Path, default=Path("configs/replay/uniform.yaml"))
    parser.add_argument("--env-steps", type=int, default=8_000, help="env steps per run, a multiple of its blocks")
    parser.add_argument("--num-envs", type=int, help="environments, in this process; the configuration's if not given")
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    rows = [measure(config, args.overlay, args.env_steps, args.num_envs) for config in args.configs]
    slowest = min(rows, key=lambda row: row["env steps/s"])
    headline = {"name": f"env steps/s of {slowest['configuration']}", "value": slowest["env steps/s"], "unit": "1/s"}
    report(headline, [{**row, "threads": torch.get_num_threads()} for row in rows], args)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
