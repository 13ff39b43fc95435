"""The code on the pages about extending is run as it stands there, on the toy family of one of them."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.envs.utils import check_env_specs

from vlmrb.envs import EnvConfig, make_env, make_goals, make_renderer, registry
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring.service import ScoringService

PAGES = Path(__file__).parents[2] / "docs" / "extending"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnvConfig]:
    state, code = blocks("environment.md")
    path = code.splitlines()[0].removeprefix("# ")
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(code)
    (tmp_path / state.splitlines()[0].removeprefix("# ")).write_text(state)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_registered", [])
    (env_id,) = re.findall(r"`env.id: (\S+)`", (PAGES / "environment.md").read_text())
    importlib.invalidate_caches()
    yield EnvConfig(id=env_id, num_envs=5, max_steps=30)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        sys.modules.pop(name)


def test_the_state_functions_draw_what_stepping_draws(room: EnvConfig) -> None:
    (path,) = re.findall(r"state: (\S+)", (PAGES / "environment.md").read_text())
    by_state = EnvConfig(id="CartPole-v1", num_envs=2, state=path)
    by_frame = replace(by_state, state=None)
    frames = []
    for config in (by_state, by_frame):
        env, renderer = make_env(config, seed=0), make_renderer(config)
        env.set_seed(3)
        torch.manual_seed(0)
        frames.append(renderer.render(env.rollout(5)["next", "snapshot"].numpy()))
    np.testing.assert_array_equal(*frames)


def test_the_toy_family_keeps_the_contract(room: EnvConfig) -> None:
    env, renderer = make_env(room, seed=1), pickle.loads(pickle.dumps(make_renderer(room)))
    check_env_specs(env)
    rollout = env.rollout(200, break_when_any_done=False)
    after = rollout["next"]
    assert after["success"].any()
    assert after["truncated"].any()
    assert (after["success"] == after["terminated"]).all()
    np.testing.assert_array_equal(renderer.observe(after["snapshot"].numpy()), after["observation"])
    frames = renderer.render(after["snapshot"].numpy(), 80)
    assert (frames.shape, frames.dtype) == ((5, 200, 80, 80, 3), np.uint8)
    assert ((frames == (230, 0, 0)).all(-1).sum((-1, -2)) == 100).all()  # the agent, in every frame, on one tile
    goal = (frames == (0, 200, 0)).all(-1).any((-1, -2))
    np.testing.assert_array_equal(goal, ~after["success"].numpy()[..., 0])  # it stands on the goal when it is there


def test_the_toy_family_resumes_exactly_and_equal_seeds_give_equal_episodes(room: EnvConfig) -> None:
    def play(env: Any, start: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return env.rollout(60, break_when_any_done=False, auto_reset=False, tensordict=start)["next", "snapshot"]

    first, second, third = make_env(room, seed=1), make_env(room, seed=1), make_env(room, seed=2)
    assert torch.equal(play(first, first.reset()), play(second, second.reset()))
    third.load_state_dict(first.state_dict())
    assert torch.equal(play(first, first.current()), play(third, third.current()))


def test_the_pages_scorer_scores_the_toy_familys_clips(room: EnvConfig) -> None:
    namespace: dict[str, Any] = {}
    exec(blocks("scorer.md")[0], namespace)
    buffer = VLMReplayBuffer(1_000, batch_size=32, terms=[VLMTerm(threshold=0.1)], lam=0.5, clip_length=8)
    scoring = ScoringService(buffer, namespace["Brightness"](), make_renderer(room), backend="sync")
    buffer.extend(make_env(room, seed=0).rollout(100, break_when_any_done=False))
    scoring.poll(env_steps=500)
    scoring.close()
    assert scoring.stats()["scored"] == scoring.stats()["emitted"] > 50
    score = buffer.columns["score"][buffer.columns["scored"]]
    assert score.min() > 40 / 255 - 0.01  # the floor's brightness
    assert score.max() < 0.25
    assert buffer.stats()["positives"] == len(score)


def test_the_pages_priority_term_changes_what_is_sampled(room: EnvConfig) -> None:
    rows = make_env(room, seed=0).rollout(100, break_when_any_done=False)
    namespace: dict[str, Any] = {
        "VLMReplayBuffer": VLMReplayBuffer,
        "VLMTerm": lambda: VLMTerm(unscored=1.0),
        "rows": rows,
        "novelty": np.arange(1, 129, dtype=np.float64),
    }
    for code in blocks("priority.md"):
        exec(code, namespace)
    buffer, batch = namespace["buffer"], namespace["batch"]
    drawn = batch["index"].numpy()
    final = dict(zip(drawn.tolist(), namespace["novelty"].tolist(), strict=True))
    column = buffer.columns["novelty"].numpy()
    assert all(column[slot] == value for slot, value in final.items())
    assert (np.delete(column[: len(buffer)], drawn) == 1.0).all()
    assert buffer.stats()["positives"] == len(buffer)
    again = torch.cat([buffer.sample()["index"] for _ in range(50)])
    favourite = max(final, key=final.__getitem__)
    assert (again == favourite).sum() > 2 * len(again) / len(buffer)  # about five times what uniform replay gives


def test_the_toy_familys_goals_are_judged_as_it_judges_them(room: EnvConfig) -> None:
    make_env(room).close()  # imports the module
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES.parent / "replay" / "hindsight.md").read_text(), re.DOTALL)
    exec(code, sys.modules[room.id.partition(":")[0]].__dict__)
    goals, after = make_goals(room), make_env(room, seed=1).rollout(200, break_when_any_done=False)["next"]
    seen = after["observation"].flatten(0, 1).numpy()
    reward, terminated = goals.judge(seen)
    np.testing.assert_array_equal(reward, after["reward"].flatten())
    np.testing.assert_array_equal(terminated, after["terminated"].flatten())
    assert reward.any()
    goal = goals.achieved(seen[::-1])
    moved = goals.place(seen, goal)
    np.testing.assert_array_equal(goals.achieved(moved), goals.achieved(seen))
    np.testing.assert_array_equal(goals.judge(moved)[1], (goals.achieved(seen) == goal).all(1))
