"""What a student costs: the same runs with it and without, in pairs, both with the sprites scorer in a process.

    python benchmarks/student_overhead.py --size 8 --pairs 5

The student takes processor time of its own, which is the share in the table, and slows the learner down where there is
no core to spare: by the ratio of env steps per second. The ratio by the learner's own processor time leaves out what it
waited for a core, and tells what the learner itself has to do for a student. Training begins once scorer and student
are set up, so that runs are compared and not starts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from vlmrb.algorithms import TrainingConfig
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.replay.config import ReplayConfig
from vlmrb.scoring.sprites import SpritesScorer
from vlmrb.scoring.student.config import StudentConfig

from app import CAPACITY, LEARNING_STARTS, Fit, fit, prepare
from common import add_json_option, paired, report


class ReadyScoring(ScoringCallback):
    """Lets training wait until everybody is set up."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Waits, for as long as they are allowed to take."""
        service, deadline = pl_module.scoring, time.monotonic() + self.config.startup_timeout_s
        while not (service.accepting and (service.desk is None or service.desk.accepting)):
            if time.monotonic() > deadline:
                raise SystemExit("scorer or student could not be set up: the log says why")
            service.poll(0)
            time.sleep(0.05)


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8, help="DoorKey's N")
    parser.add_argument("--env-steps", type=int, default=102_400, help="env steps per run")
    parser.add_argument("--clip-length", type=int, default=16)
    parser.add_argument("--role", choices=["answering", "screening"], default="answering")
    parser.add_argument("--steps-per-clip", type=float, default=StudentConfig.steps_per_clip)
    parser.add_argument("--pairs", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    training = TrainingConfig(total_env_steps=args.env_steps, learning_starts=LEARNING_STARTS)
    replay = ReplayConfig(capacity=CAPACITY, n_steps=3, clip_length=args.clip_length)
    student = StudentConfig(role=args.role, steps_per_clip=args.steps_per_clip)
    runs: dict[bool, list[Fit]] = {True: [], False: []}

    def run(with_student: bool) -> float:
        settings: dict[str, Any] = {"student": student, "audit_share": 0.02} if with_student else {}
        runs[with_student].append(fit(args.size, training, replay, ReadyScoring(SpritesScorer(), **settings)))
        return runs[with_student][-1].rate

    ratios = paired(lambda: run(True), lambda: run(False), args.pairs)
    rows: list[dict[str, Any]] = [
        {
            "pair": pair + 1,
            "with a student, env steps/s": round(taught.rate),
            "without": round(plain.rate),
            "ratio": round(ratio, 3),
            "ratio by CPU time": round(taught.cpu_rate / plain.cpu_rate, 3),
            "student's CPU share": round(taught.scoring["student_cpu_share"], 3),
            "its clips waiting": round(taught.scoring["student_waiting"]),
            "trusted": bool(taught.scoring["student_trusted"]),
        }
        for pair, (taught, plain, ratio) in enumerate(zip(runs[True], runs[False], ratios, strict=True))
    ]
    name = f"with a student ÷ without, env steps/s, DoorKey-{args.size}x{args.size}, L={args.clip_length}, {args.role}"
    report({"name": name, "value": round(float(np.median(ratios)), 3), "unit": "ratio"}, rows, args)


if __name__ == "__main__":
    main()
