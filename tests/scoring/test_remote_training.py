"""Real training beside servers that fail in each of the ways they can: it goes on, and no clip gets lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from servers import Reply, Scripted, free_port, serving, wait_for

from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.callbacks.scoring import ScoringCallback
from vlmrb.envs import EnvConfig
from vlmrb.replay.config import ReplayConfig
from vlmrb.scoring.remote import RemoteScorer
from vlmrb.scoring.sprites import SpritesScorer
from vlmrb.serving.wire import SCHEMA, Identity, unpack

pytestmark = pytest.mark.slow

SPRITES = {"class_path": "vlmrb.scoring.sprites.SpritesScorer"}
PATIENT = {"wait_s": 60.0, "deadline_s": 50.0, "timeout_s": 20.0, "backoff_s": 0.05, "breaker_s": 0.2}


class Events(Callback):
    """Does something once some env steps are collected, and waits for the scores at the end."""

    def __init__(self, events: Mapping[int, Callable[[DQN], Any]], drain_s: float) -> None:
        self.events = dict(events)
        self.drain_s = drain_s
        self.drained = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for step in [step for step in self.events if pl_module.env_steps >= step]:
            check_counts(pl_module)
            self.events.pop(step)(pl_module)
        check_counts(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert not self.events
        self.drained = pl_module.scoring.drain(self.drain_s)


def fit(
    folder: Path,
    scorer: RemoteScorer,
    events: Mapping[int, Callable[[DQN], Any]],
    drain_s: float = 60.0,
    **settings: Any,
) -> DQN:
    """Trains for 2,560 env steps; returns the module with its buffer and its service."""
    torch.manual_seed(0)
    module = DQN(
        env=EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=8),
        training=TrainingConfig(total_env_steps=2560, learning_starts=128, frames_per_batch=64),
        replay=ReplayConfig(capacity=4000, batch_size=16, clip_length=8),
        hidden_sizes=[16],
    )
    happening = Events(events, drain_s)
    callback = ScoringCallback(scorer, **{"batch_clips": 8, "backoff_s": 0.1, **settings})
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback, happening],
    )
    trainer.fit(module)
    assert module.env_steps == 2560
    assert module.grad_steps > 0
    module.drained = happening.drained
    return module


def check_counts(module: DQN) -> dict[str, float]:
    stats = module.scoring.stats()
    assert stats["emitted"] == sum(stats[name] for name in ("scored", "waiting", "in_flight", "stale", "dropped"))
    return stats


def check_scores(module: DQN) -> int:
    """Checks that all scores that were written are the right ones; returns how many clips have one."""
    table = module.buffer.clips.table()
    known = ~np.isnan(table["score"])
    if not known.any():
        return 0
    clips = module.buffer.clips.batch(table["clip_id"][known].tolist(), module.renderer)
    np.testing.assert_array_equal(table["score"][known], SpritesScorer().score(clips))
    return int(known.sum())


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_a_worker_killed_in_the_middle_costs_no_score(tmp_path, backend):
    with serving(tmp_path, SPRITES, workers=2) as server:
        victims: list[int] = []

        def kill_one(module: DQN) -> None:
            victims.append(server.workers()[0])
            os.kill(victims[0], signal.SIGKILL)

        module = fit(tmp_path, RemoteScorer(server.url, **PATIENT), {640: kill_one}, backend=backend)
        stats = check_counts(module)
        assert module.drained
        assert stats["scored"] == stats["emitted"] - stats["stale"] > 200
        assert stats["dropped"] == stats["restarts"] == 0
        assert check_scores(module) > 200
        wait_for(lambda: server.healthy(2) and victims[0] not in server.workers())


def test_a_server_that_is_restarted_scores_later_what_came_in_between(tmp_path):
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        first.enter_context(serving(tmp_path, SPRITES, port=port))

        def scored_before_it_stops(module: DQN) -> None:
            assert module.scoring.drain(30)
            first.close()

        def restart(module: DQN) -> None:
            assert check_counts(module)["waiting"] > 0
            stack.enter_context(serving(tmp_path, SPRITES, port=port, wait=False))

        events = {640: scored_before_it_stops, 1600: restart}
        module = fit(tmp_path, RemoteScorer(f"http://127.0.0.1:{port}", **PATIENT), events)
        stats = check_counts(module)
        assert module.drained
        assert stats["scored"] == stats["emitted"] - stats["stale"]
        assert stats["dropped"] == 0
        assert check_scores(module) > 200


def test_a_server_that_comes_back_with_another_scorer_writes_no_score(tmp_path):
    port = free_port()
    other = {"class_path": "vlmrb.scoring.constant.ConstantScorer"}
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        first.enter_context(serving(tmp_path, SPRITES, port=port))
        written: list[float] = []

        def replace(module: DQN) -> None:
            assert module.scoring.drain(30)
            written.append(check_counts(module)["scored"])
            first.close()
            stack.enter_context(serving(tmp_path, other, port=port))

        hasty = {**PATIENT, "deadline_s": 1.0, "timeout_s": 1.0, "wait_s": 1.0}
        module = fit(
            tmp_path, RemoteScorer(f"http://127.0.0.1:{port}", **hasty), {640: replace}, drain_s=60, cache=None
        )
        stats = check_counts(module)
        assert stats["scored"] == written[0] > 0
        assert stats["dropped"] == stats["emitted"] - stats["scored"] - stats["stale"] - stats["waiting"] > 0
        assert check_scores(module) == written[0]


def misbehaving(seed: int) -> Callable[[str, bytes, Mapping[str, str]], Reply | None]:
    """A server of the sprites scorer that does something else half of the time."""
    rng = random.Random(seed)
    scorer = SpritesScorer()
    described = vars(Identity(scorer.name, scorer.version, "", scorer.needs, scorer.frame_size))
    first = time.monotonic()

    def script(path: str, body: bytes, headers: Mapping[str, str]) -> Reply | None:
        if path == "/info":
            return 200, json.dumps({"schema": SCHEMA, "scorer": described, "max_request_bytes": 1 << 20}).encode()
        whim = rng.choice(["good"] * 6 + ["500", "503", "409", "garbage", "nan", "short", "other", "slow", "hang up"])
        scores = scorer.score(unpack(body, 1 << 24)[1]).tolist()
        answer = {"schema": SCHEMA, "scorer": described, "scores": scores}
        if whim == "slow":
            time.sleep(0.4)
        changes: dict[str, dict[str, Any]] = {
            "nan": {"scores": [float("nan")] * len(scores)},
            "short": {"scores": scores[1:]},
            "other": {"scorer": {**described, "version": "0"}, "scores": [0.123] * len(scores)},
        }
        replies: dict[str, Reply | None] = {
            "500": (500, b"boom"),
            "503": (503, b"busy"),
            "409": (409, b"another scorer"),
            "garbage": (200, b"<html>welcome</html>"),
            "hang up": None,
        }
        assert time.monotonic() - first < 300
        return replies.get(whim, (200, json.dumps({**answer, **changes.get(whim, {})}).encode()))

    return script


def test_errors_garbage_and_delays_of_two_servers_never_put_a_wrong_score_into_the_buffer(tmp_path):
    with Scripted(misbehaving(0)) as first, Scripted(misbehaving(1)) as second:
        hasty = {**PATIENT, "timeout_s": 0.3, "breaker_s": 0.1, "backoff_s": 0.01, "deadline_s": 3.0}
        module = fit(tmp_path, RemoteScorer([first.url, second.url], **hasty), {}, backend="thread", cache=None)
        stats = check_counts(module)
        assert module.drained
        assert stats["scored"] + stats["dropped"] + stats["stale"] == stats["emitted"]
        assert check_scores(module) > 150
        assert stats["scorer_failed_requests"] > 10


def test_a_server_that_never_answers_leaves_replay_uniform_and_training_going(tmp_path):
    with Scripted(lambda path, *_: misbehaving(0)(path, b"", {}) if path == "/info" else (500, b"boom")) as server:
        hasty = {**PATIENT, "timeout_s": 0.5, "deadline_s": 0.5, "breaker_s": 0.05, "backoff_s": 0.01}
        module = fit(tmp_path, RemoteScorer(server.url, **hasty), {}, drain_s=60, backend="thread", max_waiting=32)
        stats = check_counts(module)
        assert stats["scored"] == 0
        assert stats["failures"] > 0
        assert check_scores(module) == 0
