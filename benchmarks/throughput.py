"""Env steps per second: the application against a bare loop, paired in one run.

The bare loop has the same network, environment, replay ratio, n-step returns and exploration, over a plain ring buffer:
no TorchRL, no Lightning, no logging. What the application is slower by is the price of its parts; `--breakdown` says
where it goes.

    python benchmarks/throughput.py --size 6 --pairs 5 --breakdown
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from timers import timed_parts
from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.envs.doorkey import DoorKeySimulator
from vlmrb.envs.grid_simulator import NUM_ACTIONS
from vlmrb.networks.q import make_q_network
from vlmrb.replay.config import ReplayConfig

from app import CAPACITY, LEARNING_STARTS, NUM_ENVS, fit, prepare
from common import add_json_option, paired, report

BATCH, N_STEPS, TARGET_UPDATE_INTERVAL = 128, 3, 200  # as DQN's defaults, and so is the exploration below


class RingBuffer:
    """n-step rows in plain tensors, written a whole vector step at a time."""

    def __init__(self, capacity: int, size: int, gamma: float) -> None:
        self.observation = torch.zeros(capacity, size, size, 3, dtype=torch.uint8)
        self.following = torch.zeros(capacity, size, size, 3, dtype=torch.uint8)
        self.action = torch.zeros(capacity, dtype=torch.int64)
        self.reward = torch.zeros(capacity)
        self.discount = torch.zeros(capacity)  # γ^n, 0 where terminated
        self.capacity, self.gamma = capacity, gamma
        self.cursor = self.length = 0
        self.window: list[tuple[Any, ...]] = []

    def add(self, *step: Any) -> None:
        """Takes one vector step and writes the one that is n steps old."""
        self.window.append(step)
        if len(self.window) < N_STEPS:
            return
        observation, action = self.window[0][:2]
        count = len(action)
        reward, discount = np.zeros(count, np.float32), np.ones(count, np.float32)
        running = np.ones(count, bool)
        following = np.empty_like(observation)
        for _, _, step_reward, after, terminated, done in self.window:
            reward += discount * step_reward * running
            following[running] = after[running]
            discount[running] *= self.gamma * ~terminated[running]
            running &= ~done
        self.window.pop(0)
        rows = slice(self.cursor, self.cursor + count)
        self.observation[rows] = torch.from_numpy(observation)
        self.following[rows] = torch.from_numpy(following)
        self.action[rows] = torch.from_numpy(action)
        self.reward[rows] = torch.from_numpy(reward)
        self.discount[rows] = torch.from_numpy(discount)
        self.cursor = (self.cursor + count) % self.capacity
        self.length = min(self.length + count, self.capacity)


def bare_loop(size: int, env_steps: int, training: TrainingConfig, seed: int) -> float:
    """Trains with as little as possible around it; returns env steps per second from the first gradient step on."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    env = DoorKeySimulator(size, NUM_ENVS, seed=seed)
    network = make_q_network((size, size, 3), torch.uint8, NUM_ACTIONS, [128, 128])
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-4, fused=True)
    buffer = RingBuffer(CAPACITY // NUM_ENVS * NUM_ENVS, size, training.gamma)
    observation, _ = env.look()
    due, updates, start = 0.0, 0, 0.0
    for step in range(0, env_steps, NUM_ENVS):
        epsilon = 1.0 - 0.9 * min(1.0, step / (0.5 * training.total_env_steps))
        with torch.no_grad():
            greedy = network(torch.from_numpy(observation)).argmax(-1).numpy()
        action = np.where(rng.random(NUM_ENVS) < epsilon, rng.integers(0, NUM_ACTIONS, NUM_ENVS), greedy)
        after = env.step(action)
        done = after.terminated | after.truncated
        buffer.add(observation, action, after.reward, after.observation, after.terminated, done)
        observation = after.observation
        if done.any():
            env.restart(np.flatnonzero(done))
            observation, _ = env.look()
        if step < LEARNING_STARTS:
            start = time.perf_counter()
            continue
        due += NUM_ENVS * training.replay_ratio
        while due >= 1:
            due -= 1
            rows = torch.randint(buffer.length, (BATCH,))
            with torch.no_grad():
                following = target(buffer.following[rows]).amax(-1)
                aim = buffer.reward[rows] + buffer.discount[rows] * following
            value = network(buffer.observation[rows]).gather(-1, buffer.action[rows, None]).squeeze(-1)
            loss = F.smooth_l1_loss(value, aim)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            if updates % TARGET_UPDATE_INTERVAL == 0:
                target.load_state_dict(network.state_dict())
    return (env_steps - LEARNING_STARTS) / (time.perf_counter() - start)


def application(size: int, training: TrainingConfig) -> float:
    """Trains through Lightning, TorchRL and the replay buffer, uniform replay; returns env steps per second."""
    replay = ReplayConfig(capacity=CAPACITY, n_steps=N_STEPS, lam_max=0.0, vlm=None, clip_length=None)
    return fit(size, training, replay).rate


def breakdown(size: int, env_steps: int, training: TrainingConfig) -> list[dict[str, Any]]:
    """Returns microseconds per env step in each part of the application, one instrumented run."""
    from vlmrb.algorithms.base import OffPolicyModule
    from vlmrb.algorithms.collector import ReplayCollector
    from vlmrb.replay.buffer import VLMReplayBuffer

    parts = {
        "collect (environments, acting, TorchRL collector)": [(ReplayCollector, "rollout")],
        "extend": [(VLMReplayBuffer, "extend")],
        "sample": [(VLMReplayBuffer, "sample")],
        "update (forward, backward, optimizer)": [(DQN, "update")],
        "training_step (all but collecting)": [(OffPolicyModule, "training_step")],
    }
    with timed_parts(parts) as seconds:
        start = time.perf_counter()
        application(size, training)
        total = time.perf_counter() - start
    rows = [{"part": name, "µs per env step": round(1e6 * seconds[name] / env_steps, 1)} for name in parts]
    lightning = total - seconds["training_step (all but collecting)"]
    lightning -= seconds["collect (environments, acting, TorchRL collector)"]
    return [*rows, {"part": "Lightning, set-up and the rest", "µs per env step": round(1e6 * lightning / env_steps, 1)}]


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=6, help="DoorKey's N")
    parser.add_argument("--env-steps", type=int, default=25_600, help="env steps per run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--breakdown", action="store_true")
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    training = TrainingConfig(total_env_steps=args.env_steps, learning_starts=LEARNING_STARTS)
    rates: dict[str, list[float]] = {"application": [], "bare loop": []}

    def run_application() -> float:
        rates["application"].append(application(args.size, training))
        return rates["application"][-1]

    def run_bare() -> float:
        rates["bare loop"].append(bare_loop(args.size, args.env_steps, training, seed=0))
        return rates["bare loop"][-1]

    ratios = paired(run_application, run_bare, args.pairs)
    rows: list[dict[str, Any]] = [
        {"loop": name, "env steps/s, median": round(float(np.median(values)))} for name, values in rates.items()
    ]
    if args.breakdown:
        rows += breakdown(args.size, args.env_steps, training)
    report(
        {
            "name": f"application ÷ bare loop, env steps/s, DoorKey-{args.size}x{args.size}, uniform",
            "value": round(float(np.median(ratios)), 3),
            "unit": "ratio",
        },
        rows,
        args,
    )


if __name__ == "__main__":
    main()
