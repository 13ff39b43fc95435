"""The callback on a module that only counts; that real runs resume exactly is tested in tests/algorithms."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from vlmrb.callbacks.checkpoint_files import REFERENCE_KEY, CheckpointError, read_reference
from vlmrb.callbacks.replay_checkpoint import ReplayCheckpoint

BATCH = 10  # env steps


class Box:
    """Something with a state: stands for the buffer, or for the scoring service."""

    def __init__(self) -> None:
        self.value = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"].shape != self.value.shape:
            raise ValueError("saved value has another shape")
        self.value = state["value"].clone()


class Counter(LightningModule):
    """Counts env steps in its weight, its buffer and its scoring queue."""

    def __init__(self, total: int, scoring: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.training_config = SimpleNamespace(total_env_steps=total)
        self.weight = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.env_steps = 0
        self.buffer = Box()
        self.scoring = Box() if scoring else None

    def train_dataloader(self) -> list[int]:
        return [BATCH] * (self.training_config.total_env_steps // BATCH)

    def training_step(self, batch: int, batch_idx: int) -> None:
        self.env_steps += BATCH
        self.weight += BATCH
        self.buffer.value += BATCH
        if self.scoring is not None:
            self.scoring.value += BATCH

    def configure_optimizers(self) -> None:
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["env_steps"] = self.env_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.env_steps = checkpoint["env_steps"]


class At(Callback):
    """Does something at given env steps."""

    def __init__(self, env_steps: int, action: Callable[[], Any]) -> None:
        self.env_steps = env_steps
        self.action = action

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if pl_module.env_steps == self.env_steps:
            self.action()


def make(
    run_dir: Path, *others: Callback, total: int = 100, scoring: bool = True, **settings: Any
) -> tuple[Counter, ReplayCheckpoint, Trainer]:
    checkpoint = ReplayCheckpoint(**settings)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[checkpoint, *others],
        logger=False,
        default_root_dir=run_dir,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    return Counter(total, scoring), checkpoint, trainer


def fit(run_dir: Path, *others: Callback, ckpt_path: Path | None = None, **settings: Any) -> Counter:
    module, _, trainer = make(run_dir, *others, **settings)
    trainer.fit(module, ckpt_path=ckpt_path)
    return module


def last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "last.ckpt"


def sidecar(run_dir: Path) -> Path:
    reference = read_reference(last(run_dir))
    assert reference is not None
    return run_dir / "checkpoints" / reference["file"]


def saved_at(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("checkpoint-*.ckpt"))


def raise_error(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# When it saves


def test_a_checkpoint_is_written_whenever_the_interval_is_crossed(tmp_path: Path) -> None:
    fit(tmp_path, every_n_env_steps=25, keep=9, save_on_end=False)
    assert saved_at(tmp_path) == [30, 50, 80, 100]


def test_a_complete_run_is_saved(tmp_path: Path) -> None:
    fit(tmp_path)
    assert saved_at(tmp_path) == [100]


def test_a_complete_run_is_not_saved_if_that_is_switched_off(tmp_path: Path) -> None:
    fit(tmp_path, save_on_end=False)
    assert saved_at(tmp_path) == []


def test_a_complete_run_can_leave_its_side_car_behind_and_an_interrupted_one_never_does(tmp_path: Path) -> None:
    fit(tmp_path, At(50, send(signal.SIGTERM)), replay_on_end=False)
    assert len(list((tmp_path / "checkpoints").glob("replay-*.pt"))) == 1
    fit(tmp_path, ckpt_path=last(tmp_path), replay_on_end=False)
    assert saved_at(tmp_path) == [100]
    assert not list((tmp_path / "checkpoints").glob("replay-*.pt"))


def test_a_run_that_another_callback_stops_is_saved(tmp_path: Path) -> None:
    module, _, trainer = make(tmp_path, At(40, lambda: setattr(trainer, "should_stop", True)))
    trainer.fit(module)
    assert saved_at(tmp_path) == [40]


def test_nothing_is_saved_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="oops"):
        fit(tmp_path, At(40, raise_error(RuntimeError("oops"))), every_n_env_steps=30)
    assert saved_at(tmp_path) == [30]


def test_it_runs_after_all_other_callbacks(tmp_path: Path) -> None:
    other = At(0, lambda: None)
    _, checkpoint, trainer = make(tmp_path, other)
    assert trainer.callbacks[-1] is checkpoint
    assert trainer.checkpoint_callbacks == [checkpoint]


def test_a_resumed_run_saves_at_the_next_crossing_only(tmp_path: Path) -> None:
    fit(tmp_path, At(50, send(signal.SIGTERM)), keep=9)
    fit(tmp_path, ckpt_path=last(tmp_path), keep=9, every_n_env_steps=40, save_on_end=False)
    assert saved_at(tmp_path) == [50, 80]


@pytest.mark.parametrize("setting", ["every_n_env_steps", "keep"])
def test_a_setting_below_one_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"checkpoint\.{setting}=0 must be at least 1"):
        ReplayCheckpoint(**{setting: 0})


# What it restores


def test_weights_buffer_and_scoring_queue_come_back(tmp_path: Path) -> None:
    fit(tmp_path, At(60, send(signal.SIGTERM)))
    module = fit(tmp_path, ckpt_path=last(tmp_path))
    assert module.env_steps == module.weight.item() == 100
    assert (module.buffer.value == 100).all()
    assert (module.scoring.value == 100).all()


def test_the_checkpoint_can_be_loaded_with_weights_only(tmp_path: Path) -> None:
    fit(tmp_path)
    assert torch.load(last(tmp_path), weights_only=True)["env_steps"] == 100
    assert torch.load(sidecar(tmp_path), weights_only=True)["schema"] == 1


def test_a_pair_can_be_moved_to_another_folder(tmp_path: Path) -> None:
    fit(tmp_path / "a", At(60, send(signal.SIGTERM)))
    shutil.move(tmp_path / "a" / "checkpoints", tmp_path / "elsewhere")
    module = fit(tmp_path / "b", ckpt_path=tmp_path / "elsewhere" / "last.ckpt")
    assert (module.buffer.value == 100).all()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3  # another run's folder is left as it was


def test_a_complete_run_goes_on_under_a_larger_budget(tmp_path: Path) -> None:
    fit(tmp_path)
    module = fit(tmp_path, ckpt_path=last(tmp_path), total=150)
    assert module.env_steps == module.weight.item() == 150


def test_resuming_a_complete_run_trains_nothing_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path)
    before = sorted((tmp_path / "checkpoints").iterdir())
    assert fit(tmp_path, ckpt_path=last(tmp_path)).env_steps == 100
    assert sorted((tmp_path / "checkpoints").iterdir()) == before


def test_a_checkpoint_that_somebody_else_saves_names_no_side_car(tmp_path: Path) -> None:
    module, _, trainer = make(tmp_path, At(60, lambda: trainer.save_checkpoint(tmp_path / "own.ckpt")))
    trainer.fit(module)
    assert torch.load(tmp_path / "own.ckpt", weights_only=True)[REFERENCE_KEY] is None


@pytest.mark.parametrize("how", ["without replay", "ignored"])
def test_without_a_side_car_the_buffer_stays_empty_and_it_says_so(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, At(60, send(signal.SIGTERM)), save_replay=how != "without replay")
    module = fit(tmp_path, ckpt_path=last(tmp_path), ignore_replay=how == "ignored")
    assert module.weight.item() == 100
    assert (module.buffer.value == 40).all()
    assert "resuming at 60 env steps without replay" in caplog.text


def test_evaluating_a_checkpoint_asks_for_no_side_car(tmp_path: Path) -> None:
    fit(tmp_path)
    sidecar(tmp_path).unlink()
    module, checkpoint, trainer = make(tmp_path)
    trainer.state.fn = TrainerFn.TESTING
    checkpoint.on_load_checkpoint(trainer, module, torch.load(last(tmp_path), weights_only=True))


def test_a_new_run_says_nothing_of_resuming(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path)
    assert "resuming" not in caplog.text


def test_scoring_that_was_switched_off_since_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, At(60, send(signal.SIGTERM)))
    module = fit(tmp_path, ckpt_path=last(tmp_path), scoring=False)
    assert (module.buffer.value == 100).all()
    assert "was saved with scoring" in caplog.text


# Side-cars that cannot be used


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_it_older(path: Path) -> None:
    """Rewrites the side-car as an older version would have written it, with a matching `.ckpt`."""
    content = torch.load(path, weights_only=True)
    torch.save({**content, "schema": 0}, path)
    content = path.read_bytes()
    reference = {"file": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    checkpoint = torch.load(path.with_name("last.ckpt"), weights_only=True)
    torch.save({**checkpoint, REFERENCE_KEY: reference}, path.with_name("last.ckpt"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "is damaged"),
        (lambda path: os.truncate(path, 100), "is damaged"),
        (Path.unlink, "is missing"),
        (make_it_older, "has schema 0, this version of vlmrb reads schema 1"),
    ],
    ids=["flipped bit", "truncated", "missing", "older schema"],
)
def test_an_unusable_side_car_is_one_line_that_says_how_to_go_on(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    fit(tmp_path, At(60, send(signal.SIGTERM)))
    damage(sidecar(tmp_path))
    files = {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    with pytest.raises(CheckpointError, match=message) as caught:
        fit(tmp_path, ckpt_path=last(tmp_path))
    assert "\n" not in str(caught.value)
    assert "--checkpoint.ignore_replay true" in str(caught.value)
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == files  # nothing destroyed
    module = fit(tmp_path, ckpt_path=last(tmp_path), ignore_replay=True)
    assert module.weight.item() == 100


def test_a_side_car_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    fit(tmp_path, At(60, send(signal.SIGTERM)))
    module, _, trainer = make(tmp_path)
    module.buffer.value = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"replay-.*does not fit this run \(ValueError: saved value has another"):
        trainer.fit(module, ckpt_path=last(tmp_path))


# Saves that fail


def test_a_full_disk_costs_the_checkpoint_but_neither_the_run_nor_the_older_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    fill = At(30, lambda: monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7)))
    module, checkpoint, trainer = make(tmp_path, fill, every_n_env_steps=20)
    trainer.fit(module)
    assert module.env_steps == 100
    assert saved_at(tmp_path) == [20]
    assert checkpoint.failed_saves == 4
    assert "no checkpoint at 40 env steps; older ones are untouched" in caplog.text
    assert "0.0 MB free" in caplog.text


def test_a_folder_gone_read_only_costs_the_checkpoint_but_neither_the_run_nor_the_older_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    module, checkpoint, trainer = make(
        tmp_path, At(30, lambda: monkeypatch.setattr(os, "replace", refuse)), every_n_env_steps=20
    )
    trainer.fit(module)
    monkeypatch.undo()
    assert checkpoint.failed_saves == 4
    assert "Read-only file system" in caplog.text
    assert (fit(tmp_path, ckpt_path=last(tmp_path)).buffer.value == 100).all()


def test_a_run_folder_that_cannot_be_written_ends_the_run_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    module, _, trainer = make(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints into .*/file/checkpoints"):
        trainer.fit(module)
    assert module.env_steps == 0


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops_at_the_end_of_the_batch(tmp_path: Path, number: int, code: int) -> None:
    module, checkpoint, trainer = make(tmp_path, At(60, send(number)))
    trainer.fit(module)
    assert checkpoint.exit_code == code
    assert module.env_steps == 60
    assert saved_at(tmp_path) == [60]


def test_a_complete_run_exits_with_zero(tmp_path: Path) -> None:
    module, checkpoint, trainer = make(tmp_path)
    trainer.fit(module)
    assert checkpoint.exit_code == 0


def test_a_second_ctrl_c_stops_at_once_without_saving(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, At(60, lambda: [send(signal.SIGINT)(), send(signal.SIGINT)()]))
    assert saved_at(tmp_path) == []


def test_a_signal_during_a_save_stops_the_run_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, checkpoint, trainer = make(tmp_path, every_n_env_steps=50)
    save = checkpoint.save

    def interrupted_save(*arguments: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", interrupted_save)
    trainer.fit(module)
    assert checkpoint.exit_code == 143
    assert saved_at(tmp_path) == [50]
    assert (fit(tmp_path, ckpt_path=last(tmp_path)).buffer.value == 100).all()


def test_sigterm_while_callbacks_set_up_exits_with_143(tmp_path: Path) -> None:
    class EarlySigterm(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, EarlySigterm())
    assert caught.value.code == 143


@pytest.mark.parametrize("ending", ["complete", "signal", "exception"])
def test_signal_handlers_are_given_back(tmp_path: Path, ending: str) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    action = {"complete": lambda: None, "signal": send(signal.SIGTERM), "exception": raise_error(RuntimeError("oops"))}
    try:
        fit(tmp_path, At(60, action[ending]))
    except RuntimeError:
        assert ending == "exception"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_it_tells_where_and_how_long_it_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fit(tmp_path)
    assert "saved" in caplog.text
    assert "checkpoint-000000100" in caplog.text
