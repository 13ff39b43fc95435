"""Training does not wait for its scorer: an instant one against one that takes a second per clip.

The same VLM-only run in four conditions, one right after the other in every round: with an instant scorer, with one
that sleeps for a second per clip (as one on a GPU or a server does), with one that computes for a second per clip on
this CPU, and with the sleeping one beside a busy loop in a program of its own. The last is the control for the third:
both need the same from the machine, so what a computing scorer costs beyond it would be waiting. Either costs something
where virtual cores share a physical one.

    python benchmarks/scoring_never_waits.py --rounds 5
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from slow_scorers import TimedScorer
from vlmrb.algorithms import TrainingConfig
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.replay.config import ReplayConfig

from app import CAPACITY, LEARNING_STARTS, Fit, fit, prepare
from common import add_json_option, report

INSTANT, ASLEEP, COMPUTING, OUTSIDE = "instant", "asleep", "computing", "asleep, busy loop outside"


@contextmanager
def busy_loop() -> Iterator[None]:
    """Keeps one core busy from outside this program."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def conditions(size: int, env_steps: int, seconds: float) -> dict[str, Callable[[], Fit]]:
    """Returns a run per condition; each scores in a process, without a cache."""
    training = TrainingConfig(total_env_steps=env_steps, learning_starts=LEARNING_STARTS)
    replay = ReplayConfig(capacity=CAPACITY, n_steps=3, clip_length=16)

    def run(scorer: TimedScorer) -> Fit:
        timeout_s = 60 + 100 * seconds
        return fit(size, training, replay, ScoringCallback(scorer, cache=None, backend="process", timeout_s=timeout_s))

    def run_beside_a_busy_loop() -> Fit:
        with busy_loop():
            return run(TimedScorer(seconds, "sleep"))

    return {
        INSTANT: lambda: run(TimedScorer()),
        ASLEEP: lambda: run(TimedScorer(seconds, "sleep")),
        COMPUTING: lambda: run(TimedScorer(seconds, "compute")),
        OUTSIDE: run_beside_a_busy_loop,
    }


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=6, help="DoorKey's N")
    parser.add_argument("--env-steps", type=int, default=51_200, help="env steps per run")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per clip of the slow scorers")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    runs = conditions(args.size, args.env_steps, args.seconds)
    fits: dict[str, list[Fit]] = {name: [] for name in runs}
    for round_number in range(args.rounds):
        order = list(runs) if round_number % 2 == 0 else list(runs)[::-1]  # drift favours no condition
        for name in order:
            fits[name].append(runs[name]())
    rates = {name: np.array([result.rate for result in results]) for name, results in fits.items()}
    cpu_rates = {name: np.array([result.cpu_rate for result in results]) for name, results in fits.items()}
    rows: list[dict[str, Any]] = [
        {
            "scorer": name,
            "env steps/s, median": round(float(np.median(rates[name]))),
            "÷ instant, median of rounds": round(float(np.median(rates[name] / rates[INSTANT])), 3),
            "lowest": round(float((rates[name] / rates[INSTANT]).min()), 3),
            "highest": round(float((rates[name] / rates[INSTANT]).max()), 3),
            "÷ instant, per own CPU second": round(float(np.median(cpu_rates[name] / cpu_rates[INSTANT])), 3),
            "off the CPU": round(float(np.median(1 - rates[name] / cpu_rates[name])), 4),
            "share scored": round(float(np.mean([result.scoring["share_scored"] for result in results])), 4),
        }
        for name, results in fits.items()
    ]
    headline = float(np.median(rates[ASLEEP] / rates[INSTANT]))
    name = f"asleep {args.seconds:g} s per clip ÷ instant, env steps/s, DoorKey-{args.size}x{args.size}"
    report({"name": name, "value": round(headline, 3), "unit": "ratio"}, rows, args)


if __name__ == "__main__":
    main()
