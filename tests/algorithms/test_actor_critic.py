"""SAC and TD3 against numbers derived by hand: constant critics make every target a line of arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Unbounded
from torchrl.modules import TanhNormal
from torchrl.objectives import ValueEstimators

from vlmrb.algorithms import SAC, TD3, TrainingConfig
from vlmrb.algorithms.actor_critic import ActorCritic
from vlmrb.envs import EnvConfig
from vlmrb.losses.td_errors import abs_td_error
from vlmrb.replay.config import ReplayConfig

LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 0.5])
GAMMA = 0.5
BOTH = pytest.mark.parametrize("algorithm", [SAC, TD3])


def make(algorithm: type[ActorCritic], **settings: Any) -> Any:
    """An agent of two-dimensional states and actions between (-2, 0) and (2, ½)."""
    torch.manual_seed(0)
    module = algorithm(
        EnvConfig("PointReach-6-v0", num_envs=2),
        TrainingConfig(total_env_steps=400, learning_starts=40, frames_per_batch=40, gamma=GAMMA),
        ReplayConfig(capacity=1_000, batch_size=16, vlm=None, lam_max=0.0, clip_length=None),
        hidden_sizes=[8],
        **settings,
    )
    module.action_spec = Bounded(LOW, HIGH, dtype=torch.float32)
    module.build(Unbounded((2,)), module.action_spec)
    return module


def constant_critics(module: Any, online: tuple[float, float], target: tuple[float, float]) -> None:
    for parameters, values in (
        (module.loss.qvalue_network_params, online),
        (module.loss.target_qvalue_network_params, target),
    ):
        last = parameters["module", "layers", "3"]
        last["weight"].data.zero_()
        last["bias"].data.copy_(torch.tensor(values).unsqueeze(1))


def rows(reward: float, terminated: bool, done: bool, steps: int | None, count: int = 1) -> TensorDict:
    data = TensorDict(
        {
            "observation": torch.zeros(count, 2),
            "action": torch.tensor([[1.0, 0.25]]).expand(count, -1),
            "next": {
                "observation": torch.ones(count, 2),
                "reward": torch.full((count, 1), reward),
                "done": torch.full((count, 1), done),
                "terminated": torch.full((count, 1), terminated),
            },
        },
        [count],
    )
    if steps is not None:
        data["steps_to_next_obs"] = torch.full((count,), steps)
    return data


def critic_losses(module: Any, batch: TensorDict) -> tuple[Tensor, Tensor]:
    loss = module.loss.qvalue_v2_loss if isinstance(module, SAC) else module.loss.value_loss
    losses, written = loss(module.rows_for_loss(batch))
    return losses.detach(), abs_td_error(module.loss, written["td_error"])


# Online critics say 2 and 5, target critics 3 and 4: the target is 1 + γ^n · 3, if the row ends in no terminal state.
@pytest.mark.parametrize(
    ("terminated", "done", "steps", "target"),
    [
        (False, False, None, 1 + 0.5 * 3),
        (False, False, 1, 1 + 0.5 * 3),
        (False, False, 3, 1 + 0.125 * 3),
        (False, True, 1, 1 + 0.5 * 3),  # truncation bootstraps
        (False, True, 3, 1 + 0.125 * 3),
        (True, True, 1, 1.0),  # termination does not
        (True, True, 3, 1.0),
    ],
)
@BOTH
def test_targets_and_td_errors_are_the_hand_computed_ones(
    algorithm: type[ActorCritic], terminated: bool, done: bool, steps: int | None, target: float
) -> None:
    module = make(algorithm, **({"initial_temperature": 1e-12} if algorithm is SAC else {}))
    constant_critics(module, (2.0, 5.0), (3.0, 4.0))
    losses, error = critic_losses(module, rows(1.0, terminated, done, steps))
    assert losses.tolist() == pytest.approx([(2 - target) ** 2 + (5 - target) ** 2])  # summed over the twins
    assert error.tolist() == pytest.approx([max(abs(2 - target), abs(5 - target))])  # the larger of the twins'
    constant_critics(module, (9.0, -1.0), (3.0, 4.0))
    assert critic_losses(module, rows(1.0, terminated, done, steps))[1].tolist() == pytest.approx(
        [max(abs(9 - target), abs(-1 - target))]
    )


def test_sac_adds_the_entropy_of_the_next_action_to_its_target() -> None:
    module = make(SAC, initial_temperature=0.5)
    constant_critics(module, (0.0, 0.0), (3.0, 4.0))
    loc, scale = (part.detach() for part in module.actor(torch.ones(1, 2)))
    torch.manual_seed(7)
    noise = torch.normal(torch.zeros(1, 2), torch.ones(1, 2))
    action = (loc + scale * noise).tanh()
    gaussian = -0.5 * noise.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    log_prob = (gaussian - (1 - action.square()).log()).sum()
    torch.manual_seed(7)
    _, error = critic_losses(module, rows(1.0, False, False, 1))
    assert error.item() == pytest.approx((1 + GAMMA * (3 - 0.5 * log_prob)).item(), rel=1e-4)


def test_importance_weights_scale_the_critics_loss_item_by_item() -> None:
    module = make(TD3)
    module.manual_backward = lambda loss: loss.backward()
    constant_critics(module, (2.0, 5.0), (3.0, 4.0))
    batch = torch.cat([rows(1.0, True, True, 1), rows(2.0, True, True, 1)])  # losses 1 + 16 = 17 and 0 + 9 = 9
    optimizer = torch.optim.SGD(module.loss.qvalue_network_params.parameters(), lr=0.0)
    losses, _ = module.loss.value_loss(module.rows_for_loss(batch))
    assert module.critic_step(optimizer, losses, batch).item() == pytest.approx(13.0)
    batch["priority_weight"] = torch.tensor([1.0, 0.5])
    losses, written = module.loss.value_loss(module.rows_for_loss(batch))
    assert losses.tolist() == pytest.approx([17.0, 9.0])
    assert module.critic_step(optimizer, losses, batch).item() == pytest.approx((17 + 4.5) / 2)
    bias = module.loss.qvalue_network_params["module", "layers", "3", "bias"].grad
    # d/dQ of the weighted mean: (2(2 − 1) + 0.5 · 2(2 − 2)) / 2 = 1 and (2(5 − 1) + 0.5 · 2(5 − 2)) / 2 = 5.5.
    assert bias.flatten().tolist() == pytest.approx([1.0, 5.5])
    assert abs_td_error(module.loss, written["td_error"]).tolist() == pytest.approx([4.0, 3.0])


@BOTH
def test_actions_are_translated_between_the_networks_and_the_environment(algorithm: type[ActorCritic]) -> None:
    module = make(algorithm)
    actions = torch.tensor([[-2.0, 0.0], [0.0, 0.25], [2.0, 0.5], [1.0, 0.125]])
    scaled = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5]])
    torch.testing.assert_close(module.bounds.to_network(actions), scaled)
    torch.testing.assert_close(module.bounds.to_environment(scaled), actions)
    observation, generator = torch.randn(500, 2) * 100, torch.Generator().manual_seed(0)
    module.env_steps = 40
    for chosen in (module.act(observation), module.explore(observation, generator)):
        assert ((chosen >= LOW) & (chosen <= HIGH)).all()
        assert (chosen.max(0).values > 0.8 * HIGH).all()
    assert torch.equal(module.rows_for_loss(rows(0.0, False, False, 1))["action"], torch.tensor([[0.5, 0.0]]))


@BOTH
def test_actions_are_uniform_until_learning_starts(algorithm: type[ActorCritic]) -> None:
    module, generator = make(algorithm), torch.Generator().manual_seed(0)
    observation = torch.zeros(4_000, 2)
    early = module.explore(observation, generator)
    expected = (HIGH - LOW) / math.sqrt(12)
    torch.testing.assert_close(early.std(0), expected, rtol=0.03, atol=0.0)
    module.env_steps = 40
    assert (module.explore(observation, generator).mean(0) - module.act(observation)[0]).abs().max() < 0.2


def test_sac_explores_by_samples_of_the_policy_that_its_loss_assumes() -> None:
    module, generator = make(SAC), torch.Generator().manual_seed(0)
    loc, scale = (part.detach() for part in module.actor(torch.ones(1, 2)))
    samples = module.noisy_action(torch.ones(20_000, 2), generator)
    torch.manual_seed(0)
    theirs = TanhNormal(loc, scale).sample((20_000,)).squeeze(1)
    torch.testing.assert_close(samples.mean(0), theirs.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(samples.std(0), theirs.std(0), atol=0.02, rtol=0)
    torch.testing.assert_close(module.best_action(torch.ones(1, 2)), loc.tanh())


def test_td3_explores_with_noise_of_its_width_and_not_in_evaluations() -> None:
    module, generator = make(TD3, exploration_noise=0.1), torch.Generator().manual_seed(0)
    observation = torch.zeros(20_000, 2)
    best = module.best_action(observation[:1])
    noise = module.noisy_action(observation, generator) - best
    torch.testing.assert_close(noise.std(0), torch.tensor([0.1, 0.1]), atol=0.005, rtol=0)
    assert module.evaluation_epsilon == 0.0
    assert torch.equal(module.play(observation, 0.0, generator), module.act(observation))


@BOTH
def test_a_share_of_random_actions_can_be_asked_for(algorithm: type[ActorCritic]) -> None:
    module, generator = make(algorithm), torch.Generator().manual_seed(0)
    observation = torch.zeros(4_000, 2)
    played, best = module.play(observation, 0.25, generator), module.act(observation[:1])
    assert ((played != best).any(-1).float().mean() - 0.25).abs() < 0.03


@BOTH
def test_a_checkpoint_holds_every_parameter_once_and_the_actor_plays_with_the_losses(
    algorithm: type[ActorCritic],
) -> None:
    module = make(algorithm)
    state = module.state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    learnt = {id(parameter) for parameter in module.loss.actor_network_params.parameters()}
    assert {id(parameter) for parameter in module.actor.parameters()} == learnt
    other = make(algorithm)
    for parameter in other.parameters():
        parameter.data.add_(1.0)
    other.load_state_dict(state)
    observation = torch.randn(5, 2)
    assert torch.equal(other.act(observation), module.act(observation))
    module.double()  # what moves a module to another device moves the actor along
    assert next(module.actor.parameters()).dtype == torch.float64


@BOTH
def test_targets_follow_softly_after_each_step_of_the_actor(algorithm: type[ActorCritic]) -> None:
    module = make(algorithm, target_update_rate=0.25)
    optimizers = module.configure_optimizers()
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = 0.0
    module.optimizers, module.manual_backward = lambda: optimizers, lambda loss: loss.backward()
    constant_critics(module, (2.0, 5.0), (0.0, 1.0))
    found = []
    for module.grad_steps in (1, 2):
        metrics, _ = module.update(rows(1.0, False, False, 1, count=4))
        found.append(module.loss.target_qvalue_network_params["module", "layers", "3", "bias"].flatten().tolist())
        assert ("actor_loss" in metrics) == (algorithm is SAC or module.grad_steps == 2)  # TD3's actor is delayed
    once, twice = pytest.approx([0.5, 2.0]), pytest.approx([0.875, 2.75])  # a quarter of the way each time
    assert found == ([once, twice] if algorithm is SAC else [pytest.approx([0.0, 1.0]), once])


def test_settings_that_the_loss_keeps_as_buffers_are_not_those_of_a_loaded_checkpoint() -> None:
    old, new = make(SAC, target_entropy=-7.0), make(SAC)
    old.loss.make_value_estimator(ValueEstimators.TD0, gamma=0.9)
    assert old.loss.target_entropy.item() == -7.0
    new.load_state_dict(old.state_dict())
    new.on_train_start()
    assert new.loss.target_entropy.item() == -2.0  # minus the number of action dimensions
    assert new.loss.value_estimator.gamma.item() == GAMMA


def test_td3s_actor_loss_is_torchrls() -> None:
    module, observation = make(TD3), torch.randn(32, 2)
    found, gradients = [], []
    for loss in (
        module.actor_loss(observation),
        module.loss.actor_loss(TensorDict({"observation": observation}, [32]))[0].mean(),
    ):
        module.zero_grad()
        loss.backward()
        found.append(loss.item())
        gradients.append([None if each.grad is None else each.grad.clone() for each in module.parameters()])
    assert found[0] == pytest.approx(found[1])
    touched = {id(parameter) for parameter in module.actor.parameters()}
    for parameter, ours, theirs in zip(module.parameters(), *gradients, strict=True):
        assert (ours is not None) == (id(parameter) in touched)  # the critics are left alone
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@BOTH
def test_state_value_is_the_smaller_critics(algorithm: type[ActorCritic]) -> None:
    module = make(algorithm)
    constant_critics(module, (2.0, 5.0), (0.0, 1.0))
    assert module.state_value(torch.zeros(3, 2)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("algorithm", "env_id", "says"),
    [
        (SAC, "MiniGrid-DoorKey-5x5-v0", r"^model SAC needs continuous .* discrete: use --model vlmrb.algorithms.DQN"),
        (TD3, "MiniGrid-DoorKey-5x5-v0", r"^model TD3 needs continuous .* discrete: use --model vlmrb.algorithms.DQN"),
    ],
)
def test_environments_that_do_not_fit_are_refused(algorithm: type[ActorCritic], env_id: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        algorithm(EnvConfig(env_id, num_envs=1)).configure_model()


def test_unbounded_actions_arrays_as_observations_and_compilation_are_refused() -> None:
    module = make(SAC)
    with pytest.raises(ValueError, match="finite bounds"):
        module.build(Unbounded((2,)), Bounded(torch.tensor([-math.inf]), torch.tensor([1.0]), dtype=torch.float32))
    with pytest.raises(ValueError, match=r"flat vectors.*\(8, 8, 3\)"):
        module.build(Unbounded((8, 8, 3)), module.action_spec)
    compiled = SAC(EnvConfig("PointReach-6-v0", num_envs=1), TrainingConfig(compile=True))
    with pytest.raises(ValueError, match=r"training\.compile=true"):
        compiled.configure_model()


@pytest.mark.parametrize(
    ("algorithm", "setting", "value"),
    [
        (SAC, "target_update_rate", 0.0),
        (SAC, "target_update_rate", math.nan),
        (SAC, "critic_learning_rate", 0.0),
        (TD3, "actor_learning_rate", math.inf),
        (SAC, "temperature_learning_rate", -1e-3),
        (SAC, "initial_temperature", math.nan),
        (SAC, "target_entropy", -math.inf),
        (TD3, "noise_clip", math.nan),
        (SAC, "initial_temperature", 0.0),
        (TD3, "actor_interval", 0),
        (TD3, "policy_noise", -0.1),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    algorithm: type[ActorCritic], setting: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"model.{setting}={value}"):
        algorithm(**{setting: value})  # type: ignore[arg-type]


def test_hidden_layers_without_units_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.hidden_sizes\[1\]=0 must be at least 1$"):
        TD3(hidden_sizes=[16, 0])
