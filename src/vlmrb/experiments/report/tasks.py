"""Puts runs in order: tasks, in them the schemes that were compared, in them the seeds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmrb.experiments.report.runs import Run
from vlmrb.experiments.report.settings import (
    ScorerName,
    Settings,
    control_of,
    differences,
    get,
    scheme_kind,
    scorer_of,
)
from vlmrb.experiments.report.table import slug
from vlmrb.plots import SCHEMES, scheme_order

TOLERANCE = 1e-6  # successes are shares kept as float32
_BASELINES = {"uniform": "uniform", "per": "PER"}
_DOORKEY = re.compile(r"MiniGrid-DoorKey-(\d+)x\1-v0")
_SCENE = re.compile(r"scene-(?:play-)?singletask-task(\d)-v0")


@dataclass(frozen=True, eq=False)  # arrays do not compare
class Arm:
    """A scheme on a task.

    Attributes:
        label: its name.
        runs: those that have finished, by seed; the only ones in any number.
        others: those that have not, and damaged ones.
    """

    label: str
    runs: tuple[Run, ...]
    others: tuple[Run, ...] = ()

    @cached_property
    def settings(self) -> Settings:
        """The settings that its runs share, empty if not known."""
        return next((run.settings for run in (*self.runs, *self.others) if run.settings), {})

    @property
    def kind(self) -> str:
        """What it is: see `scheme_kind`; by its label if its settings are not known."""
        return scheme_kind(self.settings) or (self.label if self.label in SCHEMES else "")

    @property
    def scored(self) -> bool:
        """Whether its priorities or its rewards rest on a scorer."""
        return self.kind == "vlm_td" or bool({"vlm", "score_reward"} & set(self.kind.split("+")))

    @property
    def scorer(self) -> ScorerName:
        """What gives its scores."""
        if not self.scored and self.kind:
            return ScorerName("no scorer", "none")
        return scorer_of(self.settings.get("scoring"))

    @property
    def as_published(self) -> bool:
        """Whether it is score only or score × TD error with the paper's τ, λ and visuals, and no control in between."""
        if self.kind not in ("vlm", "vlm_td"):
            return False
        if "replay" not in self.settings:
            return self.label in ("vlm", "vlm_td")
        values = [get(self.settings, key) for key in ("replay.lam_max", "replay.vlm.threshold", "env.visuals")]
        return values == [0.5, 0.5, "standard"] and not control_of(self.settings)[0]

    @property
    def name(self) -> str:
        """Its label, with the scorer where the label does not tell."""
        if not self.scored or self.scorer.kind == "unknown" or self.scorer.name in self.label:
            return self.label
        return f"{self.label} · {self.scorer.name}"

    def final(self) -> NDArray[np.float64]:
        """Mean success of each run's last three evaluations, ``float64[n]``."""
        return np.array([run.success[-3:].mean() for run in self.runs])

    def best(self) -> NDArray[np.float64]:
        """Each run's best evaluation, ``float64[n]``."""
        return np.array([run.success.max() for run in self.runs])

    @property
    def target(self) -> float | None:
        """What others are to reach: the mean of its runs' best evaluations; ``None`` if none of them ever succeeded."""
        mean = float(self.best().mean())
        return mean if mean > TOLERANCE else None

    @property
    def never(self) -> str:
        """Says of a baseline that it has no `target`."""
        return f"{_BASELINES.get(self.kind, self.label)} never succeeded"

    def area(self) -> NDArray[np.float64]:
        """Each run's success averaged over its training (trapezoids), ``float64[n]``."""
        return np.array([float(np.trapezoid(run.success, run.steps) / run.steps[-1]) for run in self.runs])

    def steps_to(self, target: float) -> tuple[NDArray[np.float64], int]:
        """Returns each run's env steps to a success, its whole budget if never, ``float64[n]``, and how many got there.

        Args:
            target: above 0; reached by the first evaluation that is at or above it.
        """
        places = [_first(run, target) for run in self.runs]
        pairs = zip(self.runs, places, strict=True)
        steps = [run.steps[-1 if place is None else place] for run, place in pairs]
        return np.array(steps, np.float64), sum(place is not None for place in places)

    def wall_to(self, target: float) -> NDArray[np.float64]:
        """Returns each run's measured seconds to a success, all it took if never, ``float64[n]``; NaN if not kept."""
        places = [_first(run, target) for run in self.runs]
        pairs = zip(self.runs, places, strict=True)
        return np.array([run.took_s if place is None else run.wall_s[place] for run, place in pairs])

    def took(self) -> NDArray[np.float64]:
        """Returns the measured seconds that each run took in all, ``float64[n]``, NaN if not kept."""
        return np.array([run.took_s for run in self.runs])

    def metric(self, name: str) -> NDArray[np.float64]:
        """Returns a metric of each run that has it, ``float64[m]``."""
        return np.array([run.metrics[name] for run in self.runs if name in run.metrics])


