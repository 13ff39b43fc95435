"""`vlmrb sweep`: runs a study, in processes here or on Ray; resumable.

Every cell is one `vlmrb fit` in a process of its own. A cell that has finished is not run again, one that was
interrupted goes on from its last checkpoint, and one that failed is tried again.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vlmrb.experiments.board import Board, hardly_scored
from vlmrb.experiments.cells import Cell, Scheme, recorded_cells, require_same_settings
from vlmrb.experiments.children import exit_on_sigterm
from vlmrb.experiments.pools import LocalPool, Pool
from vlmrb.experiments.ray_pool import RayPool
from vlmrb.experiments.results import write_results
from vlmrb.experiments.soundness import budgets
from vlmrb.experiments.study import LABEL, Study, as_arguments, parse_seeds, read_study
from vlmrb.locks import lock_folder

log = logging.getLogger("vlmrb")
POLL_S = 0.5  # between two looks at the clock of the board
LONGEST_S = 86_400.0  # that a Ray cluster may take to answer
LAST_WORDS = 12  # lines of a failed run's log


def sweep(
    study: str | None = None,
    base: str | None = None,
    overlays: Sequence[str] = (),
    seeds: str | None = None,
    out: str | None = None,
    jobs: int | None = None,
    overrides: Sequence[str] = (),
    ray: str | None = None,
    ray_timeout_s: float = 30.0,
    dry_run: bool = False,
) -> int:
    """Runs a study: configurations × schemes × seeds; then writes tables and learning curves. See docs/sweeps.md.

    Repeat the command to go on after an interruption. A folder holds one study: runs of earlier sweeps in it are in the
    results too, and other settings are refused.

    Args:
        study: a study file, such as studies/small_schemes.yaml; its name may also stand alone, right after the verb.
        base: instead of a study file: the configuration that all runs share.
        overlays: with ``base``: replay overlays to compare, such as configs/replay/uniform.yaml.
        seeds: such as 0-4 or 0,3,7; instead of the study's.
        out: folder of the study; instead of the study's, by default runs/NAME.
        jobs: runs at a time; by default as many as cores, or the Ray cluster's resources, allow.
        overrides: further `vlmrb fit` options for every run, after those of the study.
        ray: address of a Ray cluster on which to run, or ``local`` to start one here.
        ray_timeout_s: seconds within which that address has to answer.
        dry_run: check everything, print the commands, and run nothing.
    """
    if out == "":
        raise ValueError("--out is empty: name a folder")
    if not 0 < ray_timeout_s <= LONGEST_S:
        raise ValueError(f"--ray_timeout_s {ray_timeout_s:g} must be above 0, and at most {LONGEST_S:g}")
    if (study is None) == (base is None):
        raise ValueError("name either a study file, as in `vlmrb sweep studies/small_schemes.yaml`, or --base")
    if study is not None:
        if overlays:
            raise ValueError("--overlays belongs to --base; schemes of a study stand in its file")
        plan = read_study(study, seeds=seeds, out=out, jobs=jobs, overrides=overrides)
    else:
        plan = Study(
            name=Path(base or "").stem if LABEL.fullmatch(Path(base or "").stem) else "sweep",
            configs=(Path(base or ""),),
            schemes=tuple(Scheme(Path(overlay).stem, (overlay,)) for overlay in overlays),
            seeds=parse_seeds("0-4" if seeds is None else seeds),
            out=Path(out or "runs/sweep"),
            overrides=as_arguments(overrides, "--overrides"),
            jobs=jobs,
        )
    with exit_on_sigterm():
        return run(plan, ray, ray_timeout_s, dry_run)


def run(study: Study, ray: str | None = None, ray_timeout_s: float = 30.0, dry_run: bool = False) -> int:
    """Runs what is left of a study, and writes its results.

    Args:
        study: what to run.
        ray: see `sweep`; so are the others.
        ray_timeout_s: see above.
        dry_run: see above.

    Returns:
        The exit code: 0 if every run of the study has finished, 143 or 130 after SIGTERM or Ctrl-C, otherwise 1.

    Raises:
        ValueError: settings cannot work, or the folder holds something else.
        RuntimeError: the folder is in use, or Ray cannot be.
    """
    cells, folder = study.cells(), study.out
    todo = _left(cells, folder)
    if todo:
        log.info("sweep: checking the settings of %s", study.name)
    env_steps = budgets(todo) if todo else {}
    if dry_run:
        print("\n".join(shlex.join(cell.command) for cell in todo))
        print(f"{len(cells)} runs, {len(cells) - len(todo)} already finished; all settings are sound", file=sys.stderr)
        return 0
    with lock_folder(folder, "--out "):
        todo = _left(cells, folder)  # another sweep may have been here until now
        commands = [shlex.join(cell.command) for cell in _in_order(cells, recorded_cells(folder))]
        (folder / "commands.txt").write_text("\n".join([shlex.join(["vlmrb", *sys.argv[1:]]), "", *commands, ""]))
        (folder / "study.yaml").write_text(study.to_yaml())
        pool: Pool
        if ray is None:
            pool = LocalPool(study.jobs, study.resources)
        else:
            pool = RayPool(ray, study.jobs, study.resources, ray_timeout_s)
        if todo:
            with pool, Board(cells, env_steps, study.name) as board:
                _run_all(todo, pool, board)
        else:
            print(f"{len(cells)} run{'s' if len(cells) > 1 else ''}, {len(cells)} already finished")
        damages = _write_all(cells, folder)
        _report_failures(todo)
    for damage in damages:
        print(f"\n{damage}. That run is in no result; mend the file, or remove its folder to run it again")
    if pool.exit_code:
        print("\ninterrupted; repeat the command to go on")
        return pool.exit_code
    return 0 if all(cell.finished for cell in cells) and not damages else 1


def _left(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """Returns the cells that have not finished yet.

    Raises:
        ValueError: the study's folder cannot be one, or holds something else.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--out {folder}: {there} is a file: choose another folder")
    require_same_settings(cells, folder)
    return [cell for cell in cells if not cell.finished]


