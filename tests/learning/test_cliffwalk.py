"""Schaul's Blind Cliffwalk: one rewarded episode among 2^n, and tabular Q-learning from a fixed memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import PriorityTerm, TDTerm, VLMTerm
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService

N = 8  # states before the goal
GAMMA = 1 - 1 / N
LIMIT = 20_000


class SeesTheGoal(Scorer):
    """Says yes to clips that show the goal state."""

    name, version, needs = "sees-the-goal", "1", "snapshots"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        return (clips.snapshots[..., 0] == N).any(1).astype(np.float32)


def episode(sequence: int) -> TensorDict:
    """One walk, ``[1, T]``: bit t of ``sequence`` is 0 where the action is the right one; a wrong one ends it."""
    mistakes = [(sequence >> t) & 1 for t in range(N)]
    length = mistakes.index(1) + 1 if any(mistakes) else N
    state = torch.arange(length).reshape(1, length, 1)
    last = torch.zeros(1, length, 1, dtype=torch.bool)
    last[:, -1] = True
    success = last & (not any(mistakes))
    after = torch.where(last & ~success, N + 1, state + 1)  # N is the goal, N + 1 the abyss
    rows = {"observation": state, "snapshot": state.to(torch.uint8), "action": torch.tensor([mistakes[:length]])}
    rows["next"] = {
        **{"observation": after, "snapshot": after.to(torch.uint8), "reward": success.float(), "success": success},
        **{"done": last, "terminated": last, "truncated": torch.zeros_like(last)},
    }
    return TensorDict(rows, [1, length])


def updates_until_learnt(terms: list[PriorityTerm], lam: float, seed: int) -> int:
    """Fills a buffer with all 2^n walks and counts Q-learning updates until the mean squared error is below 1e-3."""
    buffer = VLMReplayBuffer(2 ** (N + 1), batch_size=1, terms=terms, lam=lam, clip_length=N + 1, seed=seed)
    scoring = ScoringService(buffer, SeesTheGoal(), backend="sync")
    for sequence in np.random.default_rng(seed).permutation(2**N).tolist():
        buffer.extend(episode(sequence))
    scoring.poll(env_steps=len(buffer))
    scoring.close()
    truth = np.zeros((N, 2))
    truth[:, 0] = GAMMA ** np.arange(N - 1, -1, -1)
    q = np.zeros((N + 2, 2))
    q[:N] = np.random.default_rng(seed).normal(0, 0.1, (N, 2))
    for update in range(LIMIT):
        if np.mean((q[:N] - truth) ** 2) < 1e-3:
            return update
        row = buffer.sample()
        state, action, after = int(row["observation"]), int(row["action"]), int(row["next", "observation"])
        error = float(row["next", "reward"]) + GAMMA * q[after].max() * (after < N) - q[state, action]
        q[state, action] += 0.25 * error
        if any(isinstance(term, TDTerm) for term in terms):
            buffer.update_td_error(row, torch.tensor([abs(error)]))
    return LIMIT


@pytest.fixture(scope="module")
def uniform() -> list[int]:
    return [updates_until_learnt([], 0.0, seed) for seed in range(3)]


def test_uniform_replay_needs_thousands_of_updates(uniform: list[int]) -> None:
    assert 2_000 < np.median(uniform) < LIMIT


@pytest.mark.parametrize(
    ("terms", "lam"),
    [([TDTerm(0.6, 1e-6)], 1.0), ([VLMTerm()], 0.5), ([VLMTerm(), TDTerm()], 0.5)],
    ids=["per", "vlm", "vlm_td"],
)
def test_prioritised_replay_needs_far_fewer(terms: list[PriorityTerm], lam: float, uniform: list[int]) -> None:
    guided = [updates_until_learnt(terms, lam, seed) for seed in range(3)]
    assert np.median(guided) < np.median(uniform) / 3
