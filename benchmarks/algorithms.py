"""CPU time of a gradient step: each algorithm in the application against a plain PyTorch loop, paired in one run.

On the application's side a step is what training with uniform replay does: a batch from the replay buffer, TorchRL's or
this project's loss, Lightning's backward pass and optimizers, target updates. The plain side has the same networks,
batch size and optimizers on tensors, and nothing else. The time is this process's own on one thread, so that others on
the machine count for little. DQN and IQN learn DoorKey-8x8 on batches of 128, SAC and TD3 PointReach-20 on 256, with
three layers of 512 units.

    python benchmarks/algorithms.py --pairs 5
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, Trainer, seed_everything
from torch import Tensor, nn

from vlmrb.algorithms import DQN, IQN, SAC, TD3, OffPolicyModule, TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.networks.continuous import Critic, DeterministicActor, GaussianActor
from vlmrb.networks.q import make_q_network
from vlmrb.networks.quantile import make_quantile_network
from vlmrb.replay.config import ReplayConfig

from app import prepare
from common import add_json_option, paired, report

GRID, POINT = "MiniGrid-DoorKey-8x8-v0", "PointReach-20-v0"
GAMMA, ROWS, HIDDEN, RATE = 0.95, 10_000, [512, 512, 512], 0.005
Rows = Mapping[str, Tensor]
Step = Callable[[Rows], None]


def step_adam(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Takes one optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def adam(*modules: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Returns the optimizer that the application uses."""
    return torch.optim.Adam([parameter for module in modules for parameter in module.parameters()], lr, fused=True)


def follow(pairs: list[tuple[nn.Module, nn.Module]]) -> Callable[[], None]:
    """Returns the soft update of (target, source) pairs."""
    targets = [parameter.detach() for target, _ in pairs for parameter in target.parameters()]
    sources = [parameter.detach() for _, source in pairs for parameter in source.parameters()]
    return lambda: torch._foreach_lerp_(targets, sources, RATE)


def plain_dqn() -> Step:
    """DQN with as little as possible around it."""
    network = make_q_network((8, 8, 3), torch.uint8, 7, [128, 128])
    target, optimizer = copy.deepcopy(network), adam(network, lr=3e-4)

    def step(rows: Rows) -> None:
        with torch.no_grad():
            aim = rows["reward"] + rows["discount"] * target(rows["following"]).amax(-1)
        value = network(rows["observation"]).gather(-1, rows["action"][:, None]).squeeze(-1)
        step_adam(optimizer, F.smooth_l1_loss(value, aim))

    return step


def plain_iqn() -> Step:
    """IQN with as little as possible around it."""
    network = make_quantile_network((8, 8, 3), torch.uint8, 7, [128, 128])
    target, optimizer = copy.deepcopy(network), adam(network, lr=3e-4)

    def step(rows: Rows) -> None:
        count = len(rows["action"])
        each, tau = torch.arange(count), torch.rand(count, 8)
        with torch.no_grad():
            features = target.features(rows["following"])
            best = target.mean_over(features, 32).argmax(-1)
            value = target.quantiles(features, torch.rand(count, 8))[each, :, best]
            aim = rows["reward"][:, None] + rows["discount"][:, None] * value
        error = aim[:, None] - network(rows["observation"], tau)[each, :, rows["action"]][:, :, None]
        huber = F.huber_loss(error, torch.zeros_like(error), reduction="none")
        tilt = (tau[:, :, None] - (error.detach() < 0).float()).abs()
        step_adam(optimizer, (tilt * huber).mean(2).sum(1).mean())

    return step


def twins() -> tuple[nn.Module, nn.Module]:
    """Returns two critics."""
    return Critic(4, 2, HIDDEN), Critic(4, 2, HIDDEN)


