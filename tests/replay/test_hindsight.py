"""Hindsight: which goals rows are given, and what they are worth then, against the rows themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import World, collect
from numpy.typing import NDArray
from scipy.stats import chisquare
from tensordict import TensorDict, TensorDictBase

from vlmrb.algorithms import SAC, TrainingConfig
from vlmrb.early import require_sound
from vlmrb.envs import EnvConfig, make_goals
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.build import build_buffer
from vlmrb.replay.config import ReplayConfig, VLMConfig
from vlmrb.replay.hindsight import HindsightTransform
from vlmrb.replay.prefill import prefill_with_buffer, prefill_with_episodes, write_episode
from vlmrb.replay.schemes import HERConfig, ScoreRewardConfig
from vlmrb.replay.score_reward import ScoreRewardTransform
from vlmrb.replay.terms import TDTerm

CONFIGS = Path(__file__).parents[2] / "configs"
WORLD = World(max_length=9)
STRATEGIES = ("future", "final", "episode", "random")


class StateGoals:
    """Observations are ``(e, k, t, goal)``, goals are states ``(e, k, t)``, −1 being the one that was asked for.

    A step is worth what tells that it was judged, and by which goal: −t of the goal; and it ends at the goal.
    """

    def achieved(self, observation: NDArray) -> NDArray:
        return observation[:, :3]

    def place(self, observation: NDArray, goal: NDArray) -> NDArray:
        return np.concatenate((observation[:, :3], goal), 1)

    def judge(self, observation: NDArray) -> tuple[NDArray, NDArray]:
        reached = (observation[:, :3] == observation[:, 3:]).all(1)
        return -observation[:, 5].astype(np.float32), reached

    def __repr__(self) -> str:
        return "StateGoals()"


def with_goals(block: TensorDictBase) -> TensorDictBase:
    block = block.clone()
    for key in ("observation", ("next", "observation")):
        block[key] = torch.cat((block[key], torch.full_like(block[key], -1)), -1)
    return block


def blocks(count: int, num_envs: int = 4, length: int = 5) -> list[TensorDictBase]:
    return [with_goals(block) for block in collect(num_envs, length, WORLD, count)]


def make(strategy: str = "future", share: float = 0.7, capacity: int = 83, **settings: Any) -> VLMReplayBuffer:
    hindsight = HindsightTransform(StateGoals(), share, strategy, seed=5)
    defaults = {"batch_size": 32, "seed": 3, "hindsight": hindsight}
    return VLMReplayBuffer(capacity, **{**defaults, **settings})


def steps_there(buffer: VLMReplayBuffer) -> dict[tuple[int, int], list[int]]:
    """Returns which steps of each episode ``(e, k)`` are in the buffer."""
    there: dict[tuple[int, int], list[int]] = {}
    for e, k, t in buffer[:]["observation"][:, :3].tolist():
        there.setdefault((e, k), []).append(t)
    return there


def check_batch(buffer: VLMReplayBuffer, batch: TensorDictBase, strategy: str) -> int:
    """Asserts that all rows are as stored or relabelled as they should be; returns how many of them are relabelled."""
    there, stored, relabelled = steps_there(buffer), buffer[:][batch["index"]], 0
    for row, original in zip(batch, stored, strict=True):
        goal = row["observation"][3:].tolist()
        assert row["next", "observation"][3:].tolist() == goal
        if goal[0] == -1:
            assert (row.select(*original.keys(True, True)) == original).all()
            continue
        relabelled += 1
        e, k, t = row["observation"][:3].tolist()
        assert row["observation"][:3].tolist() == original["observation"][:3].tolist()
        assert row["next", "observation"][:3].tolist() == original["next", "observation"][:3].tolist()
        assert (row["action"] == original["action"]).all()
        if strategy == "random":
            assert goal[2] - 1 in there[goal[0], goal[1]]
        else:
            assert goal[:2] == [e, k]
            allowed = [step for step in there[e, k] if step >= t or strategy != "future"]
            assert goal[2] - 1 in ([max(allowed)] if strategy == "final" else allowed)
        reached = goal == [e, k, t + 1]
        assert row["next", "reward"].item() == -goal[2]
        assert row["next", "terminated"].item() == reached
        assert row["next", "done"].item() == (reached or original["next", "done"].item())
    return relabelled


def test_shares_of_relabelled_rows_and_of_goals_reached_are_those_of_the_batches() -> None:
    buffer, relabelled, reached, rows = make(), 0, 0, 0
    for block in blocks(6):
        buffer.extend(block)
    for _ in range(5):
        batch = buffer.sample()
        relabelled += check_batch(buffer, batch, "future")
        exchanged = batch["observation"][:, 3] != -1
        reached += int((batch["next", "terminated"].reshape(-1) & exchanged).sum())
        rows += len(batch)
    assert 0 < reached < relabelled
    assert buffer.gauges() == {"her_relabelled": relabelled / rows, "her_reached": reached / relabelled}
    assert buffer.gauges() == {}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("capacity", [83, 1000])
def test_rows_are_as_stored_or_have_a_goal_of_their_episode(strategy: str, capacity: int) -> None:
    buffer, relabelled = make(strategy, capacity=capacity), 0
    for block in blocks(15):
        buffer.extend(block)
        before = buffer[:].clone()
        relabelled += check_batch(buffer, buffer.sample(), strategy)
        assert (buffer[:] == before).all()  # only copies are changed
    assert 0.6 < relabelled / (15 * 32) < 0.8


def test_every_later_state_of_the_episode_is_as_likely_a_goal() -> None:
    buffer = make(share=1.0, capacity=400)
    for block in blocks(10):
        buffer.extend(block)
    there = steps_there(buffer)
    (e, k), steps = max(there.items(), key=lambda item: len(item[1]))
    assert len(steps) >= 7
    counts = dict.fromkeys(range(2, max(steps) + 1), 0)  # of goals of the row at step 2, whose own is step 3
    for _ in range(200):
        batch = buffer.sample(256)["observation"]
        for goal in batch[(batch[:, :3] == torch.tensor([e, k, 2])).all(1)][:, 5].tolist():
            counts[goal - 1] += 1
    assert sum(counts.values()) > 100
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_an_episode_that_goes_on_ends_with_its_newest_row() -> None:
    buffer = make("final", share=1.0, capacity=1000)
    for block in blocks(6, num_envs=3, length=1):
        buffer.extend(block)
        newest = {tuple(state[:2]): state[2] for state in buffer[:]["next", "observation"][:, :3].tolist()}
        batch = buffer.sample()["observation"]
        for (e, k), goal in zip(batch[:, :2].tolist(), batch[:, 5].tolist(), strict=True):
            assert goal == max(newest[e, k], goal) == newest[e, k]


def test_streams_that_end_out_of_turn_or_change_in_number_are_not_mixed() -> None:
    buffer = make("episode", share=1.0, capacity=61)
    for num_envs in (4, 2, 5):
        for block in blocks(3, num_envs, 3):
            shifted = block.clone()  # other episodes than those of the streams before
            for key in ("observation", ("next", "observation")):
                shifted[key][..., 1] += 1000 * num_envs
            buffer.extend(shifted)
            check_batch(buffer, buffer.sample(), "episode")
        buffer.change_streams()
        check_batch(buffer, buffer.sample(), "episode")


def test_episodes_of_streams_that_were_ended_here_are_different_ones() -> None:
    buffer = make("future", share=1.0, capacity=100)
    (first,) = blocks(1, 2, 4)
    buffer.extend(first)
    buffer.end_streams()
    buffer.extend(first)  # the same states again, another episode
    seen = {row["index"].item(): row["observation"][5].item() - 1 for row in buffer.sample(200)}
    ends = buffer.hindsight.index.of(np.arange(16)).last
    assert set(ends[:8]) <= set(range(4))
    assert ends[8:].min() >= 4
    assert len(seen) == 16


def test_rows_that_do_not_continue_each_other_are_refused() -> None:
    buffer = make()
    first, _, third = blocks(3)
    buffer.extend(first)
    with pytest.raises(ValueError, match="do not continue where the ones before ended"):
        buffer.extend(third)


# Its own chance


def test_a_loaded_buffer_gives_the_same_goals(tmp_path: Path) -> None:
    stream = blocks(30)
    for saved_after in (0, 2, 12):
        one, other = make("episode"), make("episode")
        for number, block in enumerate(stream):
            if number == saved_after:
                torch.save(one.state_dict(), tmp_path / "state.pt")
                other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            one.extend(block)
            drawn = one.sample()
            if number >= saved_after:
                other.extend(block)
                assert (other.sample() == drawn).all()
        assert other.gauges() == one.gauges() != {}  # shares of the whole window, what was drawn before saving included


def test_it_has_a_generator_of_its_own() -> None:
    stream, plain, hindsight = blocks(4), make(hindsight=None), make()
    everybodys = torch.get_rng_state()
    for block in stream:
        drawn = []
        for buffer in (plain, hindsight):
            buffer.extend(block)
            drawn.append(buffer.sample()["index"])
        assert torch.equal(*drawn)  # the buffer's own draws do not change
    assert torch.equal(torch.get_rng_state(), everybodys)


def test_an_emptied_buffer_begins_anew() -> None:
    buffer = make("episode", share=1.0)
    for block in blocks(12):
        buffer.extend(block)
    buffer.empty()
    for block in blocks(2):
        buffer.extend(block)
        assert check_batch(buffer, buffer.sample(), "episode") == 32


def test_a_buffer_with_other_hindsight_is_not_resumed() -> None:
    saved = make()
    for block in blocks(2):
        saved.extend(block)
    state = saved.state_dict()
    for other in (make(share=0.5), make("final"), make(hindsight=None)):
        with pytest.raises(ValueError, match="saved replay buffer has hindsight=.*resume with the saved one"):
            other.load_state_dict(copy.deepcopy(state))
    older = {**state, "settings": {k: v for k, v in state["settings"].items() if k != "hindsight"}, "hindsight": None}
    with pytest.raises(ValueError, match="saved replay buffer has hindsight=None, this one"):
        make().load_state_dict(older)


# Filled before the run


def test_rows_of_a_run_with_hindsight_are_relabelled_in_the_next(tmp_path: Path) -> None:
    saved = make("future")
    stream = blocks(14)
    for block in stream[:10]:
        saved.extend(block)
    buffer = make("episode", share=1.0)
    prefill_with_buffer(buffer, saved.state_dict())
    assert check_batch(buffer, buffer.sample(), "episode") == 32
    later = blocks(3, num_envs=6)
    for block in later:
        for key in ("observation", ("next", "observation")):
            block[key][..., 1] += 1000
        buffer.extend(block)
        assert check_batch(buffer, buffer.sample(), "episode") == 32


def test_rows_that_nobody_knows_to_belong_together_are_refused() -> None:
    saved, buffer = make(hindsight=None), make()
    saved.extend(blocks(1)[0])
    with pytest.raises(ValueError, match="filled without replay.her") as error:
        prefill_with_buffer(buffer, saved.state_dict())
    assert "\n" not in str(error.value)
    assert len(buffer) == 0


def test_recorded_episodes_are_relabelled(tmp_path: Path) -> None:
    for length in (3, 6):
        states = np.array([[length, 0, t, -1, -1, -1] for t in range(length + 1)])
        steps = {"action": np.zeros(length, np.int64), "reward": np.zeros(length, np.float32)}
        write_episode(
            tmp_path / f"{length}.npz", observation=states, snapshot=states, success=np.zeros(length, np.bool_),
            terminated=False, **steps,
        )  # fmt: skip
    buffer = make("episode", share=1.0, batch_size=8)
    list(prefill_with_episodes(buffer, sorted(tmp_path.glob("*.npz"))))
    assert check_batch(buffer, buffer.sample(64), "episode") == 64


# Together with others


def test_other_goals_have_no_share_in_the_scores_of_a_clip() -> None:
    reward = ScoreRewardTransform(weight=100.0, mode="shaped")
    buffer = make(clip_length=4, score_reward=reward, capacity=400)
    for block in blocks(10):
        buffer.extend(block)
        ids = buffer.clips.take_completed()
        buffer.write_scores(ids, [1.0] * len(ids))
    batch = buffer.sample(200)
    scored = buffer.columns["scored"][batch["index"]]
    own = batch["observation"][:, 5] == -1
    paid = batch["next", "reward"].reshape(-1) > 20
    assert torch.equal(paid, own & scored)
    assert 20 < paid.sum() < 100


def test_td_errors_are_written_for_the_rows_that_were_relabelled() -> None:
    buffer = make(terms=[TDTerm()], lam=1.0)
    buffer.extend(blocks(1)[0])
    batch = buffer.sample()
    assert buffer.update_td_error(batch, torch.ones(32)).written == 32


def test_memory_that_the_index_takes_is_counted() -> None:
    assert make(capacity=1000).nbytes - make(hindsight=None, capacity=1000).nbytes == 1000 * (4 * 8 + 2 * 4)


# Settings


def test_settings_become_the_transform() -> None:
    config = ReplayConfig(clip_length=None, lam_max=0.0, vlm=None, her=HERConfig(0.5, "final"))
    goals = make_goals(EnvConfig("PointReach-8-v0"))
    buffer = build_buffer(config, gamma=0.9, total_env_steps=1000, goals=goals)
    assert repr(buffer.hindsight) == "HindsightTransform(PointReachGoals(side=8), share=0.5, strategy='final')"
    with pytest.raises(ValueError, match="build_buffer needs those of the environment"):
        build_buffer(config, gamma=0.9, total_env_steps=1000)


@pytest.mark.parametrize(
    ("make_settings", "says"),
    [
        (lambda: HERConfig(share=0.0), r"replay\.her\.share=0\.0 must lie in \(0, 1\]"),
        (lambda: HERConfig(share=float("nan")), r"replay\.her\.share=nan"),
        (lambda: HERConfig(strategy="past"), r"replay\.her\.strategy='past' must be future, final, episode or random"),
        (lambda: ReplayConfig(her=HERConfig(), n_steps=3), r"replay\.her .* replay\.n_steps=3 .* set it to 1"),
        (lambda: make(n_steps=2), r"n_steps must be 1, got 2"),
        (lambda: HindsightTransform(StateGoals(), share=1.5), r"share in \(0, 1\], got 1\.5"),
        (
            lambda: SAC(EnvConfig("Pendulum-v1", num_envs=4), TrainingConfig(), ReplayConfig(her=HERConfig())),
            r"replay\.her .* env\.id 'Pendulum-v1' hold none",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make_settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        make_settings()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("minigrid/doorkey_6x6_dqn", r"observations of env\.id 'MiniGrid-DoorKey-6x6-v0' hold none"),
        ("ogbench/scene_3_sac_small", r"env\.id 'scene-play-singletask-task3-v0' is none of them"),
        ("point_reach/point_reach_6_sac", None),
    ],
)
def test_environments_without_goals_are_refused_before_anything_is_loaded(config: str, says: str | None) -> None:
    settings = [part for name in (config, "replay/her") for part in ("-c", str(CONFIGS / f"{name}.yaml"))]
    if says is None:
        require_sound(settings)
    else:
        with pytest.raises(ValueError, match=rf"replay\.her .*{says}"):
            require_sound(settings)


def test_a_scheme_that_reads_scores_says_so() -> None:
    assert not ReplayConfig(vlm=None, lam_max=0.0, her=HERConfig()).needs_scores
    assert ReplayConfig(vlm=None, lam_max=0.0, score_reward=ScoreRewardConfig()).needs_scores
    assert ReplayConfig(vlm=VLMConfig(), her=HERConfig()).needs_scores


def test_point_reach_rows_are_worth_what_the_simulator_would_have_given() -> None:
    goals = make_goals(EnvConfig("PointReach-8-v0"))
    hindsight = HindsightTransform(goals, 1.0, "episode", seed=1)
    buffer = VLMReplayBuffer(500, batch_size=64, hindsight=hindsight)
    random = np.random.default_rng(0)
    points = np.cumsum(random.uniform(-0.2, 0.25, (4, 31, 2)), 1, dtype=np.float32)
    seen = torch.from_numpy(np.concatenate((points, np.full_like(points, 0.9)), -1))
    flags = torch.zeros(4, 30, 1, dtype=torch.bool)
    after = {"observation": seen[:, 1:], "reward": torch.zeros(4, 30, 1), "done": flags, "terminated": flags}
    buffer.extend(TensorDict({"observation": seen[:, :-1], "action": torch.zeros(4, 30, 2), "next": after}, [4, 30]))
    batch = buffer.sample(500)
    away = (batch["next", "observation"][:, :2] - batch["next", "observation"][:, 2:]).norm(dim=1) * 4  # steps
    assert torch.equal(batch["next", "reward"].squeeze(1), (away <= 1).float())
    assert torch.equal(batch["next", "terminated"].squeeze(1), away <= 1)
    assert 20 < (away <= 1).sum() < 480
