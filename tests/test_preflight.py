"""The preflight: sizes against what a run really takes, refusals, and whether scorers keep up with real training."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from PIL import Image

from slow_scorers import ChoosyScorer, SleepingScorer
from vlmrb import preflight
from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.doctor import GIB
from vlmrb.envs import EnvConfig, make_renderer
from vlmrb.preflight import (
    Preflight,
    PreflightError,
    amount,
    buffer_check,
    checkpoint_check,
    environment_checks,
    frame_check,
    gpu_checks,
    speed_check,
)
from vlmrb.replay.config import ReplayConfig, TDConfig
from vlmrb.scoring.budget import BudgetConfig
from vlmrb.scoring.config import ScoringConfig
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.remote import RemoteScorer
from vlmrb.scoring.scorer import Scorer, ScorerError
from vlmrb.scoring.speed import Speed, SpeedWatch
from vlmrb.scoring.sprites import SpritesScorer
from vlmrb.scoring.student.check import student_check
from vlmrb.scoring.student.config import StudentConfig
from vlmrb.sizes import RunSizes, measure

DOORKEY = EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=8)
BLOCK = 64


def make_module(env_steps: int = 1280, env: EnvConfig = DOORKEY, **replay: Any) -> DQN:
    return DQN(
        env=env,
        training=TrainingConfig(env_steps, learning_starts=128, frames_per_batch=BLOCK, replay_ratio=1 / 32),
        replay=ReplayConfig(**({"capacity": 4096, "batch_size": 16, "clip_length": 8} | replay)),
        hidden_sizes=[16],
    )


def fit(
    run_dir: Path, module: DQN, scorer: Scorer | None, checkpoint: bool = False, resume: bool = False, **settings: Any
) -> dict[str, Any]:
    """Trains; returns what the preflight wrote."""
    seed_everything(1, verbose=False)
    callback = ScoringCallback(scorer, **({"backend": "thread"} | settings))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=checkpoint,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run_dir,
        callbacks=[callback, *([ReplayCheckpoint()] if checkpoint else [])],
    )
    trainer.fit(module, ckpt_path=run_dir / "checkpoints" / "last.ckpt" if resume else None, weights_only=True)
    report = run_dir / "preflight" / "preflight.json"
    return json.loads(report.read_text()) if report.is_file() else {}


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures for half a second instead of five."""
    monkeypatch.setattr(preflight, "SpeedWatch", lambda service: SpeedWatch(service, seconds=0.5))


def check_of(report: dict[str, Any], name: str) -> dict[str, str]:
    (found,) = (check for check in report["checks"] if check["name"] == name)
    return found


# Sizes


@pytest.mark.parametrize(
    "replay",
    [{}, {"n_steps": 3, "clip_length": 16, "td": TDConfig()}, {"vlm": None, "lam_max": 0.0, "clip_length": None}],
)
def test_estimated_sizes_are_what_a_full_buffer_and_its_checkpoint_take(tmp_path: Path, replay: dict[str, Any]):
    module = make_module(env_steps=4096 + 1024, **replay)
    scorer = MilestonesScorer() if module.needs_scores else None
    report = fit(tmp_path, module, scorer, checkpoint=True, backend="sync")
    assert len(module.buffer) == 4096
    assert report["sizes"]["buffer_bytes"] == pytest.approx(module.buffer.nbytes, rel=0.1)
    (sidecar,) = (tmp_path / "checkpoints").glob("replay-*.pt")
    assert report["sizes"]["sidecar_bytes"] == pytest.approx(sidecar.stat().st_size, rel=0.2)
    assert check_of(report, "replay buffer")["status"] == check_of(report, "checkpoint")["status"] == "ok"


def test_a_run_shorter_than_its_buffer_is_judged_by_what_it_fills():
    module = make_module(env_steps=640, capacity=1_000_000)
    module.configure_model()
    sizes, _ = measure(module)
    assert sizes.filled == 640
    assert sizes.rows_bytes == 640 * sizes.row_bytes
    assert sizes.sidecar_bytes < 0.01 * sizes.buffer_bytes


