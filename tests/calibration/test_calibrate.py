"""`vlmrb calibrate`: true numbers, a page that holds together, nothing scored twice, and one line for bad input."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from corpora import doorkey_corpus, square_frames, write_gif

from vlmrb.calibration.corpus import Corpus, load_corpus
from vlmrb.calibration.gallery import pick, write_clips
from vlmrb.calibration.labelled_videos import collect_videos
from vlmrb.calibration.report import SPLIT_SEED, judge, verdicts
from vlmrb.calibration.scores import load_candidates
from vlmrb.calibration.statistics import best_threshold, confusion, halves
from vlmrb.cli import main
from vlmrb.envs import EnvConfig
from vlmrb.scoring.grades import Grades
from vlmrb.settings import load_scoring

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPRITES, MILESTONES = (str(ROOT / f"configs/scorer/{name}.yaml") for name in ("sprites", "milestones"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return doorkey_corpus(tmp_path_factory.mktemp("doorkey") / "corpus", clips=96)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """24 videos: 12 turn green in the middle, of which 2 are labelled a failure by mistake."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "gifs").mkdir()
    lines = ["file,label"]
    for number in range(24):
        write_gif(folder / f"gifs/{number}.gif", square_frames(8 + number % 5, number % 2 == 0))
        lines.append(f"{number}.gif,{int(number % 2 == 0 and number not in (4, 6))}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return collect_videos(
        folder / "corpus",
        folder / "gifs",
        folder / "labels.csv",
        clip_length=8,
        frame_size=32,
        command="vlmrb corpus --videos …",
        progress=False,
    )


def green(folder: Path, name: str = "green", **arguments: Any) -> str:
    file = folder / f"{name}.yaml"
    scorer = {"class_path": "green_scorer.GreenScorer", "init_args": arguments}
    file.write_text(yaml.safe_dump({"scoring": {"scorer": scorer, "batch_clips": 4}}))
    return str(file)


def calibrated(*arguments: str, out: Path) -> dict[str, Any]:
    assert main(["calibrate", *arguments, "--out", str(out)]) == 0
    return json.loads((out / "report.json").read_text())


def test_a_perfect_scorer_is_found_perfect_and_a_plain_one_is_found_out(corpus: Corpus, tmp_path: Path) -> None:
    never = tmp_path / "never.yaml"
    constant_half = {"class_path": "vlmrb.scoring.constant.ConstantScorer", "init_args": {"value": 0.5}}
    never.write_text(yaml.safe_dump({"scoring": {"scorer": constant_half}}))
    report = calibrated("--scorers", SPRITES, str(never), "--corpus", str(corpus.folder), out=tmp_path / "out")
    sprites, constant = (scorer["by_label"]["milestone"] for scorer in report["scorers"])
    assert report["label"] == "milestone"
    assert sprites["auc"] == 1.0
    assert sprites["at_configured"]["balanced_accuracy"] == sprites["at_best"]["balanced_accuracy"] == 1.0
    assert sprites["at_best"]["threshold"] == 0.4  # in the middle between 0.1, nothing, and 0.7, a key
    assert constant["auc"] == 0.5
    assert constant["at_best"]["balanced_accuracy"] == 0.5
    assert constant["at_configured"]["precision"] is None  # 0.5 is not above 0.5: nothing is positive
    assert report["pairs"][0]["spearman"] is None
    # Strict success: τ = 0.5 lets keys and doors pass as well.
    strict = report["scorers"][0]["by_label"]["success"]
    progress, success = corpus.clips.progress, corpus.clips.success
    assert strict["at_configured"]["precision"] == pytest.approx(success.sum() / progress.sum())
    assert strict["at_best"]["threshold"] == pytest.approx((Grades().door + Grades().goal) / 2)
    assert strict["at_best"]["precision"] == 1.0


@pytest.mark.parametrize(
    ("interval", "says"),
    [
        ((0.2, 0.49), "worse than guessing"),
        ((0.4, 0.7), "no better than guessing"),
        ((0.6, 0.9), "apart poorly"),
        ((0.9, 0.99), "it tells these clips apart"),
    ],
)
def test_what_an_auc_comes_to_is_said_in_words(interval: tuple[float, float], says: str) -> None:
    scorer = {"label": "mine", "by_label": {"success": {"auc": sum(interval) / 2, "auc_interval": interval}}}
    (line,) = verdicts({"label": "success", "scorers": [scorer]})
    assert line.startswith(f"mine: ROC AUC {sum(interval) / 2:.3f} [")
    assert says in line.partition(" by success: ")[2]


