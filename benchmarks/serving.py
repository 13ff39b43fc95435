"""Clips per second of a scorer behind `vlmrb serve` on this machine, against the same scorer called directly.

What the way there and back costs: clips are packed, sent, unpacked, scored by one worker, and answered. Both sides
score the same clips, each side's frames drawn anew; the answers must be equal.

    python benchmarks/serving.py --pairs 5
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from vlmrb.envs import EnvConfig, make_env, make_renderer
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.remote import RemoteScorer
from vlmrb.scoring.scorer import Scorer
from vlmrb.serving.wire import pack
from vlmrb.settings import load_scoring

from common import add_json_option, paired, rate, report

BATCH = 16
LENGTH = 32


def make_batches(env_id: str, count: int) -> list[ClipBatch]:
    """Returns batches of 16 clips of 32 frames of a random player."""
    config = EnvConfig(env_id, num_envs=BATCH)
    env, renderer = make_env(config, BATCH, 0), make_renderer(config)
    rows = env.rollout(count * LENGTH, break_when_any_done=False)["snapshot"].numpy()  # [16, count · 32, S]
    ids, lengths = np.arange(BATCH), np.full(BATCH, LENGTH)
    return [ClipBatch(ids, part, lengths, renderer) for part in np.split(rows, count, axis=1)]


def score_all(scorer: Scorer, batches: list[ClipBatch], in_flight: int) -> np.ndarray:
    """Scores batches, some of them at a time, with frames drawn anew."""
    fresh = [ClipBatch(clips.clip_ids, clips.snapshots, clips.lengths, clips.renderer) for clips in batches]
    with ThreadPoolExecutor(in_flight) as threads:
        return np.concatenate(list(threads.map(scorer.score, fresh)))


def main() -> None:
    """Measures one batch at a time and two in flight, as the scoring service has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/scorer/sprites.yaml", help="whose scorer is served")
    parser.add_argument("--env", default="MiniGrid-DoorKey-8x8-v0")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on one side of a pair")
    add_json_option(parser)
    args = parser.parse_args()

    batches = make_batches(args.env, args.batches)
    local = load_scoring([args.config]).scorer
    assert local is not None
    local.setup()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "vlmrb.cli", "serve", "-c", args.config, "--port", str(port)])
    rows = []
    try:
        remote = RemoteScorer(f"http://127.0.0.1:{port}", wait_s=300)
        remote.setup()
        if not np.array_equal(score_all(remote, batches, 1), score_all(local, batches, 1)):
            raise RuntimeError("served scores differ from the scorer's own")
        clips = BATCH * len(batches)
        sent = sum(len(pack(part, remote._known())) for part in batches) / clips
        for in_flight in (1, 2):
            rates: dict[str, list[float]] = {"served": [], "direct": []}

            def measure(name: str, scorer: Scorer, at_once: int, rates: dict[str, list[float]] = rates) -> float:
                rates[name].append(rate(partial(score_all, scorer, batches, at_once), clips, args.seconds))
                return rates[name][-1]

            ratios = paired(
                partial(measure, "served", remote, in_flight), partial(measure, "direct", local, 1), pairs=args.pairs
            )
            row = {"scorer": local.name, "batches in flight": in_flight, "KiB a clip": sent / 1024}
            row |= {f"{name}, clips/s": float(np.median(values)) for name, values in rates.items()}
            rows.append(row | {"ratio": float(np.median(ratios)), "lowest": min(ratios)})
        remote.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    value = round(float(rows[-1]["served, clips/s"]), 1)
    report({"name": "served clips/s, two batches in flight", "value": value, "unit": "clips/s"}, rows, args)


if __name__ == "__main__":
    main()