def _first(run: Run, target: float) -> int | None:
    there = np.flatnonzero(run.success >= target - TOLERANCE)
    return int(there[0]) if there.size else None


@dataclass(frozen=True, eq=False)  # arrays do not compare
class Task:
    """An environment with an algorithm and its settings, on which schemes were compared.

    Attributes:
        name: unique; the configuration's where a sweep has recorded it.
        arms: uniform replay, PER and the score-based ones first.
        alone: whether no other task has its environment and algorithm.
    """

    name: str
    arms: tuple[Arm, ...]
    alone: bool = True

    @property
    def settings(self) -> Settings:
        """Those of its first scheme that has any; what schemes may change is not the task's."""
        return next((arm.settings for arm in self.arms if arm.settings), {})

    @property
    def env(self) -> str:
        """The environment's id, empty if not known."""
        return next((run.env for run in self._runs() if run.env), "")

    @property
    def algorithm(self) -> str:
        """The algorithm's class, empty if not known."""
        return next((run.algorithm for run in self._runs() if run.algorithm), "")

    @property
    def title(self) -> str:
        """What it is, for people."""
        known = ", ".join(part for part in (_short(self.env), self.algorithm) if part)
        return f"{known} ({self.name})" if known and not self.alone else known or self.name

    @property
    def gone(self) -> str:
        """The configuration file that kept results name and that is no longer there, empty if there is none."""
        return next((run.gone for run in self._runs() if run.gone), "")

    @property
    def slug(self) -> str:
        """Its name, fit for a file's."""
        return slug(self.name)

    def arm(self, kind: str) -> Arm | None:
        """Returns the finished arm of a kind, the one that is labelled so if there are several."""
        found = [arm for arm in self.arms if arm.kind == kind and arm.runs]
        found = [arm for arm in found if not arm.settings or get(arm.settings, "env.visuals") == "standard"] or found
        return next((arm for arm in found if arm.label == kind), found[0] if found else None)

    def published(self) -> list[Arm]:
        """Returns the finished arms that are as published, one of each kind with each scorer: the first."""
        found: dict[tuple[str, str], Arm] = {}
        for arm in self.arms:
            if arm.runs and arm.as_published:
                found.setdefault((arm.kind, arm.scorer.name), arm)
        return list(found.values())

    def _runs(self) -> Iterable[Run]:
        return (run for arm in self.arms for run in (*arm.runs, *arm.others))


def _short(env: str) -> str:
    for pattern, name in ((_DOORKEY, r"DoorKey-\1"), (_SCENE, r"Scene-\1")):
        env = pattern.sub(name, env)
    return re.sub(r"-v\d+$", "", env)


