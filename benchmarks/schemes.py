"""What each replay scheme costs per batch at 10⁵ and 10⁶ rows, against uniform replay, paired in one run.

A scheme is its overlay in configs/replay. Timed is what a gradient step has to do with the buffer: drawing a batch of
128 rows of MiniGrid 6×6 and writing back what the scheme reads (|δ|, the reducible loss), CPU time on one thread. What
a scheme does now and then over all rows (ranks, masks, moving the origin of ages) is timed by itself. Attentive replay
draws 3.25 candidates per row at this point of its schedule. What learning adds, such as the further forward passes of
the reducible loss, is not in here.

    python benchmarks/schemes.py --pairs 5
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jsonargparse import ArgumentParser
from tensordict import TensorDict

from replay import BATCH, make_block
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.terms import PriorityTerm

from common import add_json_option, report

OVERLAYS = Path(__file__).parents[1] / "configs/replay"
LEFT_OUT = {"her"}  # relabels goals, which these rows do not have


class Contender:
    """A filled buffer of one scheme.

    Args:
        name: of the overlay.
        capacity: rows.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.config = read_overlay(OVERLAYS / f"{name}.yaml", capacity)
        self.buffer: VLMReplayBuffer = build_buffer(self.config, gamma=0.95, total_env_steps=10 * capacity, seed=0)
        fill, self.block = make_block(1024), make_block(8)
        while len(self.buffer) < capacity:
            self.extend(fill)
        self.buffer.set_env_steps(capacity)  # past the warm-up of λ
        self.signal = torch.rand(BATCH)
        for _ in range(200):  # so that priorities differ
            self.step()

    def extend(self, block: TensorDict) -> None:
        """Stores a block; clips are scored as they come, a fifth of them as positive."""
        self.buffer.extend(block)
        if self.buffer.clips is not None and self.config.needs_scores:
            ids = self.buffer.clips.take_completed()
            if ids:
                self.buffer.write_scores(ids, [float(clip % 5 == 0) for clip in ids])

    def step(self) -> None:
        """Draws a batch and writes back what the scheme reads."""
        batch = self.buffer.sample()
        if self.config.relo is not None:
            self.buffer.write_reducible_loss(batch, self.signal)
        if self.config.needs_td_errors:
            self.buffer.update_td_error(batch, self.signal)

    def milliseconds(self, calls: int) -> float:
        """Times `step`, CPU ms per call."""
        start = time.process_time()
        for _ in range(calls):
            self.step()
        return (time.process_time() - start) / calls * 1e3

    def refresh_milliseconds(self) -> float:
        """Times what terms do with all rows now and then, CPU ms; 0 for a scheme that never does."""
        terms = [term for term in self.buffer.terms if type(term).refresh is not PriorityTerm.refresh]
        if not terms:
            return 0.0
        for _ in range(4):
            self.extend(self.block)  # in which some episodes end
        columns = {name: column.numpy()[: len(self.buffer)] for name, column in self.buffer.columns.items()}
        start = time.process_time()
        for term in terms:
            term.refresh(self.buffer.env_steps, columns)
        self.buffer._priorities.compose(np.arange(len(self.buffer)), source="refresh")
        return (time.process_time() - start) * 1e3


def read_overlay(path: Path, capacity: int) -> ReplayConfig:
    """Returns the settings of an overlay for buffers of so many rows."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ReplayConfig, "replay")
    settings = {**yaml.safe_load(path.read_text())["replay"], "capacity": capacity, "batch_size": BATCH}
    return parser.instantiate(parser.parse_object({"replay": settings})).replay


def measure(capacity: int, names: list[str], pairs: int, calls: int) -> list[dict[str, Any]]:
    """Returns the table's rows for one number of rows."""
    contenders = {name: Contender(name, capacity) for name in names}
    rounds = []
    for pair in range(pairs + 1):
        order = names if pair % 2 else names[::-1]
        rounds.append({name: contenders[name].milliseconds(calls) for name in order})
    rounds = rounds[1:]  # the first one warms up
    rows = []
    for name in names:
        ratios = sorted(times[name] / times["uniform"] for times in rounds)
        rows.append(
            {
                "rows": capacity,
                "scheme": name,
                "ms per batch": round(statistics.median(times[name] for times in rounds), 3),
                "÷ uniform": round(statistics.median(ratios), 2),
                "from": round(ratios[0], 2),
                "to": round(ratios[-1], 2),
                "ms per refresh of all": round(contenders[name].refresh_milliseconds(), 1),
            }
        )
    return rows


def main() -> None:
    """Measures and reports."""
    found = sorted(path.stem for path in OVERLAYS.glob("*.yaml"))
    names = ["uniform", *(name for name in found if name not in {"uniform", *LEFT_OUT})]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--schemes", nargs="+", default=names, choices=names)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=300, help="batches per measurement (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    schemes = list(dict.fromkeys(["uniform", *args.schemes]))
    rows = [row for capacity in args.rows for row in measure(capacity, schemes, args.pairs, args.calls)]
    worst = max(rows, key=lambda row: row["÷ uniform"])
    report(
        {
            "name": f"CPU time per batch ÷ uniform replay, {worst['scheme']} at {worst['rows']:,} rows, the largest",
            "value": worst["÷ uniform"],
            "unit": "ratio",
        },
        rows,
        args,
    )


if __name__ == "__main__":
    main()
