"""Bytes per transition: what the buffer holds, clip store included, against storing frames.

Fills a buffer with DoorKey rows of a random policy and counts rows, columns, priority trees and clips. Beside it stands
the same buffer with one rendered frame per transition in place of the clip store (a frame shared by neighbouring
transitions is counted once), at the paper's 32 pixels a tile. Resident memory is measured from outside as a check.

    python benchmarks/memory.py --env MiniGrid-DoorKey-16x16-v0
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch

from vlmrb.algorithms.collector import ReplayCollector
from vlmrb.envs import EnvConfig, make_env, make_renderer
from vlmrb.envs.grid_simulator import NUM_ACTIONS
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.storage import row_bytes
from vlmrb.replay.terms import TDTerm, VLMTerm

from common import add_json_option, report

NUM_ENVS, LENGTH = 32, 8


def resident_bytes() -> int:
    """Returns this process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(env_id: str, capacity: int, clip_length: int) -> dict[str, Any]:
    """Fills a buffer twice over and returns a row of the table."""
    config = EnvConfig(id=env_id, num_envs=NUM_ENVS, tile_size=32)
    env = make_env(config, seed=0)
    collector = ReplayCollector(
        env,
        lambda data: data.set("action", torch.randint(0, NUM_ACTIONS, (NUM_ENVS,))),
        frames_per_batch=NUM_ENVS * LENGTH,
        total_frames=NUM_ENVS * LENGTH * -(-2 * capacity // (NUM_ENVS * LENGTH)),
    )
    before = resident_bytes()
    buffer = VLMReplayBuffer(
        capacity, terms=[VLMTerm(), TDTerm()], lam=0.5, clip_length=clip_length, n_steps=3, gamma=0.95
    )
    first = None
    for block in collector:
        first = block[0, 0] if first is None else first
        buffer.extend(block)
        ids = buffer.clips.take_completed()
        buffer.write_scores(ids, [0.5] * len(ids))
    grown = resident_bytes() - before
    collector.shutdown()
    assert len(buffer) == capacity
    assert first is not None
    frame = make_renderer(config).render(first["snapshot"].numpy()[None])[0]
    ours = buffer.nbytes / capacity
    clips = buffer.clips.nbytes / capacity
    with_frames = ours - clips + frame.nbytes
    return {
        "env": env_id,
        "rows": capacity,
        "row B": row_bytes(buffer[:]),
        "clips B": round(clips, 1),
        "ours B": round(ours, 1),
        "resident B": round(grown / capacity, 1),
        "frame": f"{frame.shape[0]}×{frame.shape[1]}×3",
        "frame B": frame.nbytes,
        "with frames B": round(with_frames, 1),
        "ours ÷ frames": float(f"{ours / with_frames:.3g}"),
        "GB at 10⁶ rows": f"{ours / 1e3:.2f} against {with_frames / 1e3:.0f}",
    }


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--env",
        nargs="+",
        default=["MiniGrid-DoorKey-16x16-v0", "MiniGrid-DoorKey-6x6-v0"],
        help="the headline is the first one's (default: %(default)s)",
    )
    parser.add_argument("--capacity", type=int, default=50_000, help="rows (default: %(default)s)")
    parser.add_argument("--clip-length", type=int, default=32, help="frames per clip (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    rows = [measure(env_id, args.capacity, args.clip_length) for env_id in args.env]
    name = f"bytes per transition of {args.env[0]}, ours ÷ storing frames of {rows[0]['frame']}"
    report({"name": name, "value": rows[0]["ours ÷ frames"], "unit": "ratio"}, rows, args)


if __name__ == "__main__":
    main()
