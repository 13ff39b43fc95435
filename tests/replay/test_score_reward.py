"""Scores as rewards: what is added to which row, by hand; with late scores, n-step returns, after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import Pipeline, World, check_rows, collect
from tensordict import TensorDictBase

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import ReplayConfig
from vlmrb.replay.schemes import ScoreRewardConfig
from vlmrb.replay.score_reward import ScoreRewardTransform
from vlmrb.replay.terms import VLMTerm

WORLD = World(max_length=11)
LENGTH = 5  # frames of a clip
GAMMA = 0.9
MODES = pytest.mark.parametrize("mode", ["terminal", "shaped"])


def make(mode: Any = "terminal", weight: float = 2.0, threshold: float | None = None, **settings: Any) -> Any:
    reward = ScoreRewardTransform(weight, mode, threshold)
    defaults = {"batch_size": 64, "clip_length": LENGTH, "gamma": GAMMA, "seed": 2, "score_reward": reward}
    return VLMReplayBuffer(97, **{**defaults, **settings})


def expected_bonus(e: int, k: int, t: int, mode: str, weight: float, threshold: float | None) -> float:
    """Returns what the world's rules give the row that begins in a state, once it is scored."""
    rows = min(LENGTH - 1, WORLD.length(e, k) - t // (LENGTH - 1) * (LENGTH - 1))  # of the state's clip
    score = WORLD.score(e, k, t // (LENGTH - 1))
    value = weight * (score if threshold is None else float(score > threshold))
    if mode == "shaped":
        return value / rows
    return value if t % (LENGTH - 1) == rows - 1 else 0.0


def bonuses(buffer: VLMReplayBuffer, batch: TensorDictBase) -> list[float]:
    return (batch["next", "reward"] - buffer[:]["next", "reward"][batch["index"]]).reshape(-1).tolist()


@MODES
@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_rows_get_what_their_own_clip_is_worth_at_their_root(mode: str, threshold: float | None, n_steps: int) -> None:
    buffer = make(mode, threshold=threshold, n_steps=n_steps)
    pipeline = Pipeline(buffer, WORLD, delay=2)
    paid = 0
    for _ in range(7):
        pipeline.run(3)
        check_rows(buffer, WORLD, GAMMA)  # what is stored is the environment's alone
        batch = buffer.sample()
        scored = buffer.columns["scored"][batch["index"]].tolist()
        for row, known, bonus in zip(batch, scored, bonuses(buffer, batch), strict=True):
            e, k, t = row["observation"].tolist()
            expected = expected_bonus(e, k, t, mode, 2.0, threshold) if known else 0.0
            assert bonus == pytest.approx(expected, abs=1e-5)
            paid += expected > 0
    assert paid > 10
    assert not all(scored)


def test_the_parts_of_a_clip_add_up_to_what_its_end_gets() -> None:
    sums = {}
    for mode in ("terminal", "shaped"):
        buffer = make(mode)
        (block,) = collect(2, 40, WORLD, 1)
        buffer.extend(block)
        ids = buffer.clips.take_completed()
        buffer.write_scores(ids, [0.1 + i % 9 / 10 for i in range(len(ids))])
        bonus = torch.from_numpy(buffer.score_reward.bonus(torch.arange(80).numpy()))
        clip = buffer.columns["clip_id"][:80]
        sums[mode] = [bonus[clip == i].sum().item() for i in ids]
        assert [(bonus[clip == i] > 0).sum().item() for i in ids] == (
            [1] * len(ids) if mode == "terminal" else [(clip == i).sum().item() for i in ids]
        )
    assert sums["terminal"] == pytest.approx(sums["shaped"]) == [2 * (0.1 + i % 9 / 10) for i in range(len(ids))]


def test_a_score_counts_from_when_it_arrives() -> None:
    buffer = make("shaped")
    (block,) = collect(3, 20, WORLD, 1)
    buffer.extend(block)
    (first, *_) = buffer.clips.take_completed()
    assert not any(bonuses(buffer, buffer.sample()))
    for score in (1.0, 0.25):  # a later answer replaces an earlier one
        buffer.write_scores([first], [score])
        batch = buffer.sample(300)
        own = buffer.columns["clip_id"][batch["index"]] == first
        bonus = torch.tensor(bonuses(buffer, batch))
        assert own.any()
        rows = (buffer.columns["clip_id"] == first).sum().item()
        assert bonus[own].numpy() == pytest.approx(2 * score / rows)
        assert not bonus[~own].any()


@pytest.mark.parametrize(("score", "worth"), [(0.3, 0.0), (0.31, 1.0), (0.29, 0.0), (1.0, 1.0)])
def test_a_score_of_exactly_the_threshold_is_not_above_it(score: float, worth: float) -> None:
    buffer = make("shaped", weight=1.0, threshold=0.3)
    (block,) = collect(3, 20, WORLD, 1)
    buffer.extend(block)
    ids = buffer.clips.take_completed()
    buffer.write_scores(ids, [score] * len(ids))
    scored = buffer.columns["scored"][:60].numpy().nonzero()[0]
    assert buffer.score_reward.bonus(scored).sum() == pytest.approx(worth * len(ids))


@MODES
def test_a_loaded_buffer_pays_the_same(mode: str) -> None:
    one, other = make(mode), make(mode)
    Pipeline(one, WORLD, delay=1).run(30)
    one.sample()
    other.load_state_dict(one.state_dict())
    for buffer in (one, other):
        buffer.end_streams()
    assert any(bonuses(one, one.sample()))
    other.sample()
    for block in collect(4, 5, WORLD, 5):
        assert (one.sample() == other.sample()).all()
        for buffer in (one, other):
            buffer.extend(block)
    assert other.gauges() == one.gauges() != {}  # the mean of the whole window, what was drawn before saving included


def test_a_buffer_with_other_rewards_is_not_resumed() -> None:
    state = make().state_dict()
    for buffer in (make("shaped"), make(weight=1.0), make(threshold=0.5), make(score_reward=None)):
        with pytest.raises(ValueError, match="saved replay buffer has score_reward=.*resume with the saved one"):
            buffer.load_state_dict(state)


def test_draws_and_priorities_do_not_change() -> None:
    one, other = make(terms=[VLMTerm()], lam=0.5), make(terms=[VLMTerm()], lam=0.5, score_reward=None)
    for buffer in (one, other):
        Pipeline(buffer, WORLD).run(10)
    for _ in range(3):
        assert torch.equal(one.sample()["index"], other.sample()["index"])


# Settings


def test_settings_become_the_transform() -> None:
    config = ReplayConfig(lam_max=0.0, vlm=None, score_reward=ScoreRewardConfig(0.5, "shaped", 0.75))
    buffer = build_buffer(config, gamma=0.9, total_env_steps=1000)
    assert repr(buffer.score_reward) == "ScoreRewardTransform(weight=0.5, mode='shaped', threshold=0.75)"
    assert config.terms() == []


@pytest.mark.parametrize(
    ("make_settings", "says"),
    [
        (lambda: ScoreRewardConfig(weight=0.0), r"replay\.score_reward\.weight=0\.0 must be positive"),
        (lambda: ScoreRewardConfig(threshold=1.5), r"replay\.score_reward\.threshold=1\.5 must lie in \[0, 1\]"),
        (lambda: ScoreRewardConfig(threshold=1.0), r"replay\.score_reward\.threshold=1\.0 has no effect"),
        (lambda: ScoreRewardConfig(mode="dense"), r"replay\.score_reward\.mode='dense' must be terminal or shaped"),
        (
            lambda: ReplayConfig(lam_max=0.0, vlm=None, clip_length=None, score_reward=ScoreRewardConfig()),
            r"replay\.score_reward needs clips to score: set replay\.clip_length",
        ),
        (lambda: make(clip_length=None), "need clips to score: set clip_length"),
        (lambda: make(weight=-1.0), r"need weight > 0 .* got weight=-1\.0"),
        (lambda: make("late"), "got weight=2.0, mode='late'"),
        (lambda: make(threshold=1.0), r"a threshold in \[0, 1\), which some scores exceed, got 1\.0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make_settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        make_settings()
    assert "\n" not in str(error.value)
