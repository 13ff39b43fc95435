"""Tables of scorers judged offline, from `vlmrb calibrate` reports and `benchmarks/scorer.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrb.experiments.report.files import damaged, read_json
from vlmrb.experiments.report.paper import paper
from vlmrb.experiments.report.settings import ScorerName, known_vlm, named_scorer
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table, slug, to_markdown, unlike

_PROMPTS = {
    "base": ("grid", "manipulation"),
    "paraphrase A": ("grid_paraphrase_a",),
    "paraphrase B": ("grid_paraphrase_b",),
    "terse": ("grid_terse", "manipulation_terse"),
    "under-specified": ("grid_underspecified",),
}
_LABELS = {"success": "strict success", "milestone": "milestone"}


def read_calibration(path: Path) -> dict[str, Any] | None:
    """Returns a calibration's report.json, ``None`` if the file is something else.

    Raises:
        ValueError: it is one, and damaged.
    """
    content = read_json(path)
    if content is None or not {"corpus", "scorers", "label"} <= content.keys():
        return None
    return _required(path, content, bins_table, reliability_table, models_table, prompts_table)


def read_benchmark(path: Path) -> dict[str, Any] | None:
    """Returns what benchmarks/scorer.py wrote, ``None`` if the file is something else.

    Raises:
        ValueError: it is that, and damaged.
    """
    content = read_json(path)
    rows = content.get("rows") if content else None
    usable = isinstance(rows, list) and rows and isinstance(rows[0], dict) and {"model", "ours clips/s"} <= set(rows[0])
    return _required(path, content, sizes_table) if content and usable else None


def _required(path: Path, content: dict[str, Any], *tables: Callable[[list[dict[str, Any]]], Table]) -> dict[str, Any]:
    """Returns what a file holds if all its tables can be made of it, so that one that is damaged is named."""
    try:
        for table in tables:
            to_markdown(table([content]))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged(path, f"it lacks {error}" if isinstance(error, KeyError) else str(error)) from error
    return content


def bins_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Tells, threshold by threshold, where the scores lie and how well they tell successes apart."""
    columns = [Column("threshold", "τ")]
    cells: dict[str, dict[str, Cell]] = {}
    notes = []
    taken = set[str]()
    for report, scorer, name in _scorers(reports):
        judged = scorer["by_label"].get("success") or scorer["by_label"][report["label"]]
        key = unlike(slug(f"{scorer['label']} {report['corpus']['renderer']}"), taken)
        taken.add(key)
        group = f"{scorer['label']}, {_corpus(report)}"
        columns += [
            Column(f"share_{key}", "share of scores", "portion", group),
            Column(f"accuracy_{key}", "balanced accuracy", "fine", group),
        ]
        notes += _remark(scorer, name)
        for line in judged["thresholds"]:
            cells.setdefault(f"{line['lower']:g}", {}).update(
                {
                    f"share_{key}": Number(line["share"]),
                    f"accuracy_{key}": Number(line["balanced_accuracy"]),
                }
            )
    columns += [
        Column("paper_share", "share of scores", "portion", "paper: PLM-1B", True),
        Column("paper_accuracy", "balanced accuracy", "fine", "paper: PLM-1B", True),
    ]
    for lower, figures in paper()["bins"].items():
        share, accuracy = Number(figures["share"]), Number(figures["balanced_accuracy"])
        cells.setdefault(lower, {}).update({"paper_share": share, "paper_accuracy": accuracy})
    rows = [Row({"threshold": f"{float(lower):.2f}", **cells[lower]}) for lower in sorted(cells, key=float)]
    lead = f"By strict success. Share: of the scores in the bin that begins at τ. The paper: {paper()['corpus']}."
    return Table("threshold_offline", "Threshold, offline", columns, rows, lead, tuple(dict.fromkeys(notes)))


def reliability_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Tells precision and recall of scorers at their configured threshold, by both labels."""
    columns = [Column("scorer", "scorer"), Column("corpus", "corpus"), Column("threshold", "τ", "threshold")]
    for key, label in _LABELS.items():
        columns += [Column(f"{metric}_{key}", metric, "share", label) for metric in ("precision", "recall")]
    rows, notes = [], []
    for report, scorer, name in _scorers(reports):
        cells: dict[str, Cell] = {"scorer": scorer["label"], "corpus": _corpus(report)}
        notes += _remark(scorer, name)
        for key in _LABELS:
            if key in scorer["by_label"]:
                at = scorer["by_label"][key]["at_configured"]
                cells["threshold"] = Number(at["threshold"])
                intervals = at["intervals"]
                cells |= {f"{m}_{key}": _with_interval(at[m], intervals[m]) for m in ("precision", "recall")}
        rows.append(Row(cells))
    printed = {f"{m}_{key}": Number(paper()["reliability"][key][m]) for key in _LABELS for m in ("precision", "recall")}
    rows.append(Row({"scorer": "paper: PLM-1B", "threshold": Number(0.5), **printed}, "paper"))
    lead = (
        "Of the clips above τ, how many show it (precision); of the clips that show it, how many are above τ (recall)."
    )
    return Table("reliability", "How far scores can be relied on", columns, rows, lead, tuple(dict.fromkeys(notes)))


def models_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Compares models at their best threshold, by strict success."""
    columns = [
        Column("scorer", "scorer"),
        Column("corpus", "corpus"),
        Column("threshold", "best τ", "threshold"),
        Column("accuracy", "balanced accuracy", "fine"),
        Column("auc", "ROC AUC", "fine"),
    ]
    rows, notes = [], []
    for report, scorer, name in _scorers(reports):
        judged = scorer["by_label"].get("success") or scorer["by_label"][report["label"]]
        best = judged["at_best"]
        cells: dict[str, Cell] = {"scorer": scorer["label"], "corpus": _corpus(report)}
        cells |= {"threshold": Number(best["threshold"]), "auc": _with_interval(judged["auc"], judged["auc_interval"])}
        cells["accuracy"] = _with_interval(best["balanced_accuracy"], best["intervals"]["balanced_accuracy"])
        rows.append(Row(cells))
        notes += _remark(scorer, name)
    for model, figures in paper()["offline"].items():
        printed: dict[str, Cell] = {"accuracy": Number(figures["balanced_accuracy"]), "auc": Number(figures["auc"])}
        printed["threshold"] = Number(figures["threshold"])
        rows.append(Row({"scorer": f"paper: {model}", **printed}, "paper"))
    lead = "By strict success. τ is chosen on one half of our corpus, balanced accuracy reported on the other."
    return Table("models_offline", "Scorers, offline", columns, rows, lead, tuple(dict.fromkeys(notes)))


