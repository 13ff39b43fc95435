"""The scoring callback around real training: what it builds, and that nothing of it is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray

from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.replay.buffer import VLMReplayBuffer
from vlmrb.replay.config import ReplayConfig, VLMConfig
from vlmrb.replay.schemes import ScoreRewardConfig
from vlmrb.scoring.clips import ClipBatch
from vlmrb.scoring.controls import Corrupted, Shuffled
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.policy import RandomOrder
from vlmrb.scoring.scorer import ScoreControl, Scorer, ScorerError
from vlmrb.scoring.sprites import SpritesScorer

UNIFORM = {"vlm": None, "lam_max": 0.0}


class NaNScorer(Scorer):
    name = "not a number"
    version = "1"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        return np.full(len(clips), np.nan, np.float32)


class ExitingScorer(Scorer):
    name = "exiting"
    version = "1"

    def score(self, clips: ClipBatch) -> NDArray[np.float32]:
        sys.exit(0)


class After(Callback):
    """Does something after 5 batches, once a scorer process is there."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.pid = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if pl_module.env_steps >= 5 * 64:
            self.pid = pl_module.scoring._backend.pid
            self.action()


def fit(run_dir: Path, callback: ScoringCallback, *others: Callback, **replay: Any) -> DQN:
    torch.manual_seed(0)
    module = DQN(
        env=EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=8),
        training=TrainingConfig(total_env_steps=1280, learning_starts=128, frames_per_batch=64),
        replay=ReplayConfig(capacity=1000, batch_size=16, clip_length=8, **replay),
        hidden_sizes=[16],
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run_dir,
        callbacks=[callback, *others],
    )
    callback.module = module
    trainer.fit(module)
    return module


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def check_counts(module: DQN) -> dict[str, float]:
    stats = module.scoring.stats()
    assert stats["emitted"] == sum(stats[name] for name in ("scored", "waiting", "in_flight", "stale", "dropped"))
    assert stats["emitted"] == module.buffer.clips.emitted > 0
    return stats


def test_every_clip_is_scored_before_the_next_sample_in_sync_mode(tmp_path: Path):
    module = fit(tmp_path, ScoringCallback(MilestonesScorer(), backend="sync"))
    stats = check_counts(module)
    assert stats["share_scored"] == 1
    assert stats["delay_env_steps_p95"] == 0
    assert not np.isnan(module.buffer.clips.table()["score"]).any()


def test_a_process_scores_beside_training_and_is_gone_afterwards(tmp_path: Path):
    callback = ScoringCallback(SpritesScorer())
    after = After(lambda: callback.module.scoring.drain(60))
    module = fit(tmp_path, callback, after)
    stats = check_counts(module)
    assert stats["scored"] == stats["emitted"] - stats["stale"]
    assert stats["failures"] == stats["restarts"] == 0
    assert is_gone(after.pid)


@pytest.mark.parametrize(("settings", "seed"), [({}, 9), ({"seed": 1}, 1)])
def test_what_scoring_draws_by_chance_follows_the_runs_seed_unless_it_has_its_own(settings: dict[str, int], seed: int):
    buffer = VLMReplayBuffer(100, batch_size=4, clip_length=4)
    module = SimpleNamespace(buffer=buffer, renderer=None, observes_pixels=False, seed=3, env_steps=1, scoring=None)
    callback = ScoringCallback(MilestonesScorer(), backend="sync", **settings)
    callback.on_fit_start(SimpleNamespace(), module)
    assert module.scoring.config.seed == seed
    callback.close()


def test_a_second_fit_gets_a_service_of_its_own(tmp_path: Path):
    callback = ScoringCallback(MilestonesScorer(), backend="sync")
    first, second = fit(tmp_path, callback), fit(tmp_path, callback)
    assert first.scoring is not second.scoring
    assert check_counts(second)["share_scored"] == 1


@pytest.mark.parametrize("error", [RuntimeError("training failed"), KeyboardInterrupt()])
def test_an_exception_and_ctrl_c_leave_no_process(tmp_path: Path, error: BaseException):
    def fail() -> None:
        raise error

    callback, after = ScoringCallback(SpritesScorer()), After(fail)
    with pytest.raises((type(error), SystemExit)):
        fit(tmp_path, callback, after)
    assert is_gone(after.pid)
    check_counts(callback.module)


def test_a_scorer_that_breaks_its_contract_ends_the_run_with_its_name(tmp_path: Path):
    callback = ScoringCallback(NaNScorer(), backend="sync")
    with pytest.raises(ScorerError, match="scorer 'not a number' returned nan"):
        fit(tmp_path, callback)
    check_counts(callback.module)


