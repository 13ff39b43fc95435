"""Updates per second: this project's DQN loss against TorchRL's, on the same batches, paired in one run.

An update is loss, gradients and optimizer step on a network of 128-128 units; both losses give the same numbers.

    python benchmarks/loss.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Categorical
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss as TorchRLDQNLoss

from vlmrb.losses.dqn import DQNLoss
from vlmrb.networks.q import make_q_network

from app import prepare
from common import add_json_option, paired, rate, report

BATCH, ACTIONS, SIZE = 128, 7, 6


def make_network() -> torch.nn.Module:
    """The network that DoorKey-6x6 is learnt with."""
    torch.manual_seed(0)
    return make_q_network((SIZE, SIZE, 3), torch.uint8, ACTIONS, [128, 128])


def make_batch() -> TensorDict:
    """A batch as the replay buffer hands it out."""
    generator = torch.Generator().manual_seed(0)
    grids = torch.randint(0, 8, (2, BATCH, SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
    flags = torch.zeros(BATCH, 1, dtype=torch.bool)
    following = {"observation": grids[1], "reward": torch.zeros(BATCH, 1), "done": flags, "terminated": flags}
    action = torch.randint(0, ACTIONS, (BATCH,), generator=generator)
    steps = torch.full((BATCH, 1), 3)
    return TensorDict(
        {"observation": grids[0], "action": action, "steps_to_next_obs": steps, "next": following}, [BATCH]
    )


def our_update() -> Callable[[], None]:
    """Returns one update with this project's loss."""
    network = make_network()
    loss, optimizer, batch = DQNLoss(network, make_network(), 0.95), make_optimizer(network), make_batch()

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(batch)[0].backward()
        optimizer.step()

    return update


def torchrl_update() -> Callable[[], None]:
    """Returns one update with TorchRL's loss."""
    actor = QValueActor(make_network(), in_keys=["observation"], spec=Categorical(ACTIONS), action_space="categorical")
    loss = TorchRLDQNLoss(actor, delay_value=True, action_space="categorical")
    loss.make_value_estimator(gamma=0.95)
    optimizer, batch = make_optimizer(loss), make_batch()

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(batch)["loss"].backward()
        optimizer.step()

    return update


def make_optimizer(module: torch.nn.Module) -> Any:
    """The optimizer that training uses."""
    return torch.optim.Adam(module.parameters(), 1e-4, fused=True)


def main() -> None:
    """Runs the pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per measurement")
    add_json_option(parser)
    args = parser.parse_args()
    prepare()
    rates: dict[str, list[float]] = {"vlmrb": [], "torchrl": []}

    def measured(name: str, update: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            rates[name].append(rate(update, 1, args.seconds))
            return rates[name][-1]

        return measure

    ratios = paired(measured("vlmrb", our_update()), measured("torchrl", torchrl_update()), args.pairs)
    rows = [{"loss": name, "ms per update, median": 1e3 / float(np.median(found))} for name, found in rates.items()]
    rows.append({"loss": "ratio", "lowest": min(ratios), "highest": max(ratios)})
    value = round(float(np.median(ratios)), 2)
    report({"name": "vlmrb ÷ TorchRL, updates/s with the DQN loss", "value": value, "unit": "ratio"}, rows, args)


if __name__ == "__main__":
    main()
