"""What shows a replay scheme at work, against what the batches and the buffer themselves say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from counting import World, collect
from tensordict import TensorDict

from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.ero import KEPT, EROTerm
from vlmrb.replay.relo import ReLoTerm
from vlmrb.replay.schedule import LinearSchedule
from vlmrb.replay.score_reward import ScoreRewardTransform
from vlmrb.replay.similarity import SimilaritySelector
from vlmrb.replay.terms import AgeTerm, PriorityTerm, TDTerm

WORLD = World(11)


def filled(*terms: PriorityTerm, blocks: int = 6, **settings: object) -> VLMReplayBuffer:
    buffer = VLMReplayBuffer(200, batch_size=16, terms=terms, lam=1.0 if terms else 0.0, **settings)  # type: ignore[arg-type]
    for block in collect(2, 5, WORLD, blocks):
        buffer.extend(block)
    return buffer


def test_an_empty_buffer_and_plain_priorities_show_nothing() -> None:
    assert VLMReplayBuffer(200, terms=[AgeTerm(10.0)], lam=1.0).gauges() == {}
    assert filled(TDTerm()).gauges() == {}


def test_freshness_is_the_mean_factor_compared_with_the_newest_rows() -> None:
    buffer = filled(AgeTerm(20.0))
    born = buffer.columns["env_step"].numpy()[: len(buffer)]
    assert len(np.unique(born)) == 6
    assert buffer.gauges() == {"freshness": pytest.approx(np.exp((born - born.max()) / 20.0).mean())}


@pytest.mark.parametrize(("map_", "mean"), [("relu", (0.5 + 0 + 1) / 3), ("exp", (1.5 + np.exp(-2) + 2) / 3)])
def test_reducible_loss_is_the_mean_of_what_it_is_mapped_to(map_: str, mean: float) -> None:
    term = ReLoTerm(map_)  # type: ignore[arg-type]
    assert term.gauges({"reducible_loss": np.array([0.5, -2.0, 1.0])}) == {"reducible_loss": pytest.approx(mean)}


def test_a_mask_shows_what_it_keeps() -> None:
    buffer = filled(EROTerm(window=20.0, min_episodes=1, min_kept=0.0), blocks=12)
    found = buffer.gauges()
    assert found["ero_kept"] == pytest.approx(buffer.columns[KEPT].numpy()[: len(buffer)].mean())
    assert found["ero_masks"] >= 2
    restored = VLMReplayBuffer(200, batch_size=16, terms=[EROTerm(20.0, 1, 0.0)], lam=1.0)
    restored.load_state_dict(buffer.state_dict())
    assert restored.gauges() == found


def test_candidates_fall_with_their_schedule() -> None:
    buffer = filled(selector=SimilaritySelector(LinearSchedule(4.0, 1.0, 0, 120)))
    assert buffer.env_steps == 60
    assert buffer.gauges() == {"aer_candidates": pytest.approx(2.5)}


def test_the_bonus_is_what_batches_got_since_the_last_time() -> None:
    buffer = filled(clip_length=5, score_reward=ScoreRewardTransform(2.0, "shaped"), blocks=8)
    clips = buffer.clips.take_completed()  # type: ignore[union-attr]
    buffer.write_scores(clips, np.linspace(0.1, 1.0, len(clips)))
    stored = buffer[:]["next", "reward"]
    assert isinstance(stored, torch.Tensor)
    paid = []
    for _ in range(3):
        batch = buffer.sample()
        assert isinstance(batch, TensorDict)
        paid.append((batch["next", "reward"] - stored[batch["index"]]).numpy())
    assert np.mean(paid) > 0.05
    assert buffer.gauges() == {"score_bonus": pytest.approx(np.mean(paid), rel=1e-4)}
    assert buffer.gauges() == {}
