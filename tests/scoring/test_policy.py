from __future__ import annotations

import numpy as np
import pytest

from vlmrb.scoring.policies.named import make_policy
from vlmrb.scoring.policy import NewestFirst, OldestFirst, RandomOrder, SelectionPolicy, WaitingClips


def waiting(oldest: list[int], newest: list[int] | None = None) -> WaitingClips:
    steps = [[first, last] for first, last in zip(oldest, newest or oldest, strict=True)]
    return WaitingClips([[clip_id] for clip_id in range(len(oldest))], steps)


def test_a_policy_sees_the_newest_clip_of_each_content():
    clips = WaitingClips([[3, 9], [5]], [[10, 30], [20]])
    assert (clips.clip_ids.tolist(), clips.oldest.tolist(), clips.newest.tolist()) == ([9, 5], [10, 20], [30, 20])


def test_newest_first_goes_by_the_latest_clip_of_each_content():
    assert NewestFirst().rank(waiting([10, 20, 30], newest=[40, 20, 30])).tolist() == [0, 2, 1]


def test_oldest_first_goes_by_the_first_clip_of_each_content():
    assert OldestFirst().rank(waiting([10, 5, 30], newest=[40, 50, 30])).tolist() == [1, 0, 2]


def test_oldest_first_keeps_the_order_of_arrival_among_clips_of_one_env_step():
    assert OldestFirst().rank(waiting([7, 7, 7])).tolist() == [0, 1, 2]


def test_newest_first_takes_the_last_arrival_among_clips_of_one_env_step():
    assert NewestFirst().rank(waiting([7, 7, 7])).tolist() == [2, 1, 0]


def test_random_order_gives_every_clip_every_place_equally_often():
    policy, size, draws = RandomOrder(seed=0), 4, 4000
    places = np.zeros((size, size))
    for _ in range(draws):
        places[np.arange(size), policy.rank(waiting([0] * size))] += 1
    assert np.abs(places / draws - 1 / size).max() < 0.04


def test_random_order_continues_from_its_saved_state():
    policy, resumed = RandomOrder(seed=1), RandomOrder(seed=2)
    policy.rank(waiting([0] * 9))
    resumed.load_state_dict(policy.state_dict())
    assert policy.rank(waiting([0] * 50)).tolist() == resumed.rank(waiting([0] * 50)).tolist()


def test_random_order_follows_the_runs_seed_unless_it_has_its_own():
    def order(policy: RandomOrder) -> list[int]:
        policy.follow(5)
        return policy.rank(waiting([0] * 50)).tolist()

    expected, own = (np.random.default_rng(seed).permutation(50).tolist() for seed in (5, 2))
    assert order(RandomOrder()) == order(RandomOrder(seed=5)) == expected
    assert order(RandomOrder(seed=2)) == own


@pytest.mark.parametrize("name", ["newest", "oldest", "random", "novelty", "uncertainty", "expected"])
def test_policies_are_made_by_name(name: str):
    assert make_policy(name, seed=0).name == name


def test_a_policy_object_is_taken_as_it_is():
    class ShortestId(SelectionPolicy):
        name = "mine"

        def rank(self, waiting: WaitingClips) -> np.ndarray:
            return np.argsort(waiting.clip_ids)

    policy = ShortestId()
    assert make_policy(policy, seed=0) is policy


def test_an_unknown_policy_is_refused_naming_the_choices():
    with pytest.raises(ValueError, match=r"scoring\.policy='best'.*newest, oldest, random, novelty"):
        make_policy("best", seed=0)
