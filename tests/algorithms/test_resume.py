"""2N env steps equal N, a checkpoint, and N more: bit for bit, whatever the replay scheme, and twice in a row."""

from __future__ import annotations

import csv
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from vlmrb.algorithms import DQN, IQN, SAC, TD3, OffPolicyModule, TrainingConfig
from vlmrb.callbacks.evaluation import EvaluationCallback
from vlmrb.callbacks.monitoring import MonitoringCallback
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.loggers import AppendingCSVLogger
from vlmrb.replay.config import AgeConfig, ImportanceConfig, ReplayConfig, TDConfig, VLMConfig
from vlmrb.replay.schemes import AERConfig, EROConfig, HERConfig, RankConfig, ReLoConfig, RulesConfig, ScoreRewardConfig
from vlmrb.scoring.controls import Shuffled
from vlmrb.scoring.milestones import MilestonesScorer
from vlmrb.scoring.sprites import SpritesScorer

pytestmark = pytest.mark.slow

SEGMENT = 480  # env steps between two interruptions
CAPACITY = 320  # rows: the buffer has wrapped at every interruption
RULES = Path(__file__).parents[2] / "configs/rules/doorkey.json"
SCHEMES = {
    "uniform": ReplayConfig(vlm=None, lam_max=0.0),
    "per": ReplayConfig(vlm=None, td=TDConfig(0.6, 1e-6), lam_max=1.0, importance_weights=ImportanceConfig()),
    "vlm": ReplayConfig(vlm=VLMConfig()),
    "vlm_td": ReplayConfig(vlm=VLMConfig(threshold=None, unscored=0.05), td=TDConfig()),
    "rules": ReplayConfig(
        vlm=None,
        td=TDConfig(0.6, 1e-6),
        rules=RulesConfig(str(RULES)),
        lam_max=1.0,
        importance_weights=ImportanceConfig(),
    ),
    "aer": ReplayConfig(
        vlm=None, td=TDConfig(), lam_max=0.5, aer=AERConfig(3.0, 1.0, "features"), importance_weights=ImportanceConfig()
    ),
    "ero": ReplayConfig(vlm=None, lam_max=1.0, ero=EROConfig(0.1, min_episodes=2, batch_size=64)),
    "vlm_td_age": ReplayConfig(vlm=VLMConfig(threshold=None), td=TDConfig(), age=AgeConfig(200.0)),
    "rank": ReplayConfig(vlm=None, rank=RankConfig(refresh_fraction=0.2), lam_max=1.0),
    "relo": ReplayConfig(vlm=None, relo=ReLoConfig(), lam_max=1.0, stratified=True),
    "score_reward": ReplayConfig(vlm=None, lam_max=0.0, score_reward=ScoreRewardConfig(0.1, "shaped", 0.5)),
}
HER = ReplayConfig(vlm=None, lam_max=0.0, her=HERConfig())


DISCRETE = {"target_update_interval": 7, "epsilon_end": 0.3, "epsilon_fraction": 0.1}
ALGORITHMS: dict[str, tuple[type[OffPolicyModule], str, dict[str, Any]]] = {
    "dqn": (DQN, "MiniGrid-DoorKey-5x5-v0", DISCRETE),
    "iqn": (IQN, "MiniGrid-DoorKey-5x5-v0", DISCRETE),
    "sac": (SAC, "PointReach-6-v0", {}),
    "td3": (TD3, "PointReach-6-v0", {}),
}


class StopAt(Callback):
    """Sends the process a signal at given env steps, as a scheduler would."""

    def __init__(self, env_steps: int | None) -> None:
        self.env_steps = env_steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if pl_module.env_steps == self.env_steps:
            os.kill(os.getpid(), signal.SIGTERM)