def gather(runs: Sequence[Run]) -> tuple[list[Task], list[tuple[Run, str]]]:
    """Sorts runs into tasks and schemes.

    Returns:
        Tasks by name, and runs that are in none of them, each with the reason.

    Raises:
        ValueError: one scheme's runs, or one task's, cannot stand beside each other.
    """
    tasks: dict[str, dict[str, list[Run]]] = {}
    left_out: list[tuple[Run, str]] = []
    for run in runs:
        if run.seed is None and not len(run.steps):
            left_out.append((run, "nothing is known of it"))
            continue
        tasks.setdefault(_task_name(run), {}).setdefault(run.label, []).append(run)
    built = []
    for name, schemes in sorted(tasks.items()):
        members = [run for found in schemes.values() for run in found]
        _require_one_budget(name, members)
        arms = []
        for label in sorted(schemes, key=scheme_order):
            _require_same_settings(name, label, schemes[label])
            kept, repeated = _by_seed(schemes[label])
            left_out += [(run, f"seed {run.seed} of {label} is taken from {other.source}") for run, other in repeated]
            finished = tuple(run for run in kept if run.finished)
            arms.append(Arm(label, finished, tuple(run for run in kept if run not in finished)))
        built.append(Task(name, tuple(arms)))
    kinds = [(task.env, task.algorithm) for task in built]
    return [replace(task, alone=kinds.count(kind) == 1) for task, kind in zip(built, kinds, strict=True)], left_out


def _task_name(run: Run) -> str:
    return run.config or ", ".join(part for part in (run.env, run.algorithm) if part) or "unknown task"


def _by_seed(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """Keeps one run of each seed, a finished one if there is one, the first; returns the others beside it."""
    kept: dict[Any, Run] = {}
    repeated = []
    for run in sorted(runs, key=lambda run: not run.finished):
        if _which(run) in kept:
            repeated.append((run, kept[_which(run)]))
        else:
            kept[_which(run)] = run
    return sorted(kept.values(), key=_place), repeated


def _which(run: Run) -> Any:
    """Returns what two runs of one scheme share if they are the same one run twice."""
    return run.source if run.seed is None else run.seed


def _place(run: Run) -> tuple[bool, int, str]:
    return run.seed is None, run.seed or 0, str(run.source)


def _require_one_budget(name: str, runs: Sequence[Run]) -> None:
    budgets: dict[int, Run] = {}
    for run in runs:
        if run.budget is not None:
            budgets.setdefault(run.budget, run)
    if len(budgets) > 1:
        (first, one), (second, other) = list(budgets.items())[:2]
        schemes = f"scheme {one.label}" if one.label == other.label else f"schemes {one.label} and {other.label}"
        raise ValueError(
            f"{name}, {schemes}: {one.source} ran for {first:,} env steps and {other.source} for {second:,}, which no "
            "number can compare: report them apart, each into an --out of its own"
        )


def _require_same_settings(name: str, label: str, runs: Sequence[Run]) -> None:
    known = [run for run in runs if run.settings]
    for run in known[1:]:
        found = differences(known[0].settings, run.settings)
        if found:
            key, values = next(iter(found.items()))
            one, other = (json.dumps(value, default=str) for value in values)
            raise ValueError(
                f"{name}, scheme {label}: {known[0].source} and {run.source} differ in {key} ({one} and {other}): give "
                "them labels of their own in the sweep, or report them apart"
            )


def common_schemes(tasks: Sequence[Task]) -> tuple[list[str], list[Task]]:
    """Chooses schemes and tasks such that every scheme has finished runs on every task.

    Returns:
        At least two schemes and two tasks, as many of both together as there are, more schemes rather than more tasks;
        nothing if there are not as many.
    """
    finished = {task.name: [arm.label for arm in task.arms if arm.runs] for task in tasks}
    best: tuple[list[str], list[Task]] = ([], [])
    for one, other in itertools.combinations(tasks, 2):
        labels = [label for label in finished[one.name] if label in finished[other.name]]
        having = [task for task in tasks if set(labels) <= set(finished[task.name])]
        size = len(labels) * len(having), len(labels)
        if len(labels) > 1 and size > (len(best[0]) * len(best[1]), len(best[0])):
            best = labels, having
    return best


def pooled(arms: Sequence[Arm]) -> Arm:
    """Returns arms of the same settings as one; a seed that several have run counts once."""
    runs: Mapping[Any, Run] = {_which(run): run for arm in reversed(arms) for run in arm.runs}
    return Arm(arms[0].label, tuple(sorted(runs.values(), key=_place)), arms[0].others)
