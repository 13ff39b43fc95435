from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from vlmrb.algorithms import DQN, IQN, SAC, TD3, OffPolicyModule, TrainingConfig
from vlmrb.algorithms.actor_critic import ActorCritic
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig, make_env
from vlmrb.evaluation import evaluate
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import AgeConfig, ReplayConfig, TDConfig
from vlmrb.scoring.constant import ConstantScorer

ENV = EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=4)
UNIFORM = ReplayConfig(capacity=1_000, batch_size=16, vlm=None, lam_max=0.0, clip_length=None)
PER = ReplayConfig(capacity=1_000, batch_size=16, vlm=None, td=TDConfig(), lam_max=1.0, n_steps=3, clip_length=None)


def training(**changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = {"total_env_steps": 400, "learning_starts": 40, "frames_per_batch": 40}
    return TrainingConfig(**{**settings, **changes})


def fit(folder: Path, module: Any, *callbacks: Callback, **options: Any) -> Any:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module)
    return module


class After(Callback):
    """Calls a function after every batch."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.function(pl_module)


def test_fractions_of_the_replay_ratio_carry_over(tmp_path: Path) -> None:
    # 0.03 · 40 = 1.2 gradient steps a block, for the 10 blocks from learning_starts=40 on: 12 in all, never 10 or 20.
    counts: list[int] = []
    fit(tmp_path, DQN(ENV, training(replay_ratio=0.03), UNIFORM), After(lambda m: counts.append(m.grad_steps)))
    assert counts == [1, 2, 3, 4, 6, 7, 8, 9, 10, 12]


def test_nothing_is_learnt_before_learning_starts(tmp_path: Path) -> None:
    counts: list[int] = []
    module = DQN(ENV, training(learning_starts=200, replay_ratio=0.1), UNIFORM)
    fit(tmp_path, module, After(lambda m: counts.append(m.grad_steps)))
    assert counts[:4] == [0, 0, 0, 0]
    assert counts[4] == 4


def test_a_buffer_that_begins_anew_in_a_resumed_run_counts_ages_by_the_runs_clock() -> None:
    replay = replace(UNIFORM, lam_max=1.0, age=AgeConfig(0.01))  # τ is 10 env steps
    module = DQN(ENV, training(total_env_steps=10_000), replay)
    module.buffer = build_buffer(replay, gamma=0.99, total_env_steps=10_000)
    module.env_steps = 5_000  # as loaded from a checkpoint without its side-car
    module.on_train_start()
    for rows in make_env(ENV).rollout(6).split(1, dim=1):
        module.training_step(rows, 0)
    born = module.buffer.columns["env_step"][:24].reshape(6, 4)
    assert born.tolist() == [[5_000 + 4 * (t + 1)] * 4 for t in range(6)]
    priorities = module.buffer._sampler.priorities(24)
    assert priorities[4:] / priorities[:-4] == pytest.approx(math.exp(0.4))


def test_target_network_is_copied_at_its_interval_and_stays_in_between(tmp_path: Path) -> None:
    equal: list[bool] = []

    def compare(module: DQN) -> None:
        pairs = zip(module.q_network.parameters(), module.target_network.parameters(), strict=True)
        equal.append(all(torch.equal(online, target) for online, target in pairs))

    module = DQN(ENV, training(replay_ratio=0.1), UNIFORM, target_update_interval=8)
    fit(tmp_path, module, After(compare))  # 4 gradient steps a block: every second block ends on an update
    assert equal == [False, True] * 5


def test_written_td_errors_are_those_of_the_sampled_rows(tmp_path: Path) -> None:
    module = DQN(ENV, training(replay_ratio=0.05), PER)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    update = module.update

    def spy(batch: Any) -> Any:
        with torch.no_grad():
            target = module.loss.target(batch)
            value = module.q_network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        seen.append((batch["index"], (value - target).abs()))
        return update(batch)

    module.update = spy  # type: ignore[method-assign]
    fit(tmp_path, module)
    index, expected = seen[-1]
    last = dict(zip(index.tolist(), expected.tolist(), strict=True))  # of a row drawn twice the last value counts
    written = module.buffer.columns["td_error"][list(last)].float()
    torch.testing.assert_close(written, torch.tensor(list(last.values())))


@pytest.mark.parametrize("algorithm", [DQN, IQN, SAC, TD3])
def test_every_algorithm_writes_the_td_errors_that_it_returns(tmp_path: Path, algorithm: type[OffPolicyModule]) -> None:
    env = EnvConfig("PointReach-6-v0", num_envs=4) if issubclass(algorithm, ActorCritic) else ENV
    module = algorithm(env, training(replay_ratio=0.05), PER, hidden_sizes=[16])  # type: ignore[call-arg]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    update = module.update

    def spy(batch: Any) -> Any:
        metrics, abs_td_error = update(batch)
        seen.append((batch["index"], abs_td_error))
        return metrics, abs_td_error

    module.update = spy  # type: ignore[method-assign]
    fit(tmp_path, module)
    assert module.grad_steps == len(seen) == 20  # 10 blocks of 40 · 0.05
    index, expected = seen[-1]
    assert expected.shape == (16,)
    assert (expected >= 0).all()
    assert expected.max() > 0
    last = dict(zip(index.tolist(), expected.tolist(), strict=True))  # of a row drawn twice the last value counts
    written = module.buffer.columns["td_error"][list(last)].float()
    torch.testing.assert_close(written, torch.tensor(list(last.values())))


def test_epsilon_falls_linearly_over_its_fraction_of_the_budget(tmp_path: Path) -> None:
    values: list[float] = []
    module = DQN(ENV, training(), UNIFORM, epsilon_end=0.2, epsilon_fraction=0.5)
    fit(tmp_path, module, After(lambda m: values.append(m.epsilon)))
    assert values == pytest.approx([0.84, 0.68, 0.52, 0.36, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2])


def test_scores_are_written_before_the_next_sample_in_sync_mode(tmp_path: Path) -> None:
    replay = ReplayConfig(capacity=1_000, batch_size=16, clip_length=4, warmup_fraction=0.0)
    waiting: list[float] = []
    fit(
        tmp_path,
        DQN(ENV, training(), replay),
        ScoringCallback(ConstantScorer(1.0), backend="sync"),
        After(lambda m: waiting.append(m.scoring.stats()["share_scored"])),
    )
    assert waiting == [1.0] * 10


def test_more_than_one_device_is_refused_with_what_to_do() -> None:
    module = DQN(ENV, training(), UNIFORM)
    module._trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"devices=2.*seeds side by side"):
        module.setup("fit")


def test_continuous_actions_are_refused_by_dqn() -> None:
    with pytest.raises(ValueError, match="DQN needs discrete actions"):
        DQN(EnvConfig("Pendulum-v1", num_envs=1), training(), UNIFORM).configure_model()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("target_update_interval", 0),
        ("epsilon_end", math.nan),
        ("kappa", math.nan),
        ("kappa", math.inf),
        ("num_cosines", 0),
    ],
)
def test_model_settings_that_cannot_work_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^model.{setting}={value} must .*$"):
        IQN(ENV, training(), UNIFORM, **{setting: value})


def test_hidden_layers_without_units_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.hidden_sizes\[0\]=-3 must be at least 1$"):
        DQN(ENV, training(), UNIFORM, hidden_sizes=[-3])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("replay_ratio", 0.0),
        ("replay_ratio", math.nan),
        ("replay_ratio", math.inf),
        ("gamma", math.nan),
        ("learning_starts", -1),
        ("frames_per_batch", 0),
    ],
)
def test_training_settings_that_cannot_work_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^training.{setting}={value} must .*$"):
        training(**{setting: value})


def test_returns_longer_than_the_buffer_holds_rows_are_refused() -> None:
    DQN(ENV, training(), replace(UNIFORM, n_steps=250))
    with pytest.raises(ValueError, match=r"^replay.n_steps=251 .* env.num_envs=4 .* replay.capacity=1000$"):
        DQN(ENV, training(), replace(UNIFORM, n_steps=251))


def test_the_checkpoint_of_another_algorithm_is_refused_by_both_names() -> None:
    checkpoint = {"state_dict": {}}
    DQN(ENV, training(), UNIFORM).on_save_checkpoint(checkpoint)
    says = r"is of model vlmrb\.algorithms\.dqn\.DQN, and these settings train vlmrb\.algorithms\.iqn\.IQN: resume with"
    with pytest.raises(ValueError, match=says):
        IQN(ENV, training(), UNIFORM).on_load_checkpoint(checkpoint)


class TestEvaluation:
    def test_same_policy_and_seed_give_the_same_result(self) -> None:
        module = DQN(ENV, training(), UNIFORM)
        module.configure_model()
        first, second = (evaluate(module, ENV, episodes=8, seed=3, epsilon=1.0) for _ in range(2))
        assert torch.equal(first.returns, second.returns)
        assert torch.equal(first.lengths, second.lengths)
        assert not torch.equal(first.lengths, evaluate(module, ENV, episodes=8, seed=4, epsilon=1.0).lengths)

    def test_it_leaves_the_random_state_of_training_alone(self) -> None:
        module = DQN(ENV, training(), UNIFORM)
        module.configure_model()
        before = torch.get_rng_state(), module.exploration_generator.get_state()
        evaluate(module, ENV, episodes=4, seed=0, epsilon=0.5)
        assert torch.equal(before[0], torch.get_rng_state())
        assert torch.equal(before[1], module.exploration_generator.get_state())

    def test_success_return_and_length_agree_with_the_reward(self) -> None:
        module = DQN(ENV, training(), UNIFORM)
        module.configure_model()
        result = evaluate(module, ENV, episodes=40, seed=0, epsilon=1.0)
        assert 0 < result.success < 1  # a random policy on 5×5 reaches the goal now and then
        rewards = torch.where(result.successes, 1 - 0.9 * result.lengths / 250, 0.0)  # MiniGrid's reward, horizon 10·N²
        torch.testing.assert_close(result.returns, rewards)

    def test_video_shows_every_state_of_the_first_episode(self) -> None:
        module = DQN(ENV, training(), UNIFORM)
        module.configure_model()
        result = evaluate(module, ENV, episodes=3, seed=0, epsilon=1.0, video=True, frame_size=80)
        assert result.video is not None
        assert result.video.shape == (result.lengths[0] + 1, 80, 80, 3)

    def test_no_episode_is_an_error_that_names_the_setting(self) -> None:
        with pytest.raises(ValueError, match=r"evaluation\.episodes=0"):
            evaluate(DQN(ENV, training(), UNIFORM), ENV, episodes=0, seed=0)
