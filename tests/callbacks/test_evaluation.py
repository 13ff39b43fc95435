from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlmrb.algorithms import DQN, TrainingConfig
from vlmrb.callbacks.evaluation import EvaluationCallback, in_short
from vlmrb.envs import EnvConfig
from vlmrb.replay.config import ReplayConfig


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    module = DQN(
        EnvConfig("MiniGrid-DoorKey-5x5-v0", num_envs=4),
        TrainingConfig(total_env_steps=800, learning_starts=200, frames_per_batch=40),
        ReplayConfig(capacity=1_000, batch_size=16, vlm=None, lam_max=0.0, clip_length=None),
    )
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[EvaluationCallback(every_n_env_steps=300, episodes=4, video_every_n_env_steps=500)],
        logger=TensorBoardLogger(folder, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module)
    return folder


def evaluations(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "evaluations.csv").open() as file:
        return list(csv.DictReader(file))


def test_it_evaluates_at_the_start_at_every_interval_and_at_the_end(run_dir: Path) -> None:
    # Blocks of 40: the first one at or after 300 ends at 320, then 600, then the end of the budget.
    assert [int(row["env_step"]) for row in evaluations(run_dir)] == [0, 320, 600, 800]


def test_summary_repeats_what_was_measured(run_dir: Path) -> None:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    successes = [float(row["eval/success"]) for row in evaluations(run_dir)]
    assert summary["success"] == pytest.approx(sum(successes[-3:]) / 3)
    assert summary["best_success"] == max(successes)
    returns, lengths = (
        [float(row[f"eval/{name}"]) for row in evaluations(run_dir)] for name in ("return", "episode_length")
    )
    assert summary["return"] == pytest.approx(sum(returns[-3:]) / 3)
    assert summary["best_return"] == max(returns)
    assert summary["episode_length"] == pytest.approx(sum(lengths[-3:]) / 3)
    assert summary["history"] == [[int(row["env_step"]), float(row["eval/success"])] for row in evaluations(run_dir)]
    assert summary["env_steps"] == 800
    assert summary["finished"]
    assert summary["wall_s"] > 0
    assert {"0.5", "0.8", "0.9"} == set(summary["env_steps_to"])
    assert summary["versions"]["torch"].startswith("2.14")


def test_summary_in_short_says_how_the_agent_does() -> None:
    summary = {"success": 0.5, "best_success": 0.75, "return": 120.04, "best_return": 200.0, "episode_length": 120.4}
    assert in_short({**summary, "env_steps": 20_000}) == (
        "after 20,000 env steps: success 0.50 (best 0.75), return 120 (best 200), 120 env steps an episode; means of "
        "the last 3 evaluations"
    )
    nothing = {"return": None, "best_return": None, "episode_length": None, "env_steps": 1}
    assert in_short(summary | nothing).startswith("after 1 env steps: success 0.50 (best 0.75); means")


def test_a_run_of_an_earlier_version_is_summed_up_by_what_is_known() -> None:
    callback = EvaluationCallback()
    callback.load_state_dict(
        {"history": [[0, 0.0], [100, 0.5], [200, 1.0, 0.9, 12.0]], "next": 300, "next_video": 0, "seconds": 1.0}
    )
    training = SimpleNamespace(total_env_steps=200)
    module = SimpleNamespace(
        **{"scoring": None, "env_steps": 200, "grad_steps": 1, "training_config": training, "seed": 0},
        **{"env": EnvConfig("MiniGrid-DoorKey-5x5-v0"), "evaluation_epsilon": 0.0},
    )
    summary = callback.summary(module)
    assert (summary["success"], summary["return"], summary["best_return"]) == (0.5, 0.9, 0.9)
    assert summary["episode_length"] == 12.0
    assert summary["env_steps_to"] == {"0.5": 100, "0.8": 200, "0.9": 200}


def test_every_field_of_the_summary_is_documented(run_dir: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("## The run in short")[2]
    documented = {
        name for line in text.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]
    }
    assert documented == set(json.loads((run_dir / "summary.json").read_text()))


def test_an_episode_is_filmed_now_and_then_and_at_the_end(run_dir: Path) -> None:
    films = sorted(path.name for path in (run_dir / "clips").glob("*evaluation.gif"))
    assert films == [f"step_{step:08d}_evaluation.gif" for step in (0, 600, 800)]


def test_tensorboard_has_env_steps_on_its_axis(run_dir: Path) -> None:
    events = EventAccumulator(str(run_dir)).Reload()
    assert [event.step for event in events.Scalars("eval/success")] == [0, 320, 600, 800]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("every_n_env_steps", 0), ("episodes", 0), ("epsilon", 1.5), ("video_every_n_env_steps", 0)],
)
def test_bad_setting_is_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        EvaluationCallback(**{setting: value})  # type: ignore[arg-type]
