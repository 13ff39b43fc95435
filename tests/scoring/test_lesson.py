"""A student that learns from a corpus before the run: from the scorer's answers, of the run's own environment."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.calibration.corpora import DOORKEY, doorkey_corpus

from vlmrb.calibration.corpus import Corpus, load_corpus
from vlmrb.cli import main
from vlmrb.envs import make_renderer
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.clips import Renderer
from vlmrb.scoring.constant import ConstantScorer
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.scoring.student.lesson import Lesson, find_lesson
from vlmrb.scoring.student.scorer import StudentScorer

ROOT = Path(__file__).parents[2]
RENDERER = make_renderer(DOORKEY)


def keep_scores(corpus: Corpus, scorer: Scorer, folder: Path, rows: NDArray[np.int64]) -> None:
    cache, clips = ScoreCache(folder), corpus.batch(rows)
    cache.put_many(cache.keys(scorer, clips), scorer.score(clips))
    cache.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """96 clips, of which `MilestonesScorer` has answered all but the last ten."""
    made = doorkey_corpus(tmp_path_factory.mktemp("made") / "corpus", clips=96)
    scores = made.folder.with_name("calibration")
    scores.mkdir()
    keep_scores(made, MilestonesScorer(), scores, np.arange(86))
    return made


def config(made: Corpus, **changed: Any) -> StudentConfig:
    scores = str(made.folder.with_name("calibration"))
    return replace(StudentConfig(corpus=str(made.folder), corpus_scores=scores, corpus_steps=150), **changed)


def lesson_of(corpus: Corpus) -> Lesson:
    return find_lesson(config(corpus), MilestonesScorer(), RENDERER, None, 0.5)


def test_what_the_scorer_has_said_is_found_and_labels_are_not_read(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lesson = lesson_of(corpus)
    assert "10 of its 96 clips have no score yet" in caplog.text
    np.testing.assert_array_equal(lesson.rows, np.arange(86))
    np.testing.assert_array_equal(lesson.answers, MilestonesScorer().score(corpus.batch(lesson.rows)))

    class Contrary(MilestonesScorer):
        name = "contrary"

        def score(self, clips: Any) -> NDArray[np.float32]:
            return 1 - super().score(clips)

    keep_scores(corpus, Contrary(), tmp_path, np.arange(86))
    other = find_lesson(config(corpus, corpus_scores=str(tmp_path)), Contrary(), RENDERER, None, 0.5)
    np.testing.assert_array_equal(other.answers, 1 - lesson.answers)


def test_scores_of_clips_with_fewer_frames_are_others(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="none of its 96 clips has a score"):
        find_lesson(config(corpus), MilestonesScorer(), RENDERER, 4, 0.5)


class Otherwise(Renderer):
    """Draws like another renderer, and the agent sees something else."""

    name = RENDERER.name

    def __init__(self, knows: bool) -> None:
        self.knows = knows

    def render(self, snapshots: NDArray, frame_size: int | None = None) -> NDArray[np.uint8]:
        return RENDERER.render(snapshots, frame_size)

    def observe(self, snapshots: NDArray) -> NDArray:
        if not self.knows:
            raise ValueError("snapshots of 9 numbers")
        return RENDERER.observe(snapshots).astype(np.float32)


@pytest.mark.parametrize(
    ("renderer", "said"),
    [
        (
            make_renderer(replace(DOORKEY, id="MiniGrid-DoorKey-6x6-v0")),
            "is of another environment, or drawn otherwise",
        ),
        (Otherwise(knows=True), r"has other observations \(uint8\[5, 5, 3\], the run's are float32\[5, 5, 3\]\)"),
        (Otherwise(knows=False), r"does not know \(snapshots of 9 numbers\)"),
    ],
)
def test_a_corpus_of_other_observations_is_refused(corpus: Corpus, renderer: Renderer, said: str) -> None:
    with pytest.raises(ValueError, match=f"^scoring.student.corpus=.*{said}.*: make one with vlmrb corpus"):
        find_lesson(config(corpus), MilestonesScorer(), renderer, None, 0.5)


def test_a_corpus_of_videos_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    shutil.copytree(corpus.folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"kind": "videos"}))
    with pytest.raises(ValueError, match="holds videos"):
        find_lesson(config(corpus, corpus=str(folder)), MilestonesScorer(), RENDERER, None, 0.5)


def test_where_no_corpus_is_the_command_that_makes_one_is_told(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"corpus={tmp_path}/none: .* make one with vlmrb corpus --out {tmp_path}/none"
    ):
        find_lesson(config(corpus, corpus=str(tmp_path / "none")), MilestonesScorer(), RENDERER, None, 0.5)


@pytest.mark.parametrize("scores", ["missing", "calibration"])
def test_where_no_scores_are_the_command_that_makes_them_is_told(corpus: Corpus, scores: str) -> None:
    scorer = MilestonesScorer()
    scorer.version = "newer"
    folder = corpus.folder.with_name(scores)
    asked = "by scorer 'milestones', version 'newer'"
    command = f"vlmrb calibrate -c SCORER.yaml --corpus {corpus.folder} --out {folder}"
    with pytest.raises(ValueError, match=f"{asked}.*{command}"):
        find_lesson(config(corpus, corpus_scores=str(folder)), scorer, RENDERER, None, 0.5)
    assert not corpus.folder.with_name("missing").exists()


def test_from_answers_that_are_all_alike_nothing_can_be_learnt(corpus: Corpus, tmp_path: Path) -> None:
    keep_scores(corpus, ConstantScorer(0.2), tmp_path, np.arange(96))
    with pytest.raises(ValueError, match=r"finds 0 of its 96 clips positive \(τ = 0.5\)"):
        find_lesson(config(corpus, corpus_scores=str(tmp_path)), ConstantScorer(0.2), RENDERER, None, 0.5)


@pytest.mark.parametrize("settings", [{"corpus": "a"}, {"corpus_scores": "a"}])
def test_corpus_and_scores_go_together(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"corpus=.* and scoring.student.corpus_scores=.* go together"):
        StudentConfig(**settings)


def test_it_has_learned_before_it_first_guesses_and_goes_on_from_a_checkpoint_all_the_same(corpus: Corpus) -> None:
    lesson = lesson_of(corpus)
    student = StudentScorer(config(corpus), 0.5, pixels=False, lesson=lesson)
    student.setup()
    new = load_corpus(corpus.folder).batch(np.arange(86, 96))
    guesses = student.score(replace(new, snapshots=new.snapshots[:, :12]))  # the run's clips may be shorter
    truth = MilestonesScorer().score(replace(new, snapshots=new.snapshots[:, :12])) > 0.5
    assert ((guesses > 0.5) == truth).mean() >= 0.9
    assert student.stats()["steps"] == 151
    assert student.stats()["positives"] == (lesson.answers > 0.5).sum()
    state = student.state()
    assert state is not None
    guesses = student.score(replace(new, snapshots=new.snapshots[:, :8]))  # takes a step
    again = StudentScorer(config(corpus, seed=1), 0.5, pixels=False, lesson=lesson)
    again.setup()
    again.restore(state)
    np.testing.assert_array_equal(again.score(replace(new, snapshots=new.snapshots[:, :8])), guesses)
    assert again.stats() == student.stats()


def test_trust_is_still_to_be_earned(corpus: Corpus) -> None:
    buffer = VLMReplayBuffer(64, terms=[VLMTerm(0.5)], lam=0.5, batch_size=8, clip_length=16)
    student = config(corpus, corpus_steps=1)
    service = ScoringService(buffer, MilestonesScorer(), RENDERER, backend="sync", student=student)
    assert not service.stats()["student_trusted"]
    service.close()
    with pytest.raises(ValueError, match="scoring.student.corpus"):
        ScoringService(buffer, MilestonesScorer(), RENDERER, backend="sync", student=replace(student, corpus="none"))


@pytest.mark.slow
def test_from_corpus_and_calibration_to_a_run_whose_student_knows_from_the_start(tmp_path: Path) -> None:
    corpus, calibration, run = (str(tmp_path / name) for name in ("corpus", "calibration", "run"))
    env = ("-c", str(ROOT / "configs/quickstart.yaml"), "--env.id", "MiniGrid-DoorKey-5x5-v0")
    scorer = ("-c", str(ROOT / "configs/scorer/milestones.yaml"))
    made = ("--policy", "scripted", "--clips", "64", "--clip_length", "16", "--out", corpus)
    assert main(["corpus", *env, *made]) == 0
    assert main(["calibrate", *scorer, "--corpus", corpus, "--out", calibration]) == 0
    student = ("-c", str(ROOT / "configs/scorer/student.yaml"), "--scoring.backend", "sync")
    taught = ("--scoring.student.corpus", corpus, "--scoring.student.corpus_scores", calibration)
    steps = ("--training.total_env_steps", "2560", "--evaluation.every_n_env_steps", "2560", "--run_dir", run)
    replay = ("-c", str(ROOT / "configs/replay/vlm.yaml"))
    assert main(["fit", *env[:2], *replay, *scorer, *student, *env[2:], *taught, *steps]) == 0
    summary = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    row = dict(zip(summary[0].split(","), summary[-1].split(","), strict=True))
    assert float(row["scoring/student_steps"]) > StudentConfig.corpus_steps
    assert float(row["scoring/student_positives"]) >= 10