def test_sizes_of_long_returns_are_those_of_short_ones():
    def sizes(n_steps: int) -> RunSizes:
        module = make_module(capacity=1_000_000, n_steps=n_steps)
        module.configure_model()
        return measure(module)[0]

    assert sizes(100_000) == sizes(2)  # a row each would take minutes


def test_frames_that_plain_environments_keep_are_counted():
    def clips_bytes(frame_size: int) -> int:
        env = EnvConfig("CartPole-v1", num_envs=2, frame_size=frame_size)
        module = make_module(env=env)
        module.configure_model()
        return measure(module)[0].clip_bytes

    assert clips_bytes(64) - clips_bytes(32) == pytest.approx(8 * 3 * (64 * 43 - 32 * 21), rel=0.1)


@pytest.mark.parametrize(
    ("backend", "takes", "needed_gib"),
    [
        ("process", "a process of its own with 0.5 to 0.8 GiB of memory", 0.8),
        ("thread", "a thread of training's process with 0.0 to 0.2 GiB of memory", 0.3),
        ("sync", "part of training with 0.0 to 0.2 GiB of memory", 0.3),
    ],
)
def test_a_student_is_reckoned_with(backend: Any, takes: str, needed_gib: float):
    config = ScoringConfig(backend=backend, student=StudentConfig())
    check = student_check(config, int(needed_gib * GIB), cores=2)
    assert check.status == "ok"
    assert check.found.startswith(takes)
    assert check.found.endswith("what the scorer has to do is reckoned without it")
    scarce = student_check(config, int((needed_gib - 0.1) * GIB), cores=2)
    assert (scarce.status, "memory_clips" in scarce.advice) == ("warn", True)
    alone = student_check(config, int(needed_gib * GIB), cores=1)
    assert alone.status == ("warn" if backend == "process" else "ok")
    assert "one of 1 core" in alone.found


def test_a_students_line_is_there_if_there_is_a_student(tmp_path: Path):
    module = make_module()
    module.configure_model()
    module.renderer = make_renderer(module.env)
    for student in (None, StudentConfig()):
        config = ScoringConfig(backend="thread", student=student)
        checks = Preflight(module, MilestonesScorer(), tmp_path, config=config).look_ahead()
        assert [check.name for check in checks].count("student") == (student is not None)


@pytest.mark.parametrize("env_id", ["MiniGrid-DoorKey-5x5-v0", "MiniGrid-Empty-5x5-v0", "CartPole-v1"])
def test_looking_ahead_draws_from_no_random_stream(env_id: str):
    module = make_module(env=EnvConfig(env_id, num_envs=2))
    module.configure_model()

    def streams() -> tuple[Any, ...]:
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            module.exploration_generator.get_state().tolist(),
        )

    before = streams()
    measure(module)
    assert streams() == before


SIZES = RunSizes(
    capacity=1_000_000,
    filled=1_000_000,
    row_bytes=10_000,
    in_files=False,
    clip_bytes=300_000,
    clip_rows=31,
    beside_bytes=100.0,
    network_bytes=4_000_000,
)  # 9.3 GiB of rows, 9.0 of clips, 0.1 beside them


@contextmanager
def machine(
    monkeypatch: pytest.MonkeyPatch, memory_gib: float = 64, free_gib: float = 32, disk_gib: float = 100
) -> Iterator[None]:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage("/")._replace(free=int(disk_gib * GIB))
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(preflight, "memory_bytes", lambda: int(memory_gib * GIB))
        patch.setattr(preflight, "free_memory_bytes", lambda: int(free_gib * GIB))
        yield


