"""Expected values are derived by hand in the comments, on networks whose quantiles are plain tables."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from vlmrb.losses.iqn import IQNLoss
from vlmrb.networks.quantile import make_quantile_network


class Linear(nn.Module):
    """Z_τ(s, a) = base[s, a] + slope[s, a] · τ; ``observation`` is the state's number, int64[B, 1]."""

    def __init__(self, base: list[list[float]], slope: list[list[float]]) -> None:
        super().__init__()
        self.base, self.slope = nn.Parameter(torch.tensor(base)), nn.Parameter(torch.tensor(slope))

    def features(self, observation: Tensor) -> Tensor:
        return observation.squeeze(-1)

    def quantiles(self, features: Tensor, tau: Tensor) -> Tensor:
        return self.base[features].unsqueeze(1) + self.slope[features].unsqueeze(1) * tau.unsqueeze(-1)

    def forward(self, observation: Tensor, tau: Tensor) -> Tensor:
        return self.quantiles(self.features(observation), tau)

    def mean_over(self, features: Tensor, num_quantiles: int) -> Tensor:
        midpoints = (torch.arange(num_quantiles) + 0.5) / num_quantiles
        return self.quantiles(features, midpoints.unsqueeze(0)).mean(1)


def rows(reward: float, terminated: bool, steps: int = 1, done: bool | None = None) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.tensor([[0]]),
            "action": torch.tensor([1]),
            "steps_to_next_obs": torch.tensor([steps]),
            "next": {
                "observation": torch.tensor([[1]]),
                "reward": torch.tensor([[reward]]),
                "done": torch.tensor([[terminated if done is None else done]]),
                "terminated": torch.tensor([[terminated]]),
            },
        },
        [1],
    )


# State 0 is asked for action 1: Z_τ = 0.5 + τ. In state 1 the target network's means are 2 + 0/2 = 2 and 1 + 4/2 = 3,
# so it takes action 1 with Z_τ = 1 + 4τ; the online network prefers action 0, worth Z_τ = 2 to the target network.
ONLINE = ([[0.0, 0.5], [9.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]])
TARGET = ([[0.0, 0.0], [2.0, 1.0]], [[0.0, 0.0], [0.0, 4.0]])
LEVELS = torch.tensor([[0.25, 0.75]])


def make_loss(double_q: bool = False, kappa: float = 1.0) -> IQNLoss:
    return IQNLoss(Linear(*ONLINE), Linear(*TARGET), gamma=0.5, num_policy_quantiles=4, double_q=double_q, kappa=kappa)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("double_q", "terminated", "steps", "expected"),
    [
        (False, False, 1, [1 + 0.5 * 2, 1 + 0.5 * 4]),  # 1 + 4·0.25 = 2 and 1 + 4·0.75 = 4
        (False, False, 3, [1 + 0.125 * 2, 1 + 0.125 * 4]),
        (True, False, 1, [1 + 0.5 * 2, 1 + 0.5 * 2]),
        (False, True, 1, [1.0, 1.0]),
        (False, True, 3, [1.0, 1.0]),
    ],
)
def test_target_samples_are_the_hand_computed_ones(
    double_q: bool, terminated: bool, steps: int, expected: list[float]
) -> None:
    target = make_loss(double_q).target(rows(1.0, terminated, steps), LEVELS)
    assert target.tolist() == [pytest.approx(expected)]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_truncated_row_bootstraps_like_any_other(steps: int) -> None:
    cut, running = rows(1.0, False, steps, done=True), rows(1.0, False, steps)
    assert torch.equal(make_loss().target(cut, LEVELS), make_loss().target(running, LEVELS))


def test_loss_is_the_hand_computed_quantile_huber_loss() -> None:
    # Online quantiles at 0.25 and 0.75: 0.75 and 1.25. Targets y of a terminal row with reward 1: 1 and 1.
    # τ=0.25: δ = 0.25 > 0, twice: 0.25 · 0.25²/2 = 0.0078125. τ=0.75: δ = −0.25, |0.75 − 1| · 0.03125 = 0.0078125.
    loss, error = make_loss()(rows(1.0, terminated=True), LEVELS, LEVELS)
    assert loss.item() == pytest.approx(2 * 0.0078125)
    assert error.tolist() == pytest.approx([0.0])  # the means are equal: 1 and 1


