"""What cheaper scores are worth: on a scorer of which cost and worth are known, and on one that sees."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from corpora import doorkey_corpus
from costly_scorer import clock, configuration, flashes, log

from vlmrb.calibration.corpus import Corpus
from vlmrb.calibration.frontier import Frontier, Grid, find_frontier, plan
from vlmrb.calibration.frontier_report import judge_points
from vlmrb.calibration.report import SPLIT_SEED
from vlmrb.calibration.scores import Candidate, load_candidates
from vlmrb.calibration.statistics import halves
from vlmrb.calibration.timing import Timing, ratio_interval, time_candidates
from vlmrb.cli import main
from vlmrb.envs import EnvConfig
from vlmrb.scoring.cache import ScoreCache
from vlmrb.scoring.scorer import ScorerError
from vlmrb.settings import load_scoring, read_yaml

__all__ = ["clock"]

ROOT = Path(__file__).parents[2]
GRID = Grid(frame_size=(2,), dtype=("bfloat16",), timed_clips=12)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return flashes(tmp_path_factory.mktemp("flashes") / "corpus")


def candidate(folder: Path, **settings: Any) -> Candidate:
    (found,) = load_candidates([configuration(folder, **settings)])
    return found


def found(
    corpus: Corpus, folder: Path, cache: ScoreCache | None = None, grid: Grid = GRID, **settings: Any
) -> Frontier:
    points = plan(corpus, candidate(folder, **settings), grid)
    return find_frontier(corpus, points, "success", grid, cache or ScoreCache(), progress=False)


def test_one_setting_at_a_time_is_varied(corpus: Corpus, tmp_path: Path) -> None:
    points = plan(corpus, candidate(tmp_path), GRID)
    assert [point.changed for point in points] == [
        {},
        {"frames_per_clip": 8},
        {"frames_per_clip": 4},
        {"frame_size": 2},
        {"batch_clips": 2},
        {"dtype": "bfloat16"},
    ]
    whole = {"frames_per_clip": 16, "frame_size": 4, "batch_clips": 1, "dtype": "float32"}
    assert all(point.settings == whole | point.changed for point in points)
    # Half the configured frame size would do without its being named, and a configured number of frames is kept to.
    points = plan(corpus, candidate(tmp_path, frames_per_clip=8), Grid(frames=(16, 4), batch_clips=(16,)))
    assert [point.changed for point in points] == [
        {},
        {"frames_per_clip": 16},
        {"frames_per_clip": 4},
        {"frame_size": 2},
        {"batch_clips": 16},
    ]
    assert points[0].settings["frames_per_clip"] == 8
    assert points[1].candidate.frames_per_clip is None  # all that there are
    assert points[4].candidate.batch_clips == 16  # as many as are asked about at once are handed over
    assert points[4].overlay() == {
        "frames_per_clip": 8,
        "batch_clips": 16,
        "scorer": {"init_args": {"batch_clips": 16}},
    }


@pytest.mark.usefixtures("clock")
def test_speed_worth_and_choice_are_the_true_ones(corpus: Corpus, tmp_path: Path) -> None:
    frontier = found(corpus, tmp_path)
    by_label = {point.label: judged for point, judged in zip(frontier.points, frontier.judged, strict=True)}
    # A clip costs frames × size ÷ 4 × (1 + 1 ÷ batch), half of it in bfloat16; 4 frames miss half of the flashes.
    expected = {
        "as configured": (32, 1.0),
        "8 frames": (16, 1.0),
        "4 frames": (8, 0.75),
        "2 px": (16, 0.5),
        "2 at once": (24, 1.0),
        "bfloat16": (16, 1.0),
        "8 frames, 2 at once, bfloat16": (6, 1.0),
    }
    assert by_label.keys() == expected.keys()
    for label, (seconds, auc) in expected.items():
        judged = by_label[label]
        assert judged.clips_per_s == pytest.approx(1 / seconds)
        assert judged.ratio == pytest.approx(32 / seconds)
        assert judged.ratio_interval == pytest.approx((32 / seconds, 32 / seconds))
        assert judged.auc == auc
        assert judged.loss == 1 - auc
        assert judged.within == (auc == 1)
        assert judged.faster == (seconds < 32)
        assert judged.on_frontier == (seconds == 6)
        assert judged.peak_bytes is judged.frame_hits is None
    assert by_label["4 frames"].tokens == 14
    reported_on = halves(corpus.clips.success, corpus.clips.groups, SPLIT_SEED)[1]
    flashing = reported_on[corpus.clips.success[reported_on]]
    assert by_label["4 frames"].balanced_accuracy == pytest.approx((1 + (flashing % 4 > 0).mean()) / 2)
    low, high = by_label["4 frames"].loss_interval
    assert 0.15 < low < 0.25 < high < 0.35
    assert frontier.points[frontier.chosen].label == "8 frames, 2 at once, bfloat16"
    assert frontier.points[frontier.chosen].overlay() == {
        "frames_per_clip": 8,
        "batch_clips": 8,
        "scorer": {"init_args": {"batch_clips": 2, "dtype": "bfloat16"}},
    }


@pytest.mark.usefixtures("clock")
def test_a_tolerance_buys_speed(corpus: Corpus, tmp_path: Path) -> None:
    frontier = found(corpus, tmp_path, grid=Grid(frame_size=(4,), batch_clips=(1,), tolerance=0.4))
    assert [point.label for point in frontier.points] == ["as configured", "8 frames", "4 frames"]
    assert frontier.chosen == 2
    assert [judged.on_frontier for judged in frontier.judged] == [False, True, True]


@pytest.mark.usefixtures("clock")
def test_ratios_are_to_the_slowest_whatever_is_configured(corpus: Corpus, tmp_path: Path) -> None:
    grid = Grid(frames=(16, 8), frame_size=(4,), dtype=("bfloat16",), batch_clips=(1,))
    frontier = found(corpus, tmp_path, grid=grid, frames_per_clip=8)
    ratios = {point.label: judged.ratio for point, judged in zip(frontier.points, frontier.judged, strict=True)}
    assert ratios == {"as configured": 2.0, "16 frames": 1.0, "bfloat16": 4.0}
    assert frontier.points[frontier.base].label == "16 frames"
    # Put together, the best is what has been measured already.
    assert frontier.points[frontier.chosen].label == "bfloat16"


@pytest.mark.usefixtures("clock")
def test_scores_are_kept_and_speed_is_measured_anew(corpus: Corpus, tmp_path: Path) -> None:
    settings = {"scorer_frame_size": None}  # becomes known as the scorer is set up: the keys must not follow
    grid = Grid(dtype=("bfloat16",), timed_clips=12)

    def run(points: int) -> tuple[Frontier, int]:
        cache = ScoreCache(tmp_path / "scores.sqlite")
        planned = plan(corpus, candidate(tmp_path, **settings), grid)[:points]
        log.clear()
        frontier = find_frontier(corpus, planned, "success", grid, cache, progress=False)
        cache.close()
        return frontier, sum(entry.isdigit() for entry in log)

    part, _ = run(points=2)  # a run that was cut short
    assert part.scored_now == 2 * 80
    rest, _ = run(points=10)
    # 4 frames, bfloat16, and the combination; 2 at once gives the scores of 1 at once.
    assert rest.scored_now == 3 * 80
    again, asked = run(points=10)
    assert again.scored_now == 0
    assert asked > 10  # for the clock
    assert [judged.auc for judged in again.judged] == [judged.auc for judged in rest.judged]
    np.testing.assert_allclose([j.clips_per_s for j in again.judged], [j.clips_per_s for j in rest.judged])


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("memory_bytes", [0, None])
def test_rounds_go_back_and_forth_warm_and_with_nothing_kept(
    memory_bytes: int | None, corpus: Corpus, tmp_path: Path
) -> None:
    grid = Grid(frames=(8,), frame_size=(2,), batch_clips=(1,))
    points = plan(corpus, candidate(tmp_path, scorer_memory_bytes=memory_bytes), grid)
    whole, thin, small = (point.candidate for point in points)
    shared = [whole, Candidate(**{**vars(thin), "scorer": whole.scorer}), small]
    clips = corpus.batch(np.arange(8))
    timings = time_candidates(shared, clips, 2, progress=False)
    assert [timing.clips_per_s.tolist() for timing in timings] == [[1 / 32] * 2, [1 / 16] * 2, [1 / 16] * 2]
    first = ["setup", "16", "8", "forget", "16", "forget", "8"]
    second = ["setup", "16", "forget", "16"]
    if memory_bytes is None:  # who knows whether both fit: one after the other
        back = ["setup", "16", "forget", "16", "close", "setup", "16", "8", "forget", "8", "forget", "16", "close"]
        assert log == [*first, "close", *second, "close", *back]
    else:
        assert log == [*first, *second, "forget", "16", "forget", "8", "forget", "16", "close", "close"]


@pytest.mark.usefixtures("clock")
def test_a_scorer_that_cannot_be_set_up_is_closed_with_all_others(corpus: Corpus, tmp_path: Path) -> None:
    points = plan(corpus, candidate(tmp_path), Grid(frames=(16,), frame_size=(4,), dtype=("float8",)))
    with pytest.raises(ScorerError, match="no such dtype"):
        time_candidates([point.candidate for point in points], corpus.batch(np.arange(8)), 2, progress=False)
    assert log.count("close") == log.count("setup") == 3


def test_an_interval_of_a_median_is_the_narrowest_that_holds_with_95_percent() -> None:
    for rounds in range(1, 40):
        values = np.random.default_rng(rounds).permutation(rounds).astype(float)
        low, high = ratio_interval(values)
        assert low + high == rounds - 1
        # P(the median of the law lies outside) = 2 · P(at most `low` of the rounds lie below it)
        outside = [2 * sum(math.comb(rounds, k) for k in range(int(drop) + 1)) / 2**rounds for drop in (low, low + 1)]
        assert outside[0] <= 0.05 or low == 0
        assert outside[1] > 0.05
    assert ratio_interval(np.arange(6.0)) == (0, 5)


def test_noise_displaces_nothing_that_is_configured() -> None:
    """Equal scores: a point that is faster by a hair takes the configured one's place only if it is so every time."""
    labels, groups = np.arange(40) % 2 == 0, np.arange(40)
    scores = [labels.astype(np.float32)] * 3
    steady = np.ones(6)
    wavering, surely = np.array([1.2, 1.3, 1.1, 1.2, 1.3, 0.99]), np.full(6, 1.05)
    timings = [Timing(ratio, {}, None) for ratio in (steady, wavering, surely)]
    judged, chosen = judge_points(scores[:2], timings[:2], [steady, wavering], labels, groups, 0.01)
    assert not judged[1].faster
    assert chosen == 0
    judged, chosen = judge_points(scores, timings, [steady, wavering, surely], labels, groups, 0.01)
    assert chosen == 2
    # A configured way that is not worth its scores has no such claim.
    scores[0] = np.full(40, 0.5, np.float32)
    assert judge_points(scores, timings, [steady, wavering, surely], labels, groups, 0.01)[1] == 1


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "-c {costly} --frames 8",
            "--frames, --frame_sizes, --batches, --dtypes and the like say what --frontier tries",
        ),
        ("-c {costly} --frontier --frames 1", "--frames 1 must be at least 2"),
        ("-c {costly} --frontier --frames 8 8", "--frames names 8 twice"),
        ("-c {costly} --frontier --frames 32", "--frames 32: the corpus has clips of 16 frames"),
        ("-c {costly} --frontier --batches 0", "--batches 0 must be at least 1"),
        ("-c {costly} --frontier --tolerance -1", "--tolerance -1.0 must lie in [0, 0.5)"),
        ("-c {costly} --frontier --rounds 5", "--rounds 5 must be at least 6"),
        ("-c {costly} --frontier --timed_clips 0", "--timed_clips 0 must be at least 1"),
        ("--scorers {costly} {every} --frontier", "--frontier is of one scorer with one prompt, and here are 2"),
        ("-c {every} --frontier", "there is nothing to vary with scorer 'every'"),
        ("-c {every} --frontier --frames 8", "--frames: scorer 'every' reads what happens off consecutive frames"),
        ("-c {frames} --frontier --dtypes bfloat16", "--dtypes: the scorer costly_scorer.FramesScorer takes no dtype"),
        ("-c {thinned}", "scoring.frames_per_clip=4 leaves some out"),
    ],
)
def test_bad_input_is_one_line(
    typed: str, says: str, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "costly": configuration(tmp_path),
        "every": configuration(tmp_path, "EveryFrameScorer", "every"),
        "frames": configuration(tmp_path, "FramesScorer", "frames"),
        "thinned": configuration(tmp_path, "EveryFrameScorer", "thinned", frames_per_clip=4),
    }
    arguments = [part.format(**names) for part in typed.split()]
    out = tmp_path / "out"
    assert main(["calibrate", *arguments, "--corpus", str(corpus.folder), "--out", str(out)]) == 1
    assert says in capsys.readouterr().err.strip().splitlines()[-1]
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_the_report_tells_of_the_frontier(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, config = tmp_path / "out", configuration(tmp_path)
    options = ["--frontier", "--frames", "8", "4", "--dtypes", "bfloat16", "--timed_clips", "8"]
    assert main(["calibrate", "-c", config, "--corpus", str(corpus.folder), "--out", str(out), *options]) == 0
    assert "chosen: 8 frames, 2 at once, bfloat16" in capsys.readouterr().out
    rows = list(csv.DictReader((out / "frontier.csv").open()))
    assert [float(row["ratio"]) for row in rows] == pytest.approx([1, 2, 4, 2, 4 / 3, 2, 32 / 6])
    assert [row["chosen"] for row in rows] == ["False"] * 6 + ["True"]
    assert rows[0]["peak_bytes"] == ""
    for name in ("frontier.png", "frontier_dark.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text()
    assert page.count('<tr class="best"><td>8 frames, 2 at once, bfloat16</td>') == 1
    assert "tokens a clip" in page
    assert "GPU memory" not in page
    # The overlay is one, and makes of the configuration what was measured.
    scoring = load_scoring([config, str(out / "frontier.yaml")])
    assert scoring.config.frames_per_clip == 8
    assert (scoring.scorer.batch_clips, scoring.scorer.dtype) == (2, "bfloat16")  # type: ignore[union-attr]
    assert read_yaml(out / "frontier.yaml")["replay"]["vlm"]["threshold"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("clock")
def test_what_is_configured_is_what_is_judged(corpus: Corpus, tmp_path: Path) -> None:
    out, config = tmp_path / "out", configuration(tmp_path, frames_per_clip=4)
    assert main(["calibrate", "-c", config, "--corpus", str(corpus.folder), "--out", str(out)]) == 0
    (scorer,) = yaml.safe_load((out / "report.json").read_text())["scorers"]
    assert scorer["frames_per_clip"] == 4
    assert scorer["by_label"]["success"]["auc"] == 0.75
    assert set(log) & {"4", "16"} == {"4"}


@pytest.mark.slow
def test_a_model_that_sees_is_dearer_with_more_frames_and_worth_it(tmp_path: Path) -> None:
    doorkey = EnvConfig("MiniGrid-DoorKey-8x8-v0", num_envs=4)
    corpus = doorkey_corpus(tmp_path / "corpus", clips=64, config=doorkey, clip_length=32)
    out, config = tmp_path / "out", str(ROOT / "configs/scorer/tiny_vlm.yaml")
    command = ["calibrate", "-c", config, "--corpus", str(corpus.folder), "--out", str(out), "--shown", "1"]
    command += ["--frontier", "--frames", "32", "4", "--frame_sizes", "64", "--batches", "16", "--timed_clips", "24"]
    assert main(command) == 0
    whole, thin = list(csv.DictReader((out / "frontier.csv").open()))
    assert (whole["point"], thin["point"]) == ("as configured", "4 frames")
    assert float(whole["auc"]) > 0.97
    assert float(thin["ratio_low"]) > 1.2
    assert float(whole["tokens"]) - float(thin["tokens"]) == 28 * 4  # tokens a frame
    assert 0 < float(thin["frame_hits"]) < float(whole["frame_hits"]) < 1