@pytest.mark.parametrize(
    ("in_files", "limits", "status", "says"),
    [
        (False, {}, "ok", "18.4 GiB in memory (32.0 GiB free of 64.0 GiB)"),
        (False, {"memory_gib": 16, "free_gib": 8}, "fail", "replay.storage=memmap"),
        (False, {"free_gib": 8}, "warn", "or stop what else runs here"),
        (True, {"memory_gib": 16, "free_gib": 12}, "ok", "9.3 GiB of it in files in"),
        (True, {"memory_gib": 8}, "fail", "lower replay.capacity"),
        (True, {"disk_gib": 5}, "fail", "replay.scratch_dir"),
    ],
)
def test_a_buffer_is_judged_by_memory_and_by_the_disk_of_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_files: bool, limits: dict[str, Any], status: str, says: str
):
    with machine(monkeypatch, **limits):
        check = buffer_check(replace(SIZES, in_files=in_files), tmp_path)
    assert check.status == status
    assert says in f"{check.found} {check.advice}"


@pytest.mark.parametrize(
    ("settings", "limits", "status", "says"),
    [
        ({}, {"free_gib": 60}, "ok", "18.4 GiB at the end"),
        ({}, {"disk_gib": 10}, "fail", "checkpoint.save_replay=false"),
        ({"save_replay": False}, {"disk_gib": 10}, "ok", "11.4 MiB at the end, 0 B of it replay"),
        ({}, {"disk_gib": 30, "free_gib": 60}, "warn", "run_dir on a larger disk"),
        ({"keep": 5}, {"free_gib": 60}, "warn", "5 kept"),
        ({"reserved": 90 * GIB}, {"free_gib": 60}, "fail", "10.0 GiB free"),
        ({}, {"memory_gib": 32}, "fail", "saving copies the replay, 36.8 GiB in memory in all of 32.0 GiB"),
        ({}, {"free_gib": 20}, "warn", "saving copies the replay"),
    ],
)
def test_a_checkpoint_is_judged_by_the_disk_and_by_the_copy_that_saving_takes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    limits: dict[str, Any],
    status: str,
    says: str,
):
    with machine(monkeypatch, **limits):
        check = checkpoint_check(SIZES, tmp_path, **({"save_replay": True, "keep": 1} | settings))
    assert check.status == status
    assert says in f"{check.found} {check.advice}"


def test_amounts_are_written_for_the_eye():
    assert [amount(size) for size in (12, 2048, 3.5 * 2**20, 2000 * GIB)] == [
        "12 B",
        "2.0 KiB",
        "3.5 MiB",
        "2,000.0 GiB",
    ]


# Frames


def test_frames_beyond_what_the_scorer_takes_are_refused():
    renderer = make_renderer(DOORKEY)
    module = make_module()
    module.configure_model()
    snapshots = measure(module)[1]
    assert frame_check(SleepingScorer(), renderer, snapshots).found.startswith("40 × 40 pixels")

    class Careless:
        name = "careless"

        def render(self, snapshots: Any, frame_size: int | None = None) -> Any:
            return renderer.render(snapshots)

    check = frame_check(ChoosyScorer(), Careless(), snapshots)
    assert check.status == "fail"
    assert "40 × 40 pixels, of 24 that scorer 'choosy' takes" in check.found


def test_frames_that_cannot_be_drawn_so_small_are_refused():
    class Tiny(SleepingScorer):
        frame_size = 2

    module = make_module()
    module.configure_model()
    check = frame_check(Tiny(), make_renderer(DOORKEY), measure(module)[1])
    assert check.status == "fail"
    assert "cannot be drawn" in check.found


# What the scorer knows


def objections(scorer: Scorer, env: EnvConfig) -> list[str]:
    module = make_module(env=env)
    module.configure_model()
    snapshots = measure(module)[1]
    return [check.found for check in environment_checks(scorer, env.id, make_renderer(env), snapshots)]


@pytest.mark.parametrize("env_id", ["MiniGrid-DoorKey-5x5-v0", "MiniGrid-Empty-5x5-v0"])
def test_a_world_that_a_scorer_knows_is_no_matter(env_id: str):
    env = EnvConfig(env_id, num_envs=2)
    for scorer in (MilestonesScorer(), SpritesScorer(), SpritesScorer(tile_size=8), SleepingScorer()):
        assert objections(scorer, env) == []


