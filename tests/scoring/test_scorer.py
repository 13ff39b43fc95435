"""What counts as a scorer's answer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from odd_scorers import GoodScorer

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.scorer import ScorerError, checked_scores

TWO_CLIPS = ClipBatch(np.arange(2), np.zeros((2, 4, 3)), np.full(2, 4))


def ask(answer: Any) -> np.ndarray:
    """Returns the checked answer of a scorer that gives this one for two clips."""
    scorer = GoodScorer()
    scorer.score = lambda clips: answer  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return checked_scores(scorer, TWO_CLIPS)


@pytest.mark.parametrize(
    "answer",
    [
        [0.25, 1],
        (0.25, np.float64(1)),
        np.array([0.25, 1.0]),
        torch.tensor([0.25, 1.0], dtype=torch.float64),
        torch.tensor([0.25, 1.0], dtype=torch.bfloat16),
        torch.tensor([0.25, 1.0], requires_grad=True),
        [torch.tensor(0.25, requires_grad=True), torch.tensor(1)],
    ],
    ids=["list", "tuple", "float64", "tensor", "bfloat16", "tensor with a graph", "list of tensors"],
)
def test_numbers_of_any_make_become_float32(answer: Any):
    scores = ask(answer)
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.25, 1.0]


def test_the_answer_is_not_changed_by_who_keeps_the_array():
    own = np.array([0.25, 1.0], np.float32)
    scores = ask(own)
    own[:] = 0.5
    assert scores.tolist() == [0.25, 1.0]


@pytest.mark.parametrize(
    "answer",
    [np.array([0.5, 0.5 + 1j]), torch.tensor([0.5, 0.5j]), [0.5, 1j], [[0.5], [0.5, 0.5]], ["high", "low"]],
    ids=["complex", "complex tensor", "complex list", "ragged", "words"],
)
def test_what_is_no_row_of_real_numbers_breaks_the_contract(answer: Any):
    with pytest.raises(ScorerError, match="scorer 'good' returned a .* no array of real numbers; expected float32"):
        ask(answer)
