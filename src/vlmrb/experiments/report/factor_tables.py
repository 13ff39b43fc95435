"""What happens when one thing is changed: priority, λ, threshold, labels, model, visuals, clip length."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrb.experiments.report.paper import paper, standing
from vlmrb.experiments.report.settings import control_of, get, signature
from vlmrb.experiments.report.statistics import means
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table, slug, unlike
from vlmrb.experiments.report.tasks import Arm, Task, pooled

Level = str
"""One value of what is changed, as it is written in paper.yaml."""

_AREA = ("area", "over training", "share")
_BEST = ("best", "best success", "share")
_TO_UNIFORM = ("to_uniform", "steps to uniform's best", "steps")
_TO_PER = ("to_per", "steps to PER's best", "steps")
_TO_08 = ("to_0.8", "steps to 0.8", "steps")


@dataclass(frozen=True)
class Factor:
    """Something that is changed while all else stays.

    Attributes:
        key: of the table and of the paper's figures, if it has any.
        title: of the table.
        lead: what to know before reading it.
        head: of the column of levels.
        level_of: the level of a score-based arm; ``None``: it has none.
        free: beginnings of the settings that may differ between levels.
        columns: what is told of each level.
        words: level → how it is written for people.
    """

    key: str
    title: str
    lead: str
    head: str
    level_of: Callable[[Arm], Level | None]
    free: tuple[str, ...]
    columns: tuple[tuple[str, str, Any], ...]
    words: Mapping[str, str]


def _threshold(arm: Arm) -> Level:
    value = get(arm.settings, "replay.vlm.threshold")
    return "raw" if value is None else f"{value:g}"


def _lambda(arm: Arm) -> Level:
    lam, warmup = (get(arm.settings, f"replay.{name}") for name in ("lam_max", "warmup_fraction"))
    return "pure" if lam == 1 and warmup == 0 else f"{lam:g}"


def _corruption(arm: Arm) -> Level | None:
    control, kappa = control_of(arm.settings)
    if control == "corrupted":
        return f"{kappa:g}"
    return control or "0"


def _model(arm: Arm) -> Level:
    threshold = _threshold(arm)
    behind = {"0.5": "", "raw": ", raw score"}.get(threshold, f", τ = {threshold}")
    return f"{arm.scorer.name}{behind}"


FACTORS = (
    Factor(
        "threshold",
        "Threshold, in training",
        "τ above which a score counts as positive; *raw*: the score itself is the priority.",
        "τ",
        _threshold,
        ("replay.vlm.threshold", "replay.vlm.exponent"),
        (_AREA, _BEST, _TO_08),
        {"raw": "raw score"},
    ),
    Factor(
        "lambda",
        "λ_max, the prioritised share of a batch",
        "*Pure*: λ = 1 from the first batch on. Otherwise λ rises from 0 over the warm-up.",
        "λ_max",
        _lambda,
        ("replay.lam_max", "replay.warmup_fraction"),
        (_AREA, _BEST, _TO_UNIFORM),
        {"pure": "pure priority"},
    ),
    Factor(
        "corruption",
        "Corrupted labels",
        "Each positive clip is demoted with probability κ and a later negative promoted in its place; *shuffled*: a "
        "clip gets another clip's score.",
        "κ",
        _corruption,
        ("scoring.control",),
        (_AREA, _BEST, _TO_UNIFORM),
        {},
    ),
    Factor(
        "models",
        "Scorers, in training",
        "The same scheme with another scorer. Only what is named as a public checkpoint is a VLM.",
        "scorer",
        _model,
        tuple(
            f"scoring.{name}"
            for name in ("scorer", "backend", "batch_clips", "threads", "policy", "max", "duty", "low", "seed")
        )
        + ("replay.vlm.threshold", "replay.vlm.exponent"),
        (_AREA, _BEST, _TO_UNIFORM),
        {},
    ),
    Factor(
        "visuals",
        "What the frames look like",
        "Dynamics and the agent's observations stay; only the scorer sees other tiles.",
        "tiles",
        lambda arm: str(get(arm.settings, "env.visuals")),
        ("env.visuals",),
        (_AREA, _BEST, _TO_UNIFORM),
        {tiles: tiles for tiles in ("standard", "misleading", "abstract")},
    ),
    Factor(
        "clip_length",
        "Clip length",
        "Frames per clip; not in the paper, which has L = 32.",
        "L",
        lambda arm: str(get(arm.settings, "replay.clip_length")),
        ("replay.clip_length",),
        (_AREA, _BEST, _TO_UNIFORM),
        {},
    ),
)


@dataclass(frozen=True)
class _Group:
    """Levels of one factor on one task, all else being equal."""

    task: Task
    levels: Mapping[Level, Arm]
    remark: str


def factor_table(factor: Factor, tasks: Sequence[Task]) -> Table:
    """Puts the levels of a factor beside each other, ours and the paper's."""
    return _table(
        factor.key, factor.title, factor.lead, factor.head, factor.columns, factor.words, list(_groups(factor, tasks))
    )


