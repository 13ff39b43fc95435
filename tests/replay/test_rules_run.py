"""Runs with rules: settings that are refused, training and going on with the overlay, and what the page shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from vlmrb.algorithms import DQN, OffPolicyModule
from vlmrb.cli import main
from vlmrb.early import require_sound
from vlmrb.envs import EnvConfig
from vlmrb.replay.config import ReplayConfig, TDConfig
from vlmrb.replay.rules.schema import parse_rules, read_rules, write_rules
from vlmrb.replay.schemes import RulesConfig

ROOT = Path(__file__).parents[2]
RULES = str(ROOT / "configs/rules/doorkey.json")
BASE = ["-c", str(ROOT / "configs/minigrid/doorkey_6x6_dqn.yaml"), "-c", str(ROOT / "configs/replay/rules.yaml")]
SHORT = [
    *("--env.num_envs", "4", "--env.max_steps", "100", "--training.total_env_steps", "800"),
    *("--training.frames_per_batch", "40", "--training.learning_starts", "200", "--training.replay_ratio", "0.1"),
    *("--replay.capacity", "600", "--evaluation.episodes", "1", "--evaluation.every_n_env_steps", "800"),
    *("--evaluation.video_every_n_env_steps", "null", "--checkpoint.every_n_env_steps", "400"),
]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--replay.rules.eta 0", "replay.rules.eta=0.0 must be positive and finite"),
        ("--replay.lam_max 0 --replay.importance_weights null", "replay.rules has no effect at lam_max=0"),
        ("--replay.rules.file none.json", "rules none.json cannot be read: No such file"),
        (
            "--env.id MiniGrid-LavaCrossingS9N1-v0",
            "predicates of doorkey, which env.id=MiniGrid-LavaCrossingS9N1-v0 is",
        ),
        ("--replay.rules.bogus 1", "bogus"),
    ],
)
def test_settings_that_cannot_work_are_refused(more: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    require_sound(BASE)
    with pytest.raises(Exception, match=r".") as raised:
        require_sound([*BASE, *more.split()])
    assert says in " ".join(str(raised.value).split())


def test_rules_alone_are_a_priority_and_need_neither_scores_nor_errors() -> None:
    replay = ReplayConfig(clip_length=None, vlm=None, rules=RulesConfig(RULES, 3.0))
    assert [repr(term) for term in replay.terms()] == [f"RuleTerm(eta=3.0, rules=doorkey/{read_rules(RULES).digest})"]
    assert not replay.needs_scores
    assert not replay.needs_td_errors


def test_modules_made_in_python_are_refused_rules_for_other_environments() -> None:
    replay = ReplayConfig(clip_length=None, vlm=None, td=TDConfig(), rules=RulesConfig(RULES))
    for env, says in (("MiniGrid-LavaCrossingS9N1-v0", "which env.id"), ("MiniGrid-DoorKey-5x5-v0", None)):
        module = DQN(EnvConfig(env, num_envs=4), replay=replay)
        module._trainer = type("Trainer", (), {"world_size": 1})()
        if says is None:
            module.setup("fit")
            assert "rule_truth" in list(module.buffer.columns.keys())
        else:
            with pytest.raises(ValueError, match=says):
                module.setup("fit")


@pytest.mark.slow
def test_the_overlay_trains_and_goes_on_with_the_same_rules_only_and_its_agent_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    rules = tmp_path / "rules.json"
    write_rules(rules, read_rules(RULES))
    command = ["fit", *BASE, *SHORT, "--replay.rules.file", str(rules), "--run_dir"]
    run = [*command, str(tmp_path / "run")]
    assert main([*run, "--training.total_env_steps", "400"]) == 0
    content = rules.read_text()
    rules.write_text(content.replace("0.8", "0.7"))
    assert main([*run, "--resume", "true"]) == 1
    assert "saved replay buffer has terms=" in capsys.readouterr().err
    rules.write_text(content)
    assert main([*run, "--resume", "true"]) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["env_steps"], summary["grad_steps"]) == (800, 64)
    rules.unlink()
    assert OffPolicyModule.from_checkpoint(tmp_path / "run/checkpoints/last.ckpt").replay.rules is not None


@pytest.mark.slow
def test_the_pages_example_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (ROOT / "docs/replay/rules.md").read_text()
    for language in ("python", "yaml"):
        (code,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    _, rules = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rules.json").write_text(rules)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    section = page[page.index("## Your own environment") : page.index("## Confidences")]
    commands = re.findall(r"^    (vlmrb .*)$", section, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["rules", "record", "rules", "fit"]
    budget = "--training.total_env_steps 1280 --training.learning_starts 640 --evaluation.episodes 2"
    monkeypatch.chdir(tmp_path)
    for command in commands:
        arguments = shlex.split(command)[1:]
        assert main([*arguments, *(budget.split() if arguments[0] == "fit" else [])]) == 0, command
    listed = capsys.readouterr().out
    assert "falls_right   The pole leans to the right in s, and goes on turning to the right." in listed
    right, left, wrong, _ = read_fitted(tmp_path / "my_fitted_rules.json")
    assert right > 0.02
    assert left > 0.02
    assert wrong == 0.0
    assert json.loads((tmp_path / "runs/cartpole/summary.json").read_text())["env_steps"] == 1280


def read_fitted(path: Path) -> list[float]:
    return [rule["confidence"] for rule in json.loads(path.read_text())["rules"]]


def test_rules_on_the_page_are_rules() -> None:
    page = (ROOT / "docs/replay/rules.md").read_text()
    first, _ = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(parse_rules(json.loads(first)).rules) == 2