class Run(NamedTuple):
    module: OffPolicyModule
    trainer: Trainer
    checkpoint: ReplayCheckpoint

    def state(self) -> dict[str, Any]:
        """Everything that the run's future depends on; what is measured in seconds left out."""
        module = self.module
        scoring = None if module.scoring is None else module.scoring.state_dict()
        if scoring is not None:
            scoring.pop("meter")
        return {
            "parameters": dict(module.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "buffer": module.buffer.state_dict(),
            "scoring": scoring,
            "collector": module._collector.state_dict(),
            "generators": {name: generator.get_state() for name, generator in module.generators().items()},
            "torch": torch.get_rng_state(),
            "numpy": list(np.random.get_state()),
            "counters": [module.env_steps, module.grad_steps, module._due, module._learning_from, module.gauges()],
            "next draws": [module.buffer.sample().to_dict() for _ in range(3)],
        }


def train(
    run_dir: Path,
    scheme: str,
    *,
    stop_at: int | None = None,
    resume: bool = False,
    total: int = 3 * SEGMENT,
    scorer: Any = "milestones",
    control: Any = None,
    monitor: bool = False,
    cache: str | None = "memory",
    backend: str = "sync",
    others: Sequence[Callback] = (),
    algorithm: str = "dqn",
    env_id: str | None = None,
    model: dict[str, Any] | None = None,
    **checkpoint: Any,
) -> Run:
    torch.manual_seed(3)
    np.random.seed(3)
    chosen = HER if scheme == "her" else SCHEMES[scheme]
    n_steps = 3 if chosen.her is None else 1
    replay = ReplayConfig(
        **{**vars(chosen), "capacity": CAPACITY, "batch_size": 16, "clip_length": 8, "n_steps": n_steps}
    )
    module_class, usual_env, settings = ALGORITHMS[algorithm]
    module = module_class(
        EnvConfig(env_id or usual_env, num_envs=4, max_steps=70),
        TrainingConfig(
            total_env_steps=total,
            learning_starts=64,
            frames_per_batch=32,
            replay_ratio=0.17,
        ),
        replay,
        seed=3,
        hidden_sizes=(16,),
        **(settings | (model or {})),
    )
    callback = ReplayCheckpoint(**{"every_n_env_steps": 10**9, **checkpoint})
    scorers = {"milestones": MilestonesScorer(), "sprites": SpritesScorer(), None: None}
    callbacks = [ScoringCallback(scorers[scorer], control, cache, backend=backend), StopAt(stop_at), *others, callback]
    if monitor:
        callbacks += [
            EvaluationCallback(every_n_env_steps=200, episodes=2),
            MonitoringCallback(every_n_env_steps=300, clips_every_n_env_steps=None),
        ]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=AppendingCSVLogger(run_dir) if monitor else False,
        default_root_dir=run_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, ckpt_path=str(run_dir / "checkpoints" / "last.ckpt") if resume else None)
    return Run(module, trainer, callback)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Returns the paths at which two nested states differ."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        same = same and torch.equal(a.isnan(), b.isnan())
        return [] if same else [path]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return [] if np.array_equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {a.keys() ^ b.keys()}"]
        return [line for key in a for line in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{path}/{i}")]
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return []
    return [] if a == b else [f"{path}: {a!r} {b!r}"]


def is_torn(run: Run) -> bool:
    """Whether the run was interrupted within episodes, within clips, with n-step rows held back and ε > 0."""
    streams = run.module.buffer._stamper.streams
    assert streams is not None
    return bool(
        (streams._episode >= 0).any()
        and (streams._position > 0).any()
        and run.module.buffer.state_dict()["look_back"] is not None
        and run.module.gauges()["epsilon"] > 0
        and run.module.env_steps > CAPACITY == len(run.module.buffer)
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_interrupted_twice_equals_one_that_was_not(tmp_path: Path, scheme: str) -> None:
    scorer = {"uniform": None, "vlm": "sprites"}.get(scheme, "milestones")
    whole = train(tmp_path / "whole", scheme, scorer=scorer)
    for stop_at in (SEGMENT, 2 * SEGMENT, None):
        part = train(tmp_path / "parts", scheme, stop_at=stop_at, resume=stop_at != SEGMENT, scorer=scorer)
        if stop_at is not None:
            assert part.checkpoint.exit_code == 143
            assert part.module.env_steps == stop_at
            assert is_torn(part)
    assert whole.checkpoint.exit_code == part.checkpoint.exit_code == 0
    assert whole.module.grad_steps > 200
    if scheme.startswith("vlm"):  # the prioritised part had something to draw
        assert (whole.module.buffer.columns["score"] > 0.5).any()
        assert whole.module.buffer.stats()["uniform_fallbacks"] < whole.module.grad_steps / 2
    assert differences(whole.state(), part.state()) == []


@pytest.mark.parametrize("scheme", ["uniform", "per", "vlm", "vlm_td"])
@pytest.mark.parametrize("algorithm", ["iqn", "sac", "td3"])
def test_every_algorithm_resumes_exactly_under_every_scheme(tmp_path: Path, algorithm: str, scheme: str) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "total": 2 * SEGMENT}
    settings["scorer"] = "milestones" if scheme.startswith("vlm") else None
    whole = train(tmp_path / "whole", scheme, **settings)
    train(tmp_path / "parts", scheme, stop_at=SEGMENT, **settings)
    resumed = train(tmp_path / "parts", scheme, resume=True, **settings)
    assert whole.module.grad_steps == 157  # 29 blocks of 32 · 0.17, from env step 64 on
    assert differences(whole.state(), resumed.state()) == []
    agent = OffPolicyModule.from_checkpoint(tmp_path / "parts" / "checkpoints" / "last.ckpt")
    observation = next(iter(resumed.module.buffer.sample()["observation"].split(4)))
    assert torch.equal(agent.act(observation), resumed.module.act(observation))


def test_hindsight_resumes_exactly(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "sac", "total": 2 * SEGMENT, "scorer": None}
    whole = train(tmp_path / "whole", "her", **settings)
    train(tmp_path / "parts", "her", stop_at=SEGMENT, **settings)
    resumed = train(tmp_path / "parts", "her", resume=True, **settings)
    assert differences(whole.state(), resumed.state()) == []
    assert whole.module.buffer.gauges() == resumed.module.buffer.gauges() != {}


@pytest.mark.parametrize("cache", ["memory", None])
def test_a_control_experiment_resumes_exactly(tmp_path: Path, cache: str | None) -> None:
    def part(folder: str, **settings: Any) -> Run:  # little exploration: many clips are alike, and come from the cache
        control = Shuffled(memory=200)
        return train(tmp_path / folder, "vlm_td", control=control, cache=cache, model={"epsilon_end": 0.05}, **settings)

    whole = part("whole")
    part("parts", stop_at=SEGMENT)
    resumed = part("parts", resume=True)
    assert whole.module.scoring is not None
    assert (whole.module.scoring.stats()["cache_hits"] > 20) == (cache is not None)
    assert differences(whole.state(), resumed.state()) == []


def test_the_metrics_of_an_interrupted_run_are_those_of_a_whole_one(tmp_path: Path) -> None:
    def metrics(run_dir: Path, name: str) -> list[dict[str, str]]:
        with open(run_dir / name) as file:
            rows = csv.DictReader(file)
            return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]

    train(tmp_path / "whole", "vlm", monitor=True, total=2 * SEGMENT, scorer="milestones")
    train(tmp_path / "parts", "vlm", monitor=True, total=2 * SEGMENT, scorer="milestones", stop_at=SEGMENT)
    train(tmp_path / "parts", "vlm", monitor=True, total=2 * SEGMENT, scorer="milestones", resume=True)
    for name in ("metrics.csv", "evaluations.csv"):
        assert differences(metrics(tmp_path / "parts", name), metrics(tmp_path / "whole", name)) == []


