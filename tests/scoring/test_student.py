"""The student: what it sees of clips, that few answers teach it any kind of observations, when it is trusted."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.scoring.student.memory import AnsweredClips
from vlmrb.scoring.student.networks import VectorNetwork
from vlmrb.scoring.student.parts import OUTSIDE, Kind, Parts, kind_of, make_parts_maker, together
from vlmrb.scoring.student.scorer import StudentScorer
from vlmrb.scoring.student.student import NOTHING, Student
from vlmrb.scoring.student.trust import Trust

LENGTH = 6


def grids(count: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Walks on a grid where something else changes at times; positive: a 5 beside a 2 becomes a 1."""
    seen = np.zeros((count, LENGTH, 7, 7, 3), np.uint8)
    seen[:, :, 1:6, 1:6, 0] = 1
    positive = rng.random(count) < 0.3
    for clip in seen:
        x, y = rng.integers(2, 5, 2)
        clip[:, x, y, 0], clip[:, x, y, 2] = 5, rng.integers(3)
        for frame in clip:  # somebody walks by
            frame[rng.integers(1, 6), rng.integers(1, 6), 1] = rng.integers(1, 4)
    for number in np.flatnonzero(positive):
        (x, y), when = np.argwhere(seen[number, 0, :, :, 0] == 5)[0], rng.integers(1, LENGTH)
        seen[number, when:, x, y, 0] = 1
    return seen, positive


