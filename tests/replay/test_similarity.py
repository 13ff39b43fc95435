"""Attentive replay: which candidates are chosen, against brute force; with priorities, weights and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import World, collect
from hypothesis import given
from hypothesis import strategies as st
from lightning import Trainer, seed_everything
from tensordict import TensorDict
from torch import Tensor, nn

from vlmrb.algorithms import DQN, IQN, SAC, TD3, OffPolicyModule, TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import ReplayConfig, TDConfig
from vlmrb.replay.schedule import LinearSchedule
from vlmrb.replay.schemes import AERConfig
from vlmrb.replay.similarity import SimilaritySelector
from vlmrb.replay.terms import TDTerm


def constant(factor: float) -> LinearSchedule:
    return LinearSchedule(factor, factor)


def block(before: Tensor, after: Tensor, done: bool = False) -> TensorDict:
    """One row of each environment; states ``[n, …]``."""
    count = len(before)
    flags = torch.full((count, 1, 1), done)
    following = {"observation": after[:, None], "reward": torch.zeros(count, 1, 1), "done": flags, "terminated": flags}
    action = torch.zeros(count, 1, dtype=torch.int64)
    return TensorDict({"observation": before[:, None], "action": action, "next": following}, [count, 1])


def selector_at(states: Tensor, **kwargs: Any) -> SimilaritySelector:
    selector = SimilaritySelector(constant(4.0), **kwargs)
    selector.observe(block(states, states))
    return selector


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The choice


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 12))
def test_the_candidates_most_similar_to_any_current_state_are_chosen(seed: int, envs: int, count: int) -> None:
    random = np.random.default_rng(seed)
    states, candidates = random.normal(size=(envs, 3)), random.normal(size=(12, 3))
    cosine = [
        max(float(c @ s) / (np.linalg.norm(c) * np.linalg.norm(s)) for s in states) for c in candidates
    ]  # by the definition, one pair at a time
    selector = selector_at(torch.from_numpy(states))
    assert selector.similarities(torch.from_numpy(candidates)).tolist() == pytest.approx(cosine, abs=1e-5)
    chosen = selector.choose(torch.from_numpy(candidates), count, generator())
    assert chosen.tolist() == sorted(np.argsort(cosine)[::-1][:count].tolist())


def test_features_are_compared_by_distance() -> None:
    selector = selector_at(torch.tensor([[1.0, 0.0], [5.0, 0.0]]), similarity="features")
    selector.features = lambda observation: 2 * observation
    candidates = torch.tensor([[10.0, 0.0], [1.0, 1.0], [4.5, 0.0], [-1.0, 0.0]])
    assert selector.similarities(candidates).tolist() == pytest.approx([-10.0, -2.0, -1.0, -4.0])
    assert selector.choose(candidates, 2, generator()).tolist() == [1, 2]


def test_features_that_nobody_set_are_asked_for() -> None:
    with pytest.raises(ValueError, match="set the selector's features"):
        selector_at(torch.ones(1, 2), similarity="features").choose(torch.ones(4, 2), 2, generator())


def test_bytes_of_several_dimensions_are_compared_and_a_state_of_zeros_is_like_none() -> None:
    states = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    states[0, 0, 0] = 200
    selector = selector_at(states)
    candidates = torch.stack([torch.zeros_like(states[0]), states[0], states[0].flip(0)])
    assert selector.similarities(candidates).tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_equally_similar_candidates_are_chosen_by_chance() -> None:
    selector = selector_at(torch.ones(1, 2))
    candidates = torch.ones(8, 2)
    candidates[3] = torch.tensor([1.0, -1.0])
    random, counts = generator(), np.zeros(8)
    for _ in range(2_000):
        np.add.at(counts, selector.choose(candidates, 2, random), 1)
    assert counts[3] == 0
    expected = 2_000 * 2 / 7
    assert np.abs(np.delete(counts, 3) - expected).max() < 5 * np.sqrt(expected)


def test_the_current_states_are_those_that_the_newest_rows_led_to() -> None:
    buffer = VLMReplayBuffer(8, batch_size=2, selector=SimilaritySelector(constant(2.0)))
    first, second = torch.eye(4)[:2], torch.eye(4)[2:]
    buffer.extend(block(first, second))
    assert buffer.selector is not None
    assert buffer.selector.similarities(torch.eye(4)).tolist() == [0, 0, 1, 1]
    buffer.extend(block(second, first, done=True))  # the state in which the episodes ended
    assert buffer.selector.similarities(torch.eye(4)).tolist() == [1, 1, 0, 0]
    buffer.extend(block(-first, second))
    assert buffer.selector.similarities(torch.eye(4)).tolist() == [0, 0, 1, 1]


def test_of_a_longer_block_the_last_rows_count() -> None:
    buffer = VLMReplayBuffer(8, batch_size=2, selector=SimilaritySelector(constant(2.0)))
    states = torch.eye(6)
    buffer.extend(torch.cat([block(states[:2], states[2:4]), block(states[2:4], states[4:])], 1))
    assert buffer.selector is not None
    assert buffer.selector.similarities(states).tolist() == [0, 0, 0, 0, 1, 1]


def test_a_later_change_of_a_block_changes_no_state() -> None:
    rows = block(torch.eye(2), torch.eye(2))
    buffer = VLMReplayBuffer(8, batch_size=2, selector=SimilaritySelector(constant(2.0)))
    buffer.extend(rows)
    rows["next", "observation"].zero_()
    assert buffer.selector is not None
    assert buffer.selector.similarities(torch.eye(2)).tolist() == [1, 1]


# In the buffer


def circle(factor: LinearSchedule | float | None, capacity: int = 400, **kwargs: Any) -> VLMReplayBuffer:
    """A buffer of states all around the unit circle, the current one at angle 0; row i lies at angle 2πi/capacity."""
    if isinstance(factor, float):
        factor = constant(factor)
    selector = None if factor is None else SimilaritySelector(factor)
    buffer = VLMReplayBuffer(capacity, batch_size=40, selector=selector, **kwargs)
    angles = 2 * torch.pi * torch.arange(capacity + 1) / capacity
    states = torch.stack([angles.cos(), angles.sin()], -1)
    count = len(states) - 1
    flags = torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": states[1:], "reward": torch.zeros(count, 1), "done": flags, "terminated": flags}
    rows = {"observation": states[:-1], "action": torch.zeros(count, dtype=torch.int64), "next": following}
    buffer.extend(TensorDict(rows, [count]))
    return buffer


def distance(index: Tensor, capacity: int = 400) -> Tensor:
    return torch.minimum(index, capacity - index) / (capacity / 2)  # 0 at the current state, 1 opposite to it


def test_a_batch_holds_the_most_similar_of_the_candidates_and_training_data_as_ever() -> None:
    """Of 4·B uniform candidates the nearest B lie within a quarter of the half circle, up to chance."""
    buffer = circle(4.0)
    mean, reach = [], []
    for _ in range(200):
        batch = buffer.sample()
        assert batch.batch_size == torch.Size([40])
        assert torch.equal(buffer[:]["observation"][batch["index"]], batch["observation"])
        assert (batch["index_generation"] == 0).all()
        mean.append(distance(batch["index"]).mean())
        reach.append(distance(batch["index"]).max())
    assert np.mean(mean) == pytest.approx(1 / 8, abs=0.005)
    assert np.mean(reach) == pytest.approx(1 / 4, abs=0.01)


def test_the_factor_falls_until_all_rows_are_alike() -> None:
    buffer = circle(LinearSchedule(4.0, 1.0, begin=1_000, duration=3_000))
    means = []
    for env_steps in (0, 1_000, 2_000, 3_000, 4_000):
        buffer.set_env_steps(env_steps)
        means.append(np.mean([distance(buffer.sample()["index"]).mean() for _ in range(200)]))
    expected = [1 / (2 * factor) for factor in (4, 4, 3, 2, 1)]
    assert means == pytest.approx(expected, abs=0.015)


def test_without_a_choice_the_very_same_rows_are_drawn_as_without_a_selector() -> None:
    plain, choosing = circle(None, seed=5), circle(1.0, seed=5)
    for _ in range(5):
        assert torch.equal(plain.sample()["index"], choosing.sample()["index"])


def prioritised(factor: float | None, lam: float, beta: float | None = None, **kwargs: Any) -> VLMReplayBuffer:
    buffer = circle(factor, terms=[TDTerm(1.0)], lam=lam, beta=beta, **kwargs)
    values = np.random.default_rng(3).uniform(0.1, 3.0, 400)
    values[100:300] = 0.0
    buffer.write_column("td_error", np.arange(400), np.zeros(400, np.int64), values, source="test")
    return buffer


def test_candidates_are_drawn_by_priority() -> None:
    buffer = prioritised(4.0, lam=1.0)
    for _ in range(50):
        index = buffer.sample()["index"]
        assert ((index < 100) | (index >= 300)).all()
    # Half the circle has no priority: the nearest quarter of the candidates lies within an eighth of it.
    assert np.mean([distance(buffer.sample()["index"]).mean() for _ in range(200)]) == pytest.approx(1 / 16, abs=0.01)


@pytest.mark.parametrize("cap", [None, 0.05])
def test_importance_weights_are_those_of_the_chosen_rows(cap: float | None) -> None:
    buffer = prioritised(4.0, lam=0.6, beta=0.7, max_draws_per_positive=cap)
    lam = 0.6 if cap is None else 0.05 * 200 / 160  # the cap is on prioritised draws, of which there are 160 in all
    priorities = buffer._sampler.priorities(400)
    q = lam * priorities / priorities.sum() + (1 - lam) / 400
    for _ in range(5):
        batch = buffer.sample()
        expected = (400 * q[batch["index"].numpy()]) ** -0.7
        np.testing.assert_allclose(batch["priority_weight"], expected / expected.max(), rtol=1e-6)
        assert batch["priority_weight"].max() == 1


def test_prioritised_draws_still_come_first() -> None:
    buffer = prioritised(4.0, lam=0.5)
    counts = []
    for _ in range(200):
        index = buffer.sample()["index"].numpy()
        count = buffer._sampler.last_prioritized
        assert ((index[:count] < 100) | (index[:count] >= 300)).all()
        counts.append(count)
    assert np.mean(counts) == pytest.approx(40 * 2 / 3, abs=1)  # twice as dense near the current state


# Persistence


def test_a_resumed_buffer_draws_the_same_batches(tmp_path: Path) -> None:
    blocks = list(collect(4, 5, World(11), 30))

    def make(seed: int = 3) -> VLMReplayBuffer:
        selector = SimilaritySelector(LinearSchedule(4.0, 1.0, 0, 500))
        return VLMReplayBuffer(83, batch_size=16, n_steps=3, gamma=0.9, seed=seed, selector=selector)

    def run(buffer: VLMReplayBuffer, blocks: list) -> list[Tensor]:
        drawn = []
        for rows in blocks:
            drawn.append(buffer.sample()["index"])  # before the next block: on the states that were saved
            buffer.extend(rows)
            drawn.append(buffer.sample()["index"])
        return drawn

    straight, first = make(), make()
    for buffer in (straight, first):
        buffer.extend(blocks[0])
    expected = run(straight, blocks[1:])
    drawn = run(first, blocks[1:12])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = make(seed=99)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    drawn += run(second, blocks[12:])
    assert all(map(torch.equal, drawn, expected))


def test_a_buffer_with_another_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="has selector=None, this one selector=SimilaritySelector"):
        circle(4.0).load_state_dict(circle(None).state_dict())
    with pytest.raises(ValueError, match=r"has selector=SimilaritySelector\(factor=3.0, similarity='cosine'\)"):
        circle(4.0).load_state_dict(circle(3.0).state_dict())


def test_a_buffer_saved_before_there_were_selectors_is_read() -> None:
    state = circle(None).state_dict()
    del state["settings"]["selector"], state["selector"]
    buffer = circle(None, seed=9)
    buffer.load_state_dict(state)
    assert torch.equal(buffer.sample()["index"], circle(None).sample()["index"])


# Settings


def test_the_settings_make_the_selector() -> None:
    config = ReplayConfig(2_000, clip_length=None, lam_max=0.0, vlm=None, aer=AERConfig(4.0, 0.4))
    buffer = build_buffer(config, gamma=0.9, total_env_steps=1_000, learning_starts=100)
    assert buffer.selector is not None
    assert buffer.selector.factor == LinearSchedule(4.0, 1.0, 100, 400)
    assert build_buffer(ReplayConfig(), gamma=0.9, total_env_steps=1_000).selector is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": 0.5}, r"replay\.aer\.candidates=0\.5 must be at least 1"),
        ({"candidates": float("nan")}, r"replay\.aer\.candidates=nan"),
        ({"candidates": 1.0}, r"replay\.aer\.candidates=1 has no effect"),
        ({"fraction": 0.0}, r"replay\.aer\.fraction=0\.0 must lie in \(0, 1\]"),
        ({"fraction": 1.5}, r"replay\.aer\.fraction=1\.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AERConfig(**settings)


def test_a_selector_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="'euclid'"):
        SimilaritySelector(constant(4.0), similarity="euclid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least as many candidates as rows"):
        SimilaritySelector(LinearSchedule(4.0, 0.5))
    with pytest.raises(ValueError, match=r"keep 'observation' and \('next', 'observation'\)"):
        VLMReplayBuffer(8, batch_size=2, keep=["action"], selector=SimilaritySelector(constant(4.0)))


# Training


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DQN, IQN, SAC, TD3])
def test_algorithms_train_on_what_is_near_in_their_features(
    algorithm: type[OffPolicyModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    choose = SimilaritySelector.choose

    def watched(self: SimilaritySelector, observation: Tensor, count: int, random: torch.Generator) -> Any:
        assert self.features is not None
        features = self.features(observation)
        assert features.shape == (len(observation), 12)
        assert not features.requires_grad
        sizes.append(len(observation))
        return choose(self, observation, count, random)

    monkeypatch.setattr(SimilaritySelector, "choose", watched)
    seed_everything(0, verbose=False)
    env = EnvConfig("PointReach-6-v0" if algorithm in (SAC, TD3) else "MiniGrid-DoorKey-5x5-v0", num_envs=4)
    replay = ReplayConfig(
        480, 16, clip_length=None, lam_max=1.0, vlm=None, td=TDConfig(), aer=AERConfig(4.0, 0.5, "features")
    )
    module = algorithm(env, TrainingConfig(480, 80, 80, replay_ratio=0.1), replay, hidden_sizes=[12])
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module)
    # Blocks end at 80, 160, …, 480 env steps and take 8 gradient steps each; λ falls from 4 at 80 to 1 at 320.
    assert sizes == [64] * 8 + [48] * 8 + [32] * 8
    assert module.grad_steps == 48


def test_an_algorithm_that_does_not_tell_its_features_is_refused() -> None:
    class Silent(DQN):
        features = OffPolicyModule.features

    aer = AERConfig(similarity="features")
    with pytest.raises(ValueError, match=r"replay\.aer\.similarity=features needs an algorithm .* Silent does not"):
        Silent(replay=ReplayConfig(aer=aer))
    assert Silent(replay=ReplayConfig(aer=AERConfig())).replay.aer == AERConfig()


def test_a_network_without_a_last_layer_to_leave_out_asks_for_an_override() -> None:
    class Odd(DQN):
        def make_network(self, observation_spec: Any) -> nn.Module:
            return nn.ModuleList([super().make_network(observation_spec)])

    module = Odd(env=EnvConfig("MiniGrid-DoorKey-5x5-v0"))
    module.configure_model()
    with pytest.raises(TypeError, match="Odd's network has no last layer to leave out: override features"):
        module.features(torch.zeros(1, 5, 5, 3, dtype=torch.uint8))