def plain_sac() -> Step:
    """SAC with as little as possible around it."""
    actor, critics, log_alpha = GaussianActor(4, 2, HIDDEN), twins(), torch.zeros(1, requires_grad=True)
    targets = copy.deepcopy(critics)
    critic_adam, actor_adam = adam(*critics, lr=3e-4), adam(actor, lr=1e-3)
    actor_adam.add_param_group({"params": [log_alpha]})
    follow_targets = follow(list(zip(targets, critics, strict=True)))

    def policy(observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = actor(observation)
        noise = torch.randn_like(loc)
        raw = loc + scale * noise
        log_prob = -0.5 * noise.square() - scale.log() - 0.919 - 2 * (0.693 - raw - F.softplus(-2 * raw))
        return raw.tanh(), log_prob.sum(-1)

    def step(rows: Rows) -> None:
        observation, following = rows["observation"], rows["following"]
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = policy(following)
            value = torch.minimum(*(target(following, action).squeeze(-1) for target in targets)) - alpha * log_prob
            aim = rows["reward"] + rows["discount"] * value
        losses = [F.mse_loss(critic(observation, rows["action"]).squeeze(-1), aim) for critic in critics]
        step_adam(critic_adam, losses[0] + losses[1])
        for critic in critics:
            critic.requires_grad_(False)
        action, log_prob = policy(observation)
        value = torch.minimum(*(critic(observation, action).squeeze(-1) for critic in critics))
        entropy = -(log_alpha * (log_prob.detach() - 2.0)).mean()
        step_adam(actor_adam, (alpha * log_prob - value).mean() + entropy)
        for critic in critics:
            critic.requires_grad_(True)
        follow_targets()

    return step


def plain_td3() -> Step:
    """TD3 with as little as possible around it."""
    actor, critics = DeterministicActor(4, 2, HIDDEN), twins()
    target_actor, targets = copy.deepcopy(actor), copy.deepcopy(critics)
    critic_adam, actor_adam = adam(*critics, lr=3e-4), adam(actor, lr=3e-4)
    follow_targets = follow([(target_actor, actor), *zip(targets, critics, strict=True)])
    steps = 0

    def step(rows: Rows) -> None:
        nonlocal steps
        observation, following = rows["observation"], rows["following"]
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(rows["action"])).clamp(-0.5, 0.5)
            action = (target_actor(following) + noise).clamp(-1, 1)
            value = torch.minimum(*(target(following, action).squeeze(-1) for target in targets))
            aim = rows["reward"] + rows["discount"] * value
        losses = [F.mse_loss(critic(observation, rows["action"]).squeeze(-1), aim) for critic in critics]
        step_adam(critic_adam, losses[0] + losses[1])
        steps += 1
        if steps % 2:
            return
        critics[0].requires_grad_(False)
        step_adam(actor_adam, -critics[0](observation, actor(observation)).mean())
        critics[0].requires_grad_(True)
        follow_targets()

    return step


ALGORITHMS: dict[str, tuple[type[OffPolicyModule], str, int, Callable[[], Step]]] = {
    "DQN": (DQN, GRID, 128, plain_dqn),
    "IQN": (IQN, GRID, 128, plain_iqn),
    "SAC": (SAC, POINT, 256, plain_sac),
    "TD3": (TD3, POINT, 256, plain_td3),
}


def seconds_per_call(work: Callable[[], object], seconds: float) -> float:
    """Returns CPU seconds per call, over at least so many of them."""
    calls, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < seconds:
        work()
        calls += 1
    return elapsed / calls


class Measure(Callback):
    """Compares gradient steps within a running fit, at the first batch that can be sampled from, and ends the fit."""

    def __init__(self, plain: Callable[[], Step], batch: int, pairs: int, seconds: float) -> None:
        self.plain, self.batch, self.pairs, self.seconds = plain, batch, pairs, seconds
        self.times: dict[str, list[float]] = {"application": [], "plain": []}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Measures once there are `ROWS` env steps."""
        if pl_module.env_steps < ROWS:
            return
        everything = pl_module.buffer.sample(ROWS // 2)
        after = everything["next"]
        tensors = {
            "observation": everything["observation"].clone(),
            "action": everything["action"].clone(),
            "following": after["observation"].clone(),
            "reward": after["reward"].flatten().clone(),
            "discount": GAMMA * ~after["terminated"].flatten(),
        }
        plain_step = self.plain()

        def application() -> None:
            pl_module.grad_steps += 1
            pl_module.update(pl_module.buffer.sample())

        def plain() -> None:
            index = torch.randint(ROWS // 2, (self.batch,))
            plain_step({name: tensor[index] for name, tensor in tensors.items()})

        def timed(name: str, work: Callable[[], None]) -> Callable[[], float]:
            def measure() -> float:
                self.times[name].append(seconds_per_call(work, self.seconds))
                return self.times[name][-1]

            return measure

        for work in (application, plain):
            work()
        self.ratios = paired(timed("application", application), timed("plain", plain), self.pairs)
        trainer.should_stop = True


def compare(name: str, pairs: int, seconds: float) -> dict[str, Any]:
    """Returns one algorithm's row of the table."""
    algorithm, env_id, batch, plain = ALGORITHMS[name]
    seed_everything(0, verbose=False)
    replay = ReplayConfig(capacity=2 * ROWS, batch_size=batch, vlm=None, lam_max=0.0, clip_length=None)
    training = TrainingConfig(total_env_steps=4 * ROWS, learning_starts=4 * ROWS, frames_per_batch=400, gamma=GAMMA)
    measure = Measure(plain, batch, pairs, seconds)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[measure],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(algorithm(EnvConfig(env_id, num_envs=8), training, replay))
    return {
        "algorithm": name,
        "application, ms": round(1e3 * float(np.median(measure.times["application"])), 2),
        "plain, ms": round(1e3 * float(np.median(measure.times["plain"])), 2),
        "ratio": round(float(np.median(measure.ratios)), 2),
        "lowest": round(min(measure.ratios), 2),
        "highest": round(max(measure.ratios), 2),
    }


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds per measurement")
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    rows = [compare(name, args.pairs, args.seconds) for name in args.algorithms]
    worst = max(rows, key=lambda row: row["ratio"])
    report(
        {
            "name": f"application ÷ plain loop, CPU time of a gradient step, {worst['algorithm']}, the largest",
            "value": worst["ratio"],
            "unit": "ratio",
        },
        rows,
        args,
    )


if __name__ == "__main__":
    main()
