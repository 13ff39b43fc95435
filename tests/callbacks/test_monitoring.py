from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import TensorDict

from vlmrb.algorithms.config import TrainingConfig
from vlmrb.algorithms.dqn import DQN
from vlmrb.callbacks import monitoring
from vlmrb.callbacks.monitoring import EpisodeStatistics, MonitoringCallback
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig, make_renderer
from vlmrb.loggers import AppendingCSVLogger
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import ReplayConfig, VLMConfig
from vlmrb.replay.schemes import ScoreRewardConfig
from vlmrb.replay.terms import VLMTerm
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.constant import ConstantScorer
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.scorer import Scorer
from vlmrb.scoring.service import ScoringService
from vlmrb.scoring.sprites import SpritesScorer
from vlmrb.scoring.student.config import StudentConfig

ENVS, HORIZON = 32, 60
EVERY, TOTAL, BLOCK = 1024, 3328, 128  # the budget is no multiple of the interval: the rest is reported at the end


class ReportingSprites(SpritesScorer):
    """Reports its latest score, which depends on the clips alone, and something that is no number."""

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        scores = super().score(clips)
        self.latest = scores[-1]
        return scores

    def stats(self) -> dict[str, float]:
        return {"latest": self.latest, "undefined": math.nan}


class AskingScorer(ConstantScorer):
    """Says the same of every clip, and has been asked something."""

    prompt = "Was the goal achieved? Answer yes or no."


class FailAt(Callback):
    def __init__(self, env_steps: int) -> None:
        self.env_steps = env_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.env_steps >= self.env_steps:
            raise RuntimeError("the power went out")


def train(
    folder: Path,
    *extra: Callback,
    replay: ReplayConfig | None = None,
    resume: bool = False,
    scorer: Scorer | None = None,
) -> tuple[DQN, Trainer]:
    seed_everything(3, verbose=False)
    module = DQN(
        EnvConfig(id="MiniGrid-DoorKey-5x5-v0", num_envs=ENVS, max_steps=HORIZON),
        TrainingConfig(TOTAL, learning_starts=256, frames_per_batch=BLOCK, replay_ratio=1 / 32),
        replay or ReplayConfig(capacity=2048, batch_size=32, clip_length=12, n_steps=3),
        seed=3,
        hidden_sizes=[16],
        epsilon_end=1.0,
    )
    scorer = scorer or ReportingSprites()
    scoring = [ScoringCallback(scorer, cache=None, backend="sync")] if module.needs_scores else []
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=folder,
        logger=[TensorBoardLogger(folder, name="", version=""), AppendingCSVLogger(folder)],
        callbacks=[*scoring, MonitoringCallback(every_n_env_steps=EVERY, clips_every_n_env_steps=2048), *extra],
        enable_checkpointing=any(isinstance(callback, ReplayCheckpoint) for callback in extra),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1_000_000,
    )
    trainer.fit(module, ckpt_path=folder / "checkpoints" / "last.ckpt" if resume else None, weights_only=True)
    return module, trainer


def read(folder: Path, *without: str) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {name: float(cell) for name, cell in row.items() if cell and not name.startswith(("time/", *without))}
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DQN, Trainer]:
    folder = tmp_path_factory.mktemp("run")
    return folder, *train(folder)


def episodes_by_hand(reward: np.ndarray, done: np.ndarray, success: np.ndarray) -> list[tuple[float, int, bool]]:
    episodes = []
    for env in range(len(reward)):
        begin = 0
        for end in np.flatnonzero(done[env]):
            part = slice(begin, end + 1)
            episodes.append((reward[env, part].sum(), end + 1 - begin, success[env, part].any()))
            begin = end + 1
    return episodes


