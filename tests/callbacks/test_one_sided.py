"""Answers that tell nothing apart are told once in a run, and nothing else is."""

from __future__ import annotations

import pytest

from vlmrb.callbacks.one_sided import OneSidedAnswers


def told(windows: list[tuple[int, int, int, float]]) -> list[str]:
    watch, found = OneSidedAnswers(), []
    for window in windows:
        found += [watch.look(*window)]
        restored = OneSidedAnswers()
        restored.load_state_dict(watch.state_dict())
        watch = restored
    return [text for text in found if text]


def test_nearly_all_positive_is_told_with_the_figures() -> None:
    assert told([(110, 108, 10, 0.1)] * 2) == [
        "finds nearly everything positive: 98.2% of the last 220 clips (10% of the episodes reached the goal)"
    ]


def test_without_an_episode_there_is_no_word_about_the_goal() -> None:
    assert told([(200, 200, 0, 0.0)]) == ["finds nearly everything positive: 100.0% of the last 200 clips"]


def test_none_positive_is_told_only_after_a_long_while() -> None:
    assert told([(199, 0, 5, 0.0)] * 5) == []
    assert told([(200, 0, 5, 0.0)] * 5) == ["finds nothing positive: none of the last 1,000 clips"]


@pytest.mark.parametrize(
    "windows",
    [
        [(199, 199, 5, 0.0)],  # too few
        [(200, 190, 5, 0.0)] * 20,  # 95 % is not more than 95 %
        [(200, 200, 40, 0.5)] * 20,  # an agent that solves the task shows progress in every clip
        [(400, 0, 5, 0.0), (400, 1, 5, 0.0)] * 10,  # now and then one
        [(0, 0, 5, 0.0)] * 1000,  # a scorer that has not answered
        [(100, 100, 10, 0.0), (100, 80, 10, 0.0)] * 10,  # a stretch is judged as a whole
    ],
)
def test_other_answers_are_no_matter(windows: list[tuple[int, int, int, float]]) -> None:
    assert told(windows) == []


def test_it_is_said_once_even_if_it_changes_sides() -> None:
    windows = [(200, 200, 9, 0.0)] * 3 + [(200, 0, 9, 0.0)] * 9 + [(200, 200, 9, 0.0)] * 3
    assert len(told(windows)) == 1
    assert "everything" in told(windows)[0]


def test_a_later_change_for_the_worse_is_told() -> None:
    assert len(told([(200, 60, 9, 0.2)] * 9 + [(200, 199, 9, 0.2)])) == 1
