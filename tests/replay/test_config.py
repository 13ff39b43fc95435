from __future__ import annotations

import dataclasses

import pytest
from jsonargparse import ArgumentParser

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import (
    AgeConfig,
    ImportanceConfig,
    ReplayConfig,
    TDConfig,
    VLMConfig,
)
from vlmrb.replay.schedule import LinearSchedule


def parse(text: str) -> ReplayConfig:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--replay", type=ReplayConfig, default=ReplayConfig())
    return parser.instantiate(parser.parse_string(text)).replay


class TestSchemes:
    """Each scheme is a few lines of YAML."""

    def test_uniform(self):
        config = parse("replay: {lam_max: 0.0, vlm: null, clip_length: null}")
        assert config.terms() == []
        assert not config.needs_scores

    def test_prioritised_experience_replay(self):
        config = parse(
            "replay: {lam_max: 1.0, warmup_fraction: 0.0, clip_length: null, vlm: null, "
            "td: {exponent: 0.6, eps: 1.0e-6}, importance_weights: {beta_start: 0.4, beta_end: 1.0}}"
        )
        assert list(map(repr, config.terms())) == ["TDTerm(exponent=0.6, eps=1e-06)"]
        buffer = build_buffer(config, gamma=0.95, total_env_steps=1000, learning_starts=200)
        assert (buffer.sampler.lam, buffer.sampler.beta) == (0.0, 0.4)
        buffer.set_env_steps(200)
        assert (buffer.sampler.lam, buffer.sampler.beta) == (1.0, 0.4)
        buffer.set_env_steps(600)
        assert (buffer.sampler.lam, buffer.sampler.beta) == (1.0, pytest.approx(0.7))
        buffer.set_env_steps(5000)
        assert (buffer.sampler.lam, buffer.sampler.beta) == (1.0, 1.0)

    def test_vlm_only_is_the_default(self):
        assert parse("replay: {}") == ReplayConfig()
        assert list(map(repr, ReplayConfig().terms())) == ["VLMTerm(threshold=0.5, unscored=0.0, exponent=1.0)"]
        assert ReplayConfig().needs_scores

    def test_vlm_times_td(self):
        assert [term.name for term in parse("replay: {td: {}}").terms()] == ["vlm", "td"]

    def test_lam_rises_over_a_tenth_of_the_budget_after_learning_starts(self):
        buffer = build_buffer(ReplayConfig(), gamma=0.95, total_env_steps=10_000, learning_starts=500)
        lam = []
        for env_steps in (0, 500, 1000, 1500, 10_000, 20_000):
            buffer.set_env_steps(env_steps)
            lam.append(buffer.sampler.lam)
        assert lam == [0.0, 0.0, 0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam_max": 1.5}, r"replay.lam_max=1.5 must lie in \[0, 1\]"),
        ({"clip_length": 1}, "replay.clip_length=1 must be at least 2"),
        ({"capacity": 100}, "replay.capacity=100 is smaller than replay.batch_size=128"),
        ({"batch_size": 0}, "replay.batch_size=0"),
        ({"n_steps": 0}, "replay.n_steps=0"),
        ({"warmup_fraction": -0.1}, "replay.warmup_fraction=-0.1"),
        ({"memory_limit_gib": 0.0}, "replay.memory_limit_gib=0.0"),
        ({"memory_limit_gib": float("nan")}, "replay.memory_limit_gib=nan"),
        ({"max_draws_per_positive": float("nan")}, "replay.max_draws_per_positive=nan"),
        ({"max_draws_per_positive": 0.0}, "replay.max_draws_per_positive=0.0"),
        ({"vlm": VLMConfig(threshold=1.2)}, r"replay.* threshold must lie in \[0, 1\], got 1.2"),
        ({"vlm": VLMConfig(unscored=-1.0)}, "replay.* unscored=-1.0"),
        ({"vlm": VLMConfig(exponent=2.0)}, "replay.* exponent acts on raw scores only"),
        ({"td": TDConfig(exponent=-1.0)}, "replay.* exponent=-1.0"),
        ({"vlm": None}, "replay.lam_max=0.5 has no effect without a priority"),
        ({"clip_length": None}, "replay.vlm needs clips to score"),
        ({"importance_weights": ImportanceConfig(), "lam_max": 0.0}, "importance_weights has no effect at lam_max=0"),
        ({"importance_weights": ImportanceConfig(beta_end=1.1)}, "replay.importance_weights.beta_end=1.1"),
    ],
)
def test_settings_that_cannot_work_are_named_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        ReplayConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 5, "batch_size": 6}, "capacity=5 .* batch_size=6"),
        ({"clip_length": 1}, "clip_length=1"),
        ({"n_steps": 0}, "n_steps=0"),
        ({"gamma": 1.1}, r"gamma=1.1 must lie in \[0, 1\]"),
        ({"gamma": -0.1}, r"gamma=-0.1 must lie in \[0, 1\]"),
        ({"gamma": float("nan"), "n_steps": 3}, r"gamma=nan must lie in \[0, 1\]"),
        ({"terms": ReplayConfig().terms(), "lam": 0.5}, "the vlm term needs clips to score: set clip_length"),
        ({"storage": "cloud"}, "storage='cloud'"),
        ({"lam": 1.5}, "lam must lie in"),
        ({"beta": -0.5}, "beta must lie in"),
        ({"max_draws_per_positive": -1.0}, "max_draws_per_positive must be positive"),
        ({"terms": ReplayConfig(td=TDConfig()).terms() * 2}, "two priority terms share a name"),
    ],
)
def test_the_buffer_alone_refuses_them_too(settings, message):
    with pytest.raises(ValueError, match=message):
        VLMReplayBuffer(**{"capacity": 1000} | settings)


def test_every_setting_says_what_it_trades():
    for config in (ReplayConfig, TDConfig, VLMConfig, AgeConfig, ImportanceConfig):
        for field in dataclasses.fields(config):
            assert f"{field.name}: " in (config.__doc__ or ""), f"{config.__name__}.{field.name} is not documented"


class TestLinearSchedule:
    def test_is_flat_before_and_after_the_ramp(self):
        ramp = LinearSchedule(0.4, 1.0, begin=100, duration=200)
        assert [ramp(t) for t in (0, 100, 200, 300, 10**9)] == [0.4, 0.4, pytest.approx(0.7), 1.0, 1.0]

    def test_may_fall(self):
        assert LinearSchedule(1.0, 0.1, duration=10)(5) == pytest.approx(0.55)

    def test_without_duration_it_jumps(self):
        step = LinearSchedule(0.0, 0.5, begin=7)
        assert [step(6), step(7)] == [0.0, 0.5]

    def test_never_leaves_its_ends(self):
        ramp = LinearSchedule(0.1, 0.9, begin=3, duration=7)
        values = [ramp(t) for t in range(20)]
        assert min(values) == 0.1
        assert max(values) == 0.9
        assert values == sorted(values)

    @pytest.mark.parametrize("bad", [{"begin": -1}, {"duration": -1}])
    def test_refuses_times_before_zero(self, bad):
        with pytest.raises(ValueError, match="must be ≥ 0"):
            LinearSchedule(0.0, 1.0, **bad)