@pytest.mark.parametrize("backend", ["sync", "thread"])
def test_a_scorer_that_calls_exit_does_not_end_the_run_which_says_at_its_end_that_nothing_was_scored(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
):
    module = fit(tmp_path, ScoringCallback(ExitingScorer(), backend=backend))
    assert module.env_steps == 1280
    assert check_counts(module)["scored"] == 0
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "scorer 'exiting': NO CLIP WAS EVER SCORED" in errors[0]


def test_a_scheme_that_reads_scores_is_refused_without_a_scorer(tmp_path: Path):
    with pytest.raises(ValueError, match=r"replay\.vlm and .* read clip scores, but scoring\.scorer is not set"):
        fit(tmp_path, ScoringCallback())


@pytest.mark.parametrize(
    ("replay", "setting"),
    [
        ({"vlm": VLMConfig(0.7)}, "replay.vlm.threshold"),
        ({**UNIFORM, "score_reward": ScoreRewardConfig(threshold=0.7)}, "replay.score_reward.threshold"),
    ],
)
def test_a_control_of_another_threshold_than_replays_is_refused(replay: dict[str, Any], setting: str):
    def set_up(control: ScoreControl | None, **replay: Any) -> None:
        module = SimpleNamespace(training_config=TrainingConfig(), replay=ReplayConfig(**replay), needs_scores=True)
        ScoringCallback(MilestonesScorer(), control).setup(SimpleNamespace(), module, "fit")

    says = (
        rf"^scoring\.control\.threshold=0\.5 differs from {re.escape(setting)}=0\.7: .*'corrupted' .*"
        r"set --scoring\.control\.init_args\.threshold 0\.7$"
    )
    with pytest.raises(ValueError, match=says):
        set_up(Corrupted(), **replay)
    set_up(Corrupted(threshold=0.7), **replay)
    set_up(Shuffled(), **replay)  # has none
    set_up(Corrupted(), vlm=VLMConfig(threshold=None))  # raw scores are not above or below anything


def test_a_scheme_that_reads_no_scores_runs_without_a_scorer(tmp_path: Path):
    module = fit(tmp_path, ScoringCallback(), **UNIFORM)
    assert module.scoring is None
    assert module.grad_steps > 0


def test_scores_are_kept_for_the_records_if_the_scheme_reads_none(tmp_path: Path):
    module = fit(tmp_path, ScoringCallback(MilestonesScorer(), backend="sync"), **UNIFORM)
    assert check_counts(module)["share_scored"] == 1
    assert module.buffer.columns["scored"].any()


def test_scores_on_disk_are_used_by_the_next_run(tmp_path: Path):
    first = fit(tmp_path, ScoringCallback(MilestonesScorer(), backend="sync", cache=str(tmp_path / "scores")))
    second = fit(tmp_path, ScoringCallback(MilestonesScorer(), backend="sync", cache=str(tmp_path / "scores")))
    assert check_counts(first)["cache_hits"] < first.scoring.stats()["scored"]
    assert check_counts(second)["cache_hits"] == second.scoring.stats()["scored"]


def parse(*args: str) -> ScoringCallback:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ScoringCallback, "scoring")
    return parser.instantiate(parser.parse_args(args)).scoring


def test_scorer_policy_and_settings_are_named_side_by_side_on_the_command_line():
    callback = parse(
        "--scoring.scorer=vlmrb.scoring.sprites.SpritesScorer",
        "--scoring.control=vlmrb.scoring.controls.Shuffled",
        "--scoring.policy=vlmrb.scoring.policy.RandomOrder",
        "--scoring.backend=thread",
        "--scoring.batch_clips=4",
    )
    assert isinstance(callback.scorer, SpritesScorer)
    assert callback.control.name == "shuffled"
    assert isinstance(callback.config.policy, RandomOrder)
    assert (callback.config.backend, callback.config.batch_clips) == ("thread", 4)


@pytest.mark.parametrize("args", ["--scoring.bakend=thread", "--scoring.backend=gpu", "--scoring.policy=best"])
def test_an_unknown_setting_is_refused_when_the_command_line_is_read(args: str):
    with pytest.raises(Exception, match="bakend|backend|policy"):
        parse(args)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_whole_program_leaves_no_scorer_running(tmp_path: Path, number: signal.Signals, code: int):
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    command = ["-m", "vlmrb.cli", "fit", "-c", str(config), "--run_dir", str(tmp_path / "run")]
    command += ["--evaluation.episodes=1", "--monitoring.every_n_env_steps=500"]
    program = subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    # The settings are written with the first batch, by when the program has taken over the signals.
    while not (scorers := scoring_processes(program.pid)) or not (tmp_path / "run" / "config.yaml").exists():
        assert time.monotonic() < deadline
        assert program.poll() is None
        time.sleep(0.1)
    program.send_signal(number)
    assert program.wait(60) == code
    deadline = time.monotonic() + 10
    while not all(map(is_gone, scorers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def scoring_processes(parent: int) -> list[int]:
    """Returns the scoring processes that a program has started."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if b"vlmrb.scoring.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
