"""Tables of what runs measure about themselves: what is replayed, and how fast."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrb.experiments.report.paper import paper, standing
from vlmrb.experiments.report.statistics import Estimate, means, relative
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table, slug, unlike
from vlmrb.experiments.report.tasks import Arm, Task

_KINDS = {
    "vlm_positive": "score above τ",
    "successful_episode": "of successful episodes",
    "vlm_negative": "score up to τ",
    "unscored": "not scored (yet)",
}


def frequency_table(tasks: Sequence[Task]) -> Table:
    """Tells how often kinds of rows are replayed, compared with uniform replay."""
    columns, cells = [Column("kind", "rows")], {kind: dict[str, Cell]() for kind in _KINDS}
    notes = []
    measured = [(task, arm) for task in tasks for arm in task.arms if arm.scored and _has_frequencies(arm)]
    taken = set[str]()
    for task, arm in measured:
        key = unlike(slug(f"{task.name} {arm.label}"), taken)
        taken.add(key)
        where = standing(task)
        name = f"{task.title} · {arm.name} ({where.badge})"
        columns += [
            Column(f"times_{key}", "÷ uniform", "times", name),
            Column(f"share_{key}", "share of the buffer", "portion", name),
        ]
        notes += [f"{arm.scorer.name}: {arm.scorer.remark}."] if arm.scorer.remark else []
        for kind, row in cells.items():
            row[f"times_{key}"] = _mean(arm, f"replay/frequency_{kind}")
            row[f"share_{key}"] = _mean(arm, f"replay/share_{kind}")
    printed = paper()["frequency"]
    group = f"paper: {printed['task']}"
    columns += [
        Column("paper_times", "÷ uniform", "times", group, True),
        Column("paper_share", "share of the buffer", "portion", group, True),
    ]
    for kind, figures in printed["rows"].items():
        cells[kind] |= {"paper_times": Number(figures["times"]), "paper_share": Number(figures["share"])}
    rows = [Row({"kind": _KINDS[kind], **row}) for kind, row in cells.items()]
    lead = "How often rows are drawn, compared with uniform replay, and their share of the buffer; mean over training."
    return Table("frequency", "Replay frequency", columns, rows, lead, tuple(dict.fromkeys(notes)), printed["table"])


def speed_table(tasks: Sequence[Task]) -> Table:
    """Compares training speed with that of PER, as the runs measured it."""
    columns = [
        Column("task", "task, machine"),
        Column("scheme", "scheme"),
        Column("per", "PER", "rate", "env steps/s"),
        Column("scored", "scored", "rate", "env steps/s"),
        Column("ratio", "scored ÷ PER", "times", "env steps/s"),
        Column("paper_per", "PER", "rate", "paper, env steps/s", True),
        Column("paper_scored", "VLM-RB", "rate", "paper, env steps/s", True),
        Column("paper_ratio", "VLM-RB ÷ PER", "times", "paper, env steps/s", True),
    ]
    rows = []
    for task in tasks:
        per = task.arm("per")
        for arm in task.published():
            if row := _speeds(arm, per):
                rows.append(Row({"task": task.title, "scheme": arm.name, **row}))
    printed = paper()["speed"]
    for machine, speeds in printed["rows"].items():
        cells = {"paper_per": Number(speeds["per"]), "paper_scored": Number(speeds["vlm"])}
        ratio = Number(speeds["vlm"] / speeds["per"])
        rows.append(Row({"task": f"{printed['task']}, {machine}", **cells, "paper_ratio": ratio}, "other"))
    lead = (
        "Median over a run's training, evaluations and checkpoints aside; mean over seeds. Runs that share a machine "
        "slow each other down. The paper's scorer ran on a second GPU."
    )
    return Table("speed", "Speed of training", columns, rows, lead)


def _has_frequencies(arm: Arm) -> bool:
    return bool(len(arm.metric("replay/frequency_vlm_positive")))


def _mean(arm: Arm, name: str) -> Cell:
    values = arm.metric(name)
    return Number.of(means([values])[0]) if len(values) else None


def _speeds(arm: Arm, per: Arm | None) -> dict[str, Cell]:
    name = "time/env_steps_per_s"
    ours = arm.metric(name)
    if not len(ours):
        return {}
    cells: dict[str, Cell] = {"scored": Number.of(means([ours])[0])}
    theirs = per.metric(name) if per is not None else ours[:0]
    if len(theirs):
        more = relative([ours], [theirs])
        ratio = Estimate(more.value + 1, more.low + 1, more.high + 1, more.runs)
        cells |= {"per": Number.of(means([theirs])[0]), "ratio": Number.of(ratio)}
    return cells
