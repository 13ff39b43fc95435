"""Expected values are derived by hand in the comments; TorchRL's loss is the second opinion."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss as TorchRLDQNLoss

from vlmrb.losses.dqn import DQNLoss


class Table(nn.Module):
    """Q values looked up by the state's number: ``observation`` is int64[B, 1]."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.values[observation.squeeze(-1)]


def batch(reward: float, terminated: bool, steps: int = 1, weight: float | None = None) -> TensorDict:
    data = TensorDict(
        {
            "observation": torch.tensor([[0]]),
            "action": torch.tensor([1]),
            "steps_to_next_obs": torch.tensor([[steps]]),
            "next": {
                "observation": torch.tensor([[1]]),
                "reward": torch.tensor([[reward]]),
                "done": torch.tensor([[terminated]]),
                "terminated": torch.tensor([[terminated]]),
            },
        },
        [1],
    )
    if weight is not None:
        data["priority_weight"] = torch.tensor([weight])
    return data


ONLINE = [[0.0, 0.5], [3.0, 1.0]]
TARGET = [[0.0, 0.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("double", "terminated", "steps", "expected"),
    [
        (False, False, 1, 1.0 + 0.9 * 4.0),  # max of the target network's row [2, 4]
        (False, False, 3, 1.0 + 0.9**3 * 4.0),  # n-step rows discount by γ^n
        (True, False, 1, 1.0 + 0.9 * 2.0),  # the online network prefers action 0, worth 2 to the target network
        (False, True, 1, 1.0),  # nothing follows a terminal state
    ],
)
def test_target_is_the_hand_computed_one(double: bool, terminated: bool, steps: int, expected: float) -> None:
    loss = DQNLoss(Table(ONLINE), Table(TARGET), gamma=0.9, double_q=double)
    assert loss.target(batch(1.0, terminated, steps)).item() == pytest.approx(expected)


def test_reported_error_is_the_unweighted_absolute_td_error() -> None:
    # δ = 0.5 − 1 = −0.5; the weight scales the loss (smooth L1: 0.5·0.25·3), never the error.
    loss, error = DQNLoss(Table(ONLINE), Table(TARGET), gamma=0.9)(batch(1.0, terminated=True, weight=3.0))
    assert error.tolist() == pytest.approx([0.5])
    assert loss.item() == pytest.approx(0.375)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("loss_function", ["smooth_l1", "l2"])
def test_agrees_with_torchrl_in_loss_gradient_and_error(double: bool, loss_function: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    rows = TensorDict(
        {
            "observation": torch.randn(32, 4),
            "action": torch.randint(3, (32,)),
            "steps_to_next_obs": torch.randint(1, 4, (32, 1)),
            "next": {
                "observation": torch.randn(32, 4),
                "reward": torch.randn(32, 1),
                "done": torch.rand(32, 1) < 0.4,
                "terminated": torch.rand(32, 1) < 0.2,
            },
        },
        [32],
    )
    twin = copy.deepcopy(network)
    theirs = TorchRLDQNLoss(
        QValueActor(twin, in_keys=["observation"], action_space="categorical"),
        action_space="categorical",
        delay_value=True,
        double_dqn=double,
        loss_function=loss_function,
    )
    theirs.make_value_estimator(gamma=0.9)
    expected = theirs(rows)["loss"]
    expected.backward()
    ours, error = DQNLoss(network, copy.deepcopy(network), 0.9, double, loss_function)(rows)  # type: ignore[arg-type]
    ours.backward()
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(error.square(), rows["td_error"].squeeze(-1))
    for mine, other in zip(network.parameters(), theirs.value_network_params.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_target_network_gets_no_gradient() -> None:
    target = Table(TARGET)
    loss, _ = DQNLoss(Table(ONLINE), target, gamma=0.9)(batch(1.0, terminated=False))
    loss.backward()
    assert target.values.grad is None