@pytest.mark.parametrize(
    ("scorer", "settings", "says"),
    [
        (
            SpritesScorer(),
            {"id": "CartPole-v1"},
            "tiles of 8 or more pixels, and sees no floor of them in frames of 42",
        ),
        (SpritesScorer(), {"tile_size": 7}, "frames of 35 × 35 pixels"),
        (SpritesScorer(tile_size=16), {}, "tiles of 16 pixels"),
        (SpritesScorer(tile_size=8), {"tile_size": 16}, "tiles of 8 pixels"),
        (MilestonesScorer(), {"id": "CartPole-v1"}, "this one's names none"),
    ],
)
def test_a_world_that_a_scorer_cannot_read_is_told_with_both_names(scorer: Scorer, settings: dict[str, Any], says: str):
    env = EnvConfig(**({"id": "MiniGrid-DoorKey-5x5-v0", "num_envs": 2} | settings))
    (found,) = objections(scorer, env)
    assert found.startswith(f"scorer {scorer.name!r} cannot judge {env.id}: ")
    assert says in found


def test_a_scorer_that_does_not_know_the_world_is_refused_before_training(tmp_path: Path):
    module = make_module(env=EnvConfig("CartPole-v1", num_envs=8))
    with pytest.raises(PreflightError) as raised:
        fit(tmp_path, module, MilestonesScorer())
    assert module.env_steps == 0
    message = str(raised.value)
    assert "\n" not in message
    assert "scorer 'milestones' cannot judge CartPole-v1" in message
    assert "configs/replay/uniform.yaml" in message


def test_a_scorer_that_needs_every_frame_is_refused_thinned_clips_before_training(tmp_path: Path):
    module = make_module()
    with pytest.raises(PreflightError, match=r"clips: scorer 'sprites' reads .*frames_per_clip=4 leaves"):
        fit(tmp_path, module, SpritesScorer(), frames_per_clip=4)
    assert module.env_steps == 0


# GPU


@pytest.mark.parametrize(
    ("free_gib", "status", "says"), [(8, "ok", "needs 4.0 GiB"), (3, "fail", "but 3.0 of 16.0 GiB")]
)
def test_a_scorer_is_judged_by_the_free_memory_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, status: str, says: str
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small Card")
    scorer = SleepingScorer()
    assert gpu_checks(scorer) == []  # it does not say what it needs
    scorer.memory_bytes = 4 * GIB
    (check,) = gpu_checks(scorer)
    assert check.status == status
    assert says in check.found


@pytest.mark.gpu
def test_a_learner_on_the_gpu_is_told_of_a_scorer_that_does_not_fit_beside_it(tmp_path: Path):
    module = make_module()
    module.configure_model()
    module.renderer = make_renderer(DOORKEY)
    scorer = SleepingScorer()
    scorer.memory_bytes = torch.cuda.mem_get_info()[1] + 1
    checks = {check.name: check for check in Preflight(module.to("cuda"), scorer, tmp_path).look_ahead()}
    assert checks["GPU"].status == "fail"


# In a run


def test_a_run_that_cannot_fit_is_refused_with_the_numbers_unless_it_is_told_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with machine(monkeypatch, memory_gib=1e-5):
        module = make_module()
        with pytest.raises(PreflightError) as raised:
            fit(tmp_path, module, MilestonesScorer())
        assert module.env_steps == 0
        assert module.scoring is None
        message = str(raised.value)
        assert "\n" not in message
        assert "replay.storage=memmap" in message
        assert "of 10.5 KiB" in message
        report = json.loads((tmp_path / "preflight" / "preflight.json").read_text())
        assert check_of(report, "replay buffer")["status"] == "fail"
        assert fit(tmp_path / "other", module := make_module(), MilestonesScorer(), preflight=False) == {}
    assert module.env_steps == 1280


