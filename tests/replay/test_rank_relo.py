"""Rank-based PER and reducible loss against brute force and against the algorithms' own losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Trainer, seed_everything
from tensordict import TensorDict

from vlmrb.algorithms import DQN, IQN, SAC, TD3, OffPolicyModule, TrainingConfig
from vlmrb.envs import EnvConfig
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import AgeConfig, ReplayConfig, TDConfig
from vlmrb.replay.rank import RankTerm
from vlmrb.replay.relo import ReLoTerm
from vlmrb.replay.sampler import MixtureSampler
from vlmrb.replay.schemes import RankConfig, ReLoConfig

ALL = pytest.mark.parametrize("algorithm", [DQN, IQN, SAC, TD3])


def rows(count: int, start: int = 0) -> TensorDict:
    steps = torch.arange(start, start + count + 1).float().unsqueeze(-1)
    flags = torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": steps[1:], "reward": torch.zeros(count, 1), "done": flags, "terminated": flags}
    action = torch.zeros(count, dtype=torch.int64)
    return TensorDict({"observation": steps[:-1], "action": action, "next": following}, [count])


def buffer_of(term: RankTerm | ReLoTerm, capacity: int = 16) -> VLMReplayBuffer:
    return VLMReplayBuffer(capacity, batch_size=4, terms=[term], lam=1.0)


def write(buffer: VLMReplayBuffer, column: str, index: list[int], values: list[float]) -> None:
    buffer.write_column(column, index, buffer._writer.slot_generations[np.array(index)], values, source="test")


# Ranks


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=16), st.floats(0, 3))
def test_after_a_refresh_priorities_follow_the_ranks(errors: list[float], exponent: float) -> None:
    buffer = buffer_of(RankTerm(exponent, refresh_every=1))
    buffer.extend(rows(len(errors)))
    write(buffer, "td_error", list(range(len(errors))), errors)
    buffer._priorities.refresh(10_000, len(errors))
    expected = [(1 + sum(other > error for other in errors)) ** -exponent for error in errors]
    assert buffer._sampler.priorities(len(errors)) == pytest.approx(expected)


def test_between_refreshes_a_changed_row_gets_the_rank_it_would_have_had_then() -> None:
    term = RankTerm(1.0, refresh_every=1_000)
    buffer = buffer_of(term)
    buffer.extend(rows(4))
    write(buffer, "td_error", [0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0])
    assert buffer._sampler.priorities(4) == pytest.approx([1, 1, 1, 1])  # all were 1 when ranks were first taken
    buffer._priorities.refresh(2_000, 4)
    assert buffer._sampler.priorities(4) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    write(buffer, "td_error", [0, 3], [2.5, 9.0])
    assert buffer._sampler.priorities(4) == pytest.approx([1 / 3, 1 / 2, 1 / 3, 1])
    buffer.extend(rows(1, 4))
    assert buffer.columns["td_error"][4] == 9.0
    assert buffer._sampler.priorities(5)[4] == 1.0  # a new row has the largest live error


def test_a_loaded_buffer_tells_the_same_ranks() -> None:
    one, other = (buffer_of(RankTerm(1.0, refresh_every=1_000)) for _ in range(2))
    one.extend(rows(4))
    write(one, "td_error", [0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0])
    one._priorities.refresh(2_000, 4)
    write(one, "td_error", [3], [10.0])
    other.load_state_dict(one.state_dict())
    for buffer in (one, other):
        write(buffer, "td_error", [1], [2.5])
    assert other._sampler.priorities(4).tolist() == one._sampler.priorities(4).tolist()
    assert one._priorities.terms[0].needs_refresh(2_999) == other._priorities.terms[0].needs_refresh(2_999) is False
    assert other._priorities.terms[0].needs_refresh(3_000)


# Stratified draws


def test_stratified_draws_come_one_from_each_equal_part() -> None:
    sampler = MixtureSampler(8, lam=1.0, stratified=True)
    sampler._rng = torch.Generator().manual_seed(0)
    sampler.set_priorities(np.arange(8), np.ones(8))
    for _ in range(50):
        assert sorted(sampler.draw(8, 8)) == list(range(8))
    sampler.set_priorities(np.arange(8), np.array([4.0, 0, 0, 0, 1, 1, 1, 1]))
    counts = np.bincount(np.concatenate([sampler.draw(8, 8) for _ in range(500)]), minlength=8)
    assert counts[0] == 2_000  # exactly half of each batch
    assert (counts[1:4] == 0).all()
    assert counts[4:].sum() == 2_000


def test_stratified_draws_are_unbiased() -> None:
    sampler = MixtureSampler(5, lam=1.0, stratified=True)
    sampler._rng = torch.Generator().manual_seed(1)
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    sampler.set_priorities(np.arange(5), weights)
    counts = np.bincount(np.concatenate([sampler.draw(5, 7) for _ in range(20_000)]), minlength=5)
    assert counts / counts.sum() == pytest.approx(weights / 15, abs=0.003)


# Reducible loss


@pytest.mark.parametrize(
    ("map", "values", "expected"),
    [
        ("relu", [-2.0, 0.0, 3.0], [0.25, 0.25, 3.25]),
        ("exp", [-2.0, 0.0, 3.0], [math.exp(-2) + 0.25, 1.25, 4.25]),
    ],
)
def test_both_maps(map: Any, values: list[float], expected: list[float]) -> None:
    buffer = buffer_of(ReLoTerm(map, exponent=0.5, eps=0.25))
    buffer.extend(rows(3))
    write(buffer, "reducible_loss", [0, 1, 2], values)
    assert buffer._sampler.priorities(3) == pytest.approx([value**0.5 for value in expected])


def test_new_rows_have_the_largest_reducible_loss() -> None:
    buffer = buffer_of(ReLoTerm())
    buffer.extend(rows(2))
    assert buffer.columns["reducible_loss"][:2].tolist() == [1.0, 1.0]
    write(buffer, "reducible_loss", [0, 1], [-1.0, 0.5])
    buffer.extend(rows(1, 2))
    assert buffer.columns["reducible_loss"][2] == 0.5


def trained(algorithm: type[OffPolicyModule], folder: Path, replay: ReplayConfig, **settings: Any) -> Any:
    continuous = algorithm in (SAC, TD3)
    seed_everything(0, verbose=False)
    env = EnvConfig("PointReach-6-v0" if continuous else "MiniGrid-DoorKey-5x5-v0", num_envs=4)
    training = TrainingConfig(480, 80, 80, replay_ratio=0.1, gamma=0.5)
    module = algorithm(env, training, replay, hidden_sizes=[16], **settings)
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module)
    return module


@ALL
def test_training_writes_the_difference_of_the_two_losses(
    algorithm: type[OffPolicyModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = ReplayConfig(
        480, 16, clip_length=None, lam_max=1.0, warmup_fraction=0.0, vlm=None, relo=ReLoConfig(), rank=RankConfig()
    )
    seen = []
    plain = algorithm.reducible_loss

    def watched(self: Any, batch: Any) -> Any:
        value = plain(self, batch)
        assert value.shape == (16,)
        seen.append(value.abs().max().item())
        return value

    monkeypatch.setattr(algorithm, "reducible_loss", watched)
    module = trained(algorithm, tmp_path, replay)
    assert len(seen) == module.grad_steps == 48
    assert seen[0] == pytest.approx(0.0, abs=1e-6)  # networks and targets begin equal
    assert max(seen) > 0
    assert module.buffer.stats()["written/reducible_loss"] == module.buffer.stats()["written/td_error"] == 48 * 16


@ALL
def test_reducible_loss_is_the_loss_less_that_of_the_target_network(
    algorithm: type[OffPolicyModule], tmp_path: Path
) -> None:
    replay = ReplayConfig(480, 16, clip_length=None, lam_max=0.0, vlm=None)
    module = trained(algorithm, tmp_path, replay)
    batch = module.buffer.sample(32)
    batch["next", "terminated"] = torch.ones(32, 1, dtype=torch.bool)  # the target is the reward, whatever is drawn
    batch["next", "reward"] = torch.randn(32, 1)
    found = module.reducible_loss(batch)
    if algorithm in (SAC, TD3):
        for parameter in module.loss.target_qvalue_network_params.values(True, True):
            parameter.data.normal_()
        found = module.reducible_loss(batch)
        action = module.bounds.to_network(batch["action"])
        losses = []
        for critics in (module.loss.qvalue_network_params, module.loss.target_qvalue_network_params):
            values = [module.q_value(critic, batch["observation"], action) for critic in critics]
            losses.append(sum((value - batch["next", "reward"].squeeze(-1)).square() for value in values))
        torch.testing.assert_close(found, (losses[0] - losses[1]).detach())
        return
    for parameter in module.target_network.parameters():
        parameter.data.normal_()
    state = module.quantile_generator.get_state() if algorithm is IQN else None

    def restart() -> None:
        if state is not None:
            module.quantile_generator.set_state(state)

    def losses_of() -> list[float]:
        singles = []
        levels = module.draw_levels(32) if algorithm is IQN else ()
        for row in range(32):
            singles.append(module.loss(batch[row : row + 1], *(part[row : row + 1] for part in levels))[0].item())
        return singles

    restart()
    found = module.reducible_loss(batch)
    restart()
    online = losses_of()
    module.q_network.load_state_dict(module.target_network.state_dict())
    restart()
    old = losses_of()
    assert found.tolist() == pytest.approx([a - b for a, b in zip(online, old, strict=True)], rel=1e-3, abs=1e-4)


def test_an_algorithm_that_does_not_tell_its_reducible_loss_is_refused() -> None:
    class Silent(DQN):
        reducible_loss = OffPolicyModule.reducible_loss

    with pytest.raises(ValueError, match=r"replay\.relo needs an algorithm .* Silent does not"):
        Silent(replay=ReplayConfig(relo=ReLoConfig()))


@pytest.mark.parametrize(
    ("scheme", "setting", "value"),
    [
        (RankConfig, "exponent", -1.0),
        (RankConfig, "refresh_fraction", 0.0),
        (ReLoConfig, "eps", -1.0),
        (ReLoConfig, "eps", 0.0),
        (AgeConfig, "turnover", 0.0),
    ],
)
def test_settings_that_cannot_work_are_refused(scheme: type, setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"replay\.(rank|relo|age)\.{setting}={value}"):
        scheme(**{setting: value})


def test_schemes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replay\.td and replay\.rank"):
        ReplayConfig(td=TDConfig(), rank=RankConfig())
    with pytest.raises(ValueError, match=r"replay\.stratified=true has no effect at lam_max=0"):
        ReplayConfig(lam_max=0.0, vlm=None, stratified=True)


def test_freshness_is_told_as_a_share_of_the_buffers_turnover() -> None:
    assert repr(ReplayConfig(20_000, vlm=None, age=AgeConfig(0.25)).terms()[0]) == "AgeTerm(tau=5000.0)"