@settings(max_examples=60, deadline=None)
@given(data=st.data(), envs=st.integers(1, 4), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_episodes_are_told_apart_whatever_blocks_they_span(data: Any, envs: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = (envs, sum(lengths))
    reward = rng.integers(-5, 6, shape).astype(np.float32) / 4
    done, success = rng.random(shape) < data.draw(st.floats(0, 1)), rng.random(shape) < 0.3
    statistics = EpisodeStatistics()
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        part = (slice(None), slice(start, start + length))
        block = {
            "reward": torch.from_numpy(reward[part])[..., None],
            "done": torch.from_numpy(done[part])[..., None],
            "success": torch.from_numpy(success[part])[..., None],
        }
        restored = EpisodeStatistics()
        restored.load_state_dict(statistics.state_dict())
        statistics = restored
        statistics.update(TensorDict({"next": block}, [envs, length]))
    expected = episodes_by_hand(reward, done, success)
    taken = statistics.take()
    assert taken["episodes"] == len(expected)
    if expected:
        means = np.mean(expected, axis=0)
        assert [taken["return"], taken["episode_length"], taken["success"]] == pytest.approx(means.tolist())
    assert statistics.take() == {"episodes": 0}


def test_metrics_are_written_at_each_interval_and_when_the_budget_is_spent(run: tuple[Path, DQN, Trainer]) -> None:
    folder, module, _ = run
    rows = read(folder)
    assert [row["step"] for row in rows] == [1024, 2048, 3072, 3328]
    last = rows[-1]
    assert last["train/grad_steps"] == module.grad_steps > 0
    assert last["replay/size"] == 2048
    assert last["replay/lambda"] == 0.5
    assert last["scoring/emitted"] == last["scoring/scored"] > 50
    assert last["scoring/share_scored"] == 1.0
    assert sum(row["train/episodes"] for row in rows) >= ENVS * (TOTAL // ENVS // HORIZON)


def test_what_the_scorer_reports_about_itself_is_among_the_metrics(run: tuple[Path, DQN, Trainer]) -> None:
    folder, module, _ = run
    rows = read(folder)
    assert module.scoring is not None
    assert rows[-1]["scoring/scorer_latest"] == module.scoring.stats()["scorer_latest"]
    assert {"scoring/scorer_latest"} == {name for row in rows for name in row if "scorer_" in name}
    events = EventAccumulator(str(folder)).Reload().Scalars("scoring/scorer_latest")
    assert [event.value for event in events] == pytest.approx([row["scoring/scorer_latest"] for row in rows])


# Metrics of parts of scoring that this run does without.
OPTIONAL = tuple(f"scoring/{part}" for part in ("budget_", "audit", "throttled_", "student_", "bisection_"))


def test_metrics_of_optional_parts_of_scoring_are_documented_and_no_others() -> None:
    options = {"audit_share": 0.5, "budget": BudgetConfig(total=5), "max_delay_env_steps": 99, "bisect_to": 2}
    buffer = VLMReplayBuffer(256, terms=[VLMTerm()], lam=0.5, clip_length=4)
    renderer = make_renderer(EnvConfig(id="MiniGrid-DoorKey-5x5-v0"))
    scorer = MilestonesScorer()
    service = ScoringService(buffer, scorer, renderer, backend="sync", student=StudentConfig(), **options)
    written = {f"scoring/{name}" for name in service.stats() if f"scoring/{name}".startswith(OPTIONAL)}
    docs = Path(__file__).parents[2] / "docs"
    rows = [*(docs / "metrics.md").read_text().splitlines(), *(docs / "scorers/student.md").read_text().splitlines()]
    cells = [line.split("|")[1] for line in rows if line.startswith("| `")]
    named = {name if "/" in name else f"scoring/{name}" for cell in cells for name in cell.split("`")[1::2]}
    named = {name for name in named if name.startswith(OPTIONAL)} - {"scoring/student_…"}
    by_student = {f"scoring/student_{name}" for name in ("steps", "loss", "positives")}  # once it has answered
    assert written - named == set()
    assert named - written == by_student


def test_every_documented_metric_is_written_and_every_written_one_documented(run: tuple[Path, DQN, Trainer]) -> None:
    folder, _, _ = run
    with (folder / "metrics.csv").open() as file:
        written = set(next(csv.reader(file))) - {"step"}
    written = {"scoring/scorer_NAME" if name.startswith("scoring/scorer_") else name for name in written}
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    text = text.partition("## The run in short")[0]  # what follows is no metric
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in cell.split("`")[1::2]}
    of_actors_and_critics = {"train/actor_loss", "train/alpha", "train/entropy"}  # this run is DQN's
    assert of_actors_and_critics <= documented
    elsewhere = {name for name in documented if name.startswith(("eval/", "scoring/control_", *OPTIONAL))}
    not_in_every_run = {"replay/beta", "replay/frequency_successful_episode"}
    assert written - documented == set()
    assert documented - elsewhere - of_actors_and_critics - not_in_every_run - written - {"scoring/scores"} == set()


def test_tensorboard_shows_the_same_numbers_over_env_steps(run: tuple[Path, DQN, Trainer]) -> None:
    folder, _, _ = run
    events = EventAccumulator(str(folder)).Reload()
    rows = read(folder)
    for name in ("train/loss", "replay/lambda", "replay/frequency_vlm_positive", "scoring/share_positive"):
        expected = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected
        assert expected


def test_histogram_counts_each_score_once(run: tuple[Path, DQN, Trainer]) -> None:
    folder, module, _ = run
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload().Histograms("scoring/scores")
    assert [event.step for event in events] == [row["step"] for row in read(folder) if "scoring/share_positive" in row]
    assert module.scoring is not None
    assert sum(event.histogram_value.num for event in events) == module.scoring.stats()["scored"]
    counts, _ = module.scoring.histogram()
    assert np.sum([event.histogram_value.bucket[-20:] for event in events], axis=0).tolist() == counts.tolist()


def test_clips_are_drawn_as_files_and_in_tensorboard(run: tuple[Path, DQN, Trainer]) -> None:
    folder, _, _ = run
    names = sorted(path.name for path in (folder / "clips").iterdir())
    assert names == [f"step_0000{s}_{end}" for s in (2048, 3328) for end in ("high.gif", "low.gif", "sheet.png")]
    images = EventAccumulator(str(folder)).Reload().Images("clips/high")
    assert [image.step for image in images] == [2048, 3328]
    assert images[0].encoded_image_string == (folder / "clips" / "step_00002048_high.gif").read_bytes()
    with Image.open(folder / "clips" / names[0]) as gif:
        assert gif.is_animated


def test_drawn_clips_are_the_highest_and_the_lowest(
    run: tuple[Path, DQN, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, trainer = run
    drawn = {}
    monkeypatch.setattr(monitoring, "write_video", lambda trainer, name, frames, step: drawn.update({name: frames}))
    MonitoringCallback()._draw(trainer, module)
    store = module.buffer.clips
    assert store is not None
    table = store.table()
    extremes = {"high": np.nanmax(table["score"]), "low": np.nanmin(table["score"])}
    assert extremes["low"] < extremes["high"]
    for name, score in extremes.items():
        newest = int(table["clip_id"][table["score"] == score][-1])
        clip = store.batch([newest], module.renderer)
        frames = clip.frames(256)[0, : clip.lengths[0]]
        assert np.array_equal(drawn[name][:, -frames.shape[1] :], frames)
        assert drawn[name].shape[1] > frames.shape[1]


def test_same_seed_gives_the_same_metrics_time_aside(run: tuple[Path, DQN, Trainer], tmp_path: Path) -> None:
    train(tmp_path)
    assert read(tmp_path) == read(run[0])


def test_interrupted_run_reports_what_an_uninterrupted_one_does(run: tuple[Path, DQN, Trainer], tmp_path: Path) -> None:
    checkpoint = ReplayCheckpoint(every_n_env_steps=1792)  # in the middle of the window from 1024 to 2048
    with pytest.raises(RuntimeError, match="power"):
        train(tmp_path, checkpoint, FailAt(2560))
    assert [row["step"] for row in read(tmp_path)] == [1024, 2048]
    train(tmp_path, ReplayCheckpoint(every_n_env_steps=10_000), resume=True)
    assert read(tmp_path) == read(run[0])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("replay/size")] == [1024, 2048, 3072, 3328]


def steps(count: int, done: bool) -> TensorDict:
    """Returns a block of one environment, each step worth 1, that ends an episode or not."""
    ends = torch.arange(count)[None, :, None] == (count - 1 if done else -1)
    after = {"reward": torch.ones(1, count, 1), "done": ends, "success": ends}
    return TensorDict({"next": after}, [1, count])


@pytest.mark.parametrize(("exact_resume", "length"), [(True, 7), (False, 3)])
def test_episodes_that_cannot_go_on_in_a_resumed_run_count_for_nothing(exact_resume: bool, length: int) -> None:
    interrupted, resumed = MonitoringCallback(), MonitoringCallback()
    interrupted.episodes.update(steps(4, done=False))
    resumed.load_state_dict(interrupted.state_dict())
    trainer: Any = SimpleNamespace(loggers=[])
    module: Any = SimpleNamespace(env_steps=4, exact_resume=exact_resume, scoring=None)
    resumed.on_fit_start(trainer, module)
    resumed.on_train_batch_start(trainer, module, None, 0)
    resumed.episodes.update(steps(3, done=True))
    assert resumed.episodes.take() == {"episodes": 1, "return": length, "episode_length": length, "success": 1.0}


@pytest.mark.parametrize(("restored", "share"), [(50, 0.75), (0, 0.1)])
def test_scores_are_counted_from_where_the_service_counts_whether_it_was_restored_or_not(
    restored: int, share: float
) -> None:
    counts = {"scored": 50.0, "positives": 20.0}
    module: Any = SimpleNamespace(
        env_steps=100, exact_resume=True, replay=ReplayConfig(vlm=VLMConfig(threshold=None)), scoring=SimpleNamespace()
    )
    module.scoring.stats = lambda: dict(counts)
    edges = np.array([0.0, 0.5, 1.0])
    module.scoring.histogram = lambda: (np.array([counts["scored"] - counts["positives"], counts["positives"]]), edges)
    module.scoring.scorer = ConstantScorer(0.5)
    trainer: Any = SimpleNamespace(loggers=[])
    interrupted, resumed = MonitoringCallback(), MonitoringCallback()
    interrupted._scoring_metrics(trainer, module, {"episodes": 0})
    resumed.load_state_dict(interrupted.state_dict())
    if not restored:
        counts.update(scored=0.0, positives=0.0)
    resumed.on_fit_start(trainer, module)
    resumed.on_train_batch_start(trainer, module, None, 0)
    counts.update(scored=restored + 40.0, positives=20.0 + 30.0 if restored else 4.0)
    assert resumed._scoring_metrics(trainer, module, {"episodes": 0})["scoring/share_positive"] == share


def test_uniform_replay_has_neither_scoring_metrics_nor_clips(tmp_path: Path) -> None:
    train(tmp_path, replay=ReplayConfig(capacity=2048, batch_size=32, clip_length=None, lam_max=0.0, vlm=None))
    rows = read(tmp_path)
    assert not any(name.startswith("scoring/") for row in rows for name in row)
    assert rows[-1]["replay/effective_sample_size"] == pytest.approx(2048)
    assert not (tmp_path / "clips").exists()


@pytest.mark.parametrize(
    ("scorer", "length", "says", "advice"),
    [
        (ConstantScorer(1.0), 12, "everything positive: 100.0% of the last", "Raise {}, or take another scorer"),
        (AskingScorer(0.5), 2, "nothing positive: none of the last", "Lower {}, or change scoring.scorer.prompt"),
    ],
)
def test_a_scorer_that_tells_nothing_apart_is_told_once_and_what_to_do(
    scorer: ConstantScorer, length: int, says: str, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = ReplayConfig(capacity=2048, batch_size=32, clip_length=length)
    train(tmp_path, replay=replay, scorer=scorer)
    (told,) = [record.getMessage() for record in caplog.records if "'constant' finds" in record.getMessage()]
    assert says in told
    assert advice.format("replay.vlm.threshold") in told
    assert "scored above replay.vlm.threshold=0.5." in told
    assert "`vlmrb calibrate`" in told
    rows = read(tmp_path)
    positive = scorer.value > 0.5
    assert {row["scoring/share_positive"] for row in rows} == {float(positive)}
    assert (rows[-1]["replay/uniform_fallbacks"] > 0) != positive


def test_a_scorer_that_tells_clips_apart_and_raw_scores_are_no_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "some", replay=ReplayConfig(capacity=2048, batch_size=32, clip_length=12))
    raw = ReplayConfig(capacity=2048, batch_size=32, clip_length=12, vlm=VLMConfig(threshold=None))
    train(tmp_path / "raw", replay=raw, scorer=ConstantScorer(0.9))
    assert "replay.vlm.threshold" not in caplog.text


@pytest.mark.parametrize(("threshold", "told"), [(0.8, True), (None, False)])
def test_of_scores_as_rewards_the_threshold_of_rewards_is_named(
    threshold: float | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replay = ReplayConfig(lam_max=0.0, vlm=None, score_reward=ScoreRewardConfig(threshold=threshold))
    module: Any = SimpleNamespace(replay=replay, scoring=SimpleNamespace(scorer=ConstantScorer(0.9)))
    callback = MonitoringCallback()
    for _ in range(2):
        callback._warn_of_one_sided_answers(module, answers=300, positives=300, episodes={"episodes": 0})
    said = [
        record.getMessage() for record in caplog.records if "finds nearly everything positive" in record.getMessage()
    ]
    assert len(said) == told
    for line in said:
        assert (
            "scored above replay.score_reward.threshold=0.8. This tells nothing apart, and all clips are paid" in line
        )
        assert "Raise replay.score_reward.threshold, or take another scorer" in line


def test_loss_that_is_no_number_is_shown_and_an_absent_one_is_not(
    run: tuple[Path, DQN, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, _ = run
    rows: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: rows.append(metrics))
    trainer = SimpleNamespace(loggers=[logger])
    callback = MonitoringCallback()
    monkeypatch.setattr(module, "env_steps", module.env_steps + 128)
    callback._log(trainer, module)
    module._metrics["loss"] = [torch.tensor(float("nan"))]
    monkeypatch.setattr(module, "env_steps", module.env_steps + 128)
    callback._log(trainer, module)
    assert "train/loss" not in rows[0]
    assert math.isnan(rows[1]["train/loss"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("every_n_env_steps", 0), ("clips_every_n_env_steps", 0), ("clip_frame_size", 1)],
)
def test_setting_that_cannot_work_is_refused_by_name(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"monitoring.{setting}={value}"):
        MonitoringCallback(**{setting: value})