class GradSteps(Callback):
    """Notes the gradient steps after each batch."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.after.append(pl_module.grad_steps)


@pytest.mark.parametrize("how", ["saved without", "ignored"])
def test_without_the_side_car_the_buffer_fills_up_before_learning_goes_on_and_nothing_bursts(
    tmp_path: Path, how: str
) -> None:
    stopped = train(tmp_path, "vlm", stop_at=2 * SEGMENT, save_replay=how != "saved without")
    counter = GradSteps()
    resumed = train(tmp_path, "vlm", resume=True, ignore_replay=how == "ignored", others=[counter])
    assert resumed.module.resumed_without_replay
    config = resumed.module.training_config
    steps = np.diff([stopped.module.grad_steps, *counter.after])
    filling = config.learning_starts // config.frames_per_batch - 1  # learning_starts env steps are there by the next
    assert (steps[:filling] == 0).all()
    assert (steps[filling:] > 0).all()
    assert steps.max() <= math.ceil(config.frames_per_batch * config.replay_ratio)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_with_a_scorer_beside_the_learner_no_clip_is_lost_by_resuming(tmp_path: Path, backend: str) -> None:
    for stop_at in (SEGMENT, 2 * SEGMENT, None):
        part = train(tmp_path, "vlm", backend=backend, stop_at=stop_at, resume=stop_at != SEGMENT)
        service = part.module.scoring
        assert service is not None
        stats = service.stats()
        emitted = sum(stats[name] for name in ("scored", "waiting", "in_flight", "stale", "dropped"))
        assert stats["emitted"] == emitted
        assert stats["emitted"] == part.module.buffer.clips.emitted - len(part.module.buffer.clips._completed)
    assert stats["emitted"] > 100


def test_environments_that_cannot_be_restored_begin_new_episodes_and_no_clip_mixes_two(tmp_path: Path) -> None:
    env_id = "MiniGrid-Empty-5x5-v0"  # stepped through Gymnasium
    stopped = train(tmp_path, "vlm", env_id=env_id, scorer="sprites", stop_at=SEGMENT)
    assert is_torn(stopped)
    resumed = train(tmp_path, "vlm", env_id=env_id, scorer="sprites", resume=True)
    buffer, service = resumed.module.buffer, resumed.module.scoring
    assert buffer.clips is not None
    assert service is not None
    assert resumed.module.env_steps == 3 * SEGMENT
    assert service.stats()["emitted"] == service.stats()["scored"] == buffer.clips.emitted
    assert (
        resumed.module.grad_steps == train(tmp_path / "whole", "vlm", env_id=env_id, scorer="sprites").module.grad_steps
    )
