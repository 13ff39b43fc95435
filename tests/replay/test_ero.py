"""Experience replay optimisation: φ's gradient by hand, masks and their statistics, windows, and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import World, collect
from numpy.typing import NDArray
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import ReplayConfig, TDConfig
from vlmrb.replay.ero import KEPT, REWARD, EROTerm, features_of
from vlmrb.replay.keep_policy import KeepPolicy
from vlmrb.replay.prefill import prefill_with_buffer
from vlmrb.replay.returns import ReturnWindow
from vlmrb.replay.schemes import EROConfig
from vlmrb.replay.terms import TDTerm

WORLD = World(11)

# φ


def test_the_gradient_is_the_one_worked_out_by_hand() -> None:
    """−r·mean(I log φ + (1−I) log(1−φ)) of two ReLU layers, differentiated on paper and evaluated in NumPy."""
    policy = KeepPolicy(3, 1e-3, seed=1)
    random = np.random.default_rng(0)
    features, kept, reward = random.normal(size=(5, 3)).astype(np.float32), np.array([1, 0, 0, 1, 1.0]), -1.7
    layers = [layer for layer in policy.network if isinstance(layer, torch.nn.Linear)]
    (w1, b1), (w2, b2), (w3, b3) = (
        (layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()) for layer in layers
    )
    x = features.astype(np.float64)
    a1 = x @ w1.T + b1
    h1 = np.maximum(a1, 0)
    a2 = h1 @ w2.T + b2
    h2 = np.maximum(a2, 0)
    phi = 1 / (1 + np.exp(-(h2 @ w3.T + b3)[:, 0]))
    loss = -reward * np.mean(kept * np.log(phi) + (1 - kept) * np.log(1 - phi))
    d3 = (reward * (phi - kept) / 5)[:, None]  # of the logits: −r·(I − φ)/M
    d2 = (d3 @ w3) * (a2 > 0)
    d1 = (d2 @ w2) * (a1 > 0)
    found = policy.loss(torch.from_numpy(features), torch.from_numpy(kept).float(), reward)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-5)
    for layer, weight, bias in zip(
        layers, (d1.T @ x, d2.T @ h1, d3.T @ h2), (d1.sum(0), d2.sum(0), d3.sum(0)), strict=True
    ):
        np.testing.assert_allclose(layer.weight.grad, weight, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(layer.bias.grad, bias, rtol=1e-4, atol=1e-6)


def level(policy: KeepPolicy, logit: float) -> KeepPolicy:
    """Makes φ the same for all rows."""
    with torch.no_grad():
        policy.network[-1].weight.zero_()
        policy.network[-1].bias.fill_(logit)
    return policy


@pytest.mark.parametrize(("kept", "gradient"), [(1.0, -2.0 * 0.25), (0.0, 2.0 * 0.75)])
def test_at_phi_three_quarters_a_reward_of_two_pulls_by_known_numbers(kept: float, gradient: float) -> None:
    policy = level(KeepPolicy(3, 1e-3, seed=0), float(np.log(3)))
    policy.loss(torch.zeros(1, 3), torch.tensor([kept]), 2.0).backward()
    assert policy.network[-1].bias.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_what_was_rewarded_becomes_more_likely_and_what_was_punished_less(reward: float) -> None:
    policy = KeepPolicy(3, 1e-2, seed=0)
    features = np.random.default_rng(1).normal(size=(64, 3)).astype(np.float32)
    kept = features[:, 0] > 0

    def likelihood() -> float:
        with torch.no_grad():
            phi = torch.sigmoid(policy.logits(torch.from_numpy(features))).numpy()
        return float(np.log(np.where(kept, phi, 1 - phi)).mean())

    before = likelihood()
    for _ in range(5):
        policy.reinforce(features, kept, reward)
    assert np.sign(likelihood() - before) == reward


def test_masks_are_bernoulli_draws_of_phi_independent_of_each_other() -> None:
    policy = level(KeepPolicy(3, 1e-3, seed=0), float(np.log(3 / 7)))
    features = np.zeros((10_000, 3), np.float32)  # more than are looked at at once
    masks = np.stack([policy.draw(features) for _ in range(50)])
    assert masks.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / masks.size))
    per_row = masks.sum(0)
    assert per_row.var() == pytest.approx(50 * 0.21, rel=0.1)  # binomial: no row is favoured
    assert np.corrcoef(masks[0], masks[1])[0, 1] == pytest.approx(0, abs=0.05)
    assert np.corrcoef(masks[0, 1:], masks[0, :-1])[0, 1] == pytest.approx(0, abs=0.05)


def test_phi_begins_near_a_half_for_every_row_and_differs_by_seed() -> None:
    features = np.random.default_rng(0).uniform(-5, 5, (1_000, 3)).astype(np.float32)
    with torch.no_grad():
        one, other = (torch.sigmoid(KeepPolicy(3, 1e-3, seed).logits(torch.from_numpy(features))) for seed in (0, 1))
    assert 0.4 < float(one.min()) < float(one.max()) < 0.6
    assert not torch.equal(one, other)


def test_no_other_generator_is_touched() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    policy = KeepPolicy(3, 1e-3, seed=0)
    policy.draw(np.zeros((10, 3), np.float32))
    policy.pick(10, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


# Features


def test_features_are_standardised_over_the_rows_and_cut() -> None:
    random = np.random.default_rng(0)
    columns = {
        REWARD: np.full(1_000, 0.1),  # the same for all rows: tells nothing
        "td_error": np.append(random.exponential(size=999), 1e6),
        "env_step": np.arange(1_000),
    }
    features = features_of(columns, 5_000)
    assert features.shape == (1_000, 3)
    assert features.dtype == np.float32
    assert (features[:, 0] == 0).all()
    assert features[-1, 1] == 5.0
    age = 5_000 - np.arange(1_000)
    np.testing.assert_allclose(features[:, 2], (age - age.mean()) / age.std(), rtol=1e-5)
    assert features_of({name: values[:1] for name, values in columns.items()}, 5_000).tolist() == [[0, 0, 0]]


def test_the_scale_of_rewards_and_errors_does_not_matter() -> None:
    random = np.random.default_rng(0)
    columns = {REWARD: random.normal(size=50), "td_error": random.exponential(size=50), "env_step": np.arange(50)}
    scaled = columns | {REWARD: 1e-12 * columns[REWARD], "td_error": 1e9 * columns["td_error"]}
    np.testing.assert_allclose(features_of(scaled, 99), features_of(columns, 99), rtol=1e-5)


# Returns


@pytest.mark.parametrize(("num_envs", "length"), [(1, 7), (4, 5), (3, 40)])
def test_returns_are_those_of_the_episodes_that_end_in_the_window(num_envs: int, length: int) -> None:
    window = ReturnWindow()
    running, ended = np.zeros(num_envs), []
    for number, block in enumerate(collect(num_envs, length, WORLD, 12)):
        reward, done = (block["next", name].numpy()[..., 0] for name in ("reward", "done"))
        for env in range(num_envs):
            for step in range(length):
                running[env] += reward[env, step]
                if done[env, step]:
                    ended.append(running[env])
                    running[env] = 0
        window.add(reward, done)
        assert window.episodes == len(ended)
        if ended:
            assert window.mean() == pytest.approx(np.mean(ended))
        if number % 3 == 2:
            assert window.env_steps == 3 * num_envs * length
            window.begin()
            ended = []
    assert running.any()  # episodes under way at the end


# The term in the buffer


def block_of(rewards: list[float], start: int, done: bool = True) -> TensorDict:
    """Rows of one environment, each of which is an episode by itself unless told otherwise."""
    count = len(rewards)
    steps = torch.arange(start, start + count + 1).float().unsqueeze(-1)
    flags = torch.full((count, 1), done)
    following = {
        "observation": steps[1:],
        "reward": torch.tensor(rewards).unsqueeze(-1),
        "done": flags,
        "terminated": flags,
    }
    rows = {"observation": steps[:-1], "action": torch.zeros(count, dtype=torch.int64), "next": following}
    return TensorDict(rows, [count])


def buffer_of(term: EROTerm, capacity: int = 200, batch_size: int = 32, **kwargs: Any) -> VLMReplayBuffer:
    return VLMReplayBuffer(capacity, batch_size=batch_size, terms=[term], lam=1.0, **kwargs)


def kept(buffer: VLMReplayBuffer) -> NDArray[np.float64]:
    return buffer.columns[KEPT][: len(buffer)].numpy()


def test_rows_are_kept_until_the_first_mask_they_are_in_and_only_kept_rows_are_drawn() -> None:
    term = EROTerm(window=100, min_episodes=2)
    buffer = buffer_of(term)
    buffer.extend(block_of([0.0] * 99, 0))
    assert kept(buffer).all()
    buffer.extend(block_of([1.0], 99))  # the window ends: all hundred rows are masked, this one included
    assert 30 < kept(buffer).sum() < 70
    assert set(kept(buffer)) == {0.0, 1.0}
    mask = kept(buffer).copy()
    buffer.extend(block_of([0.0] * 20, 100))
    assert (kept(buffer)[:100] == mask).all()
    assert kept(buffer)[100:].all()
    drawn = np.concatenate([buffer.sample()["index"].numpy() for _ in range(200)])
    counts = np.bincount(drawn, minlength=120)
    assert (counts[kept(buffer) == 0] == 0).all()
    expected = len(drawn) / kept(buffer).sum()
    assert np.abs(counts[kept(buffer) == 1] - expected).max() < 6 * np.sqrt(expected)
    assert buffer.columns[REWARD][:120].tolist() == [0.0] * 99 + [1.0] + [0.0] * 20


def test_a_window_waits_for_episodes_to_end() -> None:
    term = EROTerm(window=10, min_episodes=3)
    buffer = buffer_of(term)
    buffer.extend(block_of([0.0] * 60, 0, done=False))
    buffer.extend(block_of([0.0, 0.0], 60))
    assert kept(buffer).all()
    buffer.extend(block_of([0.0], 62))
    assert not kept(buffer).all()


def test_the_mask_in_force_is_rewarded_with_the_normalised_change_of_the_mean_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[NDArray, NDArray, float]] = []
    monkeypatch.setattr(KeepPolicy, "reinforce", lambda self, *step: seen.append(step))
    term = EROTerm(window=40, min_episodes=1, updates=2, batch_size=16)
    buffer = buffer_of(term)
    rewards, masks, features = [], [], []
    for window, value in enumerate([1.0, 3.0, 3.0, 2.0]):
        seen.clear()
        buffer.extend(block_of([value - 0.5, value + 0.5] * 20, 40 * window))  # the mean return is the value
        if seen:
            assert [part.shape for _, part, _ in seen] == [(16,), (16,)]
            assert seen[0][2] == seen[1][2]
            rewards.append(seen[0][2])
            # Row by row the features and the mask of the time when the mask was drawn.
            for part_features, part_kept, _ in seen:
                for row, is_kept in zip(part_features, part_kept, strict=True):
                    (same,) = np.nonzero((features[-1] == row).all(1))
                    assert is_kept in masks[-1][same]
        else:
            assert value in (1.0, 3.0)  # there was none before, or no change
        columns = {name: values[: len(buffer)].numpy() for name, values in buffer.columns.items()}
        features.append(features_of(columns, buffer.env_steps))
        masks.append(kept(buffer).astype(bool).copy())
        buffer.update_td_error(buffer.sample(), torch.rand(32))
    # Changes 2, 0 and −1: each divided by the root mean square of those so far that were not 0.
    assert rewards == pytest.approx([1.0, -1 / np.sqrt((4 + 1) / 2)])


def test_a_mask_that_keeps_too_little_is_punished_instead_of_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[NDArray, NDArray, float]] = []
    monkeypatch.setattr(KeepPolicy, "reinforce", lambda self, *step: seen.append(step))
    for logit, min_kept, used in [(-3.0, 0.3, False), (-3.0, 0.0, True), (-50.0, 0.0, False)]:
        term = EROTerm(window=100, min_episodes=1, min_kept=min_kept)
        level(term.policy, logit)
        buffer = buffer_of(term)
        seen.clear()
        buffer.extend(block_of([0.0] * 100, 0))
        assert kept(buffer).all() != used
        assert [reward for _, _, reward in seen] == ([] if used else [-1.0] * 4)
        assert all(part.mean() < 0.3 for _, part, _ in seen)  # the mask as it was drawn
        seen.clear()
        monkeypatch.setattr(term.policy, "draw", lambda features: np.ones(len(features), bool))
        buffer.extend(block_of([1.0] * 100, 100))  # what uniform replay led to is no reward of a mask
        assert [reward for _, _, reward in seen] == ([1.0] * 4 if used else [])


def test_phi_finds_its_way_out_of_keeping_nothing() -> None:
    term = EROTerm(window=20, min_episodes=1, min_kept=0.2, learning_rate=1e-2)
    with torch.no_grad():
        term.policy.network[-1].bias.fill_(-4.0)
    buffer = buffer_of(term)
    masked = []
    for number in range(40):
        buffer.extend(block_of([1.0] * 20, 20 * number))
        masked.append(not kept(buffer).all())
    assert not any(masked[:5])
    assert any(masked)


def test_rewards_of_rows_are_n_step_returns_and_a_new_row_has_the_largest_error() -> None:
    buffer = buffer_of(EROTerm(window=1_000), n_steps=3, gamma=0.5)
    index = buffer.extend(block_of([1.0, 2.0, 4.0, 8.0], 0, done=False))
    assert buffer.columns[REWARD][:2].tolist() == [1 + 1 + 1, 2 + 2 + 2]
    buffer.write_column("td_error", index, torch.zeros(2, dtype=torch.int64), [0.25, 0.75], source="test")
    buffer.extend(block_of([0.0], 4))
    assert buffer.columns["td_error"][2] == 0.75


def test_ended_streams_begin_the_windows_anew() -> None:
    term = EROTerm(window=100, min_episodes=1)
    buffer = buffer_of(term, capacity=400)
    buffer.extend(block_of([5.0] * 40, 0, done=False))  # an episode that will never end
    buffer.end_streams()
    buffer.extend(block_of([1.0] * 99, 500))
    assert kept(buffer).all()
    buffer.extend(block_of([1.0], 599))
    assert not kept(buffer).all()
    assert term.state_dict()["previous"] == 1.0


def test_an_emptied_buffer_forgets_the_returns_under_way() -> None:
    term = EROTerm(window=10, min_episodes=1)
    buffer = buffer_of(term)
    buffer.extend(block_of([5.0] * 40, 0, done=False))
    buffer.empty()
    buffer.extend(block_of([1.0] * 10, 0))
    assert term.state_dict()["previous"] == 1.0


def test_another_buffers_rows_come_with_their_rewards_and_are_kept() -> None:
    source = VLMReplayBuffer(200, batch_size=32)
    source.extend(block_of([0.0, 1.0, 2.0], 0))
    buffer = buffer_of(EROTerm(window=2, min_episodes=1))
    prefill_with_buffer(buffer, source.state_dict())
    assert buffer.columns[REWARD][:3].tolist() == [0.0, 1.0, 2.0]
    assert kept(buffer).tolist() == [1.0, 1.0, 1.0]


def test_it_goes_together_with_other_terms() -> None:
    buffer = VLMReplayBuffer(200, batch_size=32, terms=[EROTerm(window=100, min_episodes=1), TDTerm(1.0)], lam=1.0)
    index = buffer.extend(block_of([0.0] * 100, 0))
    errors = np.random.default_rng(0).uniform(0.1, 1, 100)
    buffer.write_column("td_error", index, torch.zeros(100, dtype=torch.int64), errors, source="test")
    assert buffer._sampler.priorities(100) == pytest.approx(kept(buffer) * errors)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [1.0, 0.0])
def test_what_raises_returns_is_learnt_to_be_kept(wanted: float) -> None:
    """Returns are the share of rows with |δ| = ``wanted`` among those replayed: φ comes to keep these, not others."""
    term = EROTerm(window=20, min_episodes=1, updates=4, batch_size=512, learning_rate=2e-3)
    buffer = buffer_of(term, capacity=400, batch_size=128)
    buffer.set_rng(torch.Generator().manual_seed(0))
    slots = torch.cat([buffer.extend(block_of([0.0] * 20, 20 * number)) for number in range(20)])
    kinds = (slots % 2).double()

    def mark(index: torch.Tensor) -> None:
        generation = torch.from_numpy(buffer._writer.slot_generations[index.numpy()])
        buffer.write_column("td_error", index, generation, kinds[index], source="test")

    mark(slots)
    shares = []
    for number in range(20, 140):
        share = float((kinds[buffer.sample(2_000)["index"]] == wanted).double().mean())
        shares.append(share)
        mark(buffer.extend(block_of([share] * 20, 20 * number)))
    columns = {name: values.numpy() for name, values in buffer.columns.items()}
    with torch.no_grad():
        phi = torch.sigmoid(term.policy.logits(torch.from_numpy(features_of(columns, buffer.env_steps))))
    assert np.mean(shares[:10]) < 0.6
    assert np.mean(shares[-40:]) > 0.85
    assert phi[kinds == wanted].mean() > 5 * phi[kinds != wanted].mean()


# Persistence


@pytest.mark.parametrize("at", [1, 9, 22])  # before the first mask, in a window that has a sample, after wrapping
def test_a_resumed_buffer_goes_on_exactly(at: int, tmp_path: Path) -> None:
    blocks = list(collect(4, 5, WORLD, 40))

    def make(seed: int = 3) -> VLMReplayBuffer:
        term = EROTerm(window=60, min_episodes=2, updates=2, batch_size=64, seed=seed)
        return buffer_of(term, capacity=331, n_steps=3, gamma=0.9, seed=seed)

    def run(buffer: VLMReplayBuffer, blocks: list) -> list[torch.Tensor]:
        drawn = []
        for rows in blocks:
            buffer.extend(rows)
            batch = buffer.sample()
            drawn.append(batch["index"])
            buffer.update_td_error(batch, (batch["observation"].sum(-1) % 5).double() / 4)
        return drawn

    straight, first = make(), make()
    expected = run(straight, blocks)
    drawn = run(first, blocks[:at])
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = run_on = make(seed=99)
    run(second, blocks[: 30 - at])  # not fresh either
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    drawn += run(run_on, blocks[at:])
    assert all(map(torch.equal, drawn, expected))
    assert (kept(second) == kept(straight)).all()
    assert 0 < kept(straight).mean() < 1
    for one, other in zip(
        straight.terms[0].policy.network.parameters(), second.terms[0].policy.network.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_the_state_is_a_copy() -> None:
    term = EROTerm(window=40, min_episodes=1)
    buffer = buffer_of(term)
    for number in range(3):
        buffer.extend(block_of([float(number)] * 40, 40 * number))
    state = term.state_dict()
    weight, moment = state["policy"]["weights"]["0.weight"].clone(), state["policy"]["moments"][0]["exp_avg"].clone()
    sample = state["sample"][0].clone()
    other = EROTerm(window=40, min_episodes=1)
    other.load_state_dict(state)
    for one in (term, other):
        one.policy.reinforce(np.ones((4, 3), np.float32), np.ones(4, bool), 1.0)
        one._sample[0][:] = 7.0
    assert torch.equal(state["policy"]["weights"]["0.weight"], weight)
    assert torch.equal(state["policy"]["moments"][0]["exp_avg"], moment)
    assert torch.equal(state["sample"][0], sample)
    assert state["policy"]["moments"][0]["step"] == 8  # two windows had a change to learn from


# Settings


def test_the_settings_make_the_term() -> None:
    config = ReplayConfig(2_000, clip_length=None, lam_max=1.0, vlm=None, ero=EROConfig(0.05, 3, 0.2, 0.01, 5, 64))
    expected = "EROTerm(window=100.0, min_episodes=3, min_kept=0.2, learning_rate=0.01, updates=5, batch_size=64)"
    assert list(map(repr, config.terms())) == [expected]
    assert config.needs_td_errors
    assert not ReplayConfig().needs_td_errors
    seeds = {build_buffer(config, gamma=0.9, total_env_steps=1_000, seed=seed).terms[0].seed for seed in (0, 1)}
    assert len(seeds) == 2  # runs of different seeds draw different masks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_fraction": 0.0}, r"replay\.ero\.window_fraction=0\.0 must lie in \(0, 1\]"),
        ({"min_episodes": 0}, r"replay\.ero\.min_episodes=0 must be at least 1"),
        ({"min_kept": 1.0}, r"replay\.ero\.min_kept=1\.0 must lie in \[0, 1\)"),
        ({"min_kept": float("nan")}, r"replay\.ero\.min_kept=nan"),
        ({"learning_rate": 0.0}, r"replay\.ero\.learning_rate=0\.0 must be positive"),
        ({"updates": 0}, r"replay\.ero\.updates=0"),
        ({"batch_size": 0}, r"replay\.ero\.batch_size=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EROConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"window": 0}, {"updates": 0}, {"batch_size": 0}, {"min_kept": 1.0}, {"learning_rate": -1.0}]
)
def test_a_term_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the ero term needs .*{next(iter(settings))}"):
        EROTerm(**{"window": 100} | settings)


def test_a_mask_that_nobody_heeds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"replay\.ero has no effect at lam_max=0"):
        ReplayConfig(lam_max=0.0, vlm=None, td=TDConfig(), ero=EROConfig())
