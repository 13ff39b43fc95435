"""Policies that look at more than age: novelty, guesses, mixes; and the audited share."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from jsonargparse import ArgumentParser
from odd_scorers import GoodScorer, expected_scores
from replay_tools import Episodes, check_counts, make_buffer

from vlmrb.scoring.admission import AdmissionQueue
from vlmrb.scoring.audit import Audit
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.meter import Counts
from vlmrb.scoring.policies import ExpectedFirst, Mix, MixPart, NovelFirst, UncertainFirst
from vlmrb.scoring.policies.changes import CODES, COMPONENTS, changes
from vlmrb.scoring.policy import NewestFirst, RandomOrder, WaitingClips
from vlmrb.scoring.service import ScoringService


def batch(snapshots: np.ndarray, lengths: list[int] | None = None) -> ClipBatch:
    count = len(snapshots)
    return ClipBatch(np.arange(count), snapshots, np.array(lengths or [snapshots.shape[1]] * count))


def waiting(count: int, described: Any = None, guess: list[float] | None = None) -> WaitingClips:
    newest = [[10 * place] for place in range(count)]
    return WaitingClips(
        [[place] for place in range(count)], newest, described, None if guess is None else np.array(guess)
    )


def walks(rng: np.random.Generator, count: int, dtype: str, size: int = 9) -> np.ndarray:
    """Clips ``[count, 6, size]`` in which now and then a component changes a little."""
    steps = rng.integers(-1, 2, (count, 6, size)) * (rng.random((count, 6, size)) < 0.15)
    steps[rng.random(count) < 0.2] = 0
    return (4 + np.cumsum(steps, 1)).astype(dtype)


# Novelty


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_changes_of_whole_numbers_are_those_found_one_by_one(dtype: str) -> None:
    snapshots = walks(np.random.default_rng(0), 40, dtype)
    found = changes(batch(snapshots))
    pair_of: dict[int, tuple[int, int]] = {}
    for clip, codes in zip(snapshots.astype(int), found, strict=True):
        pairs, places = set(), set()
        for before, after in zip(clip[:-1], clip[1:], strict=True):
            for place in np.flatnonzero(before != after):
                pairs.add((before[place], after[place]))
                places.add(place)
        assert codes.tolist() == sorted(set(codes.tolist()))
        if not pairs:
            assert codes.tolist() == [0]
            continue
        assert len(codes) == len(pairs) + len(places)
        assert [code - (CODES - COMPONENTS) for code in codes if code >= CODES - COMPONENTS] == sorted(places)
        if dtype == "uint8":
            assert sorted(256 * old + new + 1 for old, new in pairs) == codes[: len(pairs)].tolist()
        else:
            alone = [changes(batch(np.array([[[old], [new]]])))[0][0] for old, new in pairs]
            assert sorted(alone) == codes[: len(pairs)].tolist()
            pair_of |= dict(zip(alone, pairs, strict=True))
    assert len(pair_of) == len(set(pair_of.values()))


def test_changes_of_real_numbers_tell_component_direction_and_size() -> None:
    first = np.zeros((7, 3, 4))
    last = [[0, 0, 0, 0], [1, 0, 0, 0], [1.9, 0, 0, 0], [-1, 0, 0, 0], [2, 0, 0, 0], [0, 1, 0, 0], [1e-9, 0, 0, 0]]
    first[:, 1:] += np.array(last)[:, None]
    codes = [found.tolist() for found in changes(batch(first))]
    assert codes[0] == codes[6] == [0]
    assert codes[1] == codes[2]
    assert len({tuple(found) for found in codes}) == 5
    assert changes(batch(np.array([[[0.0] * 4, [1, -3, 0, 2**20]]])))[0].size == 3


def test_of_frames_only_coarse_colours_and_first_and_last_count() -> None:
    frames = np.full((3, 4, 3000), 200, np.uint8)
    frames[0, 1] = 0  # there and gone
    frames[1, -1] = 199  # the same colour, coarsely
    frames[2, -1] = 20
    codes = changes(batch(frames))
    assert [found.tolist() for found in codes[:2]] == [[0], [0]]
    assert codes[2][0] == 256 * (200 >> 5) + (20 >> 5) + 1
    assert codes[2].max() < CODES


def test_novelty_ranks_as_brute_force_counts_and_goes_on_where_it_was() -> None:
    rng, policy, counts = np.random.default_rng(1), NovelFirst(), Counter[int]()
    kept: list[np.ndarray] = []
    for block in range(12):
        described = policy.describe(batch(walks(rng, 25, "uint8")))
        policy.note(described)
        for codes in described:
            counts.update(codes.tolist())
        kept += described[::5]
        if block == 5:
            policy, saved = NovelFirst(), policy.state_dict()
            policy.load_state_dict(saved)
        rarest = [min(counts[code] for code in codes.tolist()) for codes in kept]
        expected = sorted(range(len(kept)), key=lambda place: (rarest[place], -place))
        assert policy.rank(waiting(len(kept), kept)).tolist() == expected


def test_what_happens_seldom_is_scored_first() -> None:
    snapshots = np.zeros((50, 4, 6), np.uint8)
    snapshots[:, 2:, 0] = 1  # in each clip
    snapshots[17, 3, 4] = 9  # in one
    policy = NovelFirst()
    described = policy.describe(batch(snapshots))
    policy.note(described)
    assert policy.rank(waiting(50, described))[:2].tolist() == [17, 49]


def test_novelty_costs_microseconds_a_clip() -> None:
    policy, clips = NovelFirst(), batch(walks(np.random.default_rng(0), 256, "uint8", 113))
    spent = []
    for _ in range(10):
        begin = time.process_time()
        policy.note(policy.describe(clips))
        spent.append(time.process_time() - begin)
    assert min(spent) / 256 < 100e-6  # about 20 on a free core: these clips change more than real ones


# Guesses


def test_policies_by_guesses_put_the_most_uncertain_and_the_most_promising_first() -> None:
    clips = waiting(6, guess=[0.9, 0.5, np.nan, 0.1, 0.45, np.nan])
    assert UncertainFirst().rank(clips).tolist() == [1, 4, 3, 0, 5, 2]
    assert ExpectedFirst().rank(clips).tolist() == [0, 1, 4, 3, 5, 2]


@pytest.mark.parametrize("policy", [UncertainFirst(), ExpectedFirst()])
def test_without_guesses_the_newest_go_first(policy: UncertainFirst | ExpectedFirst) -> None:
    assert policy.rank(waiting(5)).tolist() == NewestFirst().rank(waiting(5)).tolist()


def test_the_queue_hands_guesses_on() -> None:
    queue = AdmissionQueue(ExpectedFirst(), None, lambda clip_id: True, Counts())
    for clip_id, guess in enumerate([0.2, 0.8, 0.5]):
        queue.add(bytes([clip_id]), clip_id, clip_id)
        queue.waiting[bytes([clip_id])].guess = guess
    assert [content.clip_ids for content in queue.choose(2)] == [[1], [2]]


# Mixes


def test_each_policy_of_a_mix_chooses_its_share() -> None:
    mix = Mix([MixPart(0.25, "oldest"), MixPart(0.75, "newest")], seed=3)
    firsts = [int(mix.rank(waiting(8))[0]) for _ in range(4000)]
    assert set(firsts) == {0, 7}
    assert firsts.count(0) / 4000 == pytest.approx(0.25, abs=0.03)
    order = mix.rank(waiting(400)).tolist()
    assert sorted(order) == list(range(400))
    old = [place for place in order[:200] if place < 200]
    assert old == list(range(len(old)))
    assert 30 < len(old) < 70


def test_a_mix_shows_each_policy_its_own_descriptions_and_goes_on_where_it_was() -> None:
    parts = [MixPart(0.5, "random"), MixPart(0.5, NovelFirst())]
    mix, alone = Mix(parts), NovelFirst()
    described = mix.describe(batch(walks(np.random.default_rng(2), 30, "uint8")))
    mix.note(described)
    alone.note([codes for _, codes in described])
    assert parts[1].policy.state_dict() == alone.state_dict()
    resumed = Mix([MixPart(0.5, "random"), MixPart(0.5, "novelty")], seed=9)
    resumed.load_state_dict(mix.state_dict())
    for _ in range(3):
        clips = waiting(30, described)
        assert mix.rank(clips).tolist() == resumed.rank(clips).tolist()
    assert Mix([MixPart(0.5, "random"), MixPart(0.5, "newest")]).describe(batch(np.zeros((2, 3, 4)))) is None


def test_the_turns_of_a_mix_and_its_policies_follow_the_runs_seed_unless_they_have_their_own() -> None:
    def order(seed: int | None, run: int, of_part: int | None = None) -> list[int]:
        mix = Mix([MixPart(0.5, RandomOrder(of_part)), MixPart(0.5, "random")], seed)
        mix.follow(run)
        return mix.rank(waiting(50)).tolist()

    assert order(None, 5) == order(5, 0) == order(5, 9)
    assert order(None, 5) != order(None, 6)
    assert order(None, 5) != order(None, 5, of_part=8) == order(5, 7, of_part=8)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ((0.5, 0.4), "must add up to 1, not 0.9"),
        ((1.0, 0.0), r"parts\[1\].share=0.0 must lie in \(0, 1\]"),
        ((), "not 0"),
    ],
)
def test_shares_that_are_none_are_refused(shares: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Mix([MixPart(share, "random") for share in shares])


def test_a_mix_is_written_by_class_paths() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--scoring", type=ScoringConfig)
    settings = {
        "policy": {
            "class_path": "vlmrb.scoring.policies.Mix",
            "init_args": {
                "parts": [
                    {"share": 0.2, "policy": "random"},
                    {"share": 0.8, "policy": {"class_path": "vlmrb.scoring.policies.NovelFirst"}},
                ]
            },
        },
        "budget": {"clips_per_env_step": 0.01, "initial_burst": 100},
        "audit_share": 0.05,
    }
    config = parser.instantiate(parser.parse_object({"scoring": settings})).scoring
    assert config.policy.name == "mix of 0.2 random, 0.8 novelty"
    assert (config.budget.clips_per_env_step, config.budget.initial_burst) == (0.01, 100)


# In the service


def run(service: ScoringService, blocks: range, episodes: Episodes) -> None:
    for block in blocks:
        service._delivery._buffer.extend(episodes.block(8))
        service.poll(16 * (block + 1))


SETTINGS: dict[str, Any] = {"backend": "sync", "batch_clips": 3, "max_waiting": 64, "audit_share": 0.2, "cache": None}


FEW = BudgetConfig(clips_per_env_step=0.15, initial_burst=10)


@pytest.mark.parametrize("policy", ["novelty", "random", "mix"])
def test_a_run_interrupted_in_mid_budget_shows_the_scorer_the_same_clips(policy: str) -> None:
    def start(buffer: Any, scorer: GoodScorer) -> ScoringService:
        chosen = Mix([MixPart(0.3, "random"), MixPart(0.7, "novelty")]) if policy == "mix" else policy
        return ScoringService(buffer, scorer, policy=chosen, budget=FEW, **SETTINGS)

    whole, first, second = GoodScorer(), GoodScorer(), GoodScorer()
    reference = start(make_buffer(256), whole)
    run(reference, range(60), Episodes(seed=4))

    episodes, buffer = Episodes(seed=4), make_buffer(256)
    interrupted = start(buffer, first)
    run(interrupted, range(31), episodes)
    resumed_buffer = make_buffer(256)
    resumed_buffer.load_state_dict(buffer.state_dict())
    resumed = start(resumed_buffer, second)
    resumed.load_state_dict(interrupted.state_dict())
    run(resumed, range(31, 60), episodes)

    assert first.seen + second.seen == whole.seen
    wall_clock = ("clips_per_s", "latency_ms_p50", "latency_ms_p95")
    recent = ("delay_env_steps_mean", "delay_env_steps_p95")
    for name, value in check_counts(reference).items():
        if name not in wall_clock + recent:
            assert resumed.stats()[name] == value, name


def test_what_is_audited_is_scored_first_and_tells_the_share_of_positives_among_all() -> None:
    buffer = make_buffer(8192)
    service = ScoringService(buffer, GoodScorer(), budget=FEW, policy="newest", **SETTINGS | {"max_waiting": 5000})
    run(service, range(200), Episodes(seed=1))
    stats = check_counts(service)
    assert stats["audited"] / stats["emitted"] == pytest.approx(0.2, abs=0.05)
    assert stats["audited"] - stats["audit_scored"] <= 10  # the budget pays for more than the audited ones
    table = buffer.clips.table()
    truth = (expected_scores(buffer.clips.batch(table["clip_id"].tolist()).snapshots) > buffer.monitor.threshold).mean()
    assert stats["audit_share_positive"] == pytest.approx(truth, abs=0.1)


def test_an_audit_draws_its_share_and_goes_on_where_it_was() -> None:
    audit, resumed = Audit(0.3, 0.5, seed=0), Audit(0.3, 0.5, seed=7)
    assert audit.draw(5000).mean() == pytest.approx(0.3, abs=0.03)
    audit.scored(np.array([0.2, 0.5, 0.9, 0.6], np.float32))
    resumed.load_state_dict(audit.state_dict())
    assert resumed.stats() == audit.stats()
    assert audit.stats()["audit_share_positive"] == 0.5
    assert (audit.draw(100) == resumed.draw(100)).all()


def test_random_order_is_what_its_name_says_within_a_mix() -> None:
    mix = Mix([MixPart(1.0, RandomOrder(seed=5))])
    assert mix.rank(waiting(20)).tolist() == RandomOrder(seed=5).rank(waiting(20)).tolist()