def _run_all(todo: Sequence[Cell], pool: Pool, board: Board) -> None:
    """Runs cells, as many at a time as there is room for; starts no more when told to stop."""
    waiting, running = list(todo), 0
    try:
        while running or (waiting and not pool.exit_code):
            while waiting and running < pool.jobs and not pool.exit_code:
                cell = waiting.pop(0)
                pool.launch(cell)
                board.started(cell)
                running += 1
            for cell, begun in pool.ended(POLL_S):
                board.ended(cell, begun)
                running -= 1
            board.refresh(pool.jobs)
    except Exception as error:
        board.say(f"asking all runs to save and exit, as this failed: {error}")
        raise


def _write_all(cells: Sequence[Cell], folder: Path) -> list[str]:
    """Writes the results of each configuration into its folder, runs of earlier sweeps included.

    Returns:
        What is wrong with damaged runs.
    """
    recorded = recorded_cells(folder)
    started = {cell.folder for cell in recorded}
    present = [cell for cell in _in_order(cells, recorded) if cell.folder in started]
    damages = []
    for config in dict.fromkeys(cell.config.stem for cell in present):
        damages += write_results([cell for cell in present if cell.config.stem == config], folder / config)
    for cell in present:
        if cell.finished and (warning := hardly_scored(cell)):
            print(f"\n{cell.name}: {warning}, so its replay knew little of its scorer")
    return damages


def _in_order(cells: Sequence[Cell], recorded: Sequence[Cell]) -> list[Cell]:
    """Returns these cells and those of earlier sweeps by configuration, scheme and seed, these cells' names first."""
    present = {cell.folder: cell for cell in [*recorded, *cells]}.values()
    configs = list(dict.fromkeys(cell.config.stem for cell in [*cells, *recorded]))
    labels = list(dict.fromkeys(cell.label for cell in [*cells, *recorded]))
    return sorted(present, key=lambda cell: (configs.index(cell.config.stem), labels.index(cell.label), cell.seed))


def _report_failures(cells: Sequence[Cell]) -> None:
    """Shows the end of each failed run's log."""
    for cell in cells:
        if cell.status == "failed":
            print(f"\n{cell.name} failed; the end of {cell.log}:")
            print("\n".join(f"    {line}" for line in cell.last_words(LAST_WORDS)))