def test_a_preflight_that_fails_itself_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "preflight").write_text("a file where the folder should be")
    module = make_module()
    fit(tmp_path, module, MilestonesScorer())
    assert module.env_steps == 1280
    assert "preflight cannot be written" in caplog.text

    def broken(module: DQN) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(preflight, "measure", broken)
    module = make_module()
    fit(tmp_path, module, MilestonesScorer())
    assert module.env_steps == 1280
    assert "preflight: could not look ahead (KeyError: 'no such thing')" in caplog.text


def test_a_missing_scoring_server_is_asked_for_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    scorer = RemoteScorer("http://127.0.0.1:1", wait_s=0.0)
    with caplog.at_level(logging.INFO), pytest.raises(ScorerError, match="no scoring server is there"):
        fit(tmp_path, make_module(), scorer)
    assert caplog.text.count("asking http://127.0.0.1:1 who scores") == 1
    assert "could not look ahead" not in caplog.text


def test_a_sync_run_is_the_same_with_and_without(tmp_path: Path, quick_watch: None):
    def end(name: str, preflight: bool) -> tuple[Any, ...]:
        module = make_module(env_steps=2560)
        report = fit(tmp_path / name, module, MilestonesScorer(), backend="sync", preflight=preflight)
        assert bool(report) == preflight
        weights = torch.cat([value.flatten().double() for value in module.state_dict().values()])
        columns = {key: value.double().nan_to_num(-9).tolist() for key, value in module.buffer.columns.items()}
        counts = vars(module.scoring.meter.counts)
        streams = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        return weights.tolist(), columns, counts, streams

    assert end("with", True) == end("without", False)


def test_a_quick_scorer_keeps_up_and_its_best_clip_is_kept_with_the_prompt(
    tmp_path: Path, quick_watch: None, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "vlmrb.preflight")
    module = make_module(env_steps=6400)
    report = fit(tmp_path, module, SleepingScorer())
    check = check_of(report, "scorer")
    assert check["status"] == "ok"
    assert "100% of the clips get a score" in check["found"]
    speed = report["speed"]
    assert speed["can_clips_per_s"] > speed["need_clips_per_s"] > 0
    assert speed["clips_per_s"] == pytest.approx(speed["env_steps_per_s"] / 7, rel=0.3)  # L − 1 rows a clip
    assert f"preflight: scorer: {check['found']}" in caplog.text
    assert report["clip"]["prompt"] == SleepingScorer.prompt
    with Image.open(tmp_path / "preflight" / "clip.gif") as gif:
        assert gif.n_frames > 1
        assert gif.height > gif.width  # the frames, and the prompt's lines above them


@pytest.mark.slow
def test_the_expected_share_is_what_a_slow_scorer_then_reaches(tmp_path: Path, quick_watch: None):
    module = make_module(env_steps=BLOCK * 400)
    report = fit(tmp_path, module, SleepingScorer(0.02), max_waiting=16, batch_clips=8, cache=None)
    check, speed = check_of(report, "scorer"), report["speed"]
    assert speed["scorer_clips_per_s"] == pytest.approx(50, rel=0.2)
    assert speed["batch"] == pytest.approx(8, abs=0.5)
    assert check["status"] == "warn"
    assert "scoring.batch_clips, now 8" in check["advice"]
    assert speed["expected_share"] < 0.8
    assert module.scoring.stats()["share_scored"] == pytest.approx(speed["expected_share"], abs=0.2)


def test_a_run_without_a_scorer_is_checked_for_its_sizes(tmp_path: Path):
    report = fit(tmp_path, make_module(vlm=None, lam_max=0.0), None)
    assert [check["name"] for check in report["checks"]] == ["replay buffer"]


def test_a_resumed_run_is_not_looked_at_again(tmp_path: Path):
    fit(tmp_path, make_module(), MilestonesScorer(), checkpoint=True, backend="sync")
    shutil.rmtree(tmp_path / "preflight")
    module = make_module(env_steps=2560)
    assert fit(tmp_path, module, MilestonesScorer(), checkpoint=True, resume=True, backend="sync") == {}
    assert module.env_steps == 2560