def priority_table(tasks: Sequence[Task]) -> Table:
    """Puts uniform replay, PER, score only and score × TD error beside each other."""
    groups = []
    for task in tasks:
        base = {kind: arm for kind in ("uniform", "per") if (arm := task.arm(kind)) is not None}
        scored: dict[str, dict[str, Arm]] = {}
        for arm in task.published():
            scored.setdefault(arm.scorer.name, {})[arm.kind] = arm
        for scorer, arms in scored.items() or [("", {})]:
            if len(base | arms) > 1:
                groups.append(_Group(task, base | arms, scorer))
    return _table(
        "priority",
        "Priority variants",
        "The paper calls the last two *VLM-only* and *VLM×TD*; what scored ours stands above the column.",
        "priority",
        (_BEST, _TO_UNIFORM, _TO_PER),
        {"uniform": "uniform", "per": "PER", "vlm": "score only", "vlm_td": "score × TD error"},
        groups,
    )


def _groups(factor: Factor, tasks: Sequence[Task]) -> Iterator[_Group]:
    for task in tasks:
        alike: dict[str, dict[Level, list[Arm]]] = {}
        for arm in task.arms:
            if arm.runs and arm.scored and "replay" in arm.settings:
                level = factor.level_of(arm)
                if level is not None:
                    alike.setdefault(signature(arm.settings, factor.free), {}).setdefault(level, []).append(arm)
        for levels in alike.values():
            if len(levels) > 1:
                members = {level: pooled(arms) for level, arms in levels.items()}
                first = next(iter(members.values()))
                if (uniform := task.arm("uniform")) is not None:
                    members["uniform"] = uniform
                remark = first.kind if factor.key == "models" else first.scorer.name
                yield _Group(task, members, remark)


def _table(
    table: str,
    title: str,
    lead: str,
    head: str,
    columns: Sequence[tuple[str, str, Any]],
    words: Mapping[str, str],
    groups: Sequence[_Group],
) -> Table:
    """Builds a table with one row per level, and columns for each of our groups and of the paper's tasks."""
    printed = _printed(table)
    heads = [Column("level", head)]
    cells: dict[Level, dict[str, Cell]] = {}
    notes = []
    taken = set[str]()
    for group in groups:
        several = sum(other.task is group.task for other in groups) > 1
        key = unlike(slug(f"{group.task.name} {group.remark}" if several else group.task.name), taken)
        taken.add(key)
        where = standing(group.task)
        name = f"{group.task.title}{f' · {group.remark}' if group.remark else ''} ({where.badge})"
        heads += [Column(f"{column}_{key}", text, kind, name) for column, text, kind in columns]
        if where.reasons:
            notes.append(f"{group.task.title}: {'; '.join(where.reasons)}.")
        notes += [
            f"{group.task.title}, {words.get(level, level)}: {arm.scorer.name}: {arm.scorer.remark}."
            for level, arm in group.levels.items()
            if arm.scored and arm.scorer.remark and table == "models"
        ]
        if table != "models":
            notes += {f"{a.scorer.name}: {a.scorer.remark}." for a in group.levels.values() if a.scorer.remark}
        for level, arm in group.levels.items():
            values = _measured(arm, group.task, [column for column, _, _ in columns])
            cells.setdefault(level, {}).update({f"{name}_{key}": value for name, value in values.items()})
    for figures in printed:
        key = slug(figures["task"])
        name = f"paper: {figures['task']}"
        told = [one for one in columns if any(one[0] in row for row in figures["rows"].values())]
        heads += [Column(f"paper_{column}_{key}", text, kind, name, True) for column, text, kind in told]
        for level, row in figures["rows"].items():
            values = {f"paper_{column}_{key}": _figure(row, column) for column, _, _ in told if column in row}
            cells.setdefault(level, {}).update(values)
    rows = [Row({"level": words.get(level, level), **cells[level]}) for level in _in_order(cells, words)]
    said = paper().get(table)
    if isinstance(said, dict) and "said" in said:
        notes.append(f"The paper shows a figure without numbers: {said['said']}.")
    return Table(table, title, heads, rows, lead, tuple(dict.fromkeys(notes)))


def _printed(key: str) -> list[dict[str, Any]]:
    found = paper().get(key)
    return found if isinstance(found, list) else []


def _figure(row: Mapping[str, Any], column: str) -> Number:
    if row[column] is None:  # never within the paper's million
        return Number(1_000_000.0, runs=1, reached=0)
    spread = float(row["spread"]) if column == "best" and "spread" in row else float("nan")
    return Number(float(row[column]), spread=spread)


def _measured(arm: Arm, task: Task, columns: Sequence[str]) -> dict[str, Cell]:
    values, reached = {}, {}
    never: dict[str, Cell] = {}
    for column in columns:
        if column == "area":
            values[column] = arm.area()
        elif column == "best":
            values[column] = arm.best()
        elif column == "to_0.8":
            values[column], reached[column] = arm.steps_to(0.8)
        elif (baseline := task.arm(column.removeprefix("to_"))) is not None:
            if baseline.target is None:
                never[column] = Number(math.nan, why=baseline.never)
            else:
                values[column], reached[column] = arm.steps_to(baseline.target)
    found = means(list(values.values()))
    return never | {column: Number.of(one, reached.get(column)) for column, one in zip(values, found, strict=True)}


def _in_order(levels: Mapping[Level, Any], words: Mapping[str, str]) -> list[Level]:
    """Sorts levels: those with a place in ``words`` by it where they are no numbers, numbers by size, words last."""
    names = list(words)

    def place(level: Level) -> tuple[int, float, str]:
        if re.fullmatch(r"[\d.]+", level):
            return 1, float(level), ""
        if level in names:
            return (0 if level in ("uniform", "per", "vlm", "vlm_td", "pure") else 2), names.index(level), ""
        return 3, 0.0, level

    return sorted(levels, key=place)
