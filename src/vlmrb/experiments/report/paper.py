"""The paper's figures, and how close a task of ours is to one of the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vlmrb.experiments.report.settings import get
from vlmrb.experiments.report.tasks import Arm, Task
from vlmrb.plots import short_number

_WORDS = {
    "training.total_env_steps": "env steps",
    "env.max_steps": "the horizon",
    "env.actions": "the actions",
    "env.visuals": "the visuals",
    "training.gamma": "γ",
    "replay.batch_size": "batch",
    "replay.clip_length": "L",
    "replay.lam_max": "λ_max",
    "replay.vlm.threshold": "τ",
    "model.init_args.learning_rate": "learning rate",
    "model.init_args.critic_learning_rate": "critic's learning rate",
    "model.init_args.target_update_interval": "target update interval",
    "model.init_args.hidden_sizes": "hidden layers",
    "evaluation.every_n_env_steps": "env steps between evaluations",
    "evaluation.episodes": "episodes per evaluation",
}
_UNSET = {"env.max_steps": "the environment's own", "env.actions": "all"}


@cache
def paper() -> dict[str, Any]:
    """Returns the content of paper.yaml."""
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())


@dataclass(frozen=True)
class Standing:
    """Where a task stands beside the paper's.

    Attributes:
        level: the paper's level of the same environment, empty if it has none.
        domain: of that level, or of the algorithm.
        same: whether all that the paper publishes of its set-up is the same.
        badge: what to write beside the task's name.
        reasons: why it is not the same.
    """

    level: str
    domain: str
    same: bool
    badge: str
    reasons: tuple[str, ...]


def standing(task: Task) -> Standing:
    """Compares a task's settings with what the paper publishes."""
    levels = [level for level in paper()["levels"] if task.env in level["ids"]]
    if not task.env:
        gone = (
            f"{task.gone}, which its commands.txt names, is gone" if task.gone else "no config.yaml lies with its runs"
        )
        return Standing("", "", False, "settings not recorded", (gone,))
    if not levels:
        smaller = "DoorKey" in task.env and task.algorithm in paper()["domains"]["DoorKey"]["algorithms"]
        badge = "a smaller task" if smaller else "not a task of the paper"
        return Standing("", "", False, badge, (f"{task.env} is none of the paper's environments",))
    level = levels[0]
    domain = paper()["domains"][level["domain"]]
    reasons = []
    if task.algorithm not in domain["algorithms"]:
        reasons.append(f"{task.algorithm or 'an unknown algorithm'} (paper: {' and '.join(domain['algorithms'])})")
    reasons += _deviations(task.settings, domain["task"])
    badge = "the paper's task"
    if reasons:
        badge = "smaller than the paper's" if _smaller(task.settings) else "not the paper's settings"
    return Standing(level["name"], level["domain"], not reasons, badge, tuple(reasons))


def _smaller(settings: Mapping[str, Any]) -> bool:
    """Says whether there are fewer env steps, actions or steps per episode than in the paper."""
    env, training = settings.get("env") or {}, settings.get("training") or {}
    fewer = training.get("total_env_steps", 0) < 1_000_000
    return fewer or env.get("max_steps") is not None or env.get("actions") is not None


def arm_deviations(arm: Arm) -> tuple[str, ...]:
    """Says in what a scored arm departs from the paper's scheme, its scorer first."""
    published = dict(paper()["scheme"])
    scorer = published.pop("scorer")
    found = [] if arm.scorer.name == scorer else [f"scored by {arm.scorer.name} (paper: {scorer})"]
    return (*found, *_deviations(arm.settings, published))


def _deviations(settings: Mapping[str, Any], published: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in published.items():
        try:
            ours = get(settings, key)
        except KeyError:
            found.append(f"{_WORDS[key]} not recorded (paper: {_text(key, value)})")
            continue
        if ours != value:
            found.append(f"{_WORDS[key]}: {_text(key, ours)} (paper: {_text(key, value)})")
    return found


def _text(key: str, value: Any) -> str:
    if value is None:
        return _UNSET.get(key, "none")
    if key == "env.actions":
        return f"{len(value)} of them"
    if isinstance(value, int) and not isinstance(value, bool):
        return short_number(value) if value % 1000 == 0 else f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