def test_wrong_labels_show_as_the_most_wrong_clips(videos: Corpus, tmp_path: Path) -> None:
    report = calibrated("-c", green(tmp_path), "--corpus", str(videos.folder), out=tmp_path / "out")
    judged = report["scorers"][0]["by_label"]["success"]
    positive = np.arange(24) % 2 == 0
    wrong = np.isin(np.arange(24), [4, 6])
    assert judged["positives"] == 10
    assert judged["at_configured"]["recall"] == 1.0
    assert judged["at_configured"]["precision"] == pytest.approx(10 / 12)
    assert judged["at_configured"]["fpr"] == pytest.approx(2 / 14)
    low, high = judged["at_configured"]["intervals"]["precision"]
    assert low < 10 / 12 < high
    page = (tmp_path / "out/index.html").read_text()
    alarms = page[page.index("scored high although") :]
    assert {int(clip) for clip in re.findall(r"<br>clip (\d+)", alarms)} == set(np.flatnonzero(positive & wrong))


def test_scores_csv_holds_every_score_with_its_labels(corpus: Corpus, tmp_path: Path) -> None:
    calibrated("--scorers", SPRITES, MILESTONES, "--corpus", str(corpus.folder), out=tmp_path / "out")
    with (tmp_path / "out/scores.csv").open() as file:
        lines = list(csv.DictReader(file))
    events = corpus.clips.milestones
    expected = Grades().score(events)
    assert [float(line["sprites"]) for line in lines] == expected.tolist()
    assert [float(line["milestones"]) for line in lines] == expected.tolist()
    assert [int(line["goal"]) for line in lines] == events[:, 2].astype(int).tolist()
    assert [int(line["milestone"]) for line in lines] == corpus.clips.progress.astype(int).tolist()


def test_prompts_are_compared_and_end_in_the_overlay(videos: Corpus, tmp_path: Path) -> None:
    report = calibrated(
        *("-c", green(tmp_path), "--prompts", "grid", "grid_underspecified", "--corpus", str(videos.folder)),
        out=tmp_path / "out",
    )
    clear, vague = report["scorers"]
    assert (clear["label"], vague["label"]) == ("green, grid prompt", "green, grid_underspecified prompt")
    assert clear["stats"] == {"batches": 3.0}
    assert clear["prompt"].startswith("You see a short video")
    assert vague["prompt"].startswith("Is this good?")
    assert report["pairs"] == [
        {"first": clear["label"], "second": vague["label"], "spearman": pytest.approx(1), "agreement": 1.0}
    ]
    # Half-hearted answers put all clips below the paper's τ, and a threshold of their own finds them again.
    assert vague["by_label"]["success"]["at_configured"]["share_positive"] == 0.0
    assert vague["by_label"]["success"]["at_best"]["recall"] == 1.0
    overlay = tmp_path / "out/calibrated_1.yaml"
    content = yaml.safe_load(overlay.read_text())
    assert content["replay"]["vlm"]["threshold"] == vague["by_label"]["success"]["at_best"]["threshold"] < 0.3
    assert load_scoring([green(tmp_path), overlay]).scorer.prompt.name == "grid_underspecified"


