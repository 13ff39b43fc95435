"""What sampling did is measured on the way, not assumed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from counting import Pipeline, World, collect

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.score_reward import ScoreRewardTransform
from vlmrb.replay.terms import TDTerm, VLMTerm

WORLD = World(9)


def make(**kwargs) -> VLMReplayBuffer:
    kwargs = {"terms": [VLMTerm()], "lam": 0.5, "clip_length": 4, "n_steps": 3} | kwargs
    return VLMReplayBuffer(120, batch_size=64, **kwargs)


def run(buffer: VLMReplayBuffer) -> VLMReplayBuffer:
    Pipeline(buffer, WORLD, num_envs=4, length=5, blocks=30).run()
    buffer.replay_frequencies()  # forgets the draws of the run
    return buffer


def test_frequencies_are_shares_of_draws_over_shares_of_rows():
    buffer = run(make())
    score = buffer.columns["score"].numpy()
    positive = np.mean(score > 0.5)
    for _ in range(1000):
        buffer.sample()
    report = buffer.replay_frequencies()
    # Half of the draws fall on positives only, the other half on everything: 0.5 / share + 0.5.
    assert report["share/vlm_positive"] == positive
    assert report["frequency/vlm_positive"] == pytest.approx(0.5 / positive + 0.5, rel=0.03)
    assert report["frequency/vlm_negative"] == pytest.approx(0.5, rel=0.05)
    assert report["frequency/unscored"] == pytest.approx(0.5, rel=0.1)
    shares = [report[f"share/{kind}"] for kind in ("vlm_positive", "vlm_negative", "unscored")]
    assert sum(shares) == pytest.approx(1.0)
    weighted = [
        report[f"share/{kind}"] * report[f"frequency/{kind}"] for kind in ("vlm_positive", "vlm_negative", "unscored")
    ]
    assert sum(weighted) == pytest.approx(1.0)


def test_uniform_replay_has_frequency_one_everywhere():
    buffer = run(make(lam=0.0))
    for _ in range(1000):
        buffer.sample()
    report = buffer.replay_frequencies()
    for kind in ("vlm_positive", "vlm_negative", "unscored", "successful_episode"):
        assert report[f"frequency/{kind}"] == pytest.approx(1.0, rel=0.1), kind
    assert report["effective_sample_size"] == pytest.approx(120)
    assert report["max_oversampling"] == pytest.approx(1.0)
    age = (buffer.env_steps - buffer.columns["env_step"]).double().mean().item()
    assert report["sampled_age"] == pytest.approx(age, rel=0.03)


def test_rows_of_successful_episodes_are_followed_without_a_scorer():
    buffer = run(make(terms=[TDTerm(0.6, 1e-6)], clip_length=None, lam=1.0))
    buffer.sample()
    report = buffer.replay_frequencies()
    assert report["share/successful_episode"] == np.mean(buffer.columns["episode_success"].numpy() == 1)
    assert report["frequency/successful_episode"] > 0
    assert not any("vlm" in name or "unscored" in name for name in report)  # kinds of scores, which nobody gives


def test_a_row_counts_as_what_it_was_when_it_was_drawn():
    buffer = make(lam=0.0)
    for block in collect(4, 5, WORLD, 6):
        buffer.extend(block)
    for _ in range(50):
        buffer.sample()
    ids = buffer.clips.table()["clip_id"].tolist()
    buffer.write_scores(ids, np.ones(len(ids)))
    report = buffer.replay_frequencies()
    assert report["frequency/vlm_positive"] == 0.0
    assert report["share/vlm_positive"] > 0.8


@pytest.mark.parametrize(
    ("terms", "threshold", "in_force"),
    [([], 0.7, 0.7), ([VLMTerm(threshold=None)], 0.7, 0.7), ([VLMTerm(0.3)], 0.7, 0.3), ([], None, 0.5)],
)
def test_clips_are_positive_by_the_threshold_that_the_scheme_uses(terms, threshold, in_force):
    buffer = make(terms=terms, lam=0.5 * bool(terms), score_reward=ScoreRewardTransform(1.0, "shaped", threshold))
    for block in collect(4, 5, WORLD, 6):
        buffer.extend(block)
    ids = buffer.clips.table()["clip_id"].tolist()
    scores = np.linspace(0.0, 1.0, len(ids), dtype=np.float32)
    buffer.write_scores(ids, scores)
    score = buffer.columns["score"].numpy()[: len(buffer)]
    assert buffer.replay_frequencies()["share/vlm_positive"] == np.mean(score > in_force)


def test_shares_are_averaged_over_the_interval():
    buffer = make(lam=0.0)
    blocks = collect(4, 5, WORLD, 12)
    for _ in range(6):
        buffer.extend(next(blocks))
    first = buffer.replay_frequencies()["share/unscored"]
    ids = buffer.clips.take_completed()
    buffer.write_scores(ids[: len(ids) // 2], np.ones(len(ids) // 2))
    for _ in range(50):
        buffer.sample()
    report = buffer.replay_frequencies()
    assert first == 1.0 > report["share/unscored"]
    drawn = report["share/unscored"]  # uniform: what is there is what is drawn
    assert report["frequency/unscored"] == pytest.approx(drawn / ((first + drawn) / 2), rel=0.03)


def test_effective_sample_size_and_oversampling_are_those_of_the_mixture():
    buffer = run(make(terms=[VLMTerm(), TDTerm()], lam=0.7))
    p = buffer.sampler.priorities(120)
    q = 0.7 * p / p.sum() + 0.3 / 120
    report = buffer.replay_frequencies()
    assert report["effective_sample_size"] == pytest.approx(1 / np.sum(q**2))
    assert report["max_oversampling"] == pytest.approx(q.max() * 120)
    assert np.isnan(report["sampled_age"])  # nothing was drawn since


def test_a_clip_that_takes_half_of_every_batch_is_warned_about_once(caplog):
    buffer = make()
    for block in collect(4, 5, WORLD, 10):
        buffer.extend(block)
    buffer.write_scores([int(buffer.clips.table()["clip_id"][-1])], [1.0])
    with caplog.at_level(logging.WARNING, logger="vlmrb"):
        assert buffer.replay_frequencies()["max_oversampling"] > 10
        buffer.replay_frequencies()
    (record,) = [record for record in caplog.records if record.name.startswith("vlmrb")]
    assert "max_draws_per_positive" in record.getMessage()
    # and the cap keeps what it promises
    capped = make(max_draws_per_positive=1.0)
    capped.load_state_dict(buffer.state_dict())
    assert capped.replay_frequencies()["max_oversampling"] <= 1 + 120 / 64


def test_memory_stays_bounded_when_nobody_asks():
    buffer = run(make())
    for _ in range(1500):
        buffer.sample()
    assert len(buffer.monitor.state_dict()["draws"]) == 1024


def test_an_empty_buffer_has_a_report():
    report = make().replay_frequencies()
    assert report["effective_sample_size"] == 0
    assert report["max_oversampling"] == 1.0


def test_stats_extend_those_of_torchrl():
    stats = run(make(beta=0.5)).stats()
    assert stats["size"] == stats["capacity"] == 120
    assert stats["write_count"] == 4 * (5 * 30 - 2)
    assert stats["env_steps"] == 600
    assert stats["lam"] == stats["beta"] == 0.5
    assert stats["written/td_error"] == 30 * 64
    assert stats["clips"] > 0
    assert stats["bytes"] > 0
    assert all(isinstance(value, int | float) for value in stats.values())
