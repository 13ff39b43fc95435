"""Time of extend, sample and priority update at 10⁶ rows, against TorchRL's own prioritised buffer, paired in one run.

Both do prioritised experience replay (α = 0.6, importance weights) on the same rows: MiniGrid 6×6 observations, blocks
of 32 environments × 8 steps, batches of 128. TorchRL's buffer is given the rows flat, as it wants them, and its default
storage. The further rows of the table show what clips, scores and 3-step returns add to ours.

    python benchmarks/replay.py --pairs 9
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from torchrl.envs.transforms import MultiStepTransform

from vlmrb.replay.buffer import ROW_KEYS, VLMReplayBuffer
from vlmrb.replay.terms import TDTerm, VLMTerm

from common import add_json_option, report

NUM_ENVS, LENGTH, BATCH = 32, 8, 128
OPERATIONS = ("extend", "sample", "update")
Work = dict[str, Callable[[], object]]


def make_block(length: int) -> TensorDict:
    """Returns rows ``[32, length]`` as a collector gives them; one in a hundred ends an episode."""
    shape = (NUM_ENVS, length)
    generator = torch.Generator().manual_seed(0)

    def state() -> dict[str, torch.Tensor]:  # states stand still, so that every block continues every other
        return {
            "observation": torch.full((*shape, 6, 6, 3), 5, dtype=torch.uint8),
            "snapshot": torch.full((*shape, 115), 5, dtype=torch.uint8),
        }

    done = torch.rand(*shape, 1, generator=generator) < 0.01
    after = {
        "reward": torch.rand(*shape, 1, generator=generator),
        "done": done,
        "terminated": done.clone(),
        "success": done.clone(),
    }
    action = torch.randint(0, 7, shape, generator=generator)
    return TensorDict({**state(), "action": action, "next": TensorDict(state() | after, shape)}, shape)


def torchrl_per(capacity: int, n_steps: int = 1) -> Work:
    """TorchRL's buffer, filled; n-step returns by its own transform, whose rows are flattened afterwards."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, eps=1e-6, storage=LazyTensorStorage(capacity), batch_size=BATCH
    )
    fill, block = (make_block(length).select(*ROW_KEYS).reshape(-1) for length in (1024, LENGTH))
    while len(buffer) < capacity:
        buffer.extend(fill)
    index, abs_td_error = buffer.sample()["index"], torch.rand(BATCH)
    multi_step = MultiStepTransform(n_steps, 0.99, done_keys=[])
    raw = make_block(LENGTH).select(*ROW_KEYS)

    def extend_n_steps() -> None:
        rows = multi_step.inv(raw)
        buffer.extend(rows.select(*ROW_KEYS).reshape(-1))

    return {
        "extend": extend_n_steps if n_steps > 1 else lambda: buffer.extend(block),
        "sample": buffer.sample,
        "update": lambda: buffer.update_priority(index, abs_td_error),
    }


def ours(capacity: int, **settings: Any) -> Work:
    """Our buffer, filled; with clips, every clip is scored as it comes."""
    buffer = VLMReplayBuffer(capacity, batch_size=BATCH, **settings)
    fill, block = make_block(1024), make_block(LENGTH)

    def score() -> None:
        ids = [] if buffer.clips is None else buffer.clips.take_completed()
        if ids:
            buffer.write_scores(ids, [clip % 10 / 10 for clip in ids])

    while len(buffer) < capacity:
        buffer.extend(fill)
        score()
    batch, abs_td_error = buffer.sample(), torch.rand(BATCH)
    work: Work = {
        "extend": lambda: buffer.extend(block),
        "sample": buffer.sample,
        "update": lambda: buffer.update_td_error(batch, abs_td_error),
    }
    if buffer.clips is not None:
        work["score"] = score  # the clips that the extends before it completed
    return work


def microseconds(work: Work, calls: int) -> dict[str, float]:
    """Times each operation, µs per call."""
    times = {}
    for name, operation in work.items():
        count = 1 if name == "score" else calls
        start = time.perf_counter()
        for _ in range(count):
            operation()
        times[name] = (time.perf_counter() - start) / calls * 1e6
    return times


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000, help="rows in each buffer (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=9, help="rounds, each measuring all in turn (default: %(default)s)"
    )
    parser.add_argument("--calls", type=int, default=200, help="calls of each operation a round (default: %(default)s)")
    add_json_option(parser)
    args = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    per = {"terms": [TDTerm(0.6, 1e-6)], "lam": 1.0, "beta": 0.4}
    scored = {"terms": [VLMTerm(), TDTerm()], "lam": 0.5, "clip_length": 32}
    contenders = {
        "TorchRL, PER": torchrl_per(args.capacity),
        "TorchRL, PER, 3-step": torchrl_per(args.capacity, n_steps=3),
        "ours, PER": ours(args.capacity, **per),
        "ours, uniform": ours(args.capacity),
        "ours, VLM×TD with clips": ours(args.capacity, **scored),
        "ours, VLM×TD with clips, 3-step": ours(args.capacity, **scored, n_steps=3),
    }
    rounds = []
    for pair in range(args.pairs + 1):
        names = list(contenders) if pair % 2 else list(contenders)[::-1]
        rounds.append({name: microseconds(contenders[name], args.calls) for name in names})
    rounds = rounds[1:]  # the first one warms up

    def total(times: dict[str, float]) -> float:
        return sum(times[operation] for operation in OPERATIONS)

    rows = []
    for name in contenders:
        row: dict[str, Any] = {"buffer": name}
        for operation in (*OPERATIONS, "score"):
            if operation in contenders[name]:
                row[f"{operation} µs"] = round(statistics.median(r[name][operation] for r in rounds), 1)
        ratios = sorted(total(r[name]) / total(r["TorchRL, PER"]) for r in rounds)
        row |= {
            "÷ TorchRL": round(statistics.median(ratios), 3),
            "from": round(ratios[0], 3),
            "to": round(ratios[-1], 3),
        }
        rows.append(row)
    report(
        {
            "name": f"extend({NUM_ENVS * LENGTH}) + sample({BATCH}) + update({BATCH}) at {args.capacity:,} rows, "
            "our time ÷ TorchRL's",
            "value": next(row["÷ TorchRL"] for row in rows if row["buffer"] == "ours, PER"),
            "unit": "ratio",
        },
        rows,
        args,
    )


if __name__ == "__main__":
    main()
