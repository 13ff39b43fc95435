"""`vlmrb report`: from runs, kept results and calibrations to tables, pictures and a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlmrb import __version__
from vlmrb.calibration.manifest import write_whole
from vlmrb.experiments.report.cost_tables import cost_table
from vlmrb.experiments.report.factor_tables import FACTORS, factor_table, priority_table
from vlmrb.experiments.report.figures import cost_picture, factor_picture, task_pictures, together_picture
from vlmrb.experiments.report.kept import kept_results, read_results
from vlmrb.experiments.report.level_tables import BASELINES, gains_table, level_table
from vlmrb.experiments.report.measured_tables import frequency_table, speed_table
from vlmrb.experiments.report.page import Part, Report, render_page
from vlmrb.experiments.report.paper import standing
from vlmrb.experiments.report.runs import SHARE_SCORED, Run, read_run, run_folders
from vlmrb.experiments.report.scorer_tables import (
    bins_table,
    models_table,
    prompts_table,
    read_benchmark,
    read_calibration,
    reliability_table,
    sizes_table,
)
from vlmrb.experiments.report.statistics import load_rliable
from vlmrb.experiments.report.table import Table, to_csv, to_markdown
from vlmrb.experiments.report.task_tables import runs_table, schemes_table, together_table
from vlmrb.experiments.report.tasks import Task, gather
from vlmrb.plots import short_number

HARDLY_SCORED = 0.5  # share of clips scored, below which a scored run is warned of


def report(runs: Sequence[str], out: str = "runs/report") -> int:
    """Puts runs beside each other and beside the paper: index.html, report.md, tables/*.csv and figures/*.png.

    Args:
        runs: folders of runs, sweeps, studies and calibrations, searched with all that is below them; results.csv
            files, also of runs that are gone; what benchmarks/scorer.py wrote.
        out: folder of the report; files of the same names there are replaced.
    """
    folder = Path(out)
    if any(place.exists() and not place.is_dir() for place in (folder, *folder.parents)):
        raise FileExistsError(f"--out {out} is a file, or lies below one: name a folder")
    load_rliable()
    found, calibrations, benchmarks = read_all([Path(path) for path in runs])
    tasks, left_out = gather(found)
    told = build(tasks, left_out, calibrations, benchmarks, _command(runs, out))
    _write(folder, told)
    finished = sum(run.finished for run in found)
    print(f"{finished} of {len(found)} runs have finished, on {len(tasks)} task{'s' if len(tasks) != 1 else ''}")
    for line in told.warnings:
        print(f"  {line}")
    print(f"page     {folder}/index.html\ntables   {folder}/report.md, {folder}/tables/\npictures {folder}/figures/")
    return 0


def read_all(paths: Sequence[Path]) -> tuple[list[Run], list[dict[str, Any]], list[dict[str, Any]]]:
    """Reads runs, calibrations and measurements of scorers from folders and files.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: there is nothing to report, or a file is something else or damaged.
    """
    runs, calibrations, benchmarks = dict[Path, list[Run]](), dict[Path, dict[str, Any]](), dict[Path, dict[str, Any]]()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: give folders of runs, or results.csv files")
        if path.suffix == ".csv":
            runs[path.resolve()] = read_results(path)
            continue
        for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
            if (calibration := read_calibration(file)) is not None:
                calibrations[file.resolve()] = calibration
            elif (benchmark := read_benchmark(file)) is not None:
                benchmarks[file.resolve()] = benchmark
            elif path.is_file():
                raise ValueError(f"{path} is no file that a report reads: give folders of runs, or results.csv files")
        if path.is_dir():
            folders = list(run_folders(path))
            runs |= {folder.resolve(): [read_run(folder)] for folder in folders}
            for file in kept_results(path):
                if not any(folder.is_relative_to(file.parent) for folder in folders):  # else it is made from those
                    runs[file.resolve()] = read_results(file)
    everything = [run for found in runs.values() for run in found]
    if not everything and not calibrations and not benchmarks:
        raise ValueError(
            f"no runs found in {', '.join(map(str, paths)) or 'nothing'}: give the --out of a vlmrb sweep, the "
            "--run_dir of a vlmrb fit, or a results.csv"
        )
    return everything, list(calibrations.values()), list(benchmarks.values())


def build(
    tasks: Sequence[Task],
    left_out: Sequence[tuple[Run, str]],
    calibrations: Sequence[dict[str, Any]],
    benchmarks: Sequence[dict[str, Any]],
    command: str,
) -> Report:
    """Computes all tables and pictures.

    Args:
        tasks: as `gather` returns them.
        left_out: the same.
        calibrations: reports of `vlmrb calibrate`.
        benchmarks: what benchmarks/scorer.py wrote.
        command: how the report was asked for.
    """
    cards = []
    for task in tasks:
        cards.append(Part(schemes_table(task), task_pictures(task), standing(task)))
        if (costs := cost_table(task)) is not None:
            picture = cost_picture(task, costs)
            cards.append(Part(costs, [picture] if picture else []))
    picture, table = together_picture(tasks), together_table(tasks)
    together = [Part(table, [picture] if picture else [])] if table or picture else []
    compared = list(_paper_parts(tasks, calibrations, benchmarks))
    scorers = dict.fromkeys(arm.scorer for task in tasks for arm in task.arms)
    return Report(
        _facts(tasks),
        [scorer for scorer in scorers if scorer.kind != "none"],
        list(warnings_on(tasks, left_out)),
        cards,
        together,
        [part for part in compared if part.table and part.table.ours],
        [part.table for part in compared if part.table and not part.table.ours],
        runs_table(tasks),
        command,
        __version__,
    )


def _paper_parts(
    tasks: Sequence[Task], calibrations: Sequence[dict[str, Any]], benchmarks: Sequence[dict[str, Any]]
) -> Iterator[Part]:
    yield from (Part(level_table(tasks, baseline)) for baseline in BASELINES)
    yield Part(gains_table(tasks))
    for table in (priority_table(tasks), *(factor_table(factor, tasks) for factor in FACTORS)):
        if table.rows:
            picture = factor_picture(table)
            yield Part(table, [picture] if picture else [])
    yield Part(frequency_table(tasks))
    yield Part(speed_table(tasks))
    for make in (bins_table, reliability_table, models_table, prompts_table):
        yield Part(make(calibrations))
    yield Part(sizes_table(benchmarks))


def _facts(tasks: Sequence[Task]) -> dict[str, str]:
    arms = [arm for task in tasks for arm in task.arms]
    runs = [run for arm in arms for run in arm.runs]
    facts = {
        "finished runs": f"{len(runs)}",
        "not finished, in no number": f"{sum(len(arm.others) for arm in arms)}",
        "tasks": f"{len(tasks)}",
        "schemes": f"{len({arm.label for arm in arms})}",
        "env steps": short_number(float(f"{sum(run.steps[-1] for run in runs):.3g}")),
    }
    return {what: number for what, number in facts.items() if number != "0"}


def warnings_on(tasks: Sequence[Task], left_out: Sequence[tuple[Run, str]]) -> Iterator[str]:
    """Yields what is missing, left out, or to be read with care, a sentence each.

    Args:
        tasks: as `gather` returns them.
        left_out: the same.
    """
    kept = []
    for task in tasks:
        for arm in task.arms:
            for run in arm.others:
                words = f": {run.ending}" if run.ending else ""
                yield f"{task.title}, {arm.label}, seed {run.seed}: {run.status}, in no number{words} ({run.source})"
        for arm in task.arms:
            for run in arm.runs if arm.scored else ():
                if remark := _hardly_scored(run):
                    yield f"{task.title}, {arm.label}, seed {run.seed}: {remark} ({run.source})"
            if len(arm.runs) == 1:
                yield f"{task.title}, {arm.label}: one run only, so nothing is known of its scatter"
        if any(run.source.suffix == ".csv" and run.settings for arm in task.arms for run in arm.runs):
            kept.append(task.title)
    if kept:
        yield f"kept results, with the settings that the files in their commands.txt hold today: {'; '.join(kept)}"
    for run, reason in left_out:
        yield f"{run.source} is left out: {reason}"


def _hardly_scored(run: Run) -> str:
    """Says what to know of a run that was to replay by scores and got few of them, empty for any other."""
    share = run.metrics.get(SHARE_SCORED, 1.0)
    if share >= HARDLY_SCORED:
        return ""
    if share == 0:
        return "share of clips scored 0.00: as to scores this was uniform replay; it is in the numbers of this scheme"
    return (
        f"share of clips scored {share:.2g}: most of what it replayed had no score; it is in the numbers of this scheme"
    )


def _write(folder: Path, told: Report) -> None:
    tables = [*(part.table for part in (*told.tasks, *told.together, *told.paper) if part.table), told.runs]
    pictures = [picture for part in (*told.tasks, *told.together, *told.paper) for picture in part.pictures]
    for name in ("tables", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for table in (*tables, *told.missing):
        write_whole(folder / "tables" / f"{table.key}.csv", to_csv(table).encode())
    for picture in pictures:
        write_whole(folder / "figures" / f"{picture.key}.png", picture.light)
        write_whole(folder / "figures" / f"{picture.key}.pdf", picture.pdf)
    command = "    " + told.command.replace("\n", "\n    ")
    lines = ["# vlmrb report", "", command, "", *map(to_markdown, tables), *_not_run(told.missing)]
    write_whole(folder / "report.md", "\n".join(lines).encode())
    write_whole(folder / "index.html", render_page(told).encode())


def _not_run(missing: Sequence[Table]) -> list[str]:
    """Lists the tables that hold nothing but the paper's figures, which tables/ has in full."""
    items = [f"- {table.title}: [tables/{table.key}.csv](tables/{table.key}.csv)" for table in missing]
    return ["## Not run here", "", "Tables that hold only the paper's figures so far:", "", *items, ""] if items else []


def _command(runs: Iterable[str], out: str) -> str:
    return shlex.join(["vlmrb", "report", *runs, "--out", out])
