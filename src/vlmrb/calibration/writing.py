"""Writes all files of a calibration report into its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vlmrb.calibration.corpus import Corpus
from vlmrb.calibration.frontier import Frontier
from vlmrb.calibration.frontier_plot import plot_frontier
from vlmrb.calibration.frontier_report import frontier_csv, frontier_facts, frontier_overlay
from vlmrb.calibration.gallery import pick, write_clips
from vlmrb.calibration.manifest import write_whole
from vlmrb.calibration.page import render_page
from vlmrb.calibration.plots import plot_roc, plot_scorer
from vlmrb.calibration.report import build_report, calibrated_overlay, scores_csv, verdicts, without_nan
from vlmrb.calibration.scores import Candidate, Scored


def write_report(
    folder: Path,
    corpus: Corpus,
    candidates: list[Candidate],
    scored: list[Scored],
    label: str,
    shown: int,
    command: str,
    frontier: Frontier | None = None,
) -> list[str]:
    """Writes ``index.html``, its pictures, ``report.json``, ``scores.csv`` and an overlay per candidate.

    Args:
        folder: an existing one.
        corpus: the clips.
        candidates: scorers with their prompts.
        scored: what each gave.
        label: by what τ is chosen.
        shown: most clips of each kind on the page.
        command: how the report was asked for.
        frontier: what other ways of asking the only candidate are worth.

    Returns:
        A line on each candidate: what it comes to.
    """
    report = build_report(corpus, candidates, scored, label, command)
    if frontier is not None:
        report["frontier"] = _write_frontier(folder, frontier, command)
    values = corpus.labels()[label]
    galleries, overlays = [], []
    for number, (candidate, result) in enumerate(zip(candidates, scored, strict=True)):
        judged = report["scorers"][number]["by_label"][label]
        plot_scorer(folder / f"plots/scorer_{number}.png", result.scores, values, label, judged)
        picked = pick(result.scores, values, judged["at_best"]["threshold"], shown)
        galleries.append(
            {kind: write_clips(corpus, rows, result.scores, folder / "clips") for kind, rows in picked.items()}
        )
        overlays.append("calibrated.yaml" if len(candidates) == 1 else f"calibrated_{number}.yaml")
        overlay = calibrated_overlay(candidate, judged, label, command)
        write_whole(folder / overlays[-1], overlay.encode())
    curves = {candidate.label: result.scores for candidate, result in zip(candidates, scored, strict=True)}
    plot_roc(folder / "plots/roc.png", curves, values, label)
    write_whole(folder / "scores.csv", scores_csv(corpus, candidates, scored).encode())
    write_whole(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    write_whole(folder / "index.html", render_page(report, galleries, overlays, "plots").encode())
    return verdicts(report)


def _write_frontier(folder: Path, frontier: Frontier, command: str) -> dict[str, Any]:
    """Writes ``frontier.csv``, ``frontier.png`` and ``frontier.yaml``, and returns their figures."""
    facts = without_nan(frontier_facts(frontier))
    write_whole(folder / "frontier.csv", frontier_csv(facts).encode())
    write_whole(folder / "frontier.yaml", frontier_overlay(frontier, facts, command).encode())
    plot_frontier(folder / "frontier.png", facts)
    return facts