def test_loss_is_linear_beyond_kappa_sums_over_online_and_averages_over_target_levels() -> None:
    # Targets 1 + 0.5·{2, 4} = {2, 3}; online 0.75 (τ = 0.25) and 1.25 (τ = 0.75); κ = 1.
    # τ=0.25: δ = 1.25 and 2.25, Huber 0.75 and 1.75, mean 1.25, times 0.25 = 0.3125.
    # τ=0.75: δ = 0.75 and 1.75, Huber 0.28125 and 1.25, mean 0.765625, times 0.75 = 0.57421875.
    loss, error = make_loss()(rows(1.0, terminated=False), LEVELS, LEVELS)
    assert loss.item() == pytest.approx(0.3125 + 0.57421875)
    assert error.tolist() == pytest.approx([2.5 - 1.0])
    # κ = 2: Huber of 1.25, 2.25, 0.75, 1.75 is 0.78125, 2·(2.25 − 1) = 2.5, 0.28125, 1.53125, all over 2.
    loss, _ = make_loss(kappa=2.0)(rows(1.0, terminated=False), LEVELS, LEVELS)
    assert loss.item() == pytest.approx(0.25 * (0.78125 + 2.5) / 4 + 0.75 * (0.28125 + 1.53125) / 4)


def test_gradient_is_the_hand_computed_one() -> None:
    # dL/dZ_i = −mean_j |τ_i − 1[δ<0]| · clip(δ, −1, 1). τ=0.25: −0.25 · (1 + 1)/2; τ=0.75: −0.75 · (0.75 + 1)/2.
    loss_module = make_loss()
    loss, _ = loss_module(rows(1.0, terminated=False), LEVELS, LEVELS)
    loss.backward()
    first, second = -0.25, -0.65625
    online = loss_module.network
    assert online.base.grad[0].tolist() == pytest.approx([0.0, first + second])  # type: ignore[union-attr, index]
    assert online.slope.grad[0].tolist() == pytest.approx([0.0, 0.25 * first + 0.75 * second])  # type: ignore[union-attr, index]
    assert online.base.grad[1].tolist() == [0.0, 0.0]  # type: ignore[union-attr, index]
    assert loss_module.target_network.base.grad is None  # type: ignore[union-attr]


def test_weights_scale_each_items_loss_and_not_its_error() -> None:
    both = torch.cat([rows(1.0, terminated=False), rows(1.0, terminated=True)])
    levels = LEVELS.expand(2, -1)
    plain, error = make_loss()(both, levels, levels)
    both["priority_weight"] = torch.tensor([0.5, 0.0])
    weighted, same = make_loss()(both, levels, levels)
    assert plain.item() == pytest.approx((0.88671875 + 0.015625) / 2)
    assert weighted.item() == pytest.approx(0.5 * 0.88671875 / 2)
    assert torch.equal(error, same)


def test_mirroring_returns_and_levels_leaves_the_loss_as_it_is() -> None:
    # ρ_τ(δ) = ρ_{1−τ}(−δ): negate reward and values and turn the levels round.
    base, slope = [[0.0, 0.5], [0.0, 1.0]], [[0.0, 1.0], [0.0, 4.0]]
    mirrored = [
        [-b - s for b, s in zip(*pair, strict=True)] for pair in zip(base, slope, strict=True)
    ]  # Z_{1−τ}, negated
    data, levels = rows(1.0, terminated=False), torch.tensor([[0.1, 0.6]])
    one = IQNLoss(Linear(base, slope), Linear(base, slope), 0.5)  # type: ignore[arg-type]
    other = IQNLoss(Linear(mirrored, slope), Linear(mirrored, slope), 0.5)  # type: ignore[arg-type]
    target = one.target(data, levels)
    # The greedy action of the mirrored problem is another one; give both problems the target of the first.
    one.target = lambda *_: target  # type: ignore[method-assign]
    other.target = lambda *_: -target  # type: ignore[method-assign]
    assert one(data, levels, levels)[0].item() == pytest.approx(other(data, 1 - levels, levels)[0].item())


def test_it_learns_the_quantiles_of_a_random_return() -> None:
    # Returns are 0 or 1 with equal probability: below τ = ½ the quantile is 0, above it 1, and the mean is ½.
    torch.manual_seed(0)
    network = make_quantile_network((1,), torch.float32, 1, [32])
    loss = IQNLoss(network, network, gamma=0.9, kappa=0.01)  # nearly the plain quantile loss
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    zeros = torch.zeros(128, 1)
    for _ in range(400):
        following = {"observation": zeros, "reward": torch.randint(2, (128, 1)).float(), "terminated": zeros == 0}
        data = TensorDict({"observation": zeros, "action": zeros[:, 0].long(), "next": following}, [128])
        optimizer.zero_grad()
        loss(data, torch.rand(128, 8), torch.rand(128, 1))[0].backward()
        optimizer.step()
    found = network(torch.zeros(1, 1), torch.tensor([[0.2, 0.35, 0.65, 0.8]])).detach().flatten()
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 1.0, 1.0]), atol=0.15, rtol=0)
    mean = network.mean_over(network.features(torch.zeros(1, 1)), 32).item()
    assert mean == pytest.approx(0.5, abs=0.07)
