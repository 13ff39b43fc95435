"""Executable specification of yes/no tokens and of the score made of them."""

from __future__ import annotations

import math

import pytest
import torch
from small_vlms import train_tokenizer

from vlmrb.scoring.prompts import PROMPTS, Prompt
from vlmrb.scoring.scorer import ScorerError
from vlmrb.scoring.vlm.answers import AnswerTokens, find_answer_tokens, judge, spellings

PROMPT = PROMPTS["grid"]


class Words:
    """A tokenizer that knows some words whole and spells the rest."""

    unk_token_id = 0

    def __init__(self, *known: str) -> None:
        self.ids = {word: 10 + i for i, word in enumerate(known)}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self.ids[text]] if text in self.ids else [1] * len(text)


def test_all_six_spellings_of_each_word_count():
    assert spellings("yes") == ["yes", " yes", "Yes", " Yes", "YES", " YES"]
    tokenizer = train_tokenizer({})
    found = find_answer_tokens(tokenizer, PROMPT)
    assert [tokenizer.decode([i]) for i in found.yes] == spellings("yes")
    assert [tokenizer.decode([i]) for i in found.no] == spellings("no")
    assert found.ids == (*found.yes, *found.no)


def test_a_spelling_counts_only_if_both_words_have_it():
    tokenizer = Words("yes", "no", "Yes", " no")
    found = find_answer_tokens(tokenizer, PROMPT)
    assert found.spellings == (("yes", "no"),)
    assert (found.yes, found.no) == ((10,), (11,))


def test_words_without_cases_count_once():
    found = find_answer_tokens(Words("是", "否"), Prompt("目标达到了吗? 是 or 否", yes="是", no="否"))
    assert (found.yes, found.no) == ((10,), (11,))


def test_a_tokenizer_that_drops_the_leading_space_counts_a_token_once():
    tokenizer = Words("yes", "no")
    tokenizer.ids |= {" yes": 10, " no": 11}
    assert find_answer_tokens(tokenizer, PROMPT).yes == (10,)


def test_the_unknown_token_is_no_answer():
    tokenizer = Words()
    tokenizer.ids = dict.fromkeys(spellings("yes") + spellings("no"), 0)
    with pytest.raises(ScorerError, match="no single tokens for 'yes' and 'no'"):
        find_answer_tokens(tokenizer, PROMPT)


def test_words_that_share_a_token_are_refused():
    tokenizer = Words()
    tokenizer.ids = dict.fromkeys(spellings("yes") + spellings("no"), 7)
    with pytest.raises(ScorerError, match="choose other words"):
        find_answer_tokens(tokenizer, PROMPT)


def test_the_score_sums_probabilities_over_spellings():
    # P = .2 .1 for yes, .05 .05 for no, .6 elsewhere: r = .3 / .4, mass .4
    logits = torch.log(torch.tensor([[0.2, 0.1, 0.05, 0.05, 0.6]])) + 3.0
    r, mass = judge(logits, AnswerTokens((0, 1), (2, 3), ()))
    assert r.dtype == mass.dtype == torch.float32
    assert r.item() == pytest.approx(0.75)
    assert mass.item() == pytest.approx(0.4)


def test_scores_are_right_where_both_probabilities_vanish():
    logits = torch.full((1, 5), 0.0)
    logits[0, 0], logits[0, 2], logits[0, 4] = -300.0, -301.0, 100.0
    r, mass = judge(logits, AnswerTokens((0,), (2,), ()))
    assert r.item() == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-5)
    assert mass.item() == 0.0


def test_sixteen_bit_logits_are_judged_in_thirty_two():
    logits = torch.tensor([[8.0, 7.9375, 0.0]], dtype=torch.bfloat16)
    r, _ = judge(logits, AnswerTokens((0,), (1,), ()))
    assert r.item() == pytest.approx(1 / (1 + math.exp(-0.0625)), abs=1e-6)