# What is said about speed


def speed(**changes: Any) -> Speed:
    usual = {"env_steps_per_s": 3100.0, "clips_per_s": 100.0, "new_share": 1.0, "scorer_clips_per_s": 50.0}
    rest = {"handover_clips_per_s": 1000.0, "batch": 16.0, "busy_share": 1.0, "seconds": 5.0}
    return Speed(**(usual | rest | changes))


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.5),
        ({"scorer_clips_per_s": 200.0}, 1.0),
        ({"new_share": 0.5}, 1.0),  # half of them are known already
        ({"new_share": 0.8, "scorer_clips_per_s": 20.0}, 0.4),  # a fifth is known, a quarter of the rest is scored
        ({"scorer_clips_per_s": 200.0, "handover_clips_per_s": 30.0}, 0.3),
        ({"new_share": 0.0, "scorer_clips_per_s": 0.0}, 1.0),
        ({"handover_clips_per_s": None}, 0.5),
        ({"scorer_clips_per_s": 200.0, "budget_clips_per_s": 20.0}, 0.2),
        ({"new_share": 0.5, "budget_clips_per_s": 5.0}, 0.55),  # half of them are known, a tenth of the rest is allowed
        ({"budget_clips_per_s": 80.0}, 0.5),  # the scorer is slower than its budget
    ],
)
def test_expected_shares_by_hand(changes: dict[str, Any], share: float):
    assert speed(**changes).expected_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("changes", "settings", "status", "says"),
    [
        ({"scorer_clips_per_s": 500.0}, {}, "ok", "100% of the clips get a score"),
        ({}, {"duty_cycle": 0.5}, "warn", "a higher scoring.duty_cycle (now 0.5)"),
        ({}, {}, "warn", "replay.clip_length"),
        ({"scorer_clips_per_s": 500.0, "handover_clips_per_s": 30.0}, {}, "warn", "lower training.frames_per_batch"),
        ({"busy_share": 0.7}, {"backend": "sync"}, "ok", "training waits for every score, 70% of its time"),
    ],
)
def test_a_scorer_that_does_not_keep_up_is_named_with_what_helps(
    changes: dict[str, Any], settings: dict[str, Any], status: str, says: str
):
    check = speed_check(speed(**changes), ScoringConfig(**settings))
    assert check.status == status
    assert says in f"{check.found} {check.advice}"


@pytest.mark.parametrize(
    ("changes", "settings", "status", "says"),
    [
        ({}, {}, "ok", "scoring.budget allows 20.0 clips/s over the run; 20% of the clips get a score"),
        ({"scorer_clips_per_s": 10.0}, {}, "warn", "allows 20.0 clips/s over the run; 10% of the clips get a score"),
        ({"clips_per_s": 21.0}, {}, "ok", "in batches of 16.0; 95% of the clips get a score"),
        ({}, {"backend": "sync"}, "ok", "over the run; training waits for every score, 100% of its time; 20% of the"),
        (
            {"scorer_clips_per_s": 10.0},
            {"max_delay_env_steps": 1000},
            "ok",
            "20% of the clips get a score, and training waits for it (scoring.max_delay_env_steps): about 1,550 env st",
        ),
    ],
)
def test_a_budget_is_taken_into_account(changes: dict[str, Any], settings: dict[str, Any], status: str, says: str):
    budget = BudgetConfig(clips_per_s=20.0, clips_per_env_step=1.0)
    check = speed_check(speed(**changes).within(budget, 100_000), ScoringConfig(budget=budget, **settings))
    assert check.status == status
    assert says in check.found


def test_without_a_budget_training_that_waits_is_slowed_to_the_scorers_pace():
    check = speed_check(speed(), ScoringConfig(max_delay_env_steps=1000))
    assert "100% of the clips get a score, and training waits" in check.found
    assert "about 1,550 env steps/s" in check.found