def vectors(count: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Random walks in metres and thousands of them; positive: the second number drops below −2 at some time."""
    walk = np.cumsum(rng.normal(size=(count, LENGTH, 3)), 1) * [1.0, 1.0, 1000.0]
    return walk, (walk[:, 1:, 1] < -2).any(1)


def pictures(count: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Grey noise that moves; positive: a bright square appears."""
    seen = rng.integers(90, 110, (count, LENGTH, 40, 48, 3), dtype=np.uint8)
    positive = rng.random(count) < 0.3
    for number in np.flatnonzero(positive):
        x, y, when = rng.integers(0, 30), rng.integers(0, 38), rng.integers(1, LENGTH)
        seen[number, when:, x : x + 10, y : y + 10] = 250
    return seen, positive


WORLDS = {"grid": grids, "vector": vectors, "pixels": pictures}


@pytest.mark.parametrize(("kind", "told", "least"), [("grid", 200, 0.95), ("vector", 600, 0.9), ("pixels", 200, 0.95)])
def test_a_few_hundred_answers_teach_it(kind: Kind, told: int, least: float) -> None:
    rng = np.random.default_rng(0)
    seen, positive = WORLDS[kind](told + 300, rng)
    student = Student(kind, seed=1)
    for start in range(0, told, 20):
        part = slice(start, start + 20)
        student.remember(seen[part], positive[part].astype(np.float32))
        student.learn(10)
    guess = student.guess(seen[told:])
    truth = positive[told:]
    recall, specificity = (guess.clips[truth] > 0).mean(), (guess.clips[~truth] <= 0).mean()
    assert min(recall, specificity) >= least
    np.testing.assert_array_equal(guess.clips, guess.transitions.max(1))


def test_it_says_which_transition_made_a_clip_positive() -> None:
    rng = np.random.default_rng(0)
    seen, positive = grids(300, rng)
    student = Student("grid", seed=1)
    student.remember(seen, positive.astype(np.float32))
    student.learn(150)
    changed = (seen[:, 1:, :, :, 0] != seen[:, :-1, :, :, 0]).any((2, 3)).argmax(1)
    found = student.guess(seen).transitions.argmax(1)
    assert (found == changed)[positive].mean() > 0.95


def test_before_it_has_heard_a_yes_and_a_no_it_does_not_learn() -> None:
    seen, _ = grids(10, np.random.default_rng(0))
    student = Student("grid")
    student.learn(5)
    student.remember(seen, np.zeros(10, np.float32))
    student.learn(5)
    assert student.steps == 0
    student.remember(seen[:1], np.ones(1, np.float32))
    student.learn(5)
    assert student.steps == 5


def test_equal_seeds_learn_alike() -> None:
    seen, positive = grids(100, np.random.default_rng(0))
    guesses = []
    for _ in range(2):
        torch.manual_seed(np.random.default_rng().integers(1000))  # whatever others draw
        student = Student("grid", seed=3)
        student.remember(seen, positive.astype(np.float32))
        student.learn(10)
        guesses.append(student.guess(seen).clips)
    np.testing.assert_array_equal(*guesses)


@pytest.mark.parametrize("kind", ["grid", "vector", "pixels"])
def test_what_it_has_learned_makes_another_guess_and_learn_alike(kind: Kind) -> None:
    seen, positive = WORLDS[kind](20, np.random.default_rng(0))
    scores = positive.astype(np.float32)
    first = Student(kind, learning_rate=3e-3, seed=1)
    first.remember(seen[:10], scores[:10])
    first.learn(2)
    other = Student(kind, learning_rate=3e-3, seed=2)
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    np.testing.assert_array_equal(other.guess(seen).transitions, first.guess(seen).transitions)
    other.remember(seen[:10], scores[:10], again=True)
    np.testing.assert_array_equal(other.guess(seen).clips, first.guess(seen).clips)
    for student in (first, other):
        student.remember(seen[10:], scores[10:])
        student.learn(2)
    np.testing.assert_array_equal(other.guess(seen).clips, first.guess(seen).clips)
    assert (other.steps, other.loss) == (first.steps, first.loss)


# Parts


def test_parts_of_a_grid_are_each_change_with_its_neighbourhood() -> None:
    seen = np.zeros((2, 3, 4, 5, 2), np.uint8)
    seen[0, 1:, 0, 4, 1] = 7  # in a corner
    seen[1, 1, 2, 2, 0], seen[1, 2, 1, 1, 0] = 3, 4
    parts = make_parts_maker("grid").parts(seen)
    assert list(zip(parts.clip.tolist(), parts.step.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1), (1, 1)]
    corner = parts.inputs[parts.which[0]]
    assert corner.shape == (2, 3, 3, 2)
    assert (corner[:, 1, 1] == [[0, 0], [0, 7]]).all()
    assert (corner[:, 0] == OUTSIDE).all()  # beyond the first column of cells
    assert (corner[:, :, 2] == OUTSIDE).all()
    (one,) = [place for place in range(1, 4) if parts.step[place] == 1 and parts.inputs[parts.which[place]][1, 1, 1, 0]]
    assert (parts.inputs[parts.which[one]][:, 1, 1, 0] == [0, 4]).all()
    assert (parts.inputs[parts.which[one]][:, 2, 2, 0] == [3, 0]).all()


@pytest.mark.parametrize("kind", ["grid", "vector", "pixels"])
def test_taking_clips_apart_and_putting_them_together_changes_nothing(kind: Kind) -> None:
    seen, _ = WORLDS[kind](7, np.random.default_rng(1))
    seen[2] = seen[2, :1]  # nothing changes in this one
    parts = make_parts_maker(kind).parts(seen)
    again = together(parts.of_clips(7))
    assert len(np.unique(again.inputs.reshape(len(again.inputs), -1), axis=0)) == len(again.inputs)
    for name in ("clip", "step"):
        np.testing.assert_array_equal(getattr(again, name), getattr(parts, name))
    np.testing.assert_array_equal(again.inputs[again.which], parts.inputs[parts.which])
    assert 2 not in parts.clip


def test_a_clip_in_which_nothing_changes_is_no_positive() -> None:
    student = Student("vector")
    guess = student.guess(np.ones((2, LENGTH, 3)))
    assert (guess.clips == NOTHING).all()
    assert guess.transitions.shape == (2, LENGTH - 1)


@pytest.mark.parametrize("kind", list(WORLDS))
def test_told_of_clips_in_which_nothing_changes_it_learns_nothing_until_there_are_others(kind: Kind) -> None:
    seen, positive = WORLDS[kind](200, np.random.default_rng(0))
    student = Student(kind, batch_clips=8)
    student.remember(np.repeat(seen[:2, :1], LENGTH, 1), np.array([0.9, 0.1], np.float32))
    student.learn(3)
    assert student.steps == 0
    student.remember(seen, positive.astype(np.float32))
    student.learn(3)
    assert student.steps == 3
    assert math.isfinite(student.loss)


def test_pixels_are_scaled_down_by_whole_blocks() -> None:
    seen = np.zeros((1, 2, 70, 64, 3), np.uint8)
    seen[0, 1, :3, :3] = 90
    parts = make_parts_maker("pixels").parts(seen)
    assert parts.inputs.shape == (1, 6, 23, 21)
    assert parts.inputs[0, 3:, 0, 0].tolist() == [90, 90, 90]
    assert not parts.inputs[0, :3].any()


def test_of_stacked_images_the_latest_counts() -> None:
    seen = np.random.default_rng(0).integers(0, 255, (2, 3, 4, 20, 20, 1), dtype=np.uint8)
    stacked, single = (make_parts_maker("pixels").parts(images) for images in (seen, seen[:, :, -1]))
    np.testing.assert_array_equal(stacked.inputs, single.inputs)


def test_kinds_of_observations_are_told_by_shape_and_type() -> None:
    byte, real = np.dtype(np.uint8), np.dtype(np.float32)
    assert kind_of((7, 7, 3), byte, pixels=False) == "grid"
    assert kind_of((84, 84, 3), byte, pixels=True) == "pixels"
    assert kind_of((29,), real, pixels=False) == "vector"
    assert kind_of((12,), byte, pixels=False) == "vector"


def test_mean_and_deviation_are_those_of_all_that_was_seen() -> None:
    values = np.random.default_rng(0).normal(5, [1, 100], (50, 2)).astype(np.float32)
    network = VectorNetwork((2,))
    for part in np.split(values, [1, 7, 30]):
        network.see(torch.from_numpy(part))
    np.testing.assert_allclose(network.mean, values.astype(np.float64).mean(0), rtol=1e-9)
    np.testing.assert_allclose(network.squares / network.seen, values.astype(np.float64).var(0), rtol=1e-9)


# Memory


def clip(number: int, inputs: int = 1) -> Parts:
    zeros = np.zeros(inputs, np.int64)
    return Parts(np.full((inputs, 10), number, np.uint8), np.arange(inputs), zeros, zeros)


def test_the_oldest_of_each_kind_is_forgotten_first() -> None:
    memory = AnsweredClips(max_clips=3, max_bytes=35)
    for number in range(5):
        memory.add(clip(number), 0.0, positive=False)
    memory.add(clip(9), 1.0, positive=True)
    drawn, targets = memory.draw(200, np.random.default_rng(0))
    assert {int(one.inputs[0, 0]) for one in drawn} == {2, 3, 4, 9}
    assert targets == [0.0] * 100 + [1.0] * 100
    memory.add(clip(7, inputs=3), 0.0, positive=False)  # 30 bytes: only one more fits
    memory.add(clip(8, inputs=4), 0.0, positive=False)  # too large, but there is nothing else
    assert len(memory) == 2
    assert memory.positives == 1


# Trust


def test_recall_over_the_latest_positives_decides() -> None:
    trust = Trust(min_recall=0.75, min_positives=4)
    assert math.isnan(trust.recall)
    for _ in range(100):
        trust.note(found=False, positive=False)
    for found in (False, True, True):
        trust.note(found, positive=True)
    assert not trust.trusted  # too few
    trust.note(found=True, positive=True)
    assert trust.trusted
    assert trust.recall == 0.75
    trust.note(found=False, positive=True)
    assert not trust.trusted
    for _ in range(8):
        trust.note(found=True, positive=True)
    assert trust.recall == 1.0  # the rest is forgotten
    trust.note(found=True, positive=False)
    assert trust.precision == pytest.approx(11 / 12)
    assert trust.prior == pytest.approx((13 + 1) / (114 + 2))
    again = Trust(0.75, 4)
    again.load_state_dict(trust.state_dict())
    assert (again.recall, again.precision, again.prior) == (trust.recall, trust.precision, trust.prior)


# As a scorer


class Shown:
    name = "shown"

    def __init__(self, seen: NDArray) -> None:
        self.seen = seen

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        raise AssertionError("a student looks at observations")

    def observe(self, snapshots: NDArray) -> NDArray:
        return self.seen[snapshots[:, 0, 0].astype(np.int64)]


def batch(seen: NDArray, rows: NDArray[np.int64], answers: NDArray[np.float32] | None = None) -> ClipBatch:
    snapshots = np.repeat(rows[:, None, None], LENGTH, 1)
    return ClipBatch(rows, snapshots, np.full(len(rows), LENGTH), Shown(seen), answers)


def test_as_a_scorer_it_learns_from_the_answers_that_clips_carry() -> None:
    seen, positive = grids(400, np.random.default_rng(0))
    scorer = StudentScorer(StudentConfig(steps_per_clip=0.5), 0.5, pixels=False)
    for start in range(0, 300, 30):
        rows = np.arange(start, start + 30)
        answers = np.where(rows % 3 == 0, np.nan, positive[rows]).astype(np.float32)
        assert scorer.score(batch(seen, rows, answers)).dtype == np.float32
    rows = np.arange(300, 400)
    scores = scorer.score(batch(seen, rows))
    assert ((scores > 0.5) == positive[rows]).mean() > 0.95
    details = scorer.details()
    assert details is not None
    np.testing.assert_allclose(1 / (1 + np.exp(-details.max(1))), scores, rtol=1e-5)
    assert scorer.stats()["steps"] == 200  # 400 clips, half a step each


def taught(seen: NDArray, positive: NDArray[np.bool_], clips: int) -> tuple[StudentScorer, bytes]:
    """Returns a student that has been told of the first clips, and what it has learned."""
    scorer = StudentScorer(StudentConfig(), 0.5, pixels=False)
    scorer.score(batch(seen, np.arange(clips), positive[:clips].astype(np.float32)))
    state = scorer.state()
    assert state is not None
    return scorer, state


def test_restored_it_guesses_as_before_while_it_is_reminded_and_learns_on_from_there() -> None:
    seen, positive = grids(100, np.random.default_rng(0))
    answers = positive.astype(np.float32)
    first, state = taught(seen, positive, 60)
    assert first.state() is None  # nothing new
    again = StudentScorer(StudentConfig(), 0.5, pixels=False)
    again.restore(state)
    assert first._student is not None
    expected = 1 / (1 + np.exp(-first._student.guess(seen).clips))
    for rows in (np.arange(30), np.arange(30, 60)):
        np.testing.assert_allclose(again.score(batch(seen, rows, answers[rows])), expected[rows], rtol=1e-6)
        assert again.state() is None
    assert again.stats() == first.stats()
    rows = np.arange(60, 100)
    np.testing.assert_array_equal(again.score(batch(seen, rows)), first.score(batch(seen, rows)))
    assert again.stats() == first.stats()
    assert again.stats()["steps"] == 10
    again.score(batch(seen, np.arange(10), answers[:10]))  # of the scorer, not a reminder
    assert again.stats()["steps"] == 11
    assert again.state() is not None


def test_it_begins_anew_if_another_version_has_learned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen, positive = grids(30, np.random.default_rng(0))
    _, state = taught(seen, positive, 30)
    monkeypatch.setattr("vlmrb.scoring.student.scorer.SCHEMA", 2)
    again = StudentScorer(StudentConfig(), 0.5, pixels=False)
    again.restore(state)
    again.score(batch(seen, np.arange(10)))
    assert again.stats()["steps"] == 0
    assert "begins anew" in caplog.text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"role": "guessing"}, "scoring.student.role"),
        ({"ask_from": 0.9, "ask_to": 0.1}, "scoring.student.ask_from"),
        ({"min_recall": 1.5}, "min_recall"),
        ({"min_positives": 0}, "min_positives"),
        ({"look_again": -1}, "look_again"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"steps_per_clip": float("nan")}, "steps_per_clip"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StudentConfig(**settings)  # type: ignore[arg-type]