def test_the_overlay_sets_the_threshold_of_a_run(corpus: Corpus, tmp_path: Path) -> None:
    """The overlay is read by `fit` itself, after the scorer's."""
    calibrated("-c", SPRITES, "--corpus", str(corpus.folder), "--label", "success", out=tmp_path / "out")
    arguments = [
        "-c",
        str(ROOT / "configs/quickstart.yaml"),
        "-c",
        SPRITES,
        "-c",
        str(tmp_path / "out/calibrated.yaml"),
    ]
    run = tmp_path / "run"
    assert main(["fit", *arguments, "--run_dir", str(run), "--training.total_env_steps", "640"]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["replay"]["vlm"]["threshold"] == 0.925


def test_the_threshold_of_a_configuration_is_the_one_reported(corpus: Corpus, tmp_path: Path) -> None:
    overlay = tmp_path / "replay.yaml"
    overlay.write_text("replay: {vlm: {threshold: 0.8}}\n")
    (candidate,) = load_candidates([SPRITES, str(overlay)])
    assert candidate.threshold == 0.8
    overlay.write_text("replay: {vlm: {threshold: 0.0}}\n")
    assert load_candidates([SPRITES, str(overlay)])[0].threshold == 0.0
    overlay.write_text("replay: {vlm: {threshold: high}}\n")
    with pytest.raises(ValueError, match="threshold='high'"):
        load_candidates([SPRITES, str(overlay)])


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    videos: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = green(tmp_path, fails_at=2, trace=str(tmp_path / "trace"))
    command = ["calibrate", "-c", config, "--corpus", str(videos.folder), "--out", str(tmp_path / "out")]
    assert main(command) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith("scorer 'green' failed: RuntimeError: the machine was switched off")
    report = calibrated(*command[1:-2], out=tmp_path / "out")
    distinct = len({clip.tobytes() for clip in videos.snapshots()})
    assert report["scorers"][0]["scored_now"] == distinct - 8 > 0
    again = calibrated(*command[1:-2], out=tmp_path / "out")
    assert again["scorers"][0]["scored_now"] == 0
    assert again["scorers"][0]["by_label"] == report["scorers"][0]["by_label"]


class Links(HTMLParser):
    """Collects what a page refers to, and whether every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset") and value]
        if tag not in ("meta", "img", "br", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_refers_to_nothing_but_its_own_files(corpus: Corpus, tmp_path: Path) -> None:
    calibrated("--scorers", SPRITES, MILESTONES, "--corpus", str(corpus.folder), "--shown", "3", out=tmp_path / "out")
    text = (tmp_path / "out/index.html").read_text()
    page = Links()
    page.feed(text)
    assert not page.open
    assert len(page.links) > 15
    for link in page.links:
        assert (tmp_path / "out" / link).is_file(), link
    gifs = list((tmp_path / "out/clips").glob("*.gif"))
    assert 6 <= len(gifs) <= 12
    assert all(gif.read_bytes().startswith(b"GIF8") for gif in gifs)
    for word in ("http:", "https:", "<script", "@import"):
        assert word not in text
    assert "prefers-color-scheme: dark" in text


def test_text_of_others_does_not_become_markup(videos: Corpus, tmp_path: Path) -> None:
    prompt = "<b>Green</b> & bright? yes or no"
    report = calibrated(
        "-c", green(tmp_path), "--prompts", prompt, "--corpus", str(videos.folder), out=tmp_path / "out"
    )
    assert report["scorers"][0]["prompt"] == prompt
    assert "&lt;b&gt;Green&lt;/b&gt; &amp; bright?" in (tmp_path / "out/index.html").read_text()


def test_the_best_threshold_is_chosen_on_one_half_and_reported_on_the_other() -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(60) < 0.5
    scores = np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1).astype(np.float32)
    groups = np.arange(60) // 2
    chosen_on, reported_on = halves(labels, groups, SPLIT_SEED)
    best = best_threshold(scores[chosen_on], labels[chosen_on])
    assert best != best_threshold(scores, labels)
    found = judge(scores, labels, groups, 0.5)["at_best"]
    assert found["threshold"] == best
    expected = confusion(scores[reported_on], labels[reported_on], best)
    assert {name: found[name] for name in expected.as_dict()} == expected.as_dict()


def test_clips_shown_are_the_extremes() -> None:
    scores = np.array([0.9, 0.1, 0.5, 0.95, 0.2, 0.3], np.float32)
    labels = np.array([True, False, True, False, False, True])
    picked = {kind: rows.tolist() for kind, rows in pick(scores, labels, 0.6, 2).items()}
    assert picked == {"highest": [3, 0], "lowest": [1, 4], "missed": [5, 2], "false alarms": [3]}


def test_a_report_in_a_used_folder_shows_its_own_clips(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "clip_00001.gif").write_bytes(b"of another corpus, or broken off")
    scores = np.zeros(len(corpus.clips), np.float32)
    for folder in (tmp_path, tmp_path / "new"):
        assert [shown.file for shown in write_clips(corpus, np.array([1]), scores, folder)] == ["clip_00001.gif"]
    assert (tmp_path / "clip_00001.gif").read_bytes() == (tmp_path / "new" / "clip_00001.gif").read_bytes()


def test_equal_scores_are_shown_from_everywhere() -> None:
    scores, labels = np.full(1000, 0.1, np.float32), np.zeros(1000, bool)
    rows = pick(scores, labels, 0.5, 6)["lowest"]
    assert rows.max() - rows.min() > 100


def test_corpora_of_one_class_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = doorkey_corpus(tmp_path / "corpus", clips=16, successes=0.0, milestones=0.0)
    assert not corpus.clips.progress.any()
    assert main(["calibrate", "-c", SPRITES, "--corpus", str(corpus.folder), "--out", str(tmp_path / "out")]) == 1
    assert "clips of one class only" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_label_that_is_missing_is_refused(
    corpus: Corpus, videos: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", "-c", green(tmp_path), "--out", str(tmp_path / "out"), "--label", "milestone"]
    assert main([*command, "--corpus", str(videos.folder)]) == 1
    assert "--label milestone: this corpus has only success" in capsys.readouterr().err
    rare = doorkey_corpus(tmp_path / "rare", clips=32, successes=0.0)
    assert main([*command[:-1], "success", "--corpus", str(rare.folder)]) == 1
    assert "--label success: the corpus holds clips of one class only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--corpus {corpus}", "no scorer named"),
        ("-c {sprites} --corpus none", "corpus none does not exist"),
        ("-c {sprites} --corpus {empty}", "holds no manifest.json"),
        ("-c {milestones} --corpus {videos}", "scorer 'milestones' reads snapshots"),
        ("-c {sprites} --corpus {corpus} --prompts grid", "takes no prompt"),
        ("-c {green} --corpus {corpus} --prompts gird", "did you mean grid"),
        ("--scorers {sprites} {sprites} --corpus {corpus}", "twice"),
        ("-c {sprites} --corpus {corpus} --shown -1", "--shown -1"),
        ("-c {sprites} --corpus {corpus} --label happiness", "label"),
        ("-c none.yaml --corpus {corpus}", "none.yaml cannot be read"),
        ("-c {env} --corpus {corpus}", "no section 'scoring'"),
        ("-c {lists} --corpus {corpus}", "lists.yaml: section 'scoring' holds no settings"),
        ("-c {sprites} -c {vlm} --corpus {corpus}", "vlm.yaml: section 'replay.vlm' holds no settings"),
        ("-c {milestones} --corpus {cart}", "scorer 'milestones' failed: ValueError: the milestones scorer reads"),
    ],
)
def test_bad_input_is_one_line(
    typed: str, says: str, corpus: Corpus, videos: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "env.yaml").write_text("env: {id: MiniGrid-DoorKey-5x5-v0}\n")
    (tmp_path / "lists.yaml").write_text("scoring: [1]\n")
    (tmp_path / "vlm.yaml").write_text("replay: {vlm: [1]}\n")
    names = {"sprites": SPRITES, "milestones": MILESTONES, "corpus": corpus.folder, "videos": videos.folder}
    names |= {"lists": tmp_path / "lists.yaml", "vlm": tmp_path / "vlm.yaml"}
    names |= {"empty": tmp_path / "empty", "green": green(tmp_path), "env": tmp_path / "env.yaml"}
    if "{cart}" in typed:
        world = EnvConfig("passing_world:Passing-v0", num_envs=2, frame_size=8, success="passing_world:passes")
        names["cart"] = doorkey_corpus(tmp_path / "cart", 32, "random", world, clip_length=5).folder
    parts = [part.format(**names) for part in typed.split()]
    assert main(["calibrate", *parts, "--out", str(tmp_path / "out")]) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vlmrb calibrate: error: ")
    assert says in error


def test_scorers_are_called_by_their_files(tmp_path: Path) -> None:
    first, second = green(tmp_path, "one"), green(tmp_path, "two", prompt="grid_terse")
    assert [candidate.label for candidate in load_candidates([], [first, second])] == ["one", "two"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="two candidates would be called 'one'"):
        load_candidates([], [first, green(tmp_path / "other", "one")])


def test_loading_a_corpus_gives_back_what_was_made(corpus: Corpus) -> None:
    loaded = load_corpus(corpus.folder)
    np.testing.assert_array_equal(loaded.snapshots(), corpus.snapshots())
    for name, array in vars(corpus.clips).items():
        np.testing.assert_array_equal(getattr(loaded.clips, name), array)
    assert loaded.renderer.name == corpus.renderer.name


@pytest.mark.slow
def test_the_tiny_vlm_is_judged_through_the_production_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model that was trained on these labels is found good; asked in other words, it is found less so."""
    monkeypatch.chdir(ROOT)  # its configuration names the model's folder from there
    world = EnvConfig("MiniGrid-DoorKey-8x8-v0", num_envs=8)
    corpus = doorkey_corpus(tmp_path / "corpus", clips=120, config=world, clip_length=32, seed=77)
    arguments = ["-c", "configs/scorer/tiny_vlm.yaml", "--prompts", "grid", "grid_paraphrase_b"]
    report = calibrated(*arguments, "--corpus", str(corpus.folder), out=tmp_path / "out")
    own, other = (scorer["by_label"]["milestone"] for scorer in report["scorers"])
    assert own["auc"] >= 0.95
    assert own["at_configured"]["balanced_accuracy"] >= 0.9
    assert other["auc"] < own["auc"]
    assert report["scorers"][0]["stats"]["mass"] > 0.9