def prompts_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Compares prompts by ROC AUC, by strict success."""
    columns = [Column("prompt", "prompt")]
    cells: dict[str, dict[str, Cell]] = {}
    seen: dict[tuple[int, str], str] = {}
    notes = []
    for report, scorer, name in _scorers(reports):
        if not scorer.get("prompt"):
            continue
        judged = scorer["by_label"].get("success") or scorer["by_label"][report["label"]]
        model = scorer["name"] if name.kind == "other" else name.name
        if (id(report), model) not in seen:
            key = unlike(slug(f"auc {model} {report['corpus']['renderer']}"), seen.values())
            seen[id(report), model] = key
            columns.append(Column(key, "ROC AUC", "fine", f"{model}, {_corpus(report)}"))
        written = str(scorer["prompt"]).partition("/")[0].partition(":")[0]
        level = next((level for level, names in _PROMPTS.items() if written in names), written)
        cells.setdefault(level, {})[seen[id(report), model]] = _with_interval(judged["auc"], judged["auc_interval"])
        notes += _remark(scorer, name)
    columns.append(Column("paper_auc", "ROC AUC", "fine", "paper: PLM-1B", True))
    for level, auc in paper()["prompts"].items():
        cells.setdefault(level, {})["paper_auc"] = Number(auc)
    order = [*_PROMPTS, *(level for level in cells if level not in _PROMPTS)]
    rows = [Row({"prompt": level, **cells[level]}) for level in order if level in cells]
    lead = "By strict success. The wording of our prompts is our own; they ask for the same."
    return Table("prompts", "Prompts", columns, rows, lead, tuple(dict.fromkeys(notes)))


def sizes_table(benchmarks: Sequence[Mapping[str, Any]]) -> Table:
    """Compares the memory and the time that models take for a clip."""
    columns = [
        Column("model", "model"),
        Column("machine", "machine"),
        Column("gib", "memory, GiB", "plain", "ours"),
        Column("seconds", "a clip", "seconds", "ours"),
        Column("paper_gib", "memory, GiB", "plain", "paper: RTX 4090", True),
        Column("paper_seconds", "a clip", "seconds", "paper: RTX 4090", True),
    ]
    rows: list[Row] = []
    printed = dict(paper()["sizes"])
    for benchmark in benchmarks:
        for line in benchmark["rows"]:
            if line["stream"] != "all frames different":  # what others would save says nothing about a model's size
                continue
            name = known_vlm(line["model"])
            cells: dict[str, Cell] = {"model": name or f"{line['model']}, no published checkpoint"}
            cells |= {"machine": str(line.get("device", "CPU")), "seconds": Number(1 / line["ours clips/s"])}
            cells["gib"] = Number(line["peak MiB"] / 1024)
            rows.append(Row({**cells, **_size(printed.pop(name, None) if name else None)}))
    rows += [Row({"model": model, **_size(figures)}) for model, figures in printed.items()]
    lead = "Clips of 32 frames that are all different. On a CPU, memory is that of the whole process."
    return Table("sizes", "Size of the model", columns, rows, lead)


def _size(figures: Mapping[str, float] | None) -> dict[str, Cell]:
    if figures is None:
        return {}
    return {"paper_gib": Number(figures["gib"]), "paper_seconds": Number(figures["seconds"])}


def _scorers(reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], ScorerName]]:
    for report in reports:
        for scorer in report["scorers"]:
            model = "tiny_vlm/model" if "tiny_vlm" in scorer["label"] else scorer["name"]
            yield report, scorer, named_scorer(scorer["class_path"], model)


def _remark(scorer: Mapping[str, Any], name: ScorerName) -> list[str]:
    return [f"{scorer['label']}: {name.remark}."] if name.remark else []


def _corpus(report: Mapping[str, Any]) -> str:
    return f"{report['corpus']['renderer']}, {report['corpus']['counts']['clips']:,} clips"


def _with_interval(value: float | None, interval: Sequence[float | None]) -> Number:
    low, high = interval
    if low is None or high is None:
        return Number(math.nan if value is None else value)
    return Number(math.nan if value is None else value, low, high)
